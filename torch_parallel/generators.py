"""What ranks draw: another sequence on each rank and in each launch, all of which follow from the caller's seed."""

from __future__ import annotations

import itertools
import os
import random
import sys

import numpy
import torch

_GPU_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Of NVIDIA's driver, of WSL's and of AMD's: where none is, there is no GPU that torch.cuda could use."""

_launches = itertools.count(1)


def seeds_of_launch(seed: int | None) -> tuple[int, ...]:
    """What the seeds of a launch are made of: `seed`, or else the caller's own and which launch of this process it is.

    The caller's generators are only read.
    """
    return (torch.initial_seed(), next(_launches)) if seed is None else (seed,)


def seed_all(seeds: tuple[int, ...], rank: int) -> None:
    """Seeds the generators of Python, NumPy and torch, those of GPUs when they come to be used."""
    draws = random.Random(repr((*seeds, rank)))
    random.seed(draws.getrandbits(64))
    numpy.random.seed(draws.getrandbits(32))  # by an array it takes a millisecond
    number = draws.getrandbits(63)
    torch.default_generator.manual_seed(number)
    if sys.platform != "linux":
        torch.manual_seed(number)  # of all kinds of devices; each takes a millisecond to note where it was called
    elif any(map(os.path.exists, _GPU_FILES)):
        torch.cuda.manual_seed_all(number)
