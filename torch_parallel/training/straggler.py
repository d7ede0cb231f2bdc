"""Slow workers on purpose: what a rank's compute in a step takes longer than it does, it sleeps.

It sleeps because with more workers than processors any work that it did instead would slow the others down too, and a
worker that really was slower would speed them up. So the arithmetic of stragglers can be looked at on two processors:
with one worker s times slower, synchronous training does 1/s of the steps.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace

from torch_parallel.units import parse_seconds


@dataclass(frozen=True)
class Slowdown:
    """What the compute of one rank's step is made to last: max(its own, at_least_s) * factor + extra_s + jitter.

    The jitter is exponential with mean `jitter_s`, drawn from `seed` (of run and rank) and step: a run can be repeated.
    """

    factor: float = 1.0
    extra_s: float = 0.0
    at_least_s: float = 0.0
    jitter_s: float = 0.0
    seed: str = ""

    def seconds(self, compute_s: float, step: int) -> float:
        """How long a step's compute lasts that took `compute_s`."""
        lasts_s = max(compute_s, self.at_least_s) * self.factor + self.extra_s
        if self.jitter_s:
            lasts_s += random.Random(f"{self.seed} {step}").expovariate(1 / self.jitter_s)
        return lasts_s

    def stretch(self, start_s: float, step: int) -> None:
        """The compute that began at `start_s` of `perf_counter` is done: sleeps until it has lasted long enough."""
        end_s = start_s + self.seconds(time.perf_counter() - start_s, step)
        time.sleep(max(0.0, end_s - time.perf_counter()))


def parse_stragglers(text: str) -> dict[int, Slowdown]:
    """`3:4x` (rank 3 takes 4 times as long), `3:50ms` (50 ms more a step), comma-separated. Raises ValueError."""
    slow: dict[int, Slowdown] = {}
    for entry in text.split(","):
        rank, _, much = (part.strip() for part in entry.partition(":"))
        if not (rank.isascii() and rank.isdecimal() and much):
            raise ValueError(f"{entry.strip()!r} is no straggler: write rank:factor or rank:time, as in 3:4x or 3:50ms")
        before = slow.get(int(rank), Slowdown())
        is_factor = much.endswith("x")
        if (before.factor != 1) if is_factor else (before.extra_s != 0):
            raise ValueError(f"rank {rank} is given two {'factors' if is_factor else 'times'}: give one")
        if is_factor:
            slow[int(rank)] = replace(before, factor=_factor(much))
        else:
            slow[int(rank)] = replace(before, extra_s=parse_seconds(much))
    return slow


def _factor(text: str) -> float:
    try:
        factor = float(text[:-1])
    except ValueError:
        factor = 0.0
    if not 1 <= factor < float("inf"):
        raise ValueError(
            f"{text!r} is no factor: write a number of at least 1 and x, as in 4x (nobody can sleep faster)"
        )
    return factor
