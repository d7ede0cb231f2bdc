"""Which samples a rank trains on next, as places in the epoch's order; the order itself is the training loop's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch_parallel.collectives.schedule import chunk_bounds


@dataclass(frozen=True)
class Share:
    """One step of one rank. The gradient is that of the sum of the losses at `places`, divided by how many targets the
    whole step has, which is of `count` samples."""

    places: slice
    count: int
    done: int
    """Samples of the epoch that all workers together have been given up to here."""

    @property
    def is_empty(self) -> bool:
        return bool(self.places.start == self.places.stop)

    @property
    def whole(self) -> slice:
        """The places of the whole step."""
        return slice(self.done - self.count, self.done)


def shard(sample_count: int, worker_index: int | None, worker_count: int) -> slice:
    """One worker's share of `sample_count` consecutive samples; nothing for a server (worker_index None)."""
    if worker_index is None:
        return slice(0, 0)
    bounds = chunk_bounds(sample_count, worker_count)
    return slice(bounds[worker_index], bounds[worker_index + 1])


def synchronous_shares(
    sample_count: int, batch_size: int, worker_index: int | None, worker_count: int, first_sample: int = 0
) -> Iterator[Share]:
    """For each step of the epoch this worker's part of the batch; `count` is the whole batch, short at the end.

    `first_sample` samples of the epoch's order have been used before, by a run that is resumed.
    """
    for start in range(first_sample, sample_count, batch_size):
        count = min(batch_size, sample_count - start)
        mine = shard(count, worker_index, worker_count)
        yield Share(slice(start + mine.start, start + mine.stop), count, start + count)


def single_shares(sample_count: int, batch_size: int, worker_count: int, first_sample: int = 0) -> list[Share]:
    """The same parts of the same batches, one after the other, each a step of its own; empty ones are left out."""
    shares = []
    for start in range(first_sample, sample_count, batch_size):
        count = min(batch_size, sample_count - start)
        for worker_index in range(worker_count):
            part = shard(count, worker_index, worker_count)
            places = slice(start + part.start, start + part.stop)
            if places.stop > places.start:
                shares.append(Share(places, places.stop - places.start, places.stop))
    return shares
