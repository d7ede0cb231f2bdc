"""The proof accepts every registered collective, and names what is wrong with a wrong one."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, permutations, product

import pytest

from torch_parallel.collectives import COLLECTIVES, Collective, Receive, Round, Send, broadcast_from, reduce_to
from torch_parallel.collectives.proof import MAX_ROUNDS, ProofError, examine, prove

RING, BROADCAST = COLLECTIVES["ring"], COLLECTIVES["broadcast"]
WHOLE, NOTHING = range(0, 1), range(0, 0)


def written(*programs: list[Round], promised: frozenset[int] | None = None, chunk_count: int = 1) -> Collective:
    """A collective from literal rounds, one list a rank."""
    return Collective(
        name="written",
        rounds=lambda rank, world_size: iter(programs[rank]),
        chunk_count=lambda world_size: chunk_count,
        contributors=lambda rank, world_size, chunk: promised,
        round_count=lambda rank, world_size: len(programs[rank]),
        message_count=lambda rank, world_size: 0,
        sent_elements=lambda rank, world_size, numel: 0,
    )


def mutated(collective: Collective, change: Callable[[int, list[Round]], list[Round]]) -> Collective:
    """The collective with each rank's rounds changed."""
    return replace(collective, rounds=lambda rank, n: iter(change(rank, list(collective.rounds(rank, n)))))


def all_receives(collective: Collective, reduce: bool) -> Collective:
    """The collective with every receive adding, or every receive replacing."""

    def changed(operation: Send | Receive) -> Send | Receive:
        return operation if isinstance(operation, Send) else replace(operation, reduce=reduce)

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


@pytest.mark.parametrize("world_size", range(1, 17))
@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_collective_is_proved(name: str, world_size: int) -> None:
    assert prove(COLLECTIVES[name], world_size).faults == ()


@pytest.mark.parametrize("root", range(4))
def test_any_rank_can_be_the_root(root: int) -> None:
    for collective in (reduce_to(root), reduce_to(root, root_contributes=False), broadcast_from(root)):
        assert prove(collective, 4).faults == ()


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
    """A rank raises a flag for `channel`, or waits for the next one and then changes `chunks`; in which round."""

    waits: bool
    channel: tuple[int, int, str]  # sender, receiver, and "data" or "ready"
    chunks: range
    number: int


class EveryOrder:
    """Visits each state that the ranks can be in together: how many steps each has done.

    A step is all flags that a round raises, or one wait. Pull transports flag the data. Where sends block, a receive
    also flags that it is ready, and a send waits for that.
    """

    def __init__(self, collective: Collective, world_size: int, sends_block: bool) -> None:
        self.steps = [
            self.steps_of(rank, collective.rounds(rank, world_size), sends_block) for rank in range(world_size)
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
    def steps_of(rank: int, rounds: Iterator[Round], sends_block: bool) -> list[list[Event]]:
        steps = []
        for number, this in enumerate(rounds):
            events = []
            for operation in this:
                sends = isinstance(operation, Send)
                pair = (rank, operation.to) if isinstance(operation, Send) else (operation.source, rank)
                events.append(Event(not sends, (*pair, "data"), operation.chunks, number))
                if sends_block:
                    events.append(Event(sends, (*pair, "ready"), NOTHING, number))
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
            unread = self.past(source, done[source], channel)[slice(*reads)]
            if unread and source in ended:
                self.unfinished_reads.add((reader, source))
            changes = [event for event in self.steps[source][done[source]] if event.waits] if source in able else []
            for sent, change in product(unread, changes):
                for chunk in set(sent.chunks) & set(change.chunks):
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
