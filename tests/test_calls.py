"""What a whole run says where its ranks do not make the same calls, and how long it may work without being silent."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torch_parallel import WorkerFailure, launch, launcher
from torch_parallel.collectives import broadcast_from
from torch_parallel.communicator import Communicator
from torch_parallel.status import StatusBoard
from torch_parallel.transport.base import TransportError

pytestmark = pytest.mark.usefixtures("started")

LONG_S = 60.0
QUICK_S = 10.0


def failure_of(work: Callable[..., Any], n: int, *arguments: Any, deadline_s: float = LONG_S) -> tuple[str, int | None]:
    """The first line of the failure, which comes long before the deadline, and whose it is."""
    start_s = time.monotonic()
    with pytest.raises(WorkerFailure) as raised:
        launch(work, n, *arguments, threads=1, deadline_s=deadline_s)
    assert time.monotonic() - start_s < QUICK_S
    return str(raised.value).splitlines()[0], raised.value.rank


# ---- ranks that return too early, or call too little ----


def returns_before_all(c: Communicator) -> None:
    if c.rank:
        c.all_reduce(torch.ones(3))


def returns_from_a_loop(c: Communicator) -> None:
    for _ in range(5 + c.rank):
        c.all_reduce(torch.ones(2, 2))


def returns_before_the_objects_are_gathered(c: Communicator) -> None:
    c.barrier()
    if c.rank:
        c.gather({"rank": c.rank})


RETURNED = [
    (returns_before_all, "call 1, all_reduce 3 elements of torch.float32 by ring"),
    (returns_from_a_loop, r"call 6, all_reduce 4 elements \[2, 2\] of torch.float32 by ring"),
    (returns_before_the_objects_are_gathered, "call 2, gather objects to rank 0, of sizes in 2 elements .*"),
]


@pytest.mark.parametrize("work, call", RETURNED)
def test_a_rank_that_returns_while_another_needs_it(work: Callable[..., Any], call: str) -> None:
    line, rank = failure_of(work, 2)
    assert re.fullmatch(
        rf"rank 1 failed: TransportError: rank 0 has returned, and rank 1 waits for it in {call}", line
    ), line
    assert rank == 1


def calls_once_more(c: Communicator) -> str:
    """Rank 0's last broadcast needs nothing of the others, so nobody waits."""
    buffer = c.share(4)
    for _ in range(2 + (c.rank == 0)):
        c.transport.perform(broadcast_from(0), buffer, "news")
    return "done"


def test_a_rank_that_has_made_more_calls_though_nobody_waits() -> None:
    line, rank = failure_of(calls_once_more, 3)
    assert re.match(r"rank [12] has returned after 3 calls, and rank 0 made 4 calls: call 4 of rank 0 was to", line)
    assert "perform broadcast on 4 elements of torch.float32 in buffer 1 (news)" in line
    assert rank in (1, 2)


def test_the_launcher_need_not_wait_until_somebody_waits() -> None:
    def work(c: Communicator) -> None:
        buffer = c.share(4)
        if c.rank:
            c.transport.perform(broadcast_from(1), buffer)
            time.sleep(LONG_S)  # as a rank whose GPU waits, of which the host says nothing

    line, rank = failure_of(work, 2)
    assert line.startswith("rank 0 has returned after 1 call, and rank 1 made 2 calls: call 2 of rank 1 was to perform")
    assert rank == 0


def leaves_out(c: Communicator, named: bool) -> dict[int, float]:
    """Rank 1 leaves out call 1 of four, rank 0 call 3: as many calls of the same kind and size on both."""
    sums = {}
    for step in range(4):
        if (c.rank, step) not in ((1, 1), (0, 3)):
            tensor = torch.tensor([10.0**step])
            sums[step] = c.all_reduce(tensor, name=f"step {step}" if named else None).item()
    return sums


def test_equal_calls_of_other_meaning_are_told_apart_by_their_names() -> None:
    line, _ = failure_of(leaves_out, 2, True)
    wants = [rf"all_reduce 1 elements of torch\.float32 by ring, named 'step {step}'" for step in (1, 2)]
    forwards = rf"rank 0 failed: TransportError: call 2: rank 0 wants to {wants[0]}, but rank 1 wants to {wants[1]}: .*"
    backwards = (
        rf"rank 1 failed: TransportError: call 2: rank 1 wants to {wants[1]}, but rank 0 wants to {wants[0]}: .*"
    )
    assert re.fullmatch(f"{forwards}|{backwards}", line), line


def every_collective(c: Communicator, odd_one: int) -> list[str]:
    """Each named; in the one that is odd rank 1 gives another name. Returns those that were told apart."""
    table = torch.ones(c.world_size, 2)
    calls: list[Callable[[str], Any]] = [
        lambda name: c.all_reduce(torch.ones(2), name=name),
        lambda name: c.broadcast(torch.ones(2), name=name),
        lambda name: c.reduce(torch.ones(2), name=name),
        lambda name: c.gather_tensor(torch.ones(2), name=name),
        lambda name: c.scatter(table, name=name),
        lambda name: c.all_gather(torch.ones(2), name=name),
        lambda name: c.reduce_scatter(table, name=name),
        lambda name: c.all_to_all(table, name=name),
        lambda name: c.barrier(name=name),
        lambda name: c.gather("object", name=name),
        lambda name: c.all_ranks(torch.ones(2), name=name),
    ]
    for number, call in enumerate(calls):
        call("odd" if (c.rank, number) == (1, odd_one) else "even")
    return []


@pytest.mark.parametrize("odd_one", range(11))
def test_every_collective_compares_its_name_and_is_one_call(odd_one: int) -> None:
    line, _ = failure_of(every_collective, 2, odd_one)
    assert re.match(rf"rank [01] failed: TransportError: call {odd_one + 1}: rank [01] wants to .*named '", line), line
    assert "named 'odd'" in line and "named 'even'" in line


# ---- long work ----

DEADLINE_S, GRACE_S, WORK_S = 1.5, 0.6, 3.2


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "GRACE_S", GRACE_S)


def one_works(c: Communicator, waits: str) -> str:
    """Rank 0 works for longer than the deadline, and the launcher's patience with the silent, while others wait."""
    buffer = c.share(6)
    if c.rank == 0:
        with c.long_work("reading"):
            time.sleep(WORK_S)
    if waits == "chain":  # rank 2 waits for rank 1, and that one for rank 0
        if c.rank:
            c.transport.hear(c.rank - 1, "word")
        if c.rank < 2:
            c.transport.tell(c.rank + 1)
    elif waits == "ring":
        c.transport.perform(broadcast_from(0), buffer)
    else:
        c.barrier()
    return "done"


@pytest.mark.parametrize("pipes", [False, True])
@pytest.mark.parametrize("waits", ["barrier", "ring", "chain"])
@pytest.mark.exhaustive
def test_who_works_may_be_waited_for_past_the_deadline(short_grace: None, pipes: bool, waits: str) -> None:
    assert launch(one_works, 3, waits, threads=1, deadline_s=DEADLINE_S, signal_pipes=pipes) == ["done"] * 3


def test_who_is_stopped_at_work_is_silent(short_grace: None) -> None:
    def work(c: Communicator) -> None:
        if c.rank == 0:
            with c.long_work("reading"):
                os.kill(os.getpid(), signal.SIGSTOP)
        c.barrier()

    line, _ = failure_of(work, 2, deadline_s=DEADLINE_S)
    assert "rank 0 is stopped; " in line or "rank 0 gave no sign of life" in line


def test_to_wait_for_each_other_is_no_work(short_grace: None) -> None:
    def work(c: Communicator) -> None:
        with c.long_work("waiting"):
            c.transport.hear(1 - c.rank, "a word that nobody says")

    line, _ = failure_of(work, 2, deadline_s=DEADLINE_S)
    assert re.fullmatch(
        r"rank \d failed: TransportError: rank \d, a word that nobody says: no signal from rank \d .*", line
    )


@pytest.mark.parametrize("failing", [0, 1])
def test_who_only_saw_a_peer_fail_is_not_blamed(failing: int) -> None:
    """Also where the peer's own error may be a consequence of something else, as a wait that ran out is."""

    def work(c: Communicator) -> None:
        if c.rank == failing:
            raise TransportError("a wait that ran out", secondhand=True)
        c.barrier()

    line, rank = failure_of(work, 2)
    assert rank == failing
    assert line == f"rank {failing} failed: TransportError: a wait that ran out"


@pytest.mark.exhaustive
def test_when_the_work_is_done_the_deadline_holds_again(short_grace: None) -> None:
    def work(c: Communicator) -> None:
        if c.rank == 0:
            with c.long_work("reading"):
                time.sleep(WORK_S)
            time.sleep(LONG_S)
        c.barrier()

    line, _ = failure_of(work, 2, deadline_s=DEADLINE_S)
    assert re.search(r"no signal from rank 0 for \d\.\d s|rank 0 gave no sign of life", line)


def test_the_board_says_what_the_work_is() -> None:
    board = StatusBoard(memoryview(bytearray(StatusBoard.bytes_needed(2))), 2)
    reporter = board.reporter(1)
    with reporter.at_work("tokenizing"):
        assert str(board.read(1)) == "rank 1 was starting, in long work (tokenizing)"
        reporter.waiting(0, "a word")
        assert str(board.read(1)) == "rank 1 was starting, waiting for rank 0 (a word)"
        assert board.last_work_s(1) == 0.0  # who waits does not work
        reporter.done_waiting()
        with reporter.at_work("and more"):  # inside of the other
            assert str(board.read(1)) == "rank 1 was starting, in long work (tokenizing)"
        assert abs(board.last_work_s(1) - time.monotonic()) < 1
    assert str(board.read(1)) == "rank 1 was starting"
    assert board.last_work_s(1) == 0.0
