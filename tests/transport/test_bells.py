"""Who waits sleeps in the kernel until it is rung: at once, without a lost ring, and without using a processor."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import pytest
import torch

from torch_parallel import launch
from torch_parallel.collectives import COLLECTIVES
from torch_parallel.communicator import Communicator
from torch_parallel.transport import bells, signals
from torch_parallel.transport.bells import Bells

sleeps = pytest.mark.skipif(
    sys.platform != "linux" or bells._kernel() is None, reason="this kernel knows no futex or membarrier"
)


@sleeps
def test_a_ring_wakes_long_before_the_time_is_up() -> None:
    memory = memoryview(bytearray(Bells.bytes_needed(2)))
    sleeper, other = Bells(memory, 0), Bells(memory, 1)
    for number in range(3):
        heard = sleeper.lie_down()
        assert other.words[Bells.place_of(0)] == 1 and other.words[Bells.place_of(1)] == 0
        threading.Timer(0.05, other.ring, (0,)).start()
        start_s = time.monotonic()
        sleeper.sleep(heard, 20.0)
        assert time.monotonic() - start_s < 10, number
        sleeper.get_up()
        assert other.words[Bells.place_of(0)] == 0


@sleeps
def test_who_was_rung_before_it_slept_does_not_sleep() -> None:
    memory = memoryview(bytearray(Bells.bytes_needed(2)))
    sleeper, other = Bells(memory, 0), Bells(memory, 1)
    heard = sleeper.lie_down()
    other.ring(0)
    start_s = time.monotonic()
    sleeper.sleep(heard, 20.0)
    assert time.monotonic() - start_s < 10


def test_nobody_sleeps_longer_than_a_nap_where_the_kernel_cannot_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bells, "_kernel", lambda: None)
    sleeper = Bells(memoryview(bytearray(Bells.bytes_needed(1))), 0)
    start_s = time.monotonic()
    sleeper.sleep(sleeper.lie_down(), 20.0)
    assert time.monotonic() - start_s < 10


def there_and_back(communicator: Communicator, times: int) -> tuple[float, float]:
    """Every wait goes to sleep at once, for seconds: a ring that was lost would be seen."""
    signals.SPINS, signals.YIELDS, signals.YIELDS_S, signals.SLICE_S = 0, 0, -1.0, 5.0
    transport, peer = communicator.transport, 1 - communicator.rank
    longest_s = 0.0
    for number in range(times):
        start_s = time.perf_counter()
        if (number + communicator.rank) % 2:
            transport.tell(peer)
        else:
            transport.hear(peer, "a ball")
        longest_s = max(longest_s, time.perf_counter() - start_s)
    return longest_s, float(times)


@sleeps
def test_no_ring_is_lost() -> None:
    for longest_s, _ in launch(there_and_back, 2, 4000, signal_pipes=False, deadline_s=60):
        assert longest_s < 4


def waits(communicator: Communicator, seconds: float) -> float:
    """Seconds of a processor that rank 0 uses while it waits so long for rank 1."""
    communicator.barrier()
    start_s = time.process_time()
    if communicator.rank == 1:
        time.sleep(seconds)
    communicator.barrier()
    return time.process_time() - start_s


@sleeps
def test_who_waits_uses_no_processor() -> None:
    used_s, _ = launch(waits, 2, 2.0, signal_pipes=False, deadline_s=60)
    assert used_s < 0.05 * 2.0


def crowd(communicator: Communicator) -> list[Any]:
    torch.set_num_threads(1)
    buffer, seen = communicator.share(999), []
    for number in range(60):
        buffer.local.copy_(torch.arange(999.0) + communicator.rank + number)
        seen.append(float(communicator.transport.perform(COLLECTIVES["ring"], buffer).sum()))
        communicator.transport.settle()
    return seen


def test_many_more_ranks_than_processors() -> None:
    ranks = 12
    expected = [ranks * sum(range(999)) + 999.0 * (sum(range(ranks)) + ranks * number) for number in range(60)]
    for seen in launch(crowd, ranks, deadline_s=60):
        assert seen == pytest.approx(expected)
