"""Schedules as data: the literal messages, the formulas recounted, and the sums in plain Python numbers."""

from __future__ import annotations

import operator
import random
from functools import partial, reduce
from itertools import pairwise
from typing import Any

import pytest

from torch_parallel.collectives import (
    ALL_REDUCE,
    COLLECTIVES,
    HIERARCHICAL,
    Collective,
    Local,
    Receive,
    Round,
    Send,
    broadcast_from,
    reduce_to,
)
from torch_parallel.collectives.schedule import chunk_bounds, chunk_size, one

WORLD_SIZES = range(1, 17)


def rounds_of(name: str, rank: int, world_size: int) -> list[Round]:
    return list(COLLECTIVES[name].rounds(rank, world_size))


def sends_of(name: str, rank: int, world_size: int) -> list[tuple[int, int]]:
    """(to, chunk) of the messages that a rank sends, in order."""
    operations = [operation for this in rounds_of(name, rank, world_size) for operation in this]
    return [(o.to, chunk) for o in operations if isinstance(o, Send) for chunk in o.chunks]


def receives_of(name: str, rank: int, world_size: int) -> list[tuple[int, int, bool]]:
    """(source, chunk, reduce) of the messages that a rank receives, in order."""
    operations = [operation for this in rounds_of(name, rank, world_size) for operation in this]
    return [(o.source, chunk, o.reduce) for o in operations if isinstance(o, Receive) for chunk in o.chunks]


def perform(collective: Collective, buffers: list[list[Any]], seed: int = 0) -> None:
    """Perform a collective on one list a rank, in a random order of ranks, reading straight from the peers' lists."""
    world_size, order = len(buffers), random.Random(seed)
    numel, chunk_count = len(buffers[0]), collective.chunk_count(world_size)
    bounds, common = chunk_bounds(numel, chunk_count), collective.common_chunks(world_size)
    for rank, buffer in enumerate(buffers):
        buffer += [None] * numel * (collective.region_count(rank, world_size) - 1)  # nothing: to add to it raises

    def cells(chunks: range) -> range:
        region = chunks.start // chunk_count
        start, stop = (bounds[chunk - region * chunk_count] for chunk in (chunks.start, chunks.stop))
        return range(region * numel + start, region * numel + stop)

    def owner(rank: int, chunks: range) -> list[int]:
        """The list in which these chunks of a rank lie: the common ones are in the first rank's."""
        return buffers[0 if chunks and chunks.start in common else rank]

    def move(rank: int, source: int, step: Receive | Local) -> None:
        if step.chunks and step.chunks.start in common:
            return  # it is used where it is
        target, addend = (step.target, step.addend) if isinstance(step, Receive) else (step.into, step.into)
        for here, plus, there in zip(cells(target), cells(addend), cells(step.chunks), strict=True):
            added = owner(rank, addend)[plus] if step.reduce else 0
            owner(rank, target)[here] = buffers[source][there] + added

    signalled = {(a, b): 0 for a in range(world_size) for b in range(world_size)}
    read = dict.fromkeys(signalled, 0)
    # in a round the signals leave before the receives
    steps = [
        [o for this in collective.rounds(rank, world_size) for o in sorted(this, key=lambda o: not isinstance(o, Send))]
        for rank in range(world_size)
    ]
    while any(steps):
        rank = order.choice([rank for rank in range(world_size) if steps[rank]])
        step = steps[rank][0]
        if isinstance(step, Send):
            signalled[rank, step.to] += 1
        elif isinstance(step, Local):
            move(rank, rank, step)
        elif read[step.source, rank] < signalled[step.source, rank]:
            read[step.source, rank] += 1
            move(rank, step.source, step)
        else:
            continue  # its signal has not come: another rank goes first
        steps[rank].pop(0)


# ---- the pieces ----


@pytest.mark.parametrize(
    ("numel", "chunk_count", "sizes"),
    [
        (9, 4, [3, 2, 2, 2]),
        (5, 4, [2, 1, 1, 1]),
        (8, 4, [2, 2, 2, 2]),
        (2, 4, [1, 1, 0, 0]),
        (0, 4, [0, 0, 0, 0]),
        (11, 3, [4, 4, 3]),
        (7, 1, [7]),
    ],
)
def test_a_buffer_is_cut_as_tensor_split_cuts_it(numel: int, chunk_count: int, sizes: list[int]) -> None:
    bounds = chunk_bounds(numel, chunk_count)
    assert [stop - start for start, stop in pairwise(bounds)] == sizes
    assert (bounds[0], bounds[-1], len(bounds)) == (0, numel, chunk_count + 1)
    assert [chunk_size(numel, chunk_count, k) for k in range(chunk_count)] == sizes
    assert [chunk_size(numel, chunk_count, k + chunk_count) for k in range(chunk_count)] == sizes  # around the ring
    assert chunk_size(numel, chunk_count, -1) == sizes[-1]


def test_one_counts_around_the_ring() -> None:
    assert [one(index, 4).start for index in (0, 3, 4, -1, -5)] == [0, 3, 0, 3, 3]
    assert one(-1, 4) == range(3, 4)


def test_the_registry_uses_the_names_of_the_collectives() -> None:
    assert [collective.name for collective in COLLECTIVES.values()] == list(COLLECTIVES)


# ---- the ring, by hand ----


def test_ring_of_four_is_the_textbook() -> None:
    assert sends_of("ring", 0, 4) == [(1, 3), (1, 2), (1, 1), (1, 0), (1, 3), (1, 2)]
    assert sends_of("ring", 2, 4) == [(3, 1), (3, 0), (3, 3), (3, 2), (3, 1), (3, 0)]
    assert receives_of("ring", 0, 4) == [
        (3, 2, True),
        (3, 1, True),
        (3, 0, True),  # the sum of chunk 0 is complete on rank 0
        (3, 3, False),
        (3, 2, False),
        (3, 1, False),
    ]


def test_each_round_of_the_ring_is_one_send_and_one_receive() -> None:
    assert rounds_of("ring", 1, 3)[0] == [Send(2, range(0, 1)), Receive(0, range(2, 3), reduce=True)]
    assert {len(this) for this in rounds_of("ring", 1, 5)} == {2}


def test_the_halves_make_the_ring() -> None:
    halves = rounds_of("ring_reduce_scatter", 2, 5) + rounds_of("ring_all_gather", 2, 5)
    assert rounds_of("ring", 2, 5) == halves


def test_ring_counts_by_hand() -> None:
    ring = COLLECTIVES["ring"]
    assert [ring.message_count(rank, 4) for rank in range(4)] == [6, 6, 6, 6]
    assert [ring.message_count(rank, 3) for rank in range(3)] == [4, 4, 4]
    assert [ring.sent_elements(rank, 4, 8) for rank in range(4)] == [12, 12, 12, 12]
    # 10 in three chunks of 4, 3, 3: rank 0 sends 2, 1, 0, 2; rank 1 sends 0, 2, 1, 0; rank 2 sends 1, 0, 2, 1
    assert [ring.sent_elements(rank, 3, 10) for rank in range(3)] == [13, 14, 13]


# ---- the rooted ones, by hand ----


def test_reduce_and_broadcast_literally() -> None:
    whole = range(0, 1)
    reduce, broadcast, push = reduce_to(2), broadcast_from(2), reduce_to(2, root_contributes=False)
    assert list(reduce.rounds(0, 4)) == [[Send(2, whole)]]
    assert list(reduce.rounds(2, 4)) == [[Receive(0, whole, True), Receive(1, whole, True), Receive(3, whole, True)]]
    assert list(push.rounds(2, 4)) == [[Receive(0, whole, False), Receive(1, whole, True), Receive(3, whole, True)]]
    assert list(broadcast.rounds(2, 4)) == [[Send(0, whole), Send(1, whole), Send(3, whole)]]
    assert list(broadcast.rounds(3, 4)) == [[Receive(2, whole, False)]]


def test_direct_reduce_scatter_literally() -> None:
    assert rounds_of("direct_reduce_scatter", 1, 3) == [
        [
            Send(2, range(2, 3)),
            Send(0, range(0, 1)),
            Receive(2, range(1, 2), reduce=True),
            Receive(0, range(1, 2), reduce=True),
        ]
    ]
    direct = COLLECTIVES["direct_reduce_scatter"]
    # 10 in three chunks of 4, 3, 3: each rank sends the two that are not its own
    assert [direct.sent_elements(rank, 3, 10) for rank in range(3)] == [6, 7, 7]
    assert [direct.message_count(rank, 3) for rank in range(3)] == [2, 2, 2]


def test_tree_of_six_by_hand() -> None:
    """To 0 by way of 1 | 2 <- 3 | 4 <- 5, and back."""
    whole = range(0, 1)
    add, take = partial(Receive, chunks=whole, reduce=True), partial(Receive, chunks=whole, reduce=False)
    assert rounds_of("tree", 0, 6) == [
        [add(1)],
        [add(2)],
        [add(4)],
        [Send(4, whole)],
        [Send(2, whole)],
        [Send(1, whole)],
    ]
    assert rounds_of("tree", 4, 6) == [[add(5)], [Send(0, whole)], [take(0)], [Send(5, whole)]]
    assert rounds_of("tree", 3, 6) == [[Send(2, whole)], [take(2)]]
    tree = COLLECTIVES["tree"]
    assert [tree.round_count(rank, 6) for rank in range(6)] == [6, 2, 4, 2, 4, 2]
    assert [tree.sent_elements(rank, 6, 10) for rank in range(6)] == [30, 10, 20, 10, 20, 10]


def test_halving_doubling_of_four_and_of_five_by_hand() -> None:
    four = [
        [Send(2, range(2, 4)), Receive(2, range(0, 2), reduce=True)],
        [Send(1, range(1, 2)), Receive(1, range(0, 1), reduce=True)],
        [Send(1, range(0, 1)), Receive(1, range(1, 2), reduce=False)],
        [Send(2, range(0, 2)), Receive(2, range(2, 4), reduce=False)],
    ]
    whole = range(0, 4)
    assert rounds_of("halving_doubling", 0, 4) == four
    assert rounds_of("halving_doubling", 0, 5) == [[Receive(4, whole, reduce=True)], *four, [Send(4, whole)]]
    assert rounds_of("halving_doubling", 4, 5) == [[Send(0, whole)], [Receive(0, whole, reduce=False)]]
    # 8 elements, chunks of 2: rank 0 sends 4 + 2 and 2 + 4, and to the rank folded into it all 8
    assert [COLLECTIVES["halving_doubling"].sent_elements(rank, 5, 8) for rank in range(5)] == [20, 12, 12, 12, 8]


def test_one_shot_of_three_adds_in_rank_order() -> None:
    whole, second = range(0, 1), range(1, 2)
    assert rounds_of("one_shot", 1, 3)[0][2:] == [
        Receive(0, whole, reduce=True, into=second, plus=whole),
        Receive(2, whole, reduce=True, into=second),
    ]
    assert rounds_of("one_shot", 2, 3)[0][2:] == [
        Receive(0, whole, reduce=False, into=second),
        Receive(1, whole, reduce=True, into=second),
        Local(whole, second, reduce=True),
    ]


def test_who_needs_how_much_memory() -> None:
    regions = {name: [each.region_count(rank, 4) for rank in range(4)] for name, each in COLLECTIVES.items()}
    assert {name: counts for name, counts in regions.items() if counts != [1] * 4} == {
        "two_shot_in_place": [2] * 4,
        "one_shot": [2] * 4,
        "gather_scatter": [4, 1, 1, 1],
        "all_gather_average": [4] * 4,
        "all_to_all": [2] * 4,
    }
    assert all(each.region_count(0, 1) == 1 for each in COLLECTIVES.values())


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_nobody_leaves_the_barrier_before_all_have_come(world_size: int) -> None:
    """All go round by round, and each signal carries whom its sender has heard of before the round."""
    heard = [{rank} for rank in range(world_size)]
    programs = [rounds_of("barrier", rank, world_size) for rank in range(world_size)]
    for rounds in zip(*programs, strict=True):
        before = [set(known) for known in heard]
        for rank, this in enumerate(rounds):
            for operation in this:
                if isinstance(operation, Receive):
                    heard[rank] |= before[operation.source]
    assert heard == [set(range(world_size))] * world_size


@pytest.mark.parametrize("name", ALL_REDUCE)
@pytest.mark.parametrize("world_size", [2, 3, 5, 7, 8])
def test_the_sum_is_made_in_one_order_on_all_ranks(name: str, world_size: int) -> None:
    """In floats, whose sums tell in which order they were made: the same bits, whoever was first."""
    numbers = random.Random(world_size)
    before = [[numbers.uniform(-1, 1) * 10 ** numbers.randint(-8, 8) for _ in range(9)] for _ in range(world_size)]
    outcomes = set()
    for seed in range(4):
        after: list[list[Any]] = [buffer.copy() for buffer in before]
        perform(COLLECTIVES[name], after, seed)
        at = 9 * COLLECTIVES[name].result_region
        results = after[:1] if COLLECTIVES[name].common_result else after
        outcomes |= {tuple(buffer[at : at + 9]) for buffer in results}
    assert len(outcomes) == 1
    if name in ("one_shot", "reduce_broadcast", "gather_scatter", "all_gather_average"):  # in rank order
        assert outcomes == {tuple(reduce(operator.add, column) for column in zip(*before, strict=True))}


@pytest.mark.parametrize("name", ALL_REDUCE)
def test_1_2_and_6_average_to_3(name: str) -> None:
    buffers: list[list[Any]] = [[1.0] * 4, [2.0] * 4, [6.0] * 4]
    perform(COLLECTIVES[name], buffers)
    at = 4 * COLLECTIVES[name].result_region
    for buffer in buffers[:1] if COLLECTIVES[name].common_result else buffers:
        assert [total / 3 for total in buffer[at : at + 4]] == [3.0] * 4


@pytest.mark.parametrize("name", COLLECTIVES)
def test_one_rank_alone_does_nothing(name: str) -> None:
    assert rounds_of(name, 0, 1) == []


# ---- the formulas, recounted ----


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_rounds_messages_and_elements_are_as_stated(name: str, world_size: int) -> None:
    collective = COLLECTIVES[name]
    chunk_count = collective.chunk_count(world_size)
    for rank in range(world_size):
        rounds = rounds_of(name, rank, world_size)
        sends = [operation for this in rounds for operation in this if isinstance(operation, Send)]
        assert len([this for this in rounds if this]) == collective.round_count(rank, world_size)
        assert len(sends) == collective.message_count(rank, world_size)
        for numel in (0, 1, 7, world_size - 1, world_size, world_size + 1, 1_000_003):
            bounds = chunk_bounds(numel, chunk_count)
            moving = [send.chunks for send in sends if not set(send.chunks) & set(collective.common_chunks(world_size))]
            sent = sum(bounds[chunks.stop] - bounds[chunks.start] for chunks in moving)
            assert sent == collective.sent_elements(rank, world_size, numel)


# ---- the numbers ----


@pytest.mark.parametrize(("world_size", "total"), [(3, 6), (4, 10), (8, 36)])
@pytest.mark.parametrize("numel", [1, 8, 13])
def test_ring_sums_the_rank_numbers(world_size: int, total: int, numel: int) -> None:
    buffers = [[rank + 1] * numel for rank in range(world_size)]
    perform(COLLECTIVES["ring"], buffers)
    assert buffers == [[total] * numel] * world_size


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_collective_computes_what_it_promises(name: str, world_size: int, seed: int) -> None:
    collective, numbers = COLLECTIVES[name], random.Random(100 * seed + world_size)
    numel = (0, 1, world_size - 1, world_size + 1, 4 * world_size + 3)[seed] * (
        world_size if collective.equal_chunks else 1
    )
    before = [[numbers.randint(-(10**6), 10**6) for _ in range(numel)] for _ in range(world_size)]
    after = [buffer.copy() for buffer in before]
    perform(collective, after, seed)
    bounds, result = chunk_bounds(numel, collective.chunk_count(world_size)), collective.result_chunks(world_size)
    at = numel * (result.start // len(result))
    for rank in range(world_size):
        holder = 0 if collective.common_chunks(world_size) else rank
        for chunk in range(len(result)):
            contributors = collective.contributors(rank, world_size, chunk)
            taken = bounds[collective.source_chunk(rank, world_size, chunk)] - bounds[chunk]
            for k in range(bounds[chunk], bounds[chunk + 1]) if contributors is not None else ():
                assert after[holder][at + k] == sum(before[source][k + taken] for source in contributors or ())


def test_what_each_collective_promises_by_hand() -> None:
    promised = {
        name: [
            [collective.contributors(rank, 3, chunk) for chunk in range(collective.chunk_count(3))] for rank in range(3)
        ]
        for name, collective in COLLECTIVES.items()
    }
    everyone = {0, 1, 2}
    sums, owners = [[everyone, None, None], [None, everyone, None], [None, None, everyone]], [[{0}, {1}, {2}]] * 3
    cut = {"ring": 3, "halving_doubling": 2, "two_shot": 3, "two_shot_in_place": 3}  # chunks of three ranks' buffers
    # of two nodes, with ranks 0 and 1, and 2: those, or one for each, or what both numbers of ranks divide
    cut |= {"flat": 3, "hierarchical_leaders": 2, "hierarchical_multi_nic": 2}
    cut |= {"hierarchical_sharded": 2, "hierarchical_grouped": 2}
    assert promised == {
        **{name: [[everyone] * cut.get(name, 1)] * 3 for name in (*ALL_REDUCE, *HIERARCHICAL)},
        "ring_reduce_scatter": sums,
        "direct_reduce_scatter": sums,
        "ring_all_gather": owners,
        "direct_all_gather": owners,
        "tree_reduce": [[everyone], [None], [None]],
        "tree_broadcast": [[{0}]] * 3,
        "gather": [owners[0], [None] * 3, [None] * 3],
        "scatter": [[{0}, None, None], [None, {0}, None], [None, None, {0}]],
        "all_to_all": owners,
        "barrier": [[{0}], [{1}], [{2}]],
        "reduce": [[everyone], [None], [None]],
        "push": [[{1, 2}], [None], [None]],
        "broadcast": [[{0}]] * 3,
    }
