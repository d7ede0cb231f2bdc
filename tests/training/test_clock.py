"""Which parts of an epoch are told apart, with a strategy that only has counters."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torch_parallel.training.clock import EpochClock, peaks
from torch_parallel.training.record import RankEpoch


def spent(*, n: int, enqueues: bool, in_background: bool, samples: int | None = None) -> dict[str, float]:
    """Of an epoch of 10 s: 4 s of exchange, of which 1 s is waiting if that is seen, and 2 s of updates."""
    strategy: Any = SimpleNamespace(
        communicator=SimpleNamespace(nics=(), nodes=(), rank=0),
        transport=SimpleNamespace(world_size=n, enqueues=enqueues, waited_s=[0.0] * n, received_bytes=[0] * n),
        exchange_clock=SimpleNamespace(total_s=100.0),
        update_clock=SimpleNamespace(total_s=50.0),
        exchange_samples=None if samples is None else 0,
        updates_in_background=in_background,
    )
    clock = EpochClock(strategy)
    strategy.exchange_clock.total_s += 4.0
    strategy.update_clock.total_s += 2.0
    strategy.exchange_samples = samples
    strategy.transport.waited_s[-1] += 0.0 if enqueues else 1.0
    epoch = clock.spent(10.0)
    return {part: getattr(epoch, f"{part}_s") for part in ("compute", "exchange", "wait", "update")}


NAN = math.nan


@pytest.mark.parametrize(
    ("how", "compute", "exchange", "wait", "update"),
    [
        ({"n": 2, "enqueues": False, "in_background": False}, 4.0, 3.0, 1.0, 2.0),
        # a stream waits, and nobody sees how long
        ({"n": 2, "enqueues": True, "in_background": False}, 4.0, 4.0, NAN, 2.0),
        ({"n": 1, "enqueues": True, "in_background": False}, 4.0, 4.0, 0.0, 2.0),
        # updates are made while others are exchanged, by one process alone too
        ({"n": 2, "enqueues": True, "in_background": True}, 4.0, 4.0, NAN, NAN),
        ({"n": 1, "enqueues": True, "in_background": True}, 4.0, 4.0, NAN, NAN),
        # torch has timed five exchanges, or four, which are too few
        ({"n": 2, "enqueues": False, "in_background": False, "samples": 5}, 4.0, 3.0, 1.0, 2.0),
        ({"n": 2, "enqueues": False, "in_background": False, "samples": 4}, 8.0, NAN, NAN, 2.0),
    ],
)
def test_what_is_not_told_apart_is_blank(
    how: dict[str, Any], compute: float, exchange: float, wait: float, update: float
) -> None:
    expected = {"compute": compute, "exchange": exchange, "wait": wait, "update": update}
    assert spent(**how) == pytest.approx(expected, nan_ok=True)


def test_the_peak_of_a_process_is_in_bytes() -> None:
    """At least what lies in memory now, and less than all that the machine has."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    high_water_kib = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
    of_process, of_gpu = peaks(torch.device("cpu"))
    assert of_gpu == 0
    assert 0.9 * high_water_kib * 1024 <= of_process <= 1.1 * high_water_kib * 1024 + 2**20


def test_parts_of_an_epoch_leave_its_first_step_out() -> None:
    """4 s, of which the first step took 2 s, with 0.75 of 1.25 s of exchange."""
    spent = RankEpoch(exchange_s=1.25, wait_s=math.nan)
    spent.set_parts(4.0, RankEpoch(exchange_s=0.75), 2.0)
    assert spent.exchanged_part == 0.25 and math.isnan(spent.waited_part)
    spent.set_parts(5.0, None, 0.0)
    assert spent.exchanged_part == 0.25
    whole = RankEpoch(1, 2, 3, 4, [5.5, 6], [7, 8], [11, 12], 9, 10, 0.25, 0.5)
    assert RankEpoch.from_numbers(whole.numbers()) == whole
