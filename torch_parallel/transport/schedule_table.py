"""A schedule as a table of numbers, for a performer that cannot run Python: a kernel on the GPU.

Each row is one of four instructions, performed from top to bottom:

    SIGNAL peer number                 tell `peer`: my `number`-th signal to you in this operation
    WAIT   peer number                 until `peer` has sent its `number`-th signal to me
    COPY   into start stop source      elements [start, stop) of `into` become the source's
    ADD    into start stop sources     they become the sum of the sources', in this order

`into` and the sources are memory: the buffer of a rank, or a further region of this rank's own. What a schedule adds to
the elements that are there has them as its first source. Chunks of a common result are only waited for.

A rank's signals to one peer are numbered 1, 2, ... whatever they say: messages first, and at the end, where the
schedule's own messages do not prove it (`Report.unfinished_reads`), that it has read the last of the peer's memory.
`kernel.py` performs the table on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from torch_parallel.collectives.schedule import NOTHING, Collective, Local, Receive, Round, Send, shifted
from torch_parallel.transport.buffer import unfinished_reads

SIGNAL, WAIT, COPY, ADD = range(4)
HEAD = 4
"""Columns before the list of sources: kind, peer or into, number or start, stop."""


@dataclass(frozen=True)
class Instruction:
    """One row before the buffer's size is known. Memory is numbered: the ranks' buffers, then my further regions."""

    kind: int
    round: int | None  # None for what comes after the last
    peer: int = 0  # of a SIGNAL or a WAIT
    number: int = 0
    into: int = 0  # of a COPY or an ADD
    chunk: int = 0  # of the region
    sources: tuple[int, ...] = ()


@dataclass(frozen=True)
class Program:
    """All instructions of one rank."""

    instructions: tuple[Instruction, ...]
    source_count: int  # of every ADD
    signals: int
    """At least as many as any rank sends to any other in one operation, and the same on all ranks: the next
    operation's numbers go on from there."""

    @property
    def width(self) -> int:
        return HEAD + self.source_count

    def rows(self, bounds: list[int], places: Sequence[int]) -> list[list[int]]:
        """The table for regions whose chunk k is [bounds[k], bounds[k + 1]), where memory number m is `places[m]`."""
        return [self._row(each, bounds, places) for each in self.instructions]

    def _row(self, each: Instruction, bounds: list[int], places: Sequence[int]) -> list[int]:
        if each.kind in (SIGNAL, WAIT):
            row = [each.kind, each.peer, each.number, 0]
        else:
            row = [each.kind, places[each.into], bounds[each.chunk], bounds[each.chunk + 1]]
        row += [places[source] for source in each.sources]
        return row + [0] * (self.width - len(row))


@cache
def compile_schedule(collective: Collective, rank: int, world_size: int) -> Program:
    """The instructions by which `rank` performs its part; worked out once, for all sizes.

    Neighbouring steps of a round that go to the same chunks become one pass over several sources, where all passes of
    the schedule have equally many.
    """
    for several in (True, False):
        instructions = tuple(_Compiler(collective, rank, world_size, several).instructions())
        counts = {len(each.sources) for each in instructions if each.kind == ADD}
        if len(counts) <= 1:
            break
    return Program(instructions, max(counts, default=1), _most_signals(collective, world_size))


@dataclass(frozen=True)
class _Pass:
    """Some chunks of `into` become the sum of the sources', once the peers have signalled."""

    peers: tuple[int, ...]
    into: int
    chunks: range
    sources: tuple[int, ...]


class _Compiler:
    def __init__(self, collective: Collective, rank: int, world_size: int, several: bool) -> None:
        self.collective, self.rank, self.world_size, self.several = collective, rank, world_size, several
        self.chunk_count = collective.chunk_count(world_size)
        self.sent, self.received = [0] * world_size, [0] * world_size

    def instructions(self) -> Iterator[Instruction]:
        for index, actions in enumerate(self.collective.rounds(self.rank, self.world_size)):
            yield from self._round(index, actions)
        unfinished = unfinished_reads(self.collective, self.world_size)
        yield from [self._signal(source, None) for reader, source in unfinished if reader == self.rank]
        yield from [self._wait(reader, None) for reader, source in unfinished if source == self.rank]

    def _round(self, index: int, actions: Round) -> Iterator[Instruction]:
        """The signals of a round, then its receives and moves in the order listed."""
        yield from [self._signal(action.to, index) for action in actions if isinstance(action, Send)]
        for this in self._passes(actions):
            yield from [self._wait(peer, index) for peer in this.peers]
            kind = COPY if len(this.sources) == 1 else ADD
            for chunk in this.chunks:
                yield Instruction(kind, index, into=this.into, chunk=chunk, sources=this.sources)

    def _passes(self, actions: Round) -> list[_Pass]:
        passes: list[_Pass] = []
        for this in [self._step(action) for action in actions if not isinstance(action, Send)]:
            if self.several and passes and _goes_on(passes[-1], this):
                last = passes.pop()
                this = replace(this, peers=last.peers + this.peers, sources=last.sources + this.sources[1:])
            passes.append(this)
        return passes

    def _step(self, action: Receive | Local) -> _Pass:
        peers: tuple[int, ...]
        if isinstance(action, Local):
            peers, source, into, addend = (), self._memory(action.chunks), action.into, action.into
        elif action.chunks and action.chunks.start in self.collective.common_chunks(self.world_size):
            return _Pass((action.source,), self.rank, NOTHING, ())
        else:
            peers, source, into, addend = (action.source,), action.source, action.target, action.addend
        sources = (self._memory(addend), source) if action.reduce else (source,)
        return _Pass(peers, self._memory(into), shifted(into, -self._region(into) * self.chunk_count), sources)

    def _memory(self, chunks: range) -> int:
        """The number of this rank's memory in which its chunks lie."""
        region = self._region(chunks)
        return self.rank if region == 0 else self.world_size + region - 1

    def _region(self, chunks: range) -> int:
        return chunks.start // self.chunk_count

    def _signal(self, peer: int, index: int | None) -> Instruction:
        self.sent[peer] += 1
        return Instruction(SIGNAL, index, peer, self.sent[peer])

    def _wait(self, peer: int, index: int | None) -> Instruction:
        self.received[peer] += 1
        return Instruction(WAIT, index, peer, self.received[peer])


def _goes_on(last: _Pass, this: _Pass) -> bool:
    """Whether the one adds something else to what the other has just put there."""
    same = (last.into, last.chunks) == (this.into, this.chunks)
    return same and len(this.sources) == 2 and this.sources[0] == this.into != this.sources[1]


@cache
def _most_signals(collective: Collective, world_size: int) -> int:
    most = 0
    for rank in range(world_size):
        sent = [0] * world_size
        for actions in collective.rounds(rank, world_size):
            for action in actions:
                if isinstance(action, Send):
                    sent[action.to] += 1
        most = max(most, *sent)
    return most + 1  # and one to acknowledge the last read
