"""Everyone reads from everyone: where all ranks reach each other's memory at the same cost, no rank passes sums on.

P = 3; a b c are what ranks 0 1 2 contribute to the chunk of a column, upper case is a complete sum, S = a + b + c:

  direct_reduce_scatter   chunk 0  chunk 1  chunk 2
    before   rank 0          a        a        a       sends chunk 1 to rank 1 and chunk 2 to rank 2
             rank 1          b        b        b       sends chunk 0 to rank 0 and chunk 2 to rank 2
             rank 2          c        c        c       sends chunk 0 to rank 0 and chunk 1 to rank 1

    round 1  rank 0         [S]       a        a       S = a + b + c
             rank 1          b       [S]       b       S = b + a + c
             rank 2          c        c       [S]      S = c + a + b

The bytes are the ring's, in 1 round instead of P - 1, and each rank sends a message to each other one. A rank adds to
its own contribution those of the others in rank order, so the bits of a sum do not depend on who comes first.
"""

from __future__ import annotations

from torch_parallel.collectives.schedule import Collective, Receive, Rounds, Send, chunk_size, one


def reduce_scatter(rank: int, world_size: int) -> Rounds:
    """Leaves the sum of chunk `rank` on rank `rank`; all other chunks stay as they are."""
    others = [other for other in range(world_size) if other != rank]
    if others:
        sends = [Send(other, one(other, world_size)) for other in others]
        yield [*sends, *(Receive(other, one(rank, world_size), reduce=True) for other in others)]


DIRECT_REDUCE_SCATTER = Collective(
    name="direct_reduce_scatter",
    rounds=reduce_scatter,
    chunk_count=lambda world_size: world_size,
    contributors=lambda rank, world_size, chunk: frozenset(range(world_size)) if chunk == rank else None,
    round_count=lambda rank, world_size: int(world_size > 1),
    message_count=lambda rank, world_size: world_size - 1,
    # every chunk but its own
    sent_elements=lambda rank, world_size, numel: numel - chunk_size(numel, world_size, rank),
)
