"""The ring: every rank sends to its right neighbour and receives from its left one.

The buffer is cut into P chunks. P - 1 rounds of reduce_scatter leave each rank with one complete sum, its own chunk;
P - 1 rounds of all_gather pass the complete chunks on. Each rank sends 2(P-1) messages and 2(P-1)/P of the buffer,
which no all-reduce can undercut, however many ranks there are (Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", 2009).

Four ranks; a b c d are what ranks 0 1 2 3 contribute to the chunk of a column. Each row is what a rank holds after the
round, [x] is what it sends to the right in the next one, and upper case is a complete sum: S = a + b + c + d.

  reduce_scatter      chunk 0  chunk 1  chunk 2  chunk 3
    before   rank 0      a        a        a       [a]
             rank 1     [b]       b        b        b
             rank 2      c       [c]       c        c
             rank 3      d        d       [d]       d

    round 1  rank 0      a        a       [ad]      a
             rank 1      b        b        b       [ab]
             rank 2     [bc]      c        c        c
             rank 3      d       [cd]      d        d

    round 2  rank 0      a       [acd]     ad       a
             rank 1      b        b       [abd]     ab
             rank 2      bc       c        c       [abc]
             rank 3     [bcd]     cd       d        d

  all_gather
    round 3  rank 0     [S]       acd      ad       a
             rank 1      b       [S]       abd      ab
             rank 2      bc       c       [S]       abc
             rank 3      bcd      cd       d       [S]

    round 4  rank 0      S        acd      ad      [S]
             rank 1     [S]       S        abd      ab
             rank 2      bc      [S]       S        abc
             rank 3      bcd      cd      [S]       S

  and after rounds 5 and 6 every rank holds S in every chunk.
"""

from __future__ import annotations

from torch_parallel.collectives.schedule import Collective, Receive, Rounds, Send, chunk_size, everyone, one


def reduce_scatter(rank: int, world_size: int) -> Rounds:
    """Leaves the sum of chunk `rank` on rank `rank`."""
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for step in range(world_size - 1):
        yield [
            Send(right, one(rank - 1 - step, world_size)),
            Receive(left, one(rank - 2 - step, world_size), reduce=True),
        ]


def all_gather(rank: int, world_size: int) -> Rounds:
    """Gives every rank the chunk that each other rank owns: chunk k is rank k's."""
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for step in range(world_size - 1):
        yield [
            Send(right, one(rank - step, world_size)),
            Receive(left, one(rank - 1 - step, world_size), reduce=False),
        ]


def all_reduce(rank: int, world_size: int) -> Rounds:
    """Gives every rank the sum over all ranks: the one half, then the other."""
    yield from reduce_scatter(rank, world_size)
    yield from all_gather(rank, world_size)


RING_REDUCE_SCATTER = Collective(
    name="ring_reduce_scatter",
    rounds=reduce_scatter,
    chunk_count=lambda world_size: world_size,
    contributors=lambda rank, world_size, chunk: frozenset(range(world_size)) if chunk == rank else None,
    round_count=lambda rank, world_size: world_size - 1,
    message_count=lambda rank, world_size: world_size - 1,
    # every chunk but its own
    sent_elements=lambda rank, world_size, numel: numel - chunk_size(numel, world_size, rank),
)

RING_ALL_GATHER = Collective(
    name="ring_all_gather",
    rounds=all_gather,
    chunk_count=lambda world_size: world_size,
    contributors=lambda rank, world_size, chunk: frozenset([chunk]),
    round_count=lambda rank, world_size: world_size - 1,
    message_count=lambda rank, world_size: world_size - 1,
    # every chunk but its right neighbour's
    sent_elements=lambda rank, world_size, numel: numel - chunk_size(numel, world_size, rank + 1),
)

RING_ALL_REDUCE = Collective(
    name="ring",
    rounds=all_reduce,
    chunk_count=lambda world_size: world_size,
    contributors=everyone,
    round_count=lambda rank, world_size: 2 * (world_size - 1),
    message_count=lambda rank, world_size: 2 * (world_size - 1),
    sent_elements=lambda rank, world_size, numel: (
        2 * numel - chunk_size(numel, world_size, rank) - chunk_size(numel, world_size, rank + 1)
    ),
)
