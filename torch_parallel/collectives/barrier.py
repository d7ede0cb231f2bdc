"""The dissemination barrier: nobody leaves before all have come (Hensgen, Finkel and Manber, "Two algorithms for
barrier synchronization", 1988).

In round k every rank signals the one at distance 2^k to its right. After ceil(log2 P) rounds each has heard, by way of
others, from all: who knows of whom in P = 4,

             before   round 1 (distance 1)   round 2 (distance 2)
    rank 0     0           3 0                   1 2 3 0
    rank 1     1           0 1                   2 3 0 1
    rank 2     2           1 2                   3 0 1 2
    rank 3     3           2 3                   0 1 2 3
"""

from __future__ import annotations

from torch_parallel.collectives.schedule import NOTHING, Collective, Receive, Rounds, Send, per_rank


def barrier(rank: int, world_size: int) -> Rounds:
    """Ends on no rank before it has begun on all."""
    distance = 1
    while distance < world_size:
        yield [
            Send((rank + distance) % world_size, NOTHING),
            Receive((rank - distance) % world_size, NOTHING, reduce=False),
        ]
        distance *= 2


BARRIER = Collective(
    name="barrier",
    rounds=barrier,
    chunk_count=lambda world_size: 1,
    contributors=lambda rank, world_size, chunk: frozenset([rank]),  # nothing has changed
    round_count=per_rank(lambda world_size: (world_size - 1).bit_length()),
    message_count=per_rank(lambda world_size: (world_size - 1).bit_length()),
    sent_elements=lambda rank, world_size, numel: 0,
)
