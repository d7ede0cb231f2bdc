"""A schedule as a table of numbers, for a performer that cannot run Python: a kernel on the GPU.

Each row is one of four instructions, performed from top to bottom:

    SIGNAL peer number                 tell `peer`: my `number`-th signal to you in this operation
    WAIT   peer number                 until `peer` has sent its `number`-th signal to me
    COPY   source start stop           my elements [start, stop) become the source's
    REDUCE -      start stop sources   add the sources' elements to mine, in this order

A rank's signals to one peer are numbered 1, 2, ... whatever they say: messages first, and at the end, where the
schedule's own messages do not prove it (`Report.unfinished_reads`), that it has read the last of the peer's memory.
`kernel.py` performs the table on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from torch_parallel.collectives.proof import examine
from torch_parallel.collectives.schedule import Collective, Receive, Round, Send

SIGNAL, WAIT, COPY, REDUCE = range(4)
HEAD = 4
"""Columns before the list of sources: kind, peer, number or start, stop."""


@dataclass(frozen=True)
class Instruction:
    """One row before the buffer's size is known: `chunk` is an index; `round` is None for what comes after the last."""

    kind: int
    peer: int  # of a SIGNAL, a WAIT or a COPY
    round: int | None
    number: int = 0
    chunk: int = 0
    sources: tuple[int, ...] = ()  # of a REDUCE


@dataclass(frozen=True)
class Program:
    """All instructions of one rank."""

    instructions: tuple[Instruction, ...]
    source_count: int  # of every REDUCE
    signals: int
    """At least as many as any rank sends to any other in one operation, and the same on all ranks: the next
    operation's numbers go on from there."""

    @property
    def width(self) -> int:
        return HEAD + self.source_count

    def rows(self, bounds: list[int]) -> list[list[int]]:
        """The table for a buffer whose chunk k is [bounds[k], bounds[k + 1])."""
        return [self._row(each, bounds) for each in self.instructions]

    def _row(self, each: Instruction, bounds: list[int]) -> list[int]:
        if each.kind in (SIGNAL, WAIT):
            row = [each.kind, each.peer, each.number, 0]
        else:
            row = [each.kind, each.peer, bounds[each.chunk], bounds[each.chunk + 1]]
        return row + (list(each.sources) or [0] * self.source_count)


@cache
def compile_schedule(collective: Collective, rank: int, world_size: int) -> Program:
    """The instructions by which `rank` performs its part; worked out once, for all sizes.

    Neighbouring receives of a round that add the same chunks become one pass over several sources, where all passes of
    the schedule have equally many.
    """
    for several in (True, False):
        instructions = _instructions(collective, rank, world_size, several)
        counts = {len(each.sources) for each in instructions if each.kind == REDUCE}
        if len(counts) <= 1:
            break
    return Program(tuple(instructions), max(counts, default=0), _most_signals(collective, world_size))


def _instructions(collective: Collective, rank: int, world_size: int, several: bool) -> list[Instruction]:
    sent, received = [0] * world_size, [0] * world_size
    instructions: list[Instruction] = []
    for index, actions in enumerate(collective.rounds(rank, world_size)):
        instructions += _round(index, actions, several, sent, received)
    unfinished = sorted(examine(collective, world_size).unfinished_reads)
    for reader, source in unfinished:
        if reader == rank:
            sent[source] += 1
            instructions.append(Instruction(SIGNAL, source, None, number=sent[source]))
    for reader, source in unfinished:
        if source == rank:
            received[reader] += 1
            instructions.append(Instruction(WAIT, reader, None, number=received[reader]))
    return instructions


def _round(index: int, actions: Round, several: bool, sent: list[int], received: list[int]) -> Iterator[Instruction]:
    """The signals of a round, then its receives in the order listed."""
    for action in actions:
        if isinstance(action, Send):
            sent[action.to] += 1
            yield Instruction(SIGNAL, action.to, index, number=sent[action.to])
    for together in _passes([action for action in actions if isinstance(action, Receive)], several):
        for receive in together:
            received[receive.source] += 1
            yield Instruction(WAIT, receive.source, index, number=received[receive.source])
        first, sources = together[0], tuple(receive.source for receive in together)
        for chunk in first.chunks:
            if first.reduce:
                yield Instruction(REDUCE, first.source, index, chunk=chunk, sources=sources)
            else:
                yield Instruction(COPY, first.source, index, chunk=chunk)


def _passes(receives: list[Receive], several: bool) -> list[list[Receive]]:
    passes: list[list[Receive]] = []
    for receive in receives:
        last = passes[-1][-1] if passes and several else None
        if last is not None and last.reduce and receive.reduce and last.chunks == receive.chunks:
            passes[-1].append(receive)
        else:
            passes.append([receive])
    return passes


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
