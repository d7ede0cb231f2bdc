"""An algorithm is data: what each rank sends and receives, round by round.

A *schedule* is a generator. Given ``rank`` and ``world_size`` it yields rounds; a *round* is the list of sends and
receives of one rank that happen together. Nothing here knows of tensors, processes or networks, so one description
can be proved (`proof.py`), priced, drawn, and performed by any transport.

    Send(to=2, chunks=range(0, 1))                      rank 2 may now have my chunk 0
    Receive(source=1, chunks=range(3, 4), reduce=True)  add rank 1's chunk 3 to my chunk 3
    Receive(source=1, chunks=range(3, 4), reduce=False) replace my chunk 3 by rank 1's
    Local(chunks=range(4, 5), into=range(0, 1), reduce=True)  add my chunk 4 to my chunk 0

The memory of a rank is one or more *regions*, each as large as the buffer and cut alike: with C chunks a region, chunk
k lies in region k // C. Region 0 is the input, which peers can read. The others are scratch, which only their rank can
reach and in which nothing lies at first. The result lies in one of them; in place means that it is region 0.

A *common* result is the exception: that region is one memory for all ranks. One rank writes each of its chunks, and the
others read it there, so `Receive` of such a chunk moves nothing and is only a wait. It stays as it is until its reader
begins the next performance on the same buffer.

Rules that every schedule keeps, and that `proof.py` checks:
- The messages of an ordered pair of ranks match in order: the k-th `Send` from a to b is the k-th `Receive` of b
  from a, and both name the same chunks of a.
- A round never changes a chunk that it sends.
- What a round receives and moves is performed in the order listed, so that no sum depends on who arrives first.
- A `Local` follows a `Receive` in its round.
- A common chunk is written by one rank only, once it has heard from every other rank, and never after it was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

WHOLE = range(0, 1)
"""The buffer where it is not cut, as one chunk."""

NOTHING = range(0)
"""A message without chunks is only a signal."""

Nodes = tuple[int, ...]
"""The node on which each rank stands."""


@dataclass(frozen=True, slots=True)
class Send:
    """My `chunks` are complete: rank `to` may have them."""

    to: int
    chunks: range


class Placed:
    """Where chunks that arrive go; see `Receive`."""

    __slots__ = ()
    chunks: range
    into: range | None
    plus: range | None

    @property
    def target(self) -> range:
        """The chunks of the receiver's that change."""
        return self.chunks if self.into is None else self.into

    @property
    def addend(self) -> range:
        """The chunks of the receiver's that are added, with `reduce`."""
        return self.target if self.plus is None else self.plus


@dataclass(frozen=True, slots=True)
class Receive(Placed):
    """Wait for rank `source`, then add its `chunks` to mine (`reduce`) or replace mine by them.

    `into` is where in my memory they go, if not to the same chunks. `plus` names those of my chunks to which they are
    added, if not those in `into`, whose contents are then lost: into = plus + chunks, in one pass.
    """

    source: int
    chunks: range
    reduce: bool
    into: range | None = None
    plus: range | None = None


@dataclass(frozen=True, slots=True)
class Local:
    """Add my own `chunks` to those in `into` (`reduce`), or replace these by them."""

    chunks: range
    into: range
    reduce: bool


Operation = Send | Receive | Local
Round = list[Operation]
Rounds = Iterator[Round]


def one(index: int, world_size: int) -> range:
    """The single chunk `index`, counted around the ring: index -1 is the last chunk."""
    start = index % world_size
    return range(start, start + 1)


def others(rank: int, world_size: int) -> list[int]:
    """All other ranks, from the right neighbour on around the ring, so that not all ranks begin with the same one."""
    return [(rank + distance) % world_size for distance in range(1, world_size)]


def shifted(chunks: range, by: int) -> range:
    return range(chunks.start + by, chunks.stop + by)


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


def in_one_region(rank: int, world_size: int) -> int:
    return 1


def one_group(world_size: int) -> int:
    return 1


def of_the_same_index(rank: int, world_size: int, chunk: int) -> int:
    return chunk


@dataclass(frozen=True, eq=False)  # two are the same if they are one object: the hash costs nothing
class Collective:
    """A schedule together with what it promises: its result and its cost, as formulas that the tests recount.

    rounds(rank, world_size)                  the schedule itself
    chunk_count(world_size)                   into how many chunks each region is cut
    contributors(rank, world_size, chunk)     the ranks whose values this chunk of this rank's result holds at the end,
                                              each exactly once; None where nothing is promised
    round_count(rank, world_size)             rounds in which this rank takes part
    message_count(rank, world_size)           messages that this rank sends
    sent_elements(rank, world_size, numel)    elements that others read from this rank, exact for every size; what lies
                                              in a common result does not move
    region_count(rank, world_size)            how many regions this rank needs, its input included
    result_region                             where the result lies; of one rank alone always in region 0
    common_result                             whether the result's region is one memory for all ranks
    source_chunk(rank, world_size, chunk)     which of the contributors' chunks this chunk of the result is made of
    equal_chunks                              whether all chunks must have one size: chunks move to other places
    group_count(world_size)                   into how many groups the chunks fall, equally many in each: the buffer may
                                              say their sizes, and each is then cut into its chunks by itself
    on_nodes(nodes)                           the same where ranks stand on these nodes; None where that does not matter
    wrong_on_purpose                          performed even if the proof finds faults: for tests that notice them
    """

    name: str
    rounds: Callable[[int, int], Rounds]
    chunk_count: Callable[[int], int]
    contributors: Callable[[int, int, int], frozenset[int] | None]
    round_count: Callable[[int, int], int]
    message_count: Callable[[int, int], int]
    sent_elements: Callable[[int, int, int], int]
    region_count: Callable[[int, int], int] = in_one_region
    result_region: int = 0
    common_result: bool = False
    source_chunk: Callable[[int, int, int], int] = of_the_same_index
    equal_chunks: bool = False
    group_count: Callable[[int], int] = one_group
    on_nodes: Callable[[Nodes], Collective] | None = None
    wrong_on_purpose: bool = False

    def placed(self, nodes: Nodes) -> Collective:
        """The collective for ranks on these nodes."""
        return self if self.on_nodes is None else self.on_nodes(nodes)

    def bounds(self, numel: int, world_size: int, groups: Sequence[int] = ()) -> list[int]:
        """Where the chunks of a region of `numel` elements begin, and the last one ends: see `chunk_bounds`.

        `groups` are the bounds of the groups, where the buffer says them. Raises ValueError for another number.
        """
        chunk_count, group_count = self.chunk_count(world_size), self.group_count(world_size)
        if group_count == 1 or not groups:
            return chunk_bounds(numel, chunk_count)
        if len(groups) != group_count + 1:
            raise ValueError(f"{self.name} has {group_count} groups here, and the buffer {len(groups) - 1}")
        cuts = [0]
        for start, stop in pairwise(groups):
            cuts += [start + cut for cut in chunk_bounds(stop - start, chunk_count // group_count)[1:]]
        return cuts

    def result_chunks(self, world_size: int) -> range:
        """The chunks in which every rank's result lies."""
        chunk_count = self.chunk_count(world_size)
        region = self.result_region if world_size > 1 else 0
        return range(region * chunk_count, (region + 1) * chunk_count)

    def common_chunks(self, world_size: int) -> range:
        """The chunks that are one memory for all ranks."""
        return self.result_chunks(world_size) if self.common_result and world_size > 1 else NOTHING

    def total_chunks(self, rank: int, world_size: int) -> int:
        """All chunks of this rank's memory."""
        return self.region_count(rank, world_size) * self.chunk_count(world_size)

    def promised(self, rank: int, world_size: int, chunk: int) -> frozenset[tuple[int, int]] | None:
        """What this chunk of this rank's memory holds at the end, as pairs of a rank and the number of its chunk."""
        result = self.result_chunks(world_size)
        if chunk not in result:
            return None
        contributors = self.contributors(rank, world_size, chunk - result.start)
        if contributors is None:
            return None
        taken = self.source_chunk(rank, world_size, chunk - result.start)
        return frozenset((source, taken) for source in contributors)


def everyone(rank: int, world_size: int, chunk: int) -> frozenset[int]:
    """The contributors of an all-reduce."""
    return frozenset(range(world_size))


def per_rank(count: Callable[[int], int]) -> Callable[[int, int], int]:
    """A formula in which the rank does not matter."""
    return lambda rank, world_size: count(world_size)
