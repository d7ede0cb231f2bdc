"""All-reduces of several nodes: what crosses a network card, and which card.

Within a node ranks reach each other's memory; between nodes bytes cross network cards, which are slower. So what counts
is the bytes on the busiest card, in each direction, in units of the buffer S. Here 2 nodes of 4 ranks, A with ranks
0 1 2 3 and B with 4 5 6 7; every rank has a card of its own, or all of a node share one.

  flat: one ring through all ranks, node after node. Two of its links lie between nodes, and each carries 2 (P-1)/P S.

      0 -> 1 -> 2 -> 3 => 4 -> 5 -> 6 -> 7 => 0                      1.75 S on a card

  leaders: reduce to the first rank of each node, a ring of these leaders, broadcast.

      0 1 2 3 -> 0  <==>  4 <- 4 5 6 7      then 0 -> 1 2 3, 4 -> 5 6 7     1 S on one card, the others idle

  multi_nic: all-reduce in each node, then every pair exchanges everything, each over its own card.

      0 <==> 4    1 <==> 5    2 <==> 6    3 <==> 7                   1 S on each card; 4 S where they share one

  sharded: reduce-scatter in each node, every pair exchanges its shard, all-gather in each node.

      0 <=> 4 chunk 0    1 <=> 5 chunk 1    2 <=> 6 chunk 2    3 <=> 7 chunk 3     1/4 S on each card; 1 S on one

  grouped: the same, but the shards are groups of whole parameters, one group for each card: see `SharedBuffer.groups`.
  The busiest card carries the largest group.

A *lane* is one rank of each node, and there are as many as the smallest node has ranks. Ranks of larger nodes beyond
that add what they have in their node and get the sum from there. With N nodes a lane's exchange is a ring of N ranks,
so what a card carries is 2 (N-1)/N times the lane's part: the numbers above are of N = 2.

"Hierarchical" all-reduces are in Horovod and NCCL's literature; Mikami et al., "Massively distributed SGD" (2018), have
the sharded one as a 2D torus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from math import lcm

from torch_parallel.collectives import direct, ring, rooted
from torch_parallel.collectives.schedule import (
    NOTHING,
    Collective,
    Local,
    Nodes,
    Operation,
    Receive,
    Rounds,
    Send,
    chunk_bounds,
    everyone,
)

Schedule = Callable[[int, int], Rounds]


@dataclass(frozen=True)
class Layout:
    """Which ranks are together: `mates[k]` are the ranks of node k, in order."""

    mates: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, nodes: Nodes) -> Layout:
        """`nodes` has the node of each rank; how nodes are numbered does not matter."""
        return cls(tuple(tuple(rank for rank, at in enumerate(nodes) if at == node) for node in dict.fromkeys(nodes)))

    @property
    def lanes(self) -> int:
        return min(map(len, self.mates))

    def lane(self, index: int) -> tuple[int, ...]:
        """One rank of each node."""
        return tuple(mates[index] for mates in self.mates)

    def of_rank(self, rank: int) -> tuple[tuple[int, ...], int]:
        """The ranks of its node, itself among them, and its place there."""
        mates = next(mates for mates in self.mates if rank in mates)
        return mates, mates.index(rank)

    def node_of(self, rank: int) -> int:
        return next(node for node, mates in enumerate(self.mates) if rank in mates)


@cache
def two_halves(world_size: int) -> Layout:
    """Where nothing is said of nodes: two, of which the first has the odd rank."""
    first = -(-world_size // 2)
    return Layout.of((0,) * first + (1,) * (world_size - first))


def on(ranks: Sequence[int], schedule: Schedule, rank: int, cuts: Sequence[int]) -> Rounds:
    """`rank`'s part of a schedule that these ranks alone perform. Its chunk k is chunks [cuts[k], cuts[k + 1]) here.

    The schedule must work in place; some of its chunks may be empty here.
    """
    for this in schedule(ranks.index(rank), len(ranks)):
        yield [_moved(operation, ranks, cuts) for operation in this]


def _moved(operation: Operation, ranks: Sequence[int], cuts: Sequence[int]) -> Operation:
    assert not isinstance(operation, Local), "only schedules that work in place are composed"
    start, stop = cuts[operation.chunks.start], cuts[operation.chunks.stop]
    chunks = range(start, stop) if start < stop else NOTHING
    if isinstance(operation, Send):
        return Send(ranks[operation.to], chunks)
    assert operation.into is operation.plus is None, "only schedules that work in place are composed"
    return replace(operation, source=ranks[operation.source], chunks=chunks)


def _have_read(ranks: Sequence[int], rank: int) -> Rounds:
    """These ranks tell each other that they have read all that they are about to change."""
    peers = [peer for peer in ranks if peer != rank]
    if peers:
        yield [*(Send(peer, NOTHING) for peer in peers), *(Receive(peer, NOTHING, reduce=False) for peer in peers)]


def equal_cuts(chunk_count: int, parts: int) -> list[int]:
    return chunk_bounds(chunk_count, parts)


# ---- the five schedules ----


def flat(rank: int, layout: Layout) -> Rounds:
    """One ring through all ranks, node after node."""
    ranks = [each for mates in layout.mates for each in mates]
    yield from on(ranks, ring.all_reduce, rank, range(len(ranks) + 1))


def leaders(rank: int, layout: Layout) -> Rounds:
    """Reduce to the first rank of each node, a ring of these, broadcast."""
    mates, place = layout.of_rank(rank)
    nodes = len(layout.mates)
    yield from on(mates, rooted.reduce, rank, [0, nodes])
    if place == 0:
        yield from on(layout.lane(0), ring.all_reduce, rank, range(nodes + 1))
    yield from on(mates, rooted.broadcast, rank, [0, nodes])


def multi_nic(rank: int, layout: Layout) -> Rounds:
    """All-reduce in each node, then every lane exchanges everything; ranks without a lane copy from one that has."""
    mates, place = layout.of_rank(rank)
    chunks, lanes = _common_multiple(layout), layout.lanes
    yield from on(mates, direct.two_shot, rank, equal_cuts(chunks, len(mates)))
    yield from _have_read(mates, rank)
    if place < lanes:
        yield from on(layout.lane(place), ring.all_reduce, rank, equal_cuts(chunks, len(layout.mates)))
    group = mates[place % lanes :: lanes]
    yield from on(group, rooted.broadcast, rank, [0, chunks])


def sharded(rank: int, layout: Layout) -> Rounds:
    """Reduce-scatter in each node, every lane exchanges its shard, all-gather in each node."""
    mates, place = layout.of_rank(rank)
    nodes, lanes = len(layout.mates), layout.lanes
    shards = [min(lane, lanes) * nodes for lane in range(len(mates) + 1)]  # empty for ranks without a lane
    yield from on(mates, direct.reduce_scatter, rank, shards)
    if place < lanes:
        first = place * nodes
        yield from on(layout.lane(place), ring.all_reduce, rank, range(first, first + nodes + 1))
    yield from on(mates, direct.all_gather, rank, shards)


# ---- their formulas ----


def _common_multiple(layout: Layout) -> int:
    return lcm(len(layout.mates), *map(len, layout.mates))


def _ring_elements(sizes: Sequence[int], place: int) -> int:
    """What one rank of a ring sends of these chunks, one for each of its ranks: see `ring.RING_ALL_REDUCE`."""
    return 2 * sum(sizes) - sizes[place] - sizes[(place + 1) % len(sizes)]


def _sizes(bounds: Sequence[int], cuts: Iterable[int]) -> list[int]:
    return [bounds[stop] - bounds[start] for start, stop in pairwise(cuts)]


def _of_flat(rank: int, layout: Layout, bounds: list[int]) -> tuple[int, int, int]:
    """Rounds, messages and elements that it sends, for one rank; so for the others below."""
    ranks = [each for mates in layout.mates for each in mates]
    messages = 2 * (len(ranks) - 1)
    return messages, messages, _ring_elements(_sizes(bounds, range(len(ranks) + 1)), ranks.index(rank))


def _of_leaders(rank: int, layout: Layout, bounds: list[int]) -> tuple[int, int, int]:
    mates, place = layout.of_rank(rank)
    if place > 0:
        return 2, 1, bounds[-1]
    hops, others = 2 * (len(layout.mates) - 1), len(mates) - 1
    elements = _ring_elements(_sizes(bounds, range(len(layout.mates) + 1)), layout.node_of(rank))
    return hops + 2 * (others > 0), hops + others, elements + others * bounds[-1]


def _of_multi_nic(rank: int, layout: Layout, bounds: list[int]) -> tuple[int, int, int]:
    mates, place = layout.of_rank(rank)
    chunks, nodes, others, lanes = len(bounds) - 1, len(layout.mates), len(mates) - 1, layout.lanes
    own = _sizes(bounds, equal_cuts(chunks, len(mates)))[place]
    rounds, messages = 3 * (others > 0), 3 * others
    elements = bounds[-1] - own + others * own
    if place >= lanes:
        return rounds + 1, messages, elements
    hops, followers = 2 * (nodes - 1), len(mates[place::lanes]) - 1
    elements += _ring_elements(_sizes(bounds, equal_cuts(chunks, nodes)), layout.node_of(rank))
    return rounds + hops + (followers > 0), messages + hops + followers, elements + followers * bounds[-1]


def _of_sharded(rank: int, layout: Layout, bounds: list[int]) -> tuple[int, int, int]:
    mates, place = layout.of_rank(rank)
    nodes, others = len(layout.mates), len(mates) - 1
    has_lane = place < layout.lanes
    cuts = range(place * nodes, (place + 1) * nodes + 1) if has_lane else range(1)
    sizes = _sizes(bounds, cuts)
    own = sum(sizes)
    hops = 2 * (nodes - 1) * has_lane
    crossing = _ring_elements(sizes, layout.node_of(rank)) if has_lane else 0
    return 2 * (others > 0) + hops, 2 * others + hops, bounds[-1] - own + crossing + others * own


Counts = Callable[[int, Layout, list[int]], tuple[int, int, int]]


@dataclass(frozen=True)
class _Recipe:
    """What makes a collective of any layout: one of the schedules above, and its numbers."""

    rounds: Callable[[int, Layout], Rounds]
    chunk_count: Callable[[Layout], int]
    counts: Counts
    group_count: Callable[[Layout], int]

    def at(self, name: str, layout_of: Callable[[int], Layout]) -> Collective:
        """Where `layout_of` says how so many ranks stand."""

        def counted(rank: int, world_size: int, numel: int = 0) -> tuple[int, int, int]:
            layout = layout_of(world_size)
            return self.counts(rank, layout, chunk_bounds(numel, self.chunk_count(layout)))

        return Collective(
            name=name,
            rounds=lambda rank, world_size: self.rounds(rank, layout_of(world_size)),
            chunk_count=lambda world_size: self.chunk_count(layout_of(world_size)),
            contributors=everyone,
            round_count=lambda rank, world_size: counted(rank, world_size)[0],
            message_count=lambda rank, world_size: counted(rank, world_size)[1],
            sent_elements=lambda rank, world_size, numel: counted(rank, world_size, numel)[2],
            group_count=lambda world_size: self.group_count(layout_of(world_size)),
            on_nodes=partial(_placed, name),
        )


_RECIPES: dict[str, _Recipe] = {}


@cache
def _placed(name: str, nodes: Nodes) -> Collective:
    """The collective of this name for ranks on these nodes: each time the same object."""
    layout = Layout.of(nodes)

    def only(world_size: int) -> Layout:
        if world_size != len(nodes):
            raise ValueError(f"{name} on {len(nodes)} ranks is performed by {world_size}: place it anew")
        return layout

    return _RECIPES[name].at(name, only)


def _collective(
    name: str,
    rounds: Callable[[int, Layout], Rounds],
    chunk_count: Callable[[Layout], int],
    counts: Counts,
    group_count: Callable[[Layout], int] = lambda layout: 1,
) -> Collective:
    """Of two halves, and by `on_nodes` of any nodes."""
    _RECIPES[name] = _Recipe(rounds, chunk_count, counts, group_count)
    return _RECIPES[name].at(name, two_halves)


def _lane_chunks(layout: Layout) -> int:
    return layout.lanes * len(layout.mates)


FLAT = _collective("flat", flat, lambda layout: sum(map(len, layout.mates)), _of_flat)
LEADERS = _collective("hierarchical_leaders", leaders, lambda layout: len(layout.mates), _of_leaders)
MULTI_NIC = _collective("hierarchical_multi_nic", multi_nic, _common_multiple, _of_multi_nic)
SHARDED = _collective("hierarchical_sharded", sharded, _lane_chunks, _of_sharded)
GROUPED = _collective(
    "hierarchical_grouped", sharded, _lane_chunks, _of_sharded, group_count=lambda layout: layout.lanes
)
