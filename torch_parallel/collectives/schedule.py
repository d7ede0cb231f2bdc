"""An algorithm is data: what each rank sends and receives, round by round.

A *schedule* is a generator. Given ``rank`` and ``world_size`` it yields rounds; a *round* is the list of sends and
receives of one rank that happen together. Nothing here knows of tensors, processes or networks, so one description
can be proved (`proof.py`), priced, drawn, and performed by any transport.

    Send(to=2, chunks=range(0, 1))                      rank 2 may now have my chunk 0
    Receive(source=1, chunks=range(3, 4), reduce=True)  add rank 1's chunk 3 to my chunk 3
    Receive(source=1, chunks=range(3, 4), reduce=False) replace my chunk 3 by rank 1's

Rules that every schedule keeps, and that `proof.py` checks:
- The messages of an ordered pair of ranks match in order: the k-th `Send` from a to b is the k-th `Receive` of b
  from a, and both name the same chunks.
- A round never changes a chunk that it sends.
- The receives of a round are performed in the order listed, so that no sum depends on who arrives first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Send:
    """My `chunks` are complete: rank `to` may have them."""

    to: int
    chunks: range


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for rank `source`, then add its `chunks` to mine (`reduce`) or replace mine by them."""

    source: int
    chunks: range
    reduce: bool


Round = list[Send | Receive]
Rounds = Iterator[Round]


def one(index: int, world_size: int) -> range:
    """The single chunk `index`, counted around the ring: index -1 is the last chunk."""
    start = index % world_size
    return range(start, start + 1)


def chunk_bounds(numel: int, chunk_count: int) -> list[int]:
    """Where `numel` elements are cut into `chunk_count` chunks: chunk k is [bounds[k], bounds[k + 1]).

    The cuts are those of `torch.tensor_split`: sizes differ by at most one, the larger chunks come first, and with more
    chunks than elements the last chunks are empty.
    """
    size, larger = divmod(numel, chunk_count)
    return [k * size + min(k, larger) for k in range(chunk_count + 1)]


def chunk_size(numel: int, chunk_count: int, index: int) -> int:
    """Elements of chunk `index` (counted around the ring)."""
    size, larger = divmod(numel, chunk_count)
    return size + (index % chunk_count < larger)


@dataclass(frozen=True)
class Collective:
    """A schedule together with what it promises: its result and its cost, as formulas that the tests recount.

    rounds(rank, world_size)                  the schedule itself
    chunk_count(world_size)                   into how many chunks the buffer is cut
    contributors(rank, world_size, chunk)     the ranks whose values this rank's chunk holds at the end, each exactly
                                              once; None where nothing is promised
    round_count(rank, world_size)             rounds in which this rank takes part
    message_count(rank, world_size)           messages that this rank sends
    sent_elements(rank, world_size, numel)    elements that this rank sends, exact for every size
    """

    name: str
    rounds: Callable[[int, int], Rounds]
    chunk_count: Callable[[int], int]
    contributors: Callable[[int, int, int], frozenset[int] | None]
    round_count: Callable[[int, int], int]
    message_count: Callable[[int, int], int]
    sent_elements: Callable[[int, int, int], int]
