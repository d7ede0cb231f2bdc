"""Which samples a worker takes in each step of an epoch.

One permutation an epoch, drawn from (seed, epoch), is the same on every rank. Global batch t is its t-th slice of
`batch_size` samples, and the workers split each batch among themselves, so the steps and the samples of each step do
not depend on the number of workers. Shards differ by at most one sample and may be empty; every sample is used once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torch_parallel.collectives.schedule import chunk_bounds


def step_count(sample_count: int, batch_size: int) -> int:
    """Optimizer steps of one epoch; the last batch may be short."""
    return -(-sample_count // batch_size)


def epoch_order(sample_count: int, seed: int, epoch: int) -> Tensor:
    """The epoch's permutation of 0..sample_count-1, int64 [sample_count]; epochs count from 1."""
    mixed = (seed * 1_000_003 + epoch) % 2**63  # another sequence for every epoch of every seed
    return torch.randperm(sample_count, generator=torch.Generator().manual_seed(mixed))


def shard(sample_count: int, worker_index: int | None, worker_count: int) -> slice:
    """One worker's share of `sample_count` consecutive samples; nothing for a server (worker_index None)."""
    if worker_index is None:
        return slice(0, 0)
    bounds = chunk_bounds(sample_count, worker_count)
    return slice(bounds[worker_index], bounds[worker_index + 1])


def batches(
    sample_count: int,
    batch_size: int,
    seed: int,
    epoch: int,
    worker_index: int | None,
    worker_count: int,
    first_sample: int = 0,
) -> Iterator[tuple[Tensor, int]]:
    """For each step of the epoch: this worker's sample indices, int64 [b], and the samples of all workers together.

    `first_sample` samples of the epoch's order have been used before, by a run that is resumed.
    """
    order = epoch_order(sample_count, seed, epoch)
    for start in range(first_sample, sample_count, batch_size):
        batch = order[start : start + batch_size]
        yield batch[shard(len(batch), worker_index, worker_count)], len(batch)
