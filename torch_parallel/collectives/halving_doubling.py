"""Recursive halving and doubling: few rounds, and no more bytes than the ring.

Pairs of ranks split what they still work on: each sends the half that the other keeps, and adds the half that it gets
to the one it keeps. After log2 P rounds of halving, each rank holds the complete sum of one chunk; after log2 P rounds
of doubling, in which the same pairs swap what they hold, every rank holds all. 2 log2 P messages and 2(P-1)/P of the
buffer a rank (Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005).

Four ranks; a b c d are what ranks 0 1 2 3 contribute. Each row is what a rank holds after the round; upper case S is a
complete sum.

  halving                 chunk 0  chunk 1  chunk 2  chunk 3
    round 1  rank 0         ac       ac       a        a        pairs 0-2 and 1-3 swap halves
             rank 1         bd       bd       b        b
             rank 2         c        c        ac       ac
             rank 3         d        d        bd       bd

    round 2  rank 0         S        ac       a        a        pairs 0-1 and 2-3 swap quarters
             rank 1         bd       S        b        b
             rank 2         c        c        S        ac
             rank 3         d        d        bd       S

  doubling
    round 3  rank 0         S        S        a        a        pairs 0-1 and 2-3
             rank 1         S        S        b        b
             rank 2         c        c        S        S
             rank 3         d        d        S        S

  and after round 4, of the pairs 0-2 and 1-3, every rank holds S in every chunk.

This needs a power of two. Of other numbers, the ranks beyond the largest power of two are folded in: each hands its
buffer to one of the others before the first round, and gets the result from it after the last.
"""

from __future__ import annotations

from torch_parallel.collectives.schedule import Collective, Receive, Rounds, Send, chunk_bounds, everyone


def core_size(world_size: int) -> int:
    """The largest power of two that is no more than `world_size`."""
    return 1 << (world_size.bit_length() - 1)


def all_reduce(rank: int, world_size: int) -> Rounds:
    """Gives every rank the sum over all ranks."""
    core = core_size(world_size)
    whole, folded = range(core), rank + core  # the rank that is folded into this one, if there is such a rank
    if rank >= core:
        yield [Send(rank - core, whole)]
        yield [Receive(rank - core, whole, reduce=False)]
        return
    if folded < world_size:
        yield [Receive(folded, whole, reduce=True)]
    yield from _halve_and_double(rank, whole)
    if folded < world_size:
        yield [Send(folded, whole)]


def _halve_and_double(rank: int, chunks: range) -> Rounds:
    """The halving round of these chunks, all that comes between, and the doubling round."""
    if len(chunks) == 1:
        return
    half = len(chunks) // 2
    partner = rank ^ half
    kept, given = chunks[:half], chunks[half:]
    if rank & half:
        kept, given = given, kept
    yield [Send(partner, given), Receive(partner, kept, reduce=True)]
    yield from _halve_and_double(rank, kept)
    yield [Send(partner, kept), Receive(partner, given, reduce=False)]


def _is_folded(rank: int, world_size: int) -> bool:
    return rank >= core_size(world_size)


def _has_folded(rank: int, world_size: int) -> bool:
    return rank + core_size(world_size) < world_size


def _swaps(world_size: int) -> int:
    return 2 * (core_size(world_size).bit_length() - 1)


def _round_count(rank: int, world_size: int) -> int:
    return 2 if _is_folded(rank, world_size) else _swaps(world_size) + 2 * _has_folded(rank, world_size)


def _message_count(rank: int, world_size: int) -> int:
    return 1 if _is_folded(rank, world_size) else _swaps(world_size) + _has_folded(rank, world_size)


def _sent_elements(rank: int, world_size: int, numel: int) -> int:
    """Halving sends all but the own chunk. Doubling sends the blocks of 1, 2, 4, ... chunks that it lies in."""
    if _is_folded(rank, world_size):
        return numel
    core, sent = core_size(world_size), numel * (1 + _has_folded(rank, world_size))
    bounds = chunk_bounds(numel, core)
    sent -= bounds[rank + 1] - bounds[rank]
    width = 1
    while width < core:
        first = rank - rank % width
        sent += bounds[first + width] - bounds[first]
        width *= 2
    return sent


HALVING_DOUBLING_ALL_REDUCE = Collective(
    name="halving_doubling",
    rounds=all_reduce,
    chunk_count=core_size,
    contributors=everyone,
    round_count=_round_count,
    message_count=_message_count,
    sent_elements=_sent_elements,
)
