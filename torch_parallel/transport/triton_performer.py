"""Performs schedules by the kernel of `kernel.py`: one launch an operation, whatever its rounds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from torch_parallel.collectives import RING_ALL_REDUCE
from torch_parallel.collectives.schedule import Collective
from torch_parallel.transport import kernel
from torch_parallel.transport.buffer import Plan, SharedBuffer
from torch_parallel.transport.schedule_table import Program, compile_schedule
from torch_parallel.transport.stream_signals import as_int32

FLAGS_PER_PEER = kernel.MOST_PROGRAMS


@dataclass(frozen=True)
class Settings:
    """The grid: programs (at most MOST_PROGRAMS), the bytes of a block, the warps of a program."""

    programs: int
    block_bytes: int
    warps: int


BEST = Settings(programs=64, block_bytes=32 << 10, warps=16)
"""Of 15 grids on two H200 the best one for a ring takes, back to back, at most 9 % less from 64 KiB on and 3 % from
4 MiB on, often with twice the programs (results/bench_all_reduce_gpu). These are half of the multiprocessors."""

BESIDE = Settings(programs=32, block_bytes=32 << 10, warps=16)
"""Beside backward, which needs the multiprocessors too. In trials on two H200 a step of a vision transformer was no
faster with 16 or with 64 programs."""


@dataclass(frozen=True)
class Table:
    """A schedule bound to the memory of one buffer, in the GPU's memory."""

    program: Program
    rows: Tensor  # [instructions, width] of int64
    longest_chunk: int  # elements
    compiled: dict[Settings, Any] = field(default_factory=dict)


class TritonPerformer:
    """One rank's launches. All ranks launch the same operations in the same order, with the same settings.

    It performs schedules of any regions, but not those that move chunks to other places (`equal_chunks`): memory that
    begins anywhere is slow to read. Nor does it perform on dtypes that are not floating, and on empty buffers.
    """

    settings = BEST
    """May be changed between calls, on all ranks."""
    beside = BESIDE
    """Those that leave most multiprocessors to what runs beside the exchange."""

    def __init__(self, rank: int, flags: list[Tensor], note_address: int, deadline_s: float) -> None:
        """`flags[r]`, [world_size * FLAGS_PER_PEER] of int32, zero at first, lies in rank r's memory.

        `note_address` is that of an int64 in host memory, where a kernel notes what it gave up to wait for.
        """
        self.rank = rank
        self.world_size = len(flags)
        self.device = flags[rank].device
        self._gave_up = torch.zeros(1 + kernel.MOST_PROGRAMS, dtype=torch.int64, device=self.device)
        self._note_address = note_address
        self.flags = flags
        self._flags = _addresses(flags)
        self._limit_ms = int(deadline_s * 1e3)
        self._base = 0
        self._launched: deque[tuple[int, str, Program]] = deque(maxlen=4096)  # more than a stream can hold

    def can_perform(self, collective: Collective, buffer: SharedBuffer) -> bool:
        """The same on all ranks, so it looks at everybody's part: of memory of one rank alone the others are empty."""
        movable = not collective.equal_chunks
        return movable and buffer.local.dtype in kernel.ELEMENTS and all(part.numel() for part in buffer.parts)

    def perform(self, collective: Collective, buffer: SharedBuffer, plan: Plan, doing: str) -> None:
        """Enqueues the operation, the acknowledgement of its reads included. `plan` is what it is bound to."""
        if plan.table is None:
            plan.table = self._bind(collective, buffer, plan)
        table: Table = plan.table
        if not table.program.instructions:  # a single rank
            return
        self._launched.append((self._base, doing, table.program))
        self._launch(table, buffer.local.dtype, self.settings)
        next_base = as_int32(self._base + table.program.signals)
        if next_base >> 30 != self._base >> 30:
            self._bring_forward(next_base)
        self._base = next_base

    def _bring_forward(self, number: int) -> None:
        """Writes all of this rank's flags on its peers, once in 2^30 numbers, when all before `number` are written.

        Programs that are not launched write none. After 2^31 numbers theirs would seem ahead, and nobody would wait.
        """
        for flags in self.flags:
            flags[self.rank * FLAGS_PER_PEER : (self.rank + 1) * FLAGS_PER_PEER].fill_(number)

    def _launch(self, table: Table, dtype: torch.dtype, settings: Settings) -> None:
        block = settings.block_bytes // dtype.itemsize
        programs = max(1, min(settings.programs, -(-table.longest_chunk // block)))
        arguments = (
            table.rows,
            len(table.program.instructions),
            self._flags,
            self._gave_up,
            self._note_address,
            self.rank,
            self._base,
            self._limit_ms,
            table.program.width,
            table.program.source_count,
            kernel.ELEMENTS[dtype],
            tl.float64 if dtype == torch.float64 else tl.float32,
            block,
            FLAGS_PER_PEER,
        )
        compiled = table.compiled.get(settings)
        if compiled is None:
            launched = kernel.perform_table[(programs,)](*arguments, num_warps=settings.warps)
            if hasattr(launched, "__getitem__"):  # the interpreter's are not kept
                table.compiled[settings] = launched
        else:  # what Triton would find out again at every launch is known: 9 microseconds of the host against 22
            compiled[(programs, 1, 1)](*arguments)

    def explain(self, note: int) -> str:
        """What a kernel noted: what it waited for, and who did not come."""
        row, peer = divmod(note & 0xFFFFFFFF, kernel.PEERS_IN_A_NOTE)
        doing = next((self._describe(row, *each) for each in list(self._launched) if each[0] == note >> 32), "long ago")
        return f"{doing}: no signal from rank {peer - 1} for {self._limit_ms / 1e3:.1f} s"

    def _describe(self, row: int, base: int, doing: str, program: Program) -> str:
        number = program.instructions[row].round
        return f"{doing}, " + ("end of the peer's reading" if number is None else f"round {number}")

    def _bind(self, collective: Collective, buffer: SharedBuffer, plan: Plan) -> Table:
        program = compile_schedule(collective, self.rank, self.world_size)
        bounds = collective.bounds(buffer.local.numel(), self.world_size, buffer.groups)
        places = [memory.data_ptr() for memory in [*buffer.parts, *plan.regions[1:]]]
        rows = torch.tensor(program.rows(bounds, places), dtype=torch.int64, device=self.device)
        return Table(program, rows, max(stop - start for start, stop in pairwise(bounds)))


def try_out(rank: int, world_size: int, device: torch.device, note_address: int, deadline_s: float) -> None:
    """Compiles the kernel as a ring of float32 needs it, and launches it with nothing to do.

    Raises whatever Triton does where it cannot; takes a second or more where Triton's cache does not have it.
    """
    flags = [torch.zeros(1, dtype=torch.int32, device=device)] * world_size
    performer = TritonPerformer(rank, flags, note_address, deadline_s)
    program = replace(compile_schedule(RING_ALL_REDUCE, rank, world_size), instructions=())
    table = Table(program, torch.zeros(program.width, dtype=torch.int64, device=device), longest_chunk=1)
    for _ in range(2):  # the first launch is Triton's own, later ones go a shorter way
        performer._launch(table, torch.float32, performer.settings)


def _addresses(parts: list[Tensor]) -> Tensor:
    return torch.tensor([part.data_ptr() for part in parts], dtype=torch.int64, device=parts[0].device)
