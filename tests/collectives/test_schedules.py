"""Schedules as data: the literal messages, the formulas recounted, and the sums in plain Python numbers."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from torch_parallel.collectives import COLLECTIVES, Collective, Receive, Round, Send, broadcast_from, reduce_to
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


def perform(collective: Collective, buffers: list[list[int]], seed: int = 0) -> None:
    """Perform a collective on one list a rank, in a random order of ranks, reading straight from the peers' lists."""
    world_size, order = len(buffers), random.Random(seed)
    bounds = chunk_bounds(len(buffers[0]), collective.chunk_count(world_size))
    signalled = {(a, b): 0 for a in range(world_size) for b in range(world_size)}
    read = dict.fromkeys(signalled, 0)
    # in a round the signals leave before the receives
    steps = [
        [o for this in collective.rounds(rank, world_size) for o in sorted(this, key=lambda o: isinstance(o, Receive))]
        for rank in range(world_size)
    ]
    while any(steps):
        rank = order.choice([rank for rank in range(world_size) if steps[rank]])
        step = steps[rank][0]
        if isinstance(step, Send):
            signalled[rank, step.to] += 1
        elif read[step.source, rank] < signalled[step.source, rank]:
            read[step.source, rank] += 1
            for k in range(bounds[step.chunks.start], bounds[step.chunks.stop]):
                buffers[rank][k] = buffers[step.source][k] + (buffers[rank][k] if step.reduce else 0)
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


# ---- the direct one, by hand ----


def test_direct_reduce_scatter_literally() -> None:
    assert rounds_of("direct_reduce_scatter", 1, 3) == [
        [
            Send(0, range(0, 1)),
            Send(2, range(2, 3)),
            Receive(0, range(1, 2), reduce=True),
            Receive(2, range(1, 2), reduce=True),
        ]
    ]
    direct = COLLECTIVES["direct_reduce_scatter"]
    # 10 in three chunks of 4, 3, 3: each rank sends the two that are not its own
    assert [direct.sent_elements(rank, 3, 10) for rank in range(3)] == [6, 7, 7]
    assert [direct.message_count(rank, 3) for rank in range(3)] == [2, 2, 2]


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
            sent = sum(bounds[send.chunks.stop] - bounds[send.chunks.start] for send in sends)
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
    numel = (0, 1, world_size - 1, world_size + 1, 4 * world_size + 3)[seed]
    before = [[numbers.randint(-(10**6), 10**6) for _ in range(numel)] for _ in range(world_size)]
    after = [buffer.copy() for buffer in before]
    perform(collective, after, seed)
    bounds = chunk_bounds(numel, collective.chunk_count(world_size))
    for rank in range(world_size):
        for chunk in range(collective.chunk_count(world_size)):
            contributors = collective.contributors(rank, world_size, chunk)
            for k in range(bounds[chunk], bounds[chunk + 1]) if contributors is not None else ():
                assert after[rank][k] == sum(before[source][k] for source in contributors or ())


def test_what_each_collective_promises_by_hand() -> None:
    promised = {
        name: [
            [collective.contributors(rank, 3, chunk) for chunk in range(collective.chunk_count(3))] for rank in range(3)
        ]
        for name, collective in COLLECTIVES.items()
    }
    everyone = {0, 1, 2}
    assert promised == {
        "ring": [[everyone] * 3] * 3,
        "ring_reduce_scatter": [[everyone, None, None], [None, everyone, None], [None, None, everyone]],
        "ring_all_gather": [[{0}, {1}, {2}]] * 3,
        "direct_reduce_scatter": [[everyone, None, None], [None, everyone, None], [None, None, everyone]],
        "reduce": [[everyone], [None], [None]],
        "push": [[{1, 2}], [None], [None]],
        "broadcast": [[{0}]] * 3,
    }
