"""The proof accepts every registered collective, and names what is wrong with a wrong one."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, permutations, product
from typing import Any

import pytest

from torch_parallel.collectives import (
    COLLECTIVES,
    Collective,
    Local,
    Operation,
    Receive,
    Round,
    Send,
    broadcast_from,
    reduce_to,
)
from torch_parallel.collectives.direct import TWO_SHOT_IN_PLACE
from torch_parallel.collectives.proof import ProofError, examine, prove
from torch_parallel.collectives.rooted import gather_to, scatter_from
from torch_parallel.collectives.shapes import MAX_ROUNDS
from torch_parallel.collectives.tree import tree_broadcast_from, tree_reduce_to

RING, BROADCAST = COLLECTIVES["ring"], COLLECTIVES["broadcast"]
WHOLE, NOTHING = range(0, 1), range(0, 0)


def written(
    *programs: list[Round], promised: frozenset[int] | None = None, chunk_count: int = 1, **more: Any
) -> Collective:
    """A collective from literal rounds, one list a rank."""
    return Collective(
        name="written",
        rounds=lambda rank, world_size: iter(programs[rank]),
        chunk_count=lambda world_size: chunk_count,
        contributors=lambda rank, world_size, chunk: promised,
        round_count=lambda rank, world_size: len(programs[rank]),
        message_count=lambda rank, world_size: 0,
        sent_elements=lambda rank, world_size, numel: 0,
        **more,
    )


def mutated(collective: Collective, change: Callable[[int, list[Round]], list[Round]]) -> Collective:
    """The collective with each rank's rounds changed."""
    return replace(collective, rounds=lambda rank, n: iter(change(rank, list(collective.rounds(rank, n)))))


def all_receives(collective: Collective, reduce: bool) -> Collective:
    """The collective with every receive adding, or every receive replacing."""

    def changed(operation: Operation) -> Operation:
        return replace(operation, reduce=reduce) if isinstance(operation, Receive) else operation

    return mutated(collective, lambda rank, rounds: [[changed(operation) for operation in this] for this in rounds])


def faults_of(collective: Collective, world_size: int) -> list[str]:
    """The faults, after a check that `prove` raises exactly when there are some, and says the first."""
    faults = list(examine(collective, world_size).faults)
    if faults:
        with pytest.raises(ProofError, match=re.escape(faults[0])):
            prove(collective, world_size)
    else:
        prove(collective, world_size)
    return faults


# ---- what is right ----


@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_collective_is_proved(name: str) -> None:
    for world_size in (*range(1, 18), 24, 31, 32):
        assert prove(COLLECTIVES[name], world_size).faults == ()


@pytest.mark.parametrize("root", range(4))
def test_any_rank_can_be_the_root(root: int) -> None:
    rooted = (
        reduce_to,
        partial(reduce_to, root_contributes=False),
        broadcast_from,
        gather_to,
        scatter_from,
        tree_reduce_to,
        tree_broadcast_from,
    )
    for collective_of in rooted:
        assert prove(collective_of(root), 4).faults == ()
        assert prove(collective_of(root), 7).faults == ()


def test_a_rank_may_send_first_and_receive_later_if_the_others_do_not_wait_for_it() -> None:
    def split_on_rank_0(rank: int, rounds: list[Round]) -> list[Round]:
        return [[operation] for this in rounds for operation in this] if rank == 0 else rounds

    assert faults_of(mutated(RING, split_on_rank_0), 4) == []


# ---- wrong chunks ----


def test_a_wrong_index_on_both_sides_is_wrong_contents() -> None:
    """The all_gather of the ring that owns chunk rank + 1, after the reduce_scatter of the one that owns chunk rank."""

    def rounds(rank: int, n: int) -> Iterator[Round]:
        yield from COLLECTIVES["ring_reduce_scatter"].rounds(rank, n)
        for step in range(n - 1):
            sent, received = (rank + 1 - step) % n, (rank - step) % n
            yield [
                Send((rank + 1) % n, range(sent, sent + 1)),
                Receive((rank - 1) % n, range(received, received + 1), reduce=False),
            ]

    assert faults_of(replace(RING, rounds=rounds), 2) == [
        "rank 0 ends with chunk 0 lacking rank 0's contribution",
        "rank 0 ends with chunk 1 lacking rank 1's contribution",
        "rank 1 ends with chunk 0 lacking rank 0's contribution",
        "rank 1 ends with chunk 1 lacking rank 1's contribution",
    ]
    assert faults_of(replace(RING, rounds=rounds), 5) != []


def test_a_wrong_index_on_one_side_is_a_mismatch() -> None:
    def expect_chunk_0(rank: int, rounds: list[Round]) -> list[Round]:
        return [[rounds[0][0], Receive(3, range(0, 1), reduce=True)], *rounds[1:]] if rank == 0 else rounds

    faults = faults_of(mutated(RING, expect_chunk_0), 4)
    assert faults[0] == "mismatch: rank 3 sends chunks 2..2 to rank 0, which expects 0..0, message 0 of the pair"
    assert "rank 0 ends with chunk 0 holding chunk 2 of rank 3, which was not promised" in faults


def test_messages_match_in_the_order_of_their_pair() -> None:
    swapped = written(
        [[Send(1, range(0, 1))], [Send(1, range(1, 2))]],
        [[Receive(0, range(1, 2), reduce=False)], [Receive(0, range(0, 1), reduce=False)]],
        chunk_count=2,
    )
    assert faults_of(swapped, 2) == [
        "mismatch: rank 0 sends chunks 0..0 to rank 1, which expects 1..1, message 0 of the pair",
        "mismatch: rank 0 sends chunks 1..1 to rank 1, which expects 0..0, message 1 of the pair",
    ]


def test_adding_where_to_replace_counts_twice() -> None:
    assert faults_of(all_receives(RING, reduce=True), 2) == [
        "rank 0 ends with chunk 1 holding rank 0's contribution 2 times",
        "rank 1 ends with chunk 0 holding rank 1's contribution 2 times",
    ]


def test_replacing_where_to_add_loses() -> None:
    assert faults_of(all_receives(RING, reduce=False), 2) == [
        "rank 0 ends with chunk 0 lacking rank 0's contribution",
        "rank 0 ends with chunk 1 lacking rank 1's contribution",
        "rank 1 ends with chunk 0 lacking rank 0's contribution",
        "rank 1 ends with chunk 1 lacking rank 1's contribution",
    ]


def test_a_contribution_that_nobody_asked_for() -> None:
    adding = written([[Send(1, WHOLE)]], [[Receive(0, WHOLE, reduce=True)]], promised=frozenset([0]))
    assert faults_of(adding, 2) == ["rank 1 ends with chunk 0 holding chunk 0 of rank 1, which was not promised"]


def test_a_missing_round_on_all_ranks_is_wrong_contents() -> None:
    assert faults_of(mutated(RING, lambda rank, rounds: rounds[:-1]), 4) == [
        "rank 0 ends with chunk 1 lacking rank 1's contribution",
        "rank 1 ends with chunk 2 lacking rank 2's contribution",
        "rank 2 ends with chunk 3 lacking rank 3's contribution",
        "rank 3 ends with chunk 0 lacking rank 0's contribution",
    ]


# ---- deadlocks and lost messages ----


def test_receiving_before_sending_is_a_deadlock_on_every_transport() -> None:
    backwards = mutated(RING, lambda rank, rounds: [[o] for this in rounds for o in reversed(this)])
    waits = [f"rank {rank} waits in round 0 to receive from rank {(rank - 1) % 3}" for rank in range(3)]
    assert faults_of(backwards, 3) == [
        f"deadlock if sends block: {', '.join(waits)}",
        f"deadlock even if sends do not block: {', '.join(waits)}",
    ]


def test_sending_before_receiving_is_a_deadlock_only_if_sends_block() -> None:
    split = mutated(RING, lambda rank, rounds: [[o] for this in rounds for o in this])
    waits = [f"rank {rank} waits in round 0 to send to rank {(rank + 1) % 3}" for rank in range(3)]
    assert faults_of(split, 3) == [f"deadlock if sends block: {', '.join(waits)}"]


def test_a_missing_round_on_one_rank() -> None:
    shortened = mutated(RING, lambda rank, rounds: rounds[:-1] if rank == 2 else rounds)
    waits = "rank 3 waits in round 5 to receive from rank 2"
    assert faults_of(shortened, 4) == [
        "stray message: rank 1 sends chunks 3..3 to rank 2 in round 5, which never receives it",
        f"deadlock if sends block: rank 1 waits in round 5 to send to rank 2, {waits}",
        f"deadlock even if sends do not block: {waits}",
    ]


def test_a_message_that_nobody_receives() -> None:
    def one_more(rank: int, rounds: list[Round]) -> list[Round]:
        return [*rounds[:-1], [*rounds[-1], Send(2, range(3, 4))]] if rank == 0 else rounds

    assert faults_of(mutated(RING, one_more), 4) == [
        "stray message: rank 0 sends chunks 3..3 to rank 2 in round 5, which never receives it",
        "deadlock if sends block: rank 0 waits in round 5 to send to rank 2",
    ]


def test_a_message_that_nobody_receives_is_not_called_overwritten_too() -> None:
    unread = written([[Send(1, WHOLE)], [Receive(1, WHOLE, reduce=True)]], [[Send(0, WHOLE)]])
    stray, deadlock = faults_of(unread, 2)
    assert stray == "stray message: rank 0 sends chunks 0..0 to rank 1 in round 0, which never receives it"
    assert deadlock.startswith("deadlock if sends block: rank 0 waits in round 0 to send to rank 1")


# ---- overwrites ----


def test_a_round_that_changes_a_chunk_it_sends() -> None:
    """Everybody adds up everybody's buffer, in place and in one round."""
    one_shot = written(
        *[
            [[Send(p, WHOLE) for p in range(3) if p != rank] + [Receive(p, WHOLE, True) for p in range(3) if p != rank]]
            for rank in range(3)
        ],
        promised=frozenset(range(3)),
    )
    assert faults_of(one_shot, 3) == [
        f"overlap: rank {rank} changes chunk 0 in round 0, which sends it to rank {reader}"
        for rank in range(3)
        for reader in range(3)
        if reader != rank
    ]


def test_one_shot_in_place_in_two_rounds_overwrites_what_others_read() -> None:
    one_shot = written(
        [[Send(1, WHOLE)], [Receive(1, WHOLE, True)]],
        [[Send(0, WHOLE)], [Receive(0, WHOLE, True)]],
        promised=frozenset(range(2)),
    )
    deadlock, *overwrites = faults_of(one_shot, 2)
    waits = "rank 0 waits in round 0 to send to rank 1, rank 1 waits in round 0 to send to rank 0"
    assert deadlock == f"deadlock if sends block: {waits}"
    assert overwrites == [
        f"overwrite if sends do not block: rank {rank} changes chunk 0 in round 1 while rank {1 - rank} may still be "
        "reading it (sent in round 0)"
        for rank in (0, 1)
    ]


def relay(reader: list[Round], writer: list[Round]) -> Collective:
    """Rank 0 lends its chunk to rank 1, then takes another from rank 2; what ranks 1 and 2 do is given."""
    return written([[Send(1, WHOLE)], [Receive(2, WHOLE, reduce=True)]], reader, writer)


OVERWRITE = (
    "overwrite if sends do not block: rank 0 changes chunk 0 in round 1 "
    "while rank 1 may still be reading it (sent in round 0)"
)
READ, TELL = Receive(0, WHOLE, reduce=False), Send(2, NOTHING)
HEAR, GIVE = Receive(1, NOTHING, reduce=False), Send(0, WHOLE)


def test_an_overwrite_that_only_pull_transports_suffer() -> None:
    assert faults_of(relay([[READ]], [[GIVE]]), 3) == [OVERWRITE]


def test_news_of_a_finished_read_travels_by_way_of_others() -> None:
    assert faults_of(relay([[READ], [TELL]], [[HEAR], [GIVE]]), 3) == []


def test_a_signal_does_not_vouch_for_the_reads_of_its_own_round() -> None:
    assert faults_of(relay([[READ, TELL]], [[HEAR], [GIVE]]), 3) == [OVERWRITE]


def test_a_signal_does_not_carry_what_its_sender_learns_later() -> None:
    assert faults_of(relay([[READ], [TELL]], [[HEAR, GIVE]]), 3) == [OVERWRITE]
    assert faults_of(relay([[READ], [TELL]], [[GIVE], [HEAR]]), 3) == [OVERWRITE]


def test_an_earlier_signal_does_not_vouch_for_a_later_read() -> None:
    twice = written(
        [[Send(1, WHOLE)], [Send(1, WHOLE)], [Receive(2, WHOLE, reduce=True)]],
        [[READ], [TELL], [READ]],
        [[HEAR], [GIVE]],
    )
    assert faults_of(twice, 3) == [OVERWRITE.replace("round 1", "round 2").replace("round 0", "round 1")]


def test_each_chunk_is_watched_by_itself() -> None:
    first, second = range(0, 1), range(1, 2)
    other_chunk = written(
        [[Send(1, first)], [Receive(2, second, reduce=True)]],
        [[Receive(0, first, reduce=False)]],
        [[Send(0, second)]],
        chunk_count=2,
    )
    assert faults_of(other_chunk, 3) == []


# ---- regions ----

EVERYONE_OF_TWO = frozenset(range(2))
SECOND = range(1, 2)


def two_regions(first: list[Round], second: list[Round], **more: Any) -> Collective:
    """Two ranks, one chunk a region, the result in the second one."""
    settings = {"promised": EVERYONE_OF_TWO, "region_count": lambda rank, world_size: 2, "result_region": 1}
    return written(first, second, **{**settings, **more})


def swap(*steps: Any) -> Callable[[int], Round]:
    """A round in which both ranks send all they have; `steps` are made from the other's rank."""
    return lambda rank: [Send(1 - rank, WHOLE), *(step(1 - rank) for step in steps)]


def both(this: Callable[[int], Round], **more: Any) -> Collective:
    return two_regions([this(0)], [this(1)], **more)


def add_into_second(peer: int) -> Receive:
    return Receive(peer, WHOLE, reduce=True, into=SECOND, plus=WHOLE)


def move_into_second(peer: int) -> Local:
    return Local(WHOLE, SECOND, reduce=True)


def test_a_sum_in_a_second_region() -> None:
    assert faults_of(both(swap(add_into_second)), 2) == []
    copied = swap(lambda peer: Receive(peer, WHOLE, reduce=False, into=SECOND), move_into_second)
    assert faults_of(both(copied), 2) == []


def test_scratch_holds_nothing_at_first() -> None:
    adding = both(swap(lambda peer: Receive(peer, WHOLE, reduce=True, into=SECOND), move_into_second))
    assert faults_of(adding, 2) == [
        f"rank {rank} ends with chunk 1 holding what lay in chunk 1 before" for rank in (0, 1)
    ]


def test_a_result_that_is_left_in_the_wrong_region() -> None:
    faults = faults_of(both(swap(add_into_second), result_region=0), 2)
    assert faults == [
        "rank 0 ends with chunk 0 lacking rank 1's contribution",
        "rank 1 ends with chunk 0 lacking rank 0's contribution",
    ]


def test_a_move_twice_counts_twice() -> None:
    faults = faults_of(both(swap(add_into_second, move_into_second)), 2)
    assert faults == [f"rank {rank} ends with chunk 1 holding rank {rank}'s contribution 2 times" for rank in (0, 1)]


def test_a_move_that_changes_a_chunk_that_its_round_sends() -> None:
    back = both(swap(add_into_second, lambda peer: Local(SECOND, WHOLE, reduce=False)))
    assert faults_of(back, 2) == [
        f"overlap: rank {rank} changes chunk 0 in round 0, which sends it to rank {1 - rank}" for rank in (0, 1)
    ]


def test_a_move_that_overwrites_what_another_still_reads() -> None:
    """Rank 1 copies rank 0's chunk; rank 0 hears from rank 1 only what it sent before, then changes the chunk."""
    early = two_regions(
        [[Send(1, WHOLE)], [Receive(1, NOTHING, False), Local(SECOND, WHOLE, reduce=False)]],
        [[Send(0, NOTHING)], [Receive(0, WHOLE, False)]],
        promised=None,
    )
    assert (
        "overwrite if sends do not block: rank 0 changes chunk 0 in round 1 while rank 1 may" in faults_of(early, 2)[-1]
    )


def test_chunks_that_change_places() -> None:
    """all_to_all with rank 0's own chunk left out, and with one chunk put in the place of the other."""
    right = COLLECTIVES["all_to_all"]
    without = mutated(right, lambda rank, rounds: [[o for o in this if not isinstance(o, Local)] for this in rounds])
    assert faults_of(without, 2) == [
        line
        for rank in (0, 1)
        for line in (
            f"rank {rank} ends with chunk {2 + rank} holding what lay in chunk {2 + rank} before",
            f"rank {rank} ends with chunk {2 + rank} lacking rank {rank}'s contribution",
        )
    ]
    wrong_places = replace(right, source_chunk=lambda rank, world_size, chunk: chunk)
    assert "rank 0 ends with chunk 4 holding chunk 0 of rank 1, which was not promised" in faults_of(wrong_places, 3)


# ---- a common result ----


def in_place(change: Callable[[int, list[Round]], list[Round]]) -> list[str]:
    """What is wrong with the changed `two_shot_in_place` of three ranks: chunks 3, 4 and 5 are the common ones."""
    return faults_of(mutated(TWO_SHOT_IN_PLACE, change), 3)


def test_two_shot_in_place_literally() -> None:
    shots = list(TWO_SHOT_IN_PLACE.rounds(1, 3))
    mine = range(1, 2)
    assert shots == [
        [
            Send(2, range(2, 3)),
            Send(0, range(0, 1)),
            Receive(2, mine, reduce=True),
            Receive(0, mine, reduce=True, into=range(4, 5), plus=mine),
        ],
        [
            Send(2, range(4, 5)),
            Send(0, range(4, 5)),
            Receive(2, range(5, 6), reduce=False),
            Receive(0, range(3, 4), reduce=False),
        ],
    ]


def test_a_common_result_needs_no_acknowledgement() -> None:
    assert prove(TWO_SHOT_IN_PLACE, 4).unfinished_reads == set()


def test_a_common_chunk_that_is_written_before_all_have_come() -> None:
    """The first addition into the common chunk, not the last: the last rank may still use the last result."""

    def early(rank: int, rounds: list[Round]) -> list[Round]:
        first, second = [operation for operation in rounds[0] if isinstance(operation, Receive)]
        into = range(3 + rank, 4 + rank)
        swapped = [replace(first, into=into, plus=first.chunks), replace(second, into=into, plus=None)]
        return [[*rounds[0][:2], *swapped], rounds[1]]

    assert in_place(early) == [
        f"common chunk: rank {rank} changes chunk {3 + rank} in round 0, while rank {(rank + 2) % 3}, from which it "
        "has not heard, may still be using the last result"
        for rank in range(3)
    ]


def test_a_common_chunk_with_two_writers() -> None:
    def mine_too(rank: int, rounds: list[Round]) -> list[Round]:
        return [[*rounds[0], Local(range(1, 2), range(4, 5), reduce=False)], rounds[1]] if rank == 2 else rounds

    assert any("which rank" in fault and "writes too" in fault for fault in in_place(mine_too))


def test_a_common_chunk_that_changes_after_it_was_sent() -> None:
    def again(rank: int, rounds: list[Round]) -> list[Round]:
        return [rounds[0], [*rounds[1], Local(range(0, 1), range(3, 4), reduce=True)]] if rank == 0 else rounds

    assert "overlap: rank 0 changes chunk 3 in round 1, which sends it to rank 1" in in_place(again)

    def later(rank: int, rounds: list[Round]) -> list[Round]:
        answer = [Send(0, NOTHING)] if rank == 1 else []
        if rank == 0:
            answer = [Receive(1, NOTHING, reduce=False), Local(range(0, 1), range(3, 4), reduce=True)]
        return [*rounds, answer]

    faults = in_place(later)
    assert "common chunk: rank 0 changes chunk 3 in round 2, which it has sent to rank 1 in round 1 for good" in faults


def test_a_rank_that_does_not_wait_for_a_common_chunk() -> None:
    """It does not know that the sum is there, whether it is or not."""

    def without(rank: int, rounds: list[Round]) -> list[Round]:
        if rank == 0:
            return [rounds[0], [o for o in rounds[1] if not (isinstance(o, Receive) and o.source == 2)]]
        return [rounds[0], [o for o in rounds[1] if not (isinstance(o, Send) and rank == 2 and o.to == 0)]]

    faults = in_place(without)
    assert faults[0] == "rank 0 ends with chunk 5 holding what lay in chunk 5 before"
    assert "rank 0 ends with chunk 5 lacking rank 1's contribution" in faults


def test_a_common_chunk_comes_from_its_writer() -> None:
    common = range(1, 2)
    relayed = written(
        [[Receive(1, WHOLE, True), Receive(2, WHOLE, True, into=common, plus=WHOLE)], [Send(1, common)]],
        [[Send(0, WHOLE)], [Receive(0, common, False)], [Send(2, common)]],
        [[Send(0, WHOLE)], [Receive(1, common, False)]],
        promised=frozenset(range(3)),
        region_count=lambda rank, world_size: 2,
        result_region=1,
        common_result=True,
    )
    assert faults_of(relayed, 3) == [
        "rank 2 waits for common chunk 1 in round 1 until rank 1 sends it, which does not write it"
    ]


@pytest.mark.parametrize(
    ("operations", "flaw"),
    [
        ([Local(WHOLE, SECOND, True)], "moves chunks without a receive before that"),
        ([Receive(1, WHOLE, False, into=range(2, 3))], "receives from rank 1 range(0, 1) to range(2, 3), which is no"),
        ([Receive(1, WHOLE, False, into=range(1, 1))], "receives from rank 1 range(0, 1) to range(1, 1), of another"),
        ([Receive(1, WHOLE, True, into=SECOND, plus=range(5, 6))], "receives from rank 1 range(0, 1) to range(5, 6), "),
        ([Receive(1, SECOND, False)], "receives from rank 1 range(1, 2), which is no slice of the chunks 0..0"),
        ([Send(1, SECOND)], "sends to rank 1 range(1, 2), which is no slice of the chunks 0..0"),
        ([Receive(1, WHOLE, False), Local(range(4, 5), SECOND, True)], "moves its own range(4, 5), which is no slice"),
        ([Receive(1, WHOLE, False), Local(WHOLE, range(0, 2), True)], "moves range(0, 1) to range(0, 2), which is no"),
    ],
)
def test_impossible_moves_are_named(operations: Round, flaw: str) -> None:
    (only,) = faults_of(two_regions([operations], []), 2)
    assert only.startswith(f"in round 0 rank 0 {flaw}")


def test_a_move_between_chunks_of_different_sizes() -> None:
    unequal = replace(COLLECTIVES["all_to_all"], equal_chunks=False)
    fits = "which fits only if all chunks have one size"
    assert faults_of(unequal, 2) == [
        f"in round 0 rank {rank} receives from rank {1 - rank} range({rank}, {rank + 1}) to "
        f"range({3 - rank}, {4 - rank}), {fits}"
        for rank in (0, 1)
    ]


def test_a_common_chunk_is_used_where_it_is() -> None:
    copied = both(
        swap(add_into_second, lambda peer: Receive(peer, SECOND, False, into=WHOLE)),
        common_result=True,
        result_region=1,
    )
    assert faults_of(copied, 2)[0] == ("in round 0 rank 0 copies common range(1, 2) in place of using it where it is")


# ---- what cannot be performed at all ----


@pytest.mark.parametrize(
    ("operation", "fault"),
    [
        (Send(3, WHOLE), "sends to rank 3, outside 0..2"),
        (Receive(-1, WHOLE, True), "receives from rank -1, outside 0..2"),
        (Send(1.0, WHOLE), "sends to rank 1.0, outside 0..2"),  # type: ignore[arg-type]
        (Send(0, WHOLE), "sends to itself"),
        (Receive(0, WHOLE, False), "receives from itself"),
        (Send(1, range(1, 3)), "sends to rank 1 range(1, 3), which is no slice of the chunks 0..1"),
        (Send(1, range(-1, 0)), "sends to rank 1 range(-1, 0), which is no slice of the chunks 0..1"),
        (Send(1, range(0, 2, 2)), "sends to rank 1 range(0, 2, 2), which is no slice of the chunks 0..1"),
        (Send(1, range(1, 0)), "sends to rank 1 range(1, 0), which is no slice of the chunks 0..1"),
        (Receive(2, range(10**15), False), "receives from rank 2 range(0, 1000000000000000), which is no slice of the"),
        (Send(1, 0), "sends to rank 1 0, which is no slice of the chunks 0..1"),  # type: ignore[arg-type]
        (None, "yields None, which is neither a Send nor a Receive"),
    ],
)
def test_impossible_operations_are_named(operation: Send | Receive, fault: str) -> None:
    (only,) = faults_of(written([[], [operation]], [], [], chunk_count=2), 3)
    assert only.startswith(f"in round 1 rank 0 {fault}")


def test_a_root_that_is_not_there() -> None:
    assert faults_of(reduce_to(5), 2)[0] == "in round 0 rank 0 sends to rank 5, outside 0..1"


def test_a_schedule_that_raises() -> None:
    def rounds(rank: int, world_size: int) -> Iterator[Round]:
        yield []
        raise IndexError("no such peer")

    assert faults_of(replace(BROADCAST, rounds=rounds), 1) == ["rank 0 fails in round 1: IndexError('no such peer')"]


def test_a_round_that_is_not_a_list() -> None:
    (fault,) = faults_of(written([Send(1, WHOLE)], []), 2)  # type: ignore[list-item]
    assert fault.startswith("rank 0 fails in round 0: TypeError(")


def test_a_schedule_without_an_end() -> None:
    def rounds(rank: int, world_size: int) -> Iterator[Round]:
        while True:
            yield []

    endless = f"rank 0 does not end: it has more than {MAX_ROUNDS} rounds"
    assert examine(replace(BROADCAST, rounds=rounds), 2).faults == (endless,)


def test_numbers_too_long_to_print() -> None:
    """Each round more than doubles: soon a number has more digits than Python agrees to print."""
    doubling = written(
        [[Receive(1, WHOLE, True)], [Send(1, WHOLE)]] * 40,
        [[Send(0, WHOLE)], [Receive(0, WHOLE, True)]] * 40,
        promised=frozenset([0, 1]),
    )
    assert "rank 0 ends with chunk 0 holding rank 0's contribution over 10^9 times" in faults_of(doubling, 2)


def test_a_world_without_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="world_size is 0"):
        examine(RING, 0)


def test_the_message_lists_the_faults_and_not_thousands() -> None:
    silent = replace(RING, rounds=lambda rank, world_size: iter([]))
    with pytest.raises(ProofError) as caught:
        prove(silent, 8)
    lines = str(caught.value).splitlines()
    assert lines[0] == "ring is wrong for 8 ranks:"
    assert lines[1] == "  - rank 0 ends with chunk 0 lacking rank 1's contribution"
    assert lines[-1] == "  - and 428 more"  # 8 ranks lack 7 contributions to each of 8 chunks, 20 of the 448 shown
    assert len(lines) == 22
    assert not issubclass(ProofError, AssertionError)


# ---- reads that are unfinished at the end ----


def test_unfinished_reads_by_hand() -> None:
    assert prove(RING, 1).unfinished_reads == set()
    assert prove(RING, 2).unfinished_reads == {(0, 1), (1, 0)}
    assert prove(RING, 3).unfinished_reads == {(1, 0), (2, 1), (0, 2)}
    assert prove(broadcast_from(1), 4).unfinished_reads == {(0, 1), (2, 1), (3, 1)}
    assert prove(reduce_to(1), 4).unfinished_reads == {(1, 0), (1, 2), (1, 3)}


@pytest.mark.parametrize("world_size", range(3, 10))
def test_in_a_ring_only_the_right_neighbour_must_acknowledge(world_size: int) -> None:
    """Only the right neighbour reads a rank's memory, and no signal leaves it after the read of its last round."""
    assert prove(RING, world_size).unfinished_reads == {((r + 1) % world_size, r) for r in range(world_size)}


def test_a_reply_acknowledges() -> None:
    answered = written(
        [[Send(1, WHOLE), Send(2, WHOLE)], [Receive(1, NOTHING, False)]],
        [[Receive(0, WHOLE, False)], [Send(0, NOTHING)]],
        [[Receive(0, WHOLE, False)]],
    )
    assert prove(answered, 3).unfinished_reads == {(2, 0)}  # and nobody reads anything of rank 1's


def test_reduce_then_broadcast_leaves_the_readers_of_the_root() -> None:
    """The root's broadcast tells the others that it has read them."""

    def rounds(rank: int, n: int) -> Iterator[Round]:
        yield from reduce_to(0).rounds(rank, n)
        yield from broadcast_from(0).rounds(rank, n)

    both = replace(BROADCAST, rounds=rounds, contributors=lambda rank, n, chunk: frozenset(range(n)))
    assert prove(both, 4).unfinished_reads == {(1, 0), (2, 0), (3, 0)}


# ---- against brute force: one order and clocks, or every order there is ----


@dataclass(frozen=True)
class Event:
    """A rank raises a flag for its `chunks` in a round, or waits for the next flag of `channel` and changes chunks."""

    waits: bool
    channel: tuple[int, int, str]  # sender, receiver, and "data" or "ready"
    chunks: frozenset[int]
    number: int


class EveryOrder:
    """Visits each state that the ranks can be in together: how many steps each has done.

    A step is all flags that a round raises, or one wait. Pull transports flag the data. Where sends block, a receive
    also flags that it is ready, and a send waits for that.
    """

    def __init__(self, collective: Collective, world_size: int, sends_block: bool) -> None:
        self.steps = [
            self.steps_of(rank, collective.rounds(rank, world_size), collective.common_chunks(world_size), sends_block)
            for rank in range(world_size)
        ]
        self.overwrites: set[tuple[int, int, int, int]] = set()  # rank, chunk, reader, round of the send
        self.unfinished_reads: set[tuple[int, int]] = set()
        self.deadlock = False
        seen, todo = set(), [(0,) * world_size]
        while todo:
            done = todo.pop()
            if done not in seen:
                seen.add(done)
                able = [rank for rank in range(world_size) if self.is_able(rank, done)]
                todo += [tuple(steps + (other == rank) for other, steps in enumerate(done)) for rank in able]
                self.judge(done, able)

    @staticmethod
    def steps_of(rank: int, rounds: Iterator[Round], common: range, sends_block: bool) -> list[list[Event]]:
        steps = []
        for number, this in enumerate(rounds):
            events: list[Event] = []
            for operation in this:
                if isinstance(operation, Local):  # a part of what its receive changes
                    last = max(index for index, event in enumerate(events) if event.waits)
                    events[last] = replace(events[last], chunks=events[last].chunks | set(operation.into))
                    continue
                sends = isinstance(operation, Send)
                pair = (rank, operation.to) if isinstance(operation, Send) else (operation.source, rank)
                chunks = operation.chunks if isinstance(operation, Send) else operation.target
                events.append(Event(not sends, (*pair, "data"), frozenset(chunks) - set(common), number))
                if sends_block:
                    events.append(Event(sends, (*pair, "ready"), frozenset(), number))
            steps += [[event for event in events if not event.waits], *[[event] for event in events if event.waits]]
        return steps

    def past(self, rank: int, done: int, channel: tuple[int, int, str]) -> list[Event]:
        return [event for step in self.steps[rank][:done] for event in step if event.channel == channel]

    def is_able(self, rank: int, done: tuple[int, ...]) -> bool:
        for event in [event for step in self.steps[rank][done[rank] :][:1] for event in step if event.waits]:
            sender, receiver, _ = event.channel
            peer = receiver if rank == sender else sender
            return len(self.past(peer, done[peer], event.channel)) > len(self.past(rank, done[rank], event.channel))
        return done[rank] < len(self.steps[rank])

    def judge(self, done: tuple[int, ...], able: list[int]) -> None:
        ended = [rank for rank, steps in enumerate(self.steps) if done[rank] == len(steps)]
        self.deadlock |= not able and len(ended) < len(done)
        for source, reader in permutations(range(len(done)), 2):
            channel = (source, reader, "data")
            reads = [len(self.past(reader, until, channel)) for until in (done[reader], len(self.steps[reader]))]
            unread = [event for event in self.past(source, done[source], channel)[slice(*reads)] if event.chunks]
            if unread and source in ended:
                self.unfinished_reads.add((reader, source))
            changes = [event for event in self.steps[source][done[source]] if event.waits] if source in able else []
            for sent, change in product(unread, changes):
                for chunk in sent.chunks & change.chunks:
                    self.overwrites.add((source, chunk, reader, sent.number))


def random_collective(numbers: random.Random) -> Collective:
    """A few messages among three ranks, cut into rounds at random; sometimes a rank has them in another order."""
    programs: list[Round] = [[], [], []]
    for _ in range(numbers.randint(2, 7)):
        sender, receiver = numbers.sample(range(3), 2)
        chunks = numbers.choice([range(0, 1), range(1, 2)])
        programs[sender].append(Send(receiver, chunks))
        programs[receiver].append(Receive(sender, chunks, reduce=True))
    if numbers.random() < 0.5:
        numbers.shuffle(programs[0])
    rounds: list[list[Round]] = []
    for program in programs:
        cuts = [0, *(k for k in range(1, len(program)) if numbers.random() < 0.7), len(program)]
        rounds.append([program[start:stop] for start, stop in pairwise(cuts)])
    return written(*rounds, chunk_count=2)


OVERWRITTEN = re.compile(r"overwrite .*rank (\d+) changes chunk (\d+) in .*rank (\d+) may .*sent in round (\d+)")


def test_the_clocks_agree_with_every_order_of_events() -> None:
    numbers, met = random.Random(0), Counter[str]()
    for _ in range(500):
        collective = random_collective(numbers)
        report = examine(collective, 3)
        text = "\n".join(report.faults)
        if "overlap" in text:
            continue  # said in place of the overwrites that it causes
        pull, blocking = (EveryOrder(collective, 3, sends_block) for sends_block in (False, True))
        assert {tuple(map(int, found)) for found in OVERWRITTEN.findall(text)} == pull.overwrites, text
        assert ("deadlock if sends block" in text) == blocking.deadlock, text
        assert ("deadlock even if sends do not block" in text) == pull.deadlock, text
        assert pull.deadlock or report.unfinished_reads == pull.unfinished_reads, text
        met["overwrite"] += bool(pull.overwrites)
        met["deadlock if sends block"] += blocking.deadlock and not pull.deadlock
        met["deadlock"] += pull.deadlock
        met["nothing"] += not report.faults
    assert len(met) == 4
    assert min(met.values()) > 15, met


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_registered_collectives_survive_every_order_of_events(name: str, world_size: int) -> None:
    pull, blocking = (EveryOrder(COLLECTIVES[name], world_size, sends_block) for sends_block in (False, True))
    assert (pull.overwrites, pull.deadlock, blocking.deadlock) == (set(), False, False)
    assert pull.unfinished_reads == prove(COLLECTIVES[name], world_size).unfinished_reads
