"""Calls have numbers: what differs between the ranks is told at once, whichever transport carries them."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transports import every_transport, on_all_ranks

from torch_parallel.collectives import ALL_REDUCE, RING_ALL_REDUCE, broadcast_from
from torch_parallel.transport.base import Transport, TransportError
from torch_parallel.transport.calls import SLOTS, TEXTS, CallBoard, Calls, signature_of

LONG_S = 30.0
"""The deadline where none is to be needed."""
QUICK_S = 5.0
ADVICE = "all ranks must call the same operations in the same order"


# ---- the board alone ----


def new_board(world_size: int) -> CallBoard:
    return CallBoard(memoryview(bytearray(CallBoard.bytes_needed(world_size))), world_size)


def enter(calls: Calls, text: str) -> None:
    calls.say(signature_of(text), text)
    calls.enter(signature_of(text))


def test_numbers_and_texts() -> None:
    board = new_board(3)
    ranks = [Calls(board, rank) for rank in range(3)]
    for number in range(1, 3 * SLOTS):
        for calls in ranks:
            enter(calls, f"sum {number}")
            calls.compare([peer for peer in range(3) if peer < calls._rank])
        assert [calls.number for calls in ranks] == [board.count(rank) for rank in range(3)] == [number] * 3
        assert board.what(1, number) == f"sum {number}"
    assert board.what(1, 2 * SLOTS - 3) is None  # so far back nothing is kept
    assert board.unequal_ends([0, 1, 2]) is None


@pytest.mark.parametrize("seed", range(40))
def test_the_first_call_that_differs_is_found_as_soon_as_both_have_made_it(seed: int) -> None:
    """Two ranks run ahead of each other at random, by less than the slots. One call of rank 1's is another one."""
    draw = random.Random(seed)
    texts = [[draw.choice("abc") for _ in range(300)] for _ in range(2)]
    texts[1] = list(texts[0])
    odd_one = draw.randrange(300)
    texts[1][odd_one] = "d"
    board = new_board(2)
    ranks = [Calls(board, rank) for rank in range(2)]
    while True:
        ahead = ranks[0].number - ranks[1].number
        most = SLOTS // 2
        rank = 0 if ahead <= -most else 1 if ahead >= most else draw.randrange(2)
        enter(ranks[rank], texts[rank][ranks[rank].number])
        both = min(calls.number for calls in ranks)
        if both > odd_one:
            break
        ranks[rank].compare()
    wants = [texts[rank][odd_one] for rank in (rank, 1 - rank)]
    with pytest.raises(TransportError) as raised:
        ranks[rank].compare()
    assert not raised.value.secondhand
    assert str(raised.value) == (
        f"call {odd_one + 1}: rank {rank} wants to {wants[0]}, but rank {1 - rank} wants to {wants[1]}: {ADVICE}"
    )


def test_a_difference_that_nobody_saw_is_seen_later() -> None:
    board = new_board(2)
    first, second = (Calls(board, rank) for rank in range(2))
    for calls, order in ((first, "ab"), (second, "ba")):
        for text in order:
            enter(calls, text)
    for _ in range(5):
        enter(first, "the same")
        enter(second, "the same")
    with pytest.raises(TransportError, match=r"^call 1: rank 0 wants to a, but rank 1 wants to b: "):
        first.compare()


def test_texts_of_long_ago_are_not_taken_for_others() -> None:
    board = new_board(2)
    first, second = (Calls(board, rank) for rank in range(2))
    old = "an old one"
    first.say(signature_of(old), old)
    for number in range(TEXTS):
        enter(first, f"new {number}")
        enter(second, f"new {number}")
    first.enter(signature_of(old))
    enter(second, "x" * 200)
    with pytest.raises(TransportError, match=f"rank 1 wants to {'x' * 200}, but rank 0 wants to call something else:"):
        second.compare()


def test_who_runs_far_ahead_is_compared_when_the_others_have_come_closer() -> None:
    board = new_board(2)
    first, second = (Calls(board, rank) for rank in range(2))
    for _ in range(10 * SLOTS):
        enter(first, "broadcast")
        first.compare()
    for number in range(10 * SLOTS):
        enter(second, "broadcast" if number != 17 else "something else")
        if number < 9 * SLOTS:
            second.compare()
    with pytest.raises(TransportError, match=r"^call "):
        second.compare()


@pytest.mark.parametrize(
    "counts, ended, expected",
    [
        ([3, 3], [0, 1], None),
        (
            [3, 2],
            [0, 1],
            (1, "rank 1 has returned after 2 calls, and rank 0 made 3 calls: call 3 of rank 0 was to c3,"),
        ),
        ([1, 2], [0], (0, "rank 0 has returned after 1 call, and rank 1 made 2 calls: call 2 of rank 1 was to c2,")),
        ([3, 2], [0], None),  # rank 1 may still come to call 3
        (
            [0, 0, 1],
            [0, 1],
            (0, "rank 0 has returned after 0 calls, and rank 2 made 1 call: call 1 of rank 2 was to c1"),
        ),
    ],
)
def test_ends_that_are_not_equal(counts: list[int], ended: list[int], expected: Any) -> None:
    board = new_board(len(counts))
    ranks = [Calls(board, rank) for rank in range(len(counts))]
    for calls, count in zip(ranks, counts, strict=True):
        for number in range(1, count + 1):
            enter(calls, f"c{number}")
    found = board.unequal_ends(ended)
    assert (found is None) == (expected is None)
    if found is not None:
        assert found[0] == expected[0]
        assert found[1].startswith(expected[1])
        ranks[0].told(TransportError("an error that its caller catches"))
        assert board.unequal_ends(ended) is None  # who was told need not be told again


# ---- what differs, on all transports ----


def other_order(transport: Transport) -> None:
    buffers = [transport.share(6, torch.float32) for _ in range(2)]
    for index in (0, 1) if transport.rank == 0 else (1, 0):
        transport.perform(RING_ALL_REDUCE, buffers[index])


def other_algorithm(transport: Transport) -> None:
    buffer = transport.share(6, torch.float32)
    transport.perform(RING_ALL_REDUCE, buffer)
    transport.settle()
    transport.perform(ALL_REDUCE["one_shot" if transport.rank else "ring"], buffer)


def other_size(transport: Transport) -> None:
    buffer = transport.share(6, torch.float32)
    transport.perform(RING_ALL_REDUCE, buffer.narrow(4 + transport.rank))


def other_root(transport: Transport) -> None:
    buffer = transport.share(6, torch.float32)
    transport.perform(broadcast_from(transport.rank), buffer)
    transport.agree("meet behind it")


def other_purpose(transport: Transport) -> None:
    buffer = transport.share(6, torch.float32)
    for what in ("losses", "norms")[transport.rank :]:
        transport.perform(RING_ALL_REDUCE, buffer, what)
    transport.agree("meet behind it")


def missing_agreement(transport: Transport) -> None:
    for step in range(4):
        if (transport.rank, step) != (1, 2):
            transport.agree(f"go on to step {step}")


def agreement_against_schedule(transport: Transport) -> None:
    buffer = transport.share(6, torch.float32)
    if transport.rank == 0:
        transport.agree("meet")
    else:
        transport.perform(RING_ALL_REDUCE, buffer)


def push_against_agreement(transport: Transport) -> None:
    """An equal call before, whose text must not be taken for that of the call that rank 1 leaves out."""
    transport.agree("meet")
    if transport.rank == 0:
        transport.agree("meet")
    else:
        transport.tell(0)
        transport.hear(0, "an answer")
        time.sleep(0.5)  # rank 0 has looked before this rank comes to the call, too late
        transport.agree("meet")


def first_words(differ: Callable[[Transport], None], transport: Transport) -> tuple[str, float]:
    start_s = time.monotonic()
    try:
        differ(transport)
    except TransportError as error:
        return str(error), time.monotonic() - start_s
    return "no error", time.monotonic() - start_s


ON_6 = "on 6 elements of torch.float32 in buffer"
RING = f"perform ring {ON_6} 1"
DIFFERENT: list[tuple[Callable[[Transport], None], str, str, str]] = [
    (other_order, "call 3", f"perform ring {ON_6} 1", f"perform ring {ON_6} 2"),
    (other_algorithm, "call 3", RING, f"perform one_shot {ON_6} 1"),
    (other_size, "call 2", RING.replace("6", "4"), RING.replace("6", "5")),
    (other_root, "call 2", f"perform broadcast {ON_6} 1", f"perform broadcast {ON_6} 1, which is another one"),
    (other_purpose, "call 2", f"{RING} (losses)", f"{RING} (norms)"),
    (missing_agreement, "call 3", "go on to step 2", "go on to step 3"),
    (agreement_against_schedule, "call 2", "meet", RING),
]


@every_transport
@pytest.mark.parametrize("differ, call, on_0, on_1", DIFFERENT)
@pytest.mark.exhaustive
def test_what_differs_is_named_at_once(
    kind: str, differ: Callable[[Transport], None], call: str, on_0: str, on_1: str
) -> None:
    told = on_all_ranks(kind, 2, lambda transport: first_words(differ, transport), deadline_s=LONG_S)
    assert max(seconds for _, seconds in told) < QUICK_S
    wants = (on_0, on_1) if "another one" not in on_1 else (on_0, on_0)
    for rank, (error, _) in enumerate(told):
        theirs = wants[1 - rank] + (", which is another one" if "another one" in on_1 else "")
        assert error == f"{call}: rank {rank} wants to {wants[rank]}, but rank {1 - rank} wants to {theirs}: {ADVICE}"


@every_transport
def test_a_push_is_not_taken_for_an_agreement(kind: str) -> None:
    told = on_all_ranks(kind, 2, lambda transport: first_words(push_against_agreement, transport), deadline_s=LONG_S)
    assert told[0][0] == (f"call 2: rank 0 wants to meet, but rank 1 has made 1 call and does something else: {ADVICE}")
    assert max(seconds for _, seconds in told) < QUICK_S


@every_transport
def test_among_three_the_odd_one_is_named(kind: str) -> None:
    def differ(transport: Transport) -> None:
        buffer = transport.share(6, torch.float32)
        transport.perform(RING_ALL_REDUCE, buffer, "b" if transport.rank == 2 else "a")
        transport.agree("meet behind it")

    told = on_all_ranks(kind, 3, lambda transport: first_words(differ, transport), deadline_s=LONG_S)
    for rank, (error, _) in enumerate(told):
        other = r"rank 2 wants to .*\(b\)" if rank < 2 else r"rank [01] wants to .*\(a\)"
        # a rank may hear first that the one it waits for has raised, or returned
        assert re.match(rf"call 2: rank {rank} wants to .*, but {other}|rank \d has", error), error
    assert sum(error.startswith("call 2: ") for error, _ in told) >= 2


# ---- a peer that is over ----


def wait_for_one_that_is_over(transport: Transport, how: str) -> tuple[str, float]:
    buffer = transport.share(6, torch.float32)
    if transport.rank == 1:
        return "", 0.0
    waits: dict[str, Callable[[], Any]] = {
        "agree": lambda: transport.agree("meet"),
        "perform": lambda: transport.perform(RING_ALL_REDUCE, buffer, "gradients"),
        "settle": lambda: (transport.perform(broadcast_from(0), buffer), transport.settle()),
        "hear": lambda: transport.hear(1, "an answer"),
        "arrivals": lambda: transport.arrivals([1], "a push"),
    }
    return first_words(lambda transport: waits[how](), transport)


OVER = {
    "agree": "in call 2, meet",
    "perform": "in call 2, gradients, round 0",
    "settle": "(broadcast, end of the peer's reading)",
    "hear": "(an answer)",
    "arrivals": "(a push)",
}


@every_transport
@pytest.mark.parametrize("how", OVER)
def test_who_waits_for_one_that_has_returned_says_so_at_once(kind: str, how: str) -> None:
    error, seconds = on_all_ranks(kind, 2, wait_for_one_that_is_over, how, deadline_s=LONG_S)[0]
    assert error == f"rank 1 has returned, and rank 0 waits for it {OVER[how]}"
    assert seconds < QUICK_S


@every_transport
def test_what_was_signalled_before_the_end_still_counts(kind: str) -> None:
    """Rank 1 posts all that rank 0 needs, and returns long before rank 0 looks."""

    def work(transport: Transport) -> float:
        buffer = transport.share(6, torch.float32)
        buffer.local.fill_(transport.rank + 1.0)
        if transport.rank == 0:
            time.sleep(0.3)
        transport.perform(broadcast_from(1), buffer)
        if transport.rank == 1:
            transport.tell(0)
        else:
            transport.hear(1, "the last word")
        return buffer.local[0].item()

    assert on_all_ranks(kind, 2, work, deadline_s=LONG_S) == [2.0, 2.0]


@every_transport
def test_of_several_that_may_come_all_must_be_over(kind: str) -> None:
    def serve(transport: Transport) -> Any:
        if transport.rank == 1:
            return None
        if transport.rank == 2:
            time.sleep(0.3)
            transport.tell(0)
            return None
        came = transport.arrivals([1, 2], "a push of any")
        try:
            transport.arrivals([1, 2], "a push of any")
        except TransportError as error:
            return came, str(error)
        return came, "no error"

    assert on_all_ranks(kind, 3, serve, deadline_s=LONG_S)[0] == (
        [2],
        "ranks 1, 2 have all returned, and rank 0 waits for them (a push of any)",
    )
