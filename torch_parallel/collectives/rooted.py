"""Collectives with a root: what the synchronous parameter server does.

The workers push, the root sums in rank order (`reduce`); then the root's buffer goes back to all (`broadcast`).

  P = 4, root 0:      reduce                 broadcast
                  1 --b--> 0             0 --S--> 1
                  2 --c--> 0             0 --S--> 2
                  3 --d--> 0             0 --S--> 3
                  S = a + b + c + d, or b + c + d where the root is a server and has no gradient of its own

One round each, but (P - 1) buffers cross the root's link in each direction: 2(P-1)S bytes where a ring's busiest link
carries 2(P-1)/P S.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

from torch_parallel.collectives.schedule import Collective, Receive, Rounds, Send

WHOLE = range(0, 1)  # a rooted collective sends the buffer as one chunk


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
