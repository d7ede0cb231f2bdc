"""All-reduces over nodes: proved for layouts of many kinds, and what they carry over the cards counted by hand."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest

from torch_parallel.collectives import COLLECTIVES, HIERARCHICAL, Collective, Receive, Send
from torch_parallel.collectives.hierarchical import Layout, on, sharded
from torch_parallel.collectives.proof import examine, prove
from torch_parallel.collectives.ring import all_reduce
from torch_parallel.collectives.schedule import Rounds

NODES = {
    "2x4": (0, 0, 0, 0, 1, 1, 1, 1),
    "3x2": (0, 0, 1, 1, 2, 2),
    "1x4": (0, 0, 0, 0),
    "4x1": (0, 1, 2, 3),
    "2+1": (0, 0, 1),
    "1+2": (5, 3, 3),
    "3+1+2": (0, 0, 0, 1, 2, 2),
    "4+2+3": (0, 0, 0, 0, 1, 1, 2, 2, 2),
    "in turns": (0, 1, 0, 1, 0, 1),
    "one": (0,),
}
every_layout = pytest.mark.parametrize("nodes", NODES.values(), ids=NODES.keys())


@pytest.mark.parametrize("name", HIERARCHICAL)
@every_layout
def test_it_is_proved_on_all_kinds_of_nodes(name: str, nodes: tuple[int, ...]) -> None:
    assert prove(HIERARCHICAL[name].placed(nodes), len(nodes)).faults == ()


@pytest.mark.parametrize("name", HIERARCHICAL)
@every_layout
@pytest.mark.parametrize("numel", [0, 7, 240, 1001])
def test_formulas_are_those_of_the_schedule(name: str, nodes: tuple[int, ...], numel: int) -> None:
    collective, world_size = HIERARCHICAL[name].placed(nodes), len(nodes)
    bounds = collective.bounds(numel, world_size)
    assert bounds[0] == 0 and bounds[-1] == numel
    for rank in range(world_size):
        rounds = list(collective.rounds(rank, world_size))
        sends = [operation for this in rounds for operation in this if isinstance(operation, Send)]
        assert collective.round_count(rank, world_size) == len(rounds)
        assert collective.message_count(rank, world_size) == len(sends)
        sent = sum(bounds[send.chunks.stop] - bounds[send.chunks.start] for send in sends)
        assert collective.sent_elements(rank, world_size, numel) == sent


def carried(collective: Collective, nodes: tuple[int, ...], cards: dict[int, object], numel: int) -> Fraction:
    """Of the buffer, what leaves by the busiest card: `cards` has that of each rank."""
    bounds, out = collective.bounds(numel, len(nodes)), Counter[object]()
    for rank, node in enumerate(nodes):
        for this in collective.rounds(rank, len(nodes)):
            for operation in this:
                if isinstance(operation, Send) and nodes[operation.to] != node:
                    out[cards[rank]] += bounds[operation.chunks.stop] - bounds[operation.chunks.start]
    return Fraction(max(out.values(), default=0), numel)


@pytest.mark.parametrize(
    ("name", "own_cards", "shared_card"),
    [
        ("flat", Fraction(7, 4), Fraction(7, 4)),
        ("hierarchical_leaders", Fraction(1), Fraction(1)),
        ("hierarchical_multi_nic", Fraction(1), Fraction(4)),
        ("hierarchical_sharded", Fraction(1, 4), Fraction(1)),
        ("hierarchical_grouped", Fraction(1, 4), Fraction(1)),
    ],
)
def test_bytes_on_the_busiest_card_of_two_nodes_of_four(name: str, own_cards: Fraction, shared_card: Fraction) -> None:
    nodes = NODES["2x4"]
    collective = HIERARCHICAL[name].placed(nodes)
    assert carried(collective, nodes, {rank: rank for rank in range(8)}, 8000) == own_cards
    assert carried(collective, nodes, dict(enumerate(nodes)), 8000) == shared_card


def test_of_three_nodes_a_lane_carries_four_thirds_of_its_part() -> None:
    nodes = NODES["3x2"]
    own = {rank: rank for rank in range(6)}
    assert carried(HIERARCHICAL["hierarchical_leaders"].placed(nodes), nodes, own, 6000) == Fraction(4, 3)
    assert carried(HIERARCHICAL["hierarchical_sharded"].placed(nodes), nodes, own, 6000) == Fraction(2, 3)


def test_within_one_node_nothing_crosses() -> None:
    nodes = NODES["1x4"]
    for collective in HIERARCHICAL.values():
        assert carried(collective.placed(nodes), nodes, dict.fromkeys(range(4), 0), 100) == 0


def test_groups_are_cut_each_by_itself() -> None:
    """Two groups, of 10 and 3 elements, each for the ring of three nodes: its chunks as `tensor_split` cuts them."""
    grouped = HIERARCHICAL["hierarchical_grouped"].placed(NODES["3x2"])
    assert grouped.bounds(13, 6, (0, 10, 13)) == [0, 4, 7, 10, 11, 12, 13]
    assert grouped.bounds(13, 6) == [0, 3, 5, 7, 9, 11, 13]
    assert COLLECTIVES["ring"].bounds(13, 6, (0, 10, 13)) == COLLECTIVES["ring"].bounds(13, 6)
    with pytest.raises(ValueError, match="hierarchical_grouped has 2 groups here, and the buffer 3"):
        grouped.bounds(13, 6, (0, 4, 10, 13))


def test_without_nodes_there_are_two_halves() -> None:
    for name, collective in HIERARCHICAL.items():
        for world_size in range(1, 8):
            first = -(-world_size // 2)
            placed = collective.placed((0,) * first + (1,) * (world_size - first))
            for rank in range(world_size):
                assert list(collective.rounds(rank, world_size)) == list(placed.rounds(rank, world_size)), name


def test_one_that_was_placed_is_the_same_each_time_and_for_its_ranks_only() -> None:
    leaders = HIERARCHICAL["hierarchical_leaders"]
    placed = leaders.placed(NODES["2+1"])
    assert leaders.placed((0, 0, 1)) is placed and placed.placed((0, 0, 1)) is placed
    with pytest.raises(ValueError, match="on 3 ranks is performed by 4: place it anew"):
        list(placed.rounds(0, 4))


def test_a_layout_is_that_of_the_ranks() -> None:
    layout = Layout.of((5, 3, 3, 5, 3))
    assert layout.mates == ((0, 3), (1, 2, 4))
    assert (layout.lanes, layout.lane(1), layout.of_rank(4), layout.node_of(4)) == (2, (3, 2), ((1, 2, 4), 2), 1)


def test_a_schedule_on_some_ranks_is_that_schedule() -> None:
    (first, second) = on([5, 2], all_reduce, 2, [3, 7, 7])
    assert first == [Send(5, range(3, 7)), Receive(5, range(0), reduce=True)]
    assert second == [Send(5, range(0)), Receive(5, range(3, 7), reduce=False)]


# ---- mutated: each fault is found ----


def mutated(nodes: tuple[int, ...], change: str) -> Collective:
    good = HIERARCHICAL["hierarchical_sharded"].placed(nodes)
    layout = Layout.of(nodes)

    def rounds(rank: int, world_size: int) -> Rounds:
        place = layout.of_rank(rank)[1]
        every = list(sharded(rank, layout))
        last_lane = place == layout.lanes - 1
        if change == "the last group is forgotten":
            every = [every[0], *(every[1:-1] if not last_lane else []), every[-1]]
        if change == "nodes do not exchange":
            every = [every[0], every[-1]]
        if change == "the exchange comes first":
            every = [*every[1:-1], every[0], every[-1]]
        if change == "copied where it should be added":
            swapped = [replace(each, reduce=False) if isinstance(each, Receive) else each for each in every[0]]
            every[0] = swapped if rank == 0 else every[0]
        if change == "one node does not gather":
            every = every[:-1] if rank in layout.mates[0] else every
        yield from every

    return replace(good, rounds=rounds)


@pytest.mark.parametrize(
    "change",
    [
        "the last group is forgotten",
        "nodes do not exchange",
        "the exchange comes first",
        "copied where it should be added",
        "one node does not gather",
    ],
)
@pytest.mark.parametrize("nodes", [NODES["2x4"], NODES["3x2"]])
def test_the_proof_finds_what_is_wrong(nodes: tuple[int, ...], change: str) -> None:
    faults = examine(mutated(nodes, change), len(nodes)).faults
    assert faults
    if change == "the last group is forgotten":
        last = Layout.of(nodes).lanes - 1
        chunks = range(last * len(set(nodes)), (last + 1) * len(set(nodes)))
        assert all(any(re.search(rf"chunks? {chunk}\b", fault) for chunk in chunks) for fault in faults), faults[:3]
