"""Collectives with a root: what the synchronous parameter server does.

The workers push, the root sums in rank order (`reduce`); then the root's buffer goes back to all (`broadcast`). The two
together are an all-reduce.

  P = 4, root 0:      reduce                 broadcast
                  1 --b--> 0             0 --S--> 1
                  2 --c--> 0             0 --S--> 2
                  3 --d--> 0             0 --S--> 3
                  S = a + b + c + d, or b + c + d where the root is a server and has no gradient of its own

Or the root first gathers all buffers, which takes P S of memory, adds them up and sends the sum back:

  P = 4, root 0:      gather into scratch             sum in rank order       send back
                  1 --b--> 0                                               0 --S--> 1
                  2 --c--> 0    buffer  scratch                            0 --S--> 2
                  3 --d--> 0       a    b  c  d      a + b,  + c,  + d     0 --S--> 3

One round each, but (P - 1) buffers cross the root's link in each direction: 2(P-1)S bytes where a ring's busiest link
carries 2(P-1)/P S (Li et al., "Scaling distributed machine learning with the parameter server", 2014).

`gather` and `scatter` move the chunks of one buffer: chunk k is rank k's.

  P = 4, root 0:      gather                 scatter
                  1 --chunk 1--> 0       0 --chunk 1--> 1
                  2 --chunk 2--> 0       0 --chunk 2--> 2
                  3 --chunk 3--> 0       0 --chunk 3--> 3
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

from torch_parallel.collectives.schedule import (
    WHOLE,
    Collective,
    Local,
    Receive,
    Rounds,
    Send,
    chunk_size,
    everyone,
    one,
    shifted,
)


def reduce(rank: int, world_size: int, root: int = 0, root_contributes: bool = True) -> Rounds:
    """Leaves the sum over all ranks on `root`; with `root_contributes=False`, over all ranks but the root.

    A root without a contribution replaces its buffer by the first one that arrives in rank order.
    """
    if rank != root:
        yield [Send(root, WHOLE)]
    elif world_size > 1:
        others = [other for other in range(world_size) if other != root]
        yield [Receive(other, WHOLE, reduce=root_contributes or other != others[0]) for other in others]


def broadcast(rank: int, world_size: int, root: int = 0) -> Rounds:
    """Gives every rank the root's buffer."""
    if rank != root:
        yield [Receive(root, WHOLE, reduce=False)]
    elif world_size > 1:
        yield [Send(other, WHOLE) for other in range(world_size) if other != root]


def gather(rank: int, world_size: int, root: int = 0) -> Rounds:
    """Gives the root every rank's chunk: chunk k is rank k's."""
    if rank != root:
        yield [Send(root, one(rank, world_size))]
    elif world_size > 1:
        yield [Receive(other, one(other, world_size), reduce=False) for other in range(world_size) if other != root]


def scatter(rank: int, world_size: int, root: int = 0) -> Rounds:
    """Gives every rank its chunk of the root's buffer."""
    if rank != root:
        yield [Receive(root, one(rank, world_size), reduce=False)]
    elif world_size > 1:
        yield [Send(other, one(other, world_size)) for other in range(world_size) if other != root]


def reduce_broadcast(rank: int, world_size: int) -> Rounds:
    """Gives every rank the sum over all ranks, by way of rank 0."""
    yield from reduce(rank, world_size)
    yield from broadcast(rank, world_size)


def gather_scatter(rank: int, world_size: int) -> Rounds:
    """The same, but rank 0 keeps all buffers, rank k's in region k, before it adds them up."""
    if rank == 0 and world_size > 1:
        workers = range(1, world_size)
        yield [
            *(Receive(worker, WHOLE, reduce=False, into=shifted(WHOLE, worker)) for worker in workers),
            *(Local(shifted(WHOLE, worker), WHOLE, reduce=True) for worker in workers),
        ]
    elif rank != 0:
        yield [Send(0, WHOLE)]
    yield from broadcast(rank, world_size)


def _takes_part(rank: int, world_size: int) -> int:
    return int(world_size > 1)


def _on(root: int, at_root: Callable[[int], int], elsewhere: int) -> Callable[[int, int], int]:
    return lambda rank, world_size: at_root(world_size) if rank == root else elsewhere


@cache
def reduce_to(root: int, root_contributes: bool = True) -> Collective:
    """`reduce` to one particular root."""

    def contributors(rank: int, world_size: int, chunk: int) -> frozenset[int] | None:
        if rank != root:
            return None
        summed = frozenset(range(world_size))
        return summed if root_contributes or world_size == 1 else summed - {root}

    return Collective(
        name="reduce" if root_contributes else "push",
        rounds=partial(reduce, root=root, root_contributes=root_contributes),
        chunk_count=lambda world_size: 1,
        contributors=contributors,
        round_count=_takes_part,
        message_count=_on(root, lambda world_size: 0, elsewhere=1),
        sent_elements=lambda rank, world_size, numel: 0 if rank == root else numel,
    )


@cache
def broadcast_from(root: int) -> Collective:
    """`broadcast` from one particular root."""
    return Collective(
        name="broadcast",
        rounds=partial(broadcast, root=root),
        chunk_count=lambda world_size: 1,
        contributors=lambda rank, world_size, chunk: frozenset([root]),
        round_count=_takes_part,
        message_count=_on(root, lambda world_size: world_size - 1, elsewhere=0),
        sent_elements=lambda rank, world_size, numel: (world_size - 1) * numel if rank == root else 0,
    )


@cache
def gather_to(root: int) -> Collective:
    """`gather` to one particular root."""
    return Collective(
        name="gather",
        rounds=partial(gather, root=root),
        chunk_count=lambda world_size: world_size,
        contributors=lambda rank, world_size, chunk: frozenset([chunk]) if rank == root else None,
        round_count=_takes_part,
        message_count=_on(root, lambda world_size: 0, elsewhere=1),
        sent_elements=lambda rank, world_size, numel: 0 if rank == root else chunk_size(numel, world_size, rank),
    )


@cache
def scatter_from(root: int) -> Collective:
    """`scatter` from one particular root."""
    return Collective(
        name="scatter",
        rounds=partial(scatter, root=root),
        chunk_count=lambda world_size: world_size,
        contributors=lambda rank, world_size, chunk: frozenset([root]) if chunk == rank else None,
        round_count=_takes_part,
        message_count=_on(root, lambda world_size: world_size - 1, elsewhere=0),
        sent_elements=lambda rank, world_size, numel: (
            numel - chunk_size(numel, world_size, root) if rank == root else 0
        ),
    )


def _through_rank_0(name: str, rounds: Callable[[int, int], Rounds], keeps_all: bool) -> Collective:
    return Collective(
        name=name,
        rounds=rounds,
        chunk_count=lambda world_size: 1,
        contributors=everyone,
        round_count=lambda rank, world_size: 2 * _takes_part(rank, world_size),
        message_count=_on(0, lambda world_size: world_size - 1, elsewhere=1),
        sent_elements=lambda rank, world_size, numel: (world_size - 1 if rank == 0 else 1) * numel,
        region_count=_on(0, lambda world_size: world_size if keeps_all else 1, elsewhere=1),
    )


REDUCE_BROADCAST = _through_rank_0("reduce_broadcast", reduce_broadcast, keeps_all=False)
GATHER_SCATTER = _through_rank_0("gather_scatter", gather_scatter, keeps_all=True)
