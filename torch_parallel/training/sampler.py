"""Which samples a worker takes in each step of an epoch.

One permutation an epoch, drawn from (seed, epoch), is the same on every rank. A strategy says which places of it a rank
trains on next (`Strategy.shares`). With a synchronous one, global batch t is its t-th slice of `batch_size` samples,
and the workers split each batch among themselves, so the steps and the samples of each step do not depend on the number
of workers. Shards differ by at most one sample and may be empty; every sample is used once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from torch_parallel.strategies.shares import Share


def step_count(sample_count: int, batch_size: int) -> int:
    """Optimizer steps of one epoch; the last batch may be short."""
    return -(-sample_count // batch_size)


def epoch_sizes(sample_count: int, batch_size: int, epochs: int | None, max_steps: int | None) -> list[int]:
    """Samples of each epoch of a run that ends after `epochs`, or after `max_steps` steps, which may be within one."""
    steps = step_count(sample_count, batch_size)
    if max_steps is None or (epochs is not None and steps * epochs <= max_steps):
        assert epochs is not None
        return [sample_count] * epochs
    whole, left = divmod(max_steps, steps)
    return [sample_count] * whole + [left * batch_size] * (left > 0)


def epoch_order(sample_count: int, seed: int, epoch: int) -> Tensor:
    """The epoch's permutation of 0..sample_count-1, int64 [sample_count]; epochs count from 1."""
    mixed = (seed * 1_000_003 + epoch) % 2**63  # another sequence for every epoch of every seed
    return torch.randperm(sample_count, generator=torch.Generator("cpu").manual_seed(mixed), device="cpu")


def batches(order: Tensor, shares: Iterable[Share], lend: bool = False) -> Iterator[tuple[Tensor, Share]]:
    """The sample indices, int64 [b] where the epoch's `order` is, of each of the shares.

    With `lend`, a share without samples is lent the first one of its step.
    """
    for share in shares:
        first = share.whole.start
        yield order[slice(first, first + 1) if lend and share.is_empty else share.places], share


def looking_ahead(drawn: Iterable[tuple[Tensor, Share]]) -> Iterator[tuple[Tensor, Share, Tensor | None]]:
    """The same, each with the indices of the next one, the very tensor; None behind the last.

    It asks for the next one before the present one is trained on.
    """
    iterator = iter(drawn)
    present = next(iterator, None)
    while present is not None:
        following = next(iterator, None)
        yield (*present, following[0] if following else None)
        present = following
