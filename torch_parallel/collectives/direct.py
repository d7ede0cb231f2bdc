"""Everybody reads from everybody: the fewest hops, for ranks that are all linked directly.

Two shots: rank r adds up chunk r of all buffers, then all ranks fetch all sums. The bytes of the ring in 2 rounds
instead of 2(P-1), with P - 1 messages in each. Chunk r is summed in the order r, r + 1, ... around the ring.

  P = 4           before       reduce_scatter       all_gather
    rank 0      a  a  a  a     S  a  a  a           S  S  S  S
    rank 1      b  b  b  b     b  S  b  b           S  S  S  S
    rank 2      c  c  c  c     c  c  S  c           S  S  S  S
    rank 3      d  d  d  d     d  d  d  S           S  S  S  S

In place: the same, but all ranks share one memory for the result, into whose chunk r rank r puts its last addition. The
second shot then moves no byte: the sums are read where they are.

  P = 4          buffer         common result
    rank 0      a  a  a  a      0 writes S  -  -  -
    rank 1      b  b  b  b                  -  S  -  -  1 writes
    rank 2      c  c  c  c      2 writes    -  -  S  -
    rank 3      d  d  d  d                  -  -  -  S  3 writes

One shot: every rank reads the whole buffer of every other and adds them up into a second region, in rank order: one
round, (P - 1) S bytes and additions a rank. For buffers so small that only the hop counts. The reads are in rank
order too, so that all ranks want rank 0's first: over links they form a convoy behind one rank after the other, and
take longer than alpha + (P - 1) S beta.

  P = 4         buffer   result
    rank 0        a        a + b,  + c,  + d
    rank 1        b        b + a,  + c,  + d
    rank 2        c        a,  + b,  + c,  + d
    rank 3        d        a,  + b,  + c,  + d

All-gather, then average: every rank first gathers all buffers, P S of memory, and then adds them up by itself.

  P = 4         buffer   result      scratch      then
    rank 0        a        b          c   d        b + a,  + c,  + d
    rank 1        b        a          c   d        a + b,  + c,  + d
    rank 2        c        a          b   d        a + b,  + c,  + d
    rank 3        d        a          b   c        a + b,  + c,  + d

"One-shot" and "two-shot" are the names in NVIDIA's TensorRT-LLM and in PyTorch's symmetric memory. The other two
collectives here are the direct all-to-all and the pieces of the two shots.
"""

from __future__ import annotations

from torch_parallel.collectives.schedule import (
    WHOLE,
    Collective,
    Local,
    Nodes,
    Receive,
    Round,
    Rounds,
    Send,
    chunk_size,
    everyone,
    one,
    others,
    per_rank,
    shifted,
)

SECOND = range(1, 2)  # the second region of a buffer that is not cut


def reduce_scatter(rank: int, world_size: int) -> Rounds:
    """Leaves the sum of chunk `rank` on rank `rank`."""
    if world_size > 1:
        mine = one(rank, world_size)
        yield [
            *(Send(peer, one(peer, world_size)) for peer in others(rank, world_size)),
            *(Receive(peer, mine, reduce=True) for peer in others(rank, world_size)),
        ]


def all_gather(rank: int, world_size: int) -> Rounds:
    """Gives every rank the chunk that each other rank owns: chunk k is rank k's."""
    if world_size > 1:
        yield [
            *(Send(peer, one(rank, world_size)) for peer in others(rank, world_size)),
            *(Receive(peer, one(peer, world_size), reduce=False) for peer in others(rank, world_size)),
        ]


def two_shot(rank: int, world_size: int) -> Rounds:
    """Gives every rank the sum over all ranks: the one half, then the other."""
    yield from reduce_scatter(rank, world_size)
    yield from all_gather(rank, world_size)


def two_shot_in_place(rank: int, world_size: int) -> Rounds:
    """The same with a common result: chunks P .. 2P - 1 are one memory for all ranks."""
    if world_size == 1:
        return
    peers, mine = others(rank, world_size), one(rank, world_size)
    *first, last = peers
    yield [
        *(Send(peer, one(peer, world_size)) for peer in peers),
        *(Receive(peer, mine, reduce=True) for peer in first),
        Receive(last, mine, reduce=True, into=shifted(mine, world_size), plus=mine),
    ]
    yield [
        *(Send(peer, shifted(mine, world_size)) for peer in peers),
        *(Receive(peer, shifted(one(peer, world_size), world_size), reduce=False) for peer in peers),
    ]


def one_shot(rank: int, world_size: int) -> Rounds:
    """Gives every rank the sum over all ranks, added up in rank order in the second region."""
    if world_size > 1:
        peers = [peer for peer in range(world_size) if peer != rank]
        yield [*(Send(peer, WHOLE) for peer in peers), *_sum_in_rank_order(rank, peers)]


def _sum_in_rank_order(rank: int, peers: list[int]) -> Round:
    first, *rest = peers
    if rank <= 1:  # the own buffer is one of the first two
        steps: Round = [Receive(first, WHOLE, reduce=True, into=SECOND, plus=WHOLE)]
    else:
        steps = [Receive(first, WHOLE, reduce=False, into=SECOND)]
    for peer in rest:
        steps.append(Receive(peer, WHOLE, reduce=True, into=SECOND))
        if peer == rank - 1:
            steps.append(Local(WHOLE, SECOND, reduce=True))
    return steps


def all_gather_average(rank: int, world_size: int) -> Rounds:
    """Gives every rank the sum over all ranks: all buffers are gathered, then added up in rank order."""
    if world_size == 1:
        return
    peers = [peer for peer in range(world_size) if peer != rank]
    places = {rank: WHOLE, **{peer: shifted(WHOLE, region) for region, peer in enumerate(peers, start=1)}}
    to_add = [places[source] for source in range(world_size) if source != peers[0]]
    yield [
        *(Send(peer, WHOLE) for peer in peers),
        *(Receive(peer, WHOLE, reduce=False, into=places[peer]) for peer in others(rank, world_size)),
        *(Local(place, SECOND, reduce=True) for place in to_add),
    ]


def all_to_all(rank: int, world_size: int) -> Rounds:
    """Gives every rank, in chunk k of the second region, the chunk that rank k has for it: the transposed table."""
    if world_size > 1:
        mine, (right, *rest) = one(rank, world_size), others(rank, world_size)
        yield [
            *(Send(peer, one(peer, world_size)) for peer in [right, *rest]),
            Receive(right, mine, reduce=False, into=shifted(one(right, world_size), world_size)),
            Local(mine, shifted(mine, world_size), reduce=False),
            *(Receive(peer, mine, reduce=False, into=shifted(one(peer, world_size), world_size)) for peer in rest),
        ]


def _all_but_own(rank: int, world_size: int, numel: int) -> int:
    return numel - chunk_size(numel, world_size, rank)


def _own_to_all(rank: int, world_size: int, numel: int) -> int:
    return (world_size - 1) * chunk_size(numel, world_size, rank)


_one_round = per_rank(lambda world_size: int(world_size > 1))
_two_rounds = per_rank(lambda world_size: 2 * int(world_size > 1))
_one_each = per_rank(lambda world_size: world_size - 1)
_two_each = per_rank(lambda world_size: 2 * (world_size - 1))
_two_regions = per_rank(lambda world_size: 2 if world_size > 1 else 1)

DIRECT_REDUCE_SCATTER = Collective(
    name="direct_reduce_scatter",
    rounds=reduce_scatter,
    chunk_count=lambda world_size: world_size,
    contributors=lambda rank, world_size, chunk: frozenset(range(world_size)) if chunk == rank else None,
    round_count=_one_round,
    message_count=_one_each,
    sent_elements=_all_but_own,
)

DIRECT_ALL_GATHER = Collective(
    name="direct_all_gather",
    rounds=all_gather,
    chunk_count=lambda world_size: world_size,
    contributors=lambda rank, world_size, chunk: frozenset([chunk]),
    round_count=_one_round,
    message_count=_one_each,
    sent_elements=_own_to_all,
)

TWO_SHOT_ALL_REDUCE = Collective(
    name="two_shot",
    rounds=two_shot,
    chunk_count=lambda world_size: world_size,
    contributors=everyone,
    round_count=_two_rounds,
    message_count=_two_each,
    sent_elements=lambda rank, world_size, numel: (
        _all_but_own(rank, world_size, numel) + _own_to_all(rank, world_size, numel)
    ),
)


def _with_memory_in_common(nodes: Nodes) -> Collective:
    """In place on one node; several have no memory in common, and there the two shots go each to its own."""
    return TWO_SHOT_IN_PLACE if len(set(nodes)) == 1 else TWO_SHOT_ALL_REDUCE


TWO_SHOT_IN_PLACE: Collective = Collective(
    name="two_shot_in_place",
    rounds=two_shot_in_place,
    chunk_count=lambda world_size: world_size,
    contributors=everyone,
    round_count=_two_rounds,
    message_count=_two_each,
    sent_elements=_all_but_own,
    region_count=_two_regions,
    result_region=1,
    common_result=True,
    on_nodes=_with_memory_in_common,
)

ONE_SHOT_ALL_REDUCE = Collective(
    name="one_shot",
    rounds=one_shot,
    chunk_count=lambda world_size: 1,
    contributors=everyone,
    round_count=_one_round,
    message_count=_one_each,
    sent_elements=lambda rank, world_size, numel: (world_size - 1) * numel,
    region_count=_two_regions,
    result_region=1,
)

ALL_GATHER_AVERAGE = Collective(
    name="all_gather_average",
    rounds=all_gather_average,
    chunk_count=lambda world_size: 1,
    contributors=everyone,
    round_count=_one_round,
    message_count=_one_each,
    sent_elements=lambda rank, world_size, numel: (world_size - 1) * numel,
    region_count=per_rank(lambda world_size: world_size),
    result_region=1,
)

ALL_TO_ALL = Collective(
    name="all_to_all",
    rounds=all_to_all,
    chunk_count=lambda world_size: world_size,
    contributors=lambda rank, world_size, chunk: frozenset([chunk]),
    round_count=_one_round,
    message_count=_one_each,
    sent_elements=_all_but_own,
    region_count=_two_regions,
    result_region=1,
    source_chunk=lambda rank, world_size, chunk: rank,
    equal_chunks=True,
)
