"""What ranks draw: another sequence on each rank and in each launch, all of which follow from the caller's seed."""

from __future__ import annotations

import hashlib
import itertools
import random

import numpy
import torch

_launches = itertools.count(1)


def seeds_of_launch(seed: int | None) -> tuple[int, ...]:
    """What the seeds of a launch are made of: `seed`, or else the caller's own and which launch of this process it is.

    The caller's generators are only read.
    """
    return (torch.initial_seed(), next(_launches)) if seed is None else (seed,)


def seed_all(seeds: tuple[int, ...], rank: int) -> None:
    """Seeds the generators of Python, NumPy and torch, those of GPUs when they come to be used."""
    digest = hashlib.sha256(repr((*seeds, rank)).encode()).digest()
    random.seed(digest)
    numpy.random.seed(numpy.frombuffer(digest, dtype=numpy.uint32))
    torch.manual_seed(int.from_bytes(digest[:8], "little", signed=True))
