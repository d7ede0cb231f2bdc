"""Signals of streams without a GPU: the driver's calls are replaced by notes of what was asked for."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from torch_parallel.transport import stream_signals
from torch_parallel.transport.signals import READ, READY, WaitTimeout
from torch_parallel.transport.stream_signals import WORDS, StreamSignals, Watchdog, flag_words

Calls = list[tuple[str, int, int]]
Watch = Callable[[StreamSignals], Watchdog]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """(verb, address, number) of every call of the driver; rank r's flags have the device address r million."""
    made: Calls = []
    bases = iter(range(0, 10**9, 10**6))
    monkeypatch.setattr(stream_signals, "device_address", lambda part: next(bases))
    monkeypatch.setattr(stream_signals, "current_stream", lambda index: 0)
    monkeypatch.setattr(stream_signals, "stream_write", lambda stream, *rest: made.append(("write", *rest)))
    monkeypatch.setattr(stream_signals, "stream_wait", lambda stream, *rest: made.append(("wait", *rest)))
    return made


def signals_of_rank_1_of_3(deadline_s: float = 10.0) -> StreamSignals:
    flags = [torch.zeros(flag_words(3), dtype=torch.int32) for _ in range(3)]
    return StreamSignals(1, flags, torch.device("cuda", 0), deadline_s)


@pytest.fixture
def watch() -> Iterator[Watch]:
    """Makes watchdogs that end with the test: a thread that is in torch when the interpreter ends would abort it."""
    watchdogs: list[Watchdog] = []

    def make(signals: StreamSignals) -> Watchdog:
        watchdogs.append(Watchdog(signals))
        return watchdogs[-1]

    yield make
    for each in watchdogs:
        each.end()


def test_a_flag_for_each_kind_and_pair(calls: Calls) -> None:
    """Kind k of source s is word (3 k + s) * 32 of the receiver: at 128 bytes for each."""
    signals = signals_of_rank_1_of_3()
    signals.post(READY, 2)
    signals.post(READ, 0)
    signals.post(READY, 2)
    signals.wait(READY, 0, "ring", 4)
    signals.wait(READ, 2, "ring, end of the peer's reading", 0)
    assert calls == [
        ("write", 2_000_000 + 128 * 1, 1),
        ("write", 0 + 128 * (3 + 1), 1),
        ("write", 2_000_000 + 128 * 1, 2),
        ("wait", 1_000_000 + 128 * 0, 1),
        ("wait", 1_000_000 + 128 * (3 + 2), 1),
    ]
    assert [str(wait) for wait in signals.pending] == ["ring, round 4", "ring, end of the peer's reading"]
    assert signals.note_address == 1_000_000 + 4 * (flag_words(3) - 4)


def test_an_operation_that_begins_with_a_wait_marks_where_it_begins(calls: Calls) -> None:
    """With a number of this rank's own, READY from itself, word 1 * 32; others mark it by what they post."""
    signals = signals_of_rank_1_of_3()
    for _ in range(2):
        signals.begin()
        signals.wait(READY, 0, "broadcast", 0)
        signals.wait(READY, 2, "broadcast", 1)
    assert calls == [
        ("write", 1_000_000 + 128 * 1, 1),
        ("wait", 1_000_000 + 128 * 0, 1),
        ("wait", 1_000_000 + 128 * 2, 1),
        ("write", 1_000_000 + 128 * 1, 2),
        ("wait", 1_000_000 + 128 * 0, 2),
        ("wait", 1_000_000 + 128 * 2, 2),
    ]


def test_what_is_over_is_taken_out_in_order_and_numbers_wrap_around(calls: Calls) -> None:
    signals = signals_of_rank_1_of_3()
    signals._awaited[READY][0] = 2**31 - 2
    for _ in range(3):
        signals.wait(READY, 0, "ring", 0)
    signals.take_out_what_is_over()
    # the flag is far behind 2^31 - 1: nothing is over
    assert [wait.number for wait in signals.pending] == [2**31 - 1, 2**31, 2**31 + 1]
    signals.flags[1][0] = -(2**31)  # 2^31, as an integer of 32 bits
    signals.take_out_what_is_over()
    assert [wait.number for wait in signals.pending] == [2**31 + 1]
    signals.give_up()
    signals.take_out_what_is_over()
    assert not signals.pending


def come_to_its_waits(signals: StreamSignals) -> None:
    """What this rank's stream would do by itself: it writes what was posted before."""
    for wait in signals.pending:
        signals.flags[wait.after.to][wait.after.word] = wait.after.number


def until(condition: Callable[[], bool]) -> bool:
    """Whether it holds within 10 s."""
    end_s = time.monotonic() + 10
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.01)
    return condition()


def test_the_oldest_wait_ends_at_the_deadline(calls: Calls, watch: Watch) -> None:
    signals = signals_of_rank_1_of_3(deadline_s=0.5)
    watchdog = watch(signals)
    signals.wait(READY, 0, "gradients of bucket 3", 0)
    signals.wait(READY, 2, "gradients of bucket 3", 1)
    come_to_its_waits(signals)
    signals.flags[1][0] = 1  # rank 0 comes, rank 2 does not
    assert until(lambda: int(signals.flags[1][2 * WORDS]) == 1)  # the number that it waited for
    assert watchdog.failure is not None
    assert re.sub(r"0\.[5-9]", "X", watchdog.failure) == "gradients of bucket 3, round 1: no signal from rank 2 for X s"
    assert [int(notes[1]) for notes in signals.notes] == [2, 0, 2]  # the peers know; rank + 1


def test_who_waits_in_vain_for_one_that_gave_up_says_so(calls: Calls, watch: Watch) -> None:
    """Rank 0 gave up, and its stream went on for a round: that a later round of it does not come is not its fault."""
    signals = signals_of_rank_1_of_3(deadline_s=0.3)
    watchdog = watch(signals)
    signals.wait(READY, 0, "gradients of bucket 3", 2)
    come_to_its_waits(signals)
    signals.notes[1][1] = 0 + 1
    assert until(lambda: watchdog.failure is not None)
    assert watchdog.failure == "exchanging with rank 0: it gave up waiting for another rank"


def test_after_a_failure_all_waits_end_whatever_a_late_peer_writes(calls: Calls, watch: Watch) -> None:
    signals = signals_of_rank_1_of_3(deadline_s=0.3)
    watchdog = watch(signals)
    for _ in range(3):
        signals.wait(READY, 0, "ring", 0)
    come_to_its_waits(signals)
    flag = signals.flags[1]
    assert until(lambda: int(flag[0]) >= 3) and watchdog.failure is not None
    time.sleep(0.1)  # it has looked again
    flag[0] = 1  # the first signal of rank 0's stream comes after all
    assert until(lambda: int(flag[0]) >= 3)
    signals.wait(READY, 2, "ring", 1)
    start_s = time.monotonic()
    assert until(lambda: int(flag[2 * WORDS]) >= 1) and time.monotonic() - start_s < 0.2


def test_waits_that_end_in_time_are_no_failure(calls: Calls, watch: Watch) -> None:
    """Each takes less than the deadline, all together more."""
    signals = signals_of_rank_1_of_3(deadline_s=0.4)
    watchdog = watch(signals)
    for number in range(1, 8):
        signals.wait(READY, 0, "ring", 0)
        come_to_its_waits(signals)
        time.sleep(0.1)
        signals.flags[1][0] = number
    time.sleep(0.1)
    assert watchdog.failure is None and not signals.pending


def test_the_clock_of_a_wait_starts_when_the_stream_comes_to_its_operation(calls: Calls, watch: Watch) -> None:
    """Rank 1's stream is busy for two deadlines before it posts what rank 2 waits for: no peer is late."""
    signals = signals_of_rank_1_of_3(deadline_s=0.5)
    watchdog = watch(signals)
    signals.begin()
    signals.post(READY, 2)
    signals.wait(READY, 0, "ring", 0)
    time.sleep(1.0)
    assert watchdog.failure is None
    signals.flags[2][1 * WORDS] = 1  # it has come there
    assert until(lambda: watchdog.failure is not None)
    assert re.sub(r"\d\.\d", "X", watchdog.failure or "") == "ring, round 0: no signal from rank 0 for X s"


def test_the_host_looks_at_what_has_come_and_takes_nothing(calls: Calls) -> None:
    signals = signals_of_rank_1_of_3()
    assert not signals.posted(READY, 0)
    signals.flags[1][0] = 1
    assert signals.posted(READY, 0) and signals.posted(READY, 0) and not signals.posted(READY, 2)
    signals.wait_any(READY, [0, 2], "a push of any worker")
    assert calls == []
    signals.wait(READY, 0, "a push of any worker", 0)
    assert calls[-1] == ("wait", 1_000_000, 1) and not signals.posted(READY, 0)


def test_the_host_waits_for_any_until_the_deadline(calls: Calls) -> None:
    signals = signals_of_rank_1_of_3(deadline_s=0.2)
    with pytest.raises(WaitTimeout, match=re.escape("no signal from any of ranks 0, 2 for 0.2 s")):
        signals.wait_any(READY, [0, 2], "a push of any worker")
