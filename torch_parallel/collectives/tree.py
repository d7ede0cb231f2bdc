"""The binomial tree: sums travel to the root along its branches, and the result travels back on them.

In each round of `reduce` half of the ranks that are still in it hand their sums to the other half, at distance 1, then
2, then 4, ...; `broadcast` is the same in reverse order. So there are only ceil(log2 P) rounds each way where a root
that hears all ranks itself has P - 1 messages to take one after the other. Each message is the whole buffer, though:
good for small buffers, 2 ceil(log2 P) times the buffer for large ones (Thakur, Rabenseifner and Gropp, "Optimization of
collective communication operations in MPICH", 2005).

  P = 4, root 0:  reduce                                       broadcast
                    round 1    1 --b--> 0     3 --d--> 2         round 3    0 --S--> 2
                    round 2    2 --cd-> 0                        round 4    0 --S--> 1     2 --S--> 3

    rank 0        a     ab    abcd = S                           S      S
    rank 1        b     b     b                                  b      S
    rank 2        c     cd    cd                                 S      S
    rank 3        d     d     d                                  d      S

With another root, ranks are counted from it on around the ring.
"""

from __future__ import annotations

from functools import cache, partial

from torch_parallel.collectives.schedule import WHOLE, Collective, Receive, Rounds, Send, everyone


def reduce(rank: int, world_size: int, root: int = 0) -> Rounds:
    """Leaves the sum over all ranks on `root`."""
    place, distance = (rank - root) % world_size, 1
    while distance < world_size:
        if place & distance:
            yield [Send((rank - distance) % world_size, WHOLE)]
            return
        if place + distance < world_size:
            yield [Receive((rank + distance) % world_size, WHOLE, reduce=True)]
        distance *= 2


def broadcast(rank: int, world_size: int, root: int = 0) -> Rounds:
    """Gives every rank the root's buffer: the branches of `reduce` backwards, from the longest to the shortest."""
    for (operation,) in reversed(list(reduce(rank, world_size, root))):
        if isinstance(operation, Send):
            yield [Receive(operation.to, WHOLE, reduce=False)]
        elif isinstance(operation, Receive):
            yield [Send(operation.source, WHOLE)]


def all_reduce(rank: int, world_size: int) -> Rounds:
    """Gives every rank the sum over all ranks, by way of rank 0."""
    yield from reduce(rank, world_size)
    yield from broadcast(rank, world_size)


def children(rank: int, world_size: int, root: int = 0) -> int:
    """How many ranks hand their sums to this one: those at distance 2^i below its lowest bit, as far as there are any.

    2^i <= world_size - 1 - place  <=>  i < bit_length(world_size - 1 - place)
    """
    place = (rank - root) % world_size
    there_are = (world_size - 1 - place).bit_length()
    return min(there_are, (place & -place).bit_length() - 1) if place else there_are


def parents(rank: int, root: int = 0) -> int:
    """To how many ranks this one hands its sum."""
    return int(rank != root)


@cache
def tree_reduce_to(root: int) -> Collective:
    """`reduce` to one particular root."""
    return Collective(
        name="tree_reduce",
        rounds=partial(reduce, root=root),
        chunk_count=lambda world_size: 1,
        contributors=lambda rank, world_size, chunk: frozenset(range(world_size)) if rank == root else None,
        round_count=lambda rank, world_size: children(rank, world_size, root) + parents(rank, root),
        message_count=lambda rank, world_size: parents(rank, root),
        sent_elements=lambda rank, world_size, numel: parents(rank, root) * numel,
    )


@cache
def tree_broadcast_from(root: int) -> Collective:
    """`broadcast` from one particular root."""
    return Collective(
        name="tree_broadcast",
        rounds=partial(broadcast, root=root),
        chunk_count=lambda world_size: 1,
        contributors=lambda rank, world_size, chunk: frozenset([root]),
        round_count=lambda rank, world_size: children(rank, world_size, root) + parents(rank, root),
        message_count=lambda rank, world_size: children(rank, world_size, root),
        sent_elements=lambda rank, world_size, numel: children(rank, world_size, root) * numel,
    )


TREE_ALL_REDUCE = Collective(
    name="tree",
    rounds=all_reduce,
    chunk_count=lambda world_size: 1,
    contributors=everyone,
    round_count=lambda rank, world_size: 2 * (children(rank, world_size) + parents(rank)),
    message_count=lambda rank, world_size: children(rank, world_size) + parents(rank),
    sent_elements=lambda rank, world_size, numel: (children(rank, world_size) + parents(rank)) * numel,
)
