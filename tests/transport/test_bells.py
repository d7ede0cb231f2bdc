"""Who waits sleeps in the kernel until it is rung, and then wakes at once."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from torch_parallel.transport import bells
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


def test_only_who_sleeps_is_rung(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, rung = memoryview(bytearray(Bells.bytes_needed(2))), []
    sleeper, other = Bells(memory, 0), Bells(memory, 1)
    monkeypatch.setattr(other, "ring", rung.append)
    other.ring_if_asleep(0)
    assert rung == []
    sleeper.lie_down()
    other.ring_if_asleep(0)
    sleeper.get_up()
    other.ring_if_asleep(0)
    assert rung == [0]
