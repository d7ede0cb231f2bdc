"""How many targets the samples of a step have, known to all ranks before it, without a message."""

from __future__ import annotations

from torch import Tensor

from torch_parallel.strategies.shares import Share, shard


class TargetCounts:
    """Of one epoch's order after the other; `counts`, whole numbers [n], of each sample, or None for one each."""

    def __init__(self, counts: Tensor | None) -> None:
        self._counts = counts
        self._up_to: list[int] = []

    def begin_epoch(self, order: Tensor) -> None:
        """`order`, int64 [n] on the CPU: the sample at each place."""
        if self._counts is not None:
            self._up_to = [0, *self._counts[order].cumsum(0).tolist()]

    def at(self, places: slice) -> int:
        """Targets of the samples at consecutive places."""
        if self._counts is None:
            size: int = places.stop - places.start
            return size
        count: int = self._up_to[places.stop] - self._up_to[places.start]
        return count

    def of_step(self, share: Share, worker_count: int) -> tuple[int, int, int]:
        """Of a worker's share, of the whole step, which all workers split evenly, and how many of them have any."""
        own, total = self.at(share.places), self.at(share.whole)
        if self._counts is None:
            return own, total, min(share.count, worker_count)  # a split leaves nobody out while there are samples
        start = share.whole.start
        parts = [shard(share.count, index, worker_count) for index in range(worker_count)]
        return own, total, sum(self.at(slice(start + part.start, start + part.stop)) > 0 for part in parts)
