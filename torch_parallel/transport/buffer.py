"""The memory of a collective, and a schedule bound to it: every view is cut and every operation chosen once.

`perform` then has nothing left to decide: it posts, waits, and calls. What a receive does besides adding or copying
(adding into another region, moving own chunks afterwards) is inside of the one call that is bound here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from torch_parallel.collectives.proof import ProofError, examine
from torch_parallel.collectives.schedule import Collective, Local, Receive, Round

# One receive, ready to perform: the source, what is done with the peer's chunk, that chunk, and whether it is added.
Pull = tuple[int, Callable[[Tensor], Any], Tensor, bool]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message, seen by its receiver. Times are of `time.perf_counter`."""

    source: int
    to: int
    bytes: int
    purpose: str
    round: int
    wait_start_s: float
    start_s: float
    end_s: float
    reduce: bool  # added to the receiver's chunk, not copied over it


@dataclass
class Plan:
    """A schedule bound to the memory of one buffer."""

    rounds: list[tuple[list[Callable[[], None]], list[Pull]]]
    acknowledge: list[int]  # whom to tell that I have read the last of theirs
    readers: list[int]  # who will tell me so
    received: list[tuple[int, int]]  # bytes read from each peer, once per performance
    heard: list[int]  # whose signals have come when it is performed
    regions: list[Tensor]  # of this rank, each [numel]; the first is its buffer
    result: Tensor  # one of them
    purpose: str | None = None  # for which it was performed last
    signature: int = 0  # of the call that does so: see `calls.py`
    unsettled: list[tuple[int, str]] = field(default_factory=list)  # the readers, with what they are waited for then
    table: Any = None  # the same for the GPU's kernel, where that performs it


@dataclass
class SharedBuffer:
    """One buffer of every rank: `parts[r]` is rank r's, [numel], readable by all; `local` is this rank's own.

    Further regions come when a collective that needs them is first performed on it: `scratch`, which nobody else
    reaches, and `common`, which is one memory for all ranks. A narrowed buffer uses those of the `whole`.
    """

    parts: list[Tensor]
    rank: int
    whole: SharedBuffer | None = None
    scratch: list[Tensor] = field(default_factory=list)
    common: Tensor | None = None
    plans: dict[Collective, Plan] = field(default_factory=dict)
    number: int = 0
    """Counted over the buffers of a transport, the same on all ranks."""
    start: int = 0
    """Of a part of the whole: its first element there."""
    groups: tuple[int, ...] = ()
    """Where groups of its elements begin, and the last one ends, for collectives that keep them together."""

    @property
    def local(self) -> Tensor:
        return self.parts[self.rank]

    def narrow(self, numel: int) -> SharedBuffer:
        """The first `numel` elements of every rank's buffer."""
        return self.part(0, numel)

    def part(self, start: int, stop: int) -> SharedBuffer:
        """Elements [start, stop) of every rank's buffer."""
        parts = [part[start:stop] for part in self.parts]
        return SharedBuffer(parts, self.rank, self.whole or self, number=self.number, start=self.start + start)

    def scratch_regions(self, count: int) -> list[Tensor]:
        """`count` regions of this rank's own memory, each [numel]. They hold anything."""
        whole = self.whole or self
        while len(whole.scratch) < count:
            whole.scratch.append(torch.empty_like(whole.local))
        return [self._of_whole(region) for region in whole.scratch[:count]]

    def common_region(self, share: Callable[[int, torch.dtype], Tensor]) -> Tensor:
        """The memory [numel] of a common result; `share` makes it the first time, on all ranks."""
        whole = self.whole or self
        if whole.common is None:
            whole.common = share(whole.local.numel(), whole.local.dtype)
        return self._of_whole(whole.common)

    def _of_whole(self, region: Tensor) -> Tensor:
        return region[self.start : self.start + self.local.numel()]


class Memory:
    """Where the chunks of a collective lie, for one rank."""

    def __init__(
        self,
        collective: Collective,
        buffer: SharedBuffer,
        world_size: int,
        share: Callable[[int, torch.dtype], Tensor],
        reached: Callable[[int], bool] = lambda peer: True,
    ) -> None:
        self._reached = reached
        numel, self.chunk_count = buffer.local.numel(), collective.chunk_count(world_size)
        if collective.equal_chunks and numel % self.chunk_count:
            raise ValueError(
                f"{collective.name} of {numel} elements: {world_size} ranks need a multiple of {self.chunk_count}"
            )
        self.parts = buffer.parts
        self.bounds = collective.bounds(numel, world_size, buffer.groups)
        self.common = collective.common_chunks(world_size)
        if self.common:
            further = [buffer.common_region(share)]
        else:
            further = buffer.scratch_regions(collective.region_count(buffer.rank, world_size) - 1)
        self.regions = [buffer.local, *further]
        self.result = self.regions[collective.result_chunks(world_size).start // self.chunk_count]

    def mine(self, chunks: range) -> Tensor:
        return self._cut(self.regions[chunks.start // self.chunk_count], chunks)

    def pulls(self, actions: Round) -> list[Pull]:
        """The receives of a round, each with the moves that follow it. To copy and then add takes one pass."""
        pulls: list[Pull] = []
        copied: range | None = None  # where the receive before put its chunks, if it did nothing else
        for receive, moves in _receives_of(actions):
            theirs, operation = self._theirs(receive), self._operation(receive)
            if receive.reduce and copied == receive.target == receive.addend:
                source, _, first, _ = pulls[-1]
                pulls[-1] = (source, nothing, first, False)
                operation = partial(torch.add, first, out=self.mine(receive.target))
            if moves:
                own = [(self._operation(move), self.mine(move.chunks)) for move in moves]
                operation = partial(_in_turn, [(operation, None), *own])
            plain = not (receive.reduce or moves or self._is_common(receive.chunks))
            copied = receive.target if plain and self._reached(receive.source) else None
            pulls.append((receive.source, operation, theirs, receive.reduce))
        return pulls

    def _theirs(self, receive: Receive) -> Tensor:
        part = self.parts[receive.source]
        return part[:0] if self._is_common(receive.chunks) else self._cut(part, receive.chunks)

    def _operation(self, step: Receive | Local) -> Callable[[Tensor], Any]:
        if self._is_common(step.chunks):
            return nothing  # it lies where it is wanted: it was only waited for
        target = self.mine(step.target if isinstance(step, Receive) else step.into)
        if isinstance(step, Receive) and step.reduce and step.addend != step.target:
            return partial(torch.add, self.mine(step.addend), out=target)
        return target.add_ if step.reduce else target.copy_

    def _is_common(self, chunks: range) -> bool:
        return bool(chunks) and chunks.start in self.common

    def _cut(self, region: Tensor, chunks: range) -> Tensor:
        first = chunks.start // self.chunk_count * self.chunk_count
        return region[self.bounds[chunks.start - first] : self.bounds[chunks.stop - first]]


def _receives_of(actions: Round) -> list[tuple[Receive, list[Local]]]:
    """Each receive of a round, with the moves that follow it before the next one."""
    receives: list[tuple[Receive, list[Local]]] = []
    for action in actions:
        if isinstance(action, Receive):
            receives.append((action, []))
        elif isinstance(action, Local):
            receives[-1][1].append(action)
    return receives


def nothing(theirs: Tensor) -> None:
    """What a receive does that only waits."""


def _in_turn(steps: list[tuple[Callable[[Tensor], Any], Tensor | None]], theirs: Tensor) -> None:
    for operation, own in steps:
        operation(theirs if own is None else own)


@cache
def unfinished_reads(collective: Collective, world_size: int) -> list[tuple[int, int]]:
    """(reader, source) pairs: who must say that it has read, since no message of the schedule proves it.

    Worked out once a schedule, however many buffers it is performed on. Raises ProofError for a schedule that is wrong,
    unless it is said to be wrong on purpose.
    """
    report = examine(collective, world_size)
    if report.faults and not collective.wrong_on_purpose:
        raise ProofError(f"{collective.name} is wrong for {world_size} ranks: {report.faults[0]}")
    return sorted(report.unfinished_reads)
