"""One Triton kernel performs any schedule, from its table (`schedule_table.py`), without the host in between.

The programs of the grid do not talk to each other. Every chunk is cut into blocks, program p of every GPU takes the
same share of them, and performs the whole table on that share; so it waits only for the programs of the same number on
the other GPUs. They signal with numbers in the waiter's memory, one word for each pair of GPUs and program, that only
grow. A signal is released and awaited with system scope, which makes the peer's elements visible before it.

Sums are made in float32 (float64 for float64), of all sources of an ADD in one pass over memory. Memory is named by its
address as this GPU reaches it, be it its own or a peer's.

Every wait has a limit. A program that reaches it notes for what it waited, and ends; kernels launched after that do
nothing. So no GPU spins for ever for a peer that is gone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from torch_parallel.transport import schedule_table

MOST_PROGRAMS = 256
"""Words of flags for each pair of GPUs."""
PEERS_IN_A_NOTE = 1 << 12
"""A note is 0, or operation << 32 | row * PEERS_IN_A_NOTE + peer + 1."""

ELEMENTS = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float64: tl.float64,
}
"""The dtypes that the kernel adds."""

_SIGNAL = tl.constexpr(schedule_table.SIGNAL)
_WAIT = tl.constexpr(schedule_table.WAIT)
_COPY = tl.constexpr(schedule_table.COPY)
_HEAD = tl.constexpr(schedule_table.HEAD)
_PEERS_IN_A_NOTE = tl.constexpr(PEERS_IN_A_NOTE)
_LOOKS = tl.constexpr(64)
"""At a flag, before the time is looked at once: that takes as long."""


@triton.jit
def _nanoseconds():
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _came(flag, number, late, limit_ns):
    """Waits until the flag has reached `number`; 1 where it has, 2 where it has not within the limit.

    All threads of the program must come to the same answer, and each reads the time for itself. So one of them writes
    to `late`, a word of this program's, 0 at first, that the limit has passed, and all go by what is there at the next
    look; if the flag has come by then, the next wait begins with 0 again.
    """
    state = 0
    looks = 0
    start = _nanoseconds()
    while state == 0:
        if tl.atomic_add(flag, 0, sem="acquire", scope="sys") - number >= 0:  # numbers may wrap around
            state = 1
        else:
            looks += 1
            if looks % _LOOKS == 0:
                state = tl.where(tl.atomic_add(late, (_nanoseconds() - start > limit_ns).to(tl.int64)) > 0, 2, 0)
    if (state == 1) & (looks >= _LOOKS):
        tl.store(late, 0)
    tl.debug_barrier()  # all threads of the program see what the one that looked has seen
    return state


@triton.jit
def _elements(address, ELEMENT: tl.constexpr):
    """Where the elements begin of the memory whose address lies there."""
    return tl.multiple_of(tl.load(address).to(tl.pointer_type(ELEMENT)), 16)


@triton.jit
def _block(
    row, block, start, stop, SOURCES: tl.constexpr, ELEMENT: tl.constexpr, ACCUMULATOR: tl.constexpr,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Copies or adds one block of SOURCES; WHOLE blocks lie inside [start, stop) and need no mask."""
    offset = block * BLOCK
    lanes = tl.arange(0, BLOCK)
    inside = (offset + lanes >= start) & (offset + lanes < stop)
    from_ = _elements(row + _HEAD, ELEMENT) + offset + lanes
    value = tl.load(from_) if WHOLE else tl.load(from_, mask=inside)
    if SOURCES > 1:
        total = value.to(ACCUMULATOR)
        for index in tl.static_range(1, SOURCES):
            from_ = _elements(row + _HEAD + index, ELEMENT) + offset + lanes
            total += (tl.load(from_) if WHOLE else tl.load(from_, mask=inside)).to(ACCUMULATOR)
        value = total.to(ELEMENT)
    to = _elements(row + 1, ELEMENT) + offset + lanes
    if WHOLE:
        tl.store(to, value)
    else:
        tl.store(to, value, mask=inside)


@triton.jit
def _share(
    row, program, SOURCES: tl.constexpr, ELEMENT: tl.constexpr, ACCUMULATOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """This program's share of the chunk [start, stop): some of the blocks that it touches, side by side.

    Blocks begin at multiples of BLOCK from the buffer's start, so they are aligned however the buffer was cut into
    chunks; only a chunk's first and last block may be partly another's.
    """
    start = tl.load(row + 2)
    stop = tl.load(row + 3)
    first = start // BLOCK
    count = (stop + BLOCK - 1) // BLOCK - first
    each = (count + tl.num_programs(0) - 1) // tl.num_programs(0)
    begin = first + program * each
    end = tl.minimum(begin + each, first + count)
    for index in range(0, (end - begin).to(tl.int32)):
        block = begin + index
        if (block * BLOCK >= start) & ((block + 1) * BLOCK <= stop):
            _block(row, block, start, stop, SOURCES, ELEMENT, ACCUMULATOR, BLOCK, True)
        else:
            _block(row, block, start, stop, SOURCES, ELEMENT, ACCUMULATOR, BLOCK, False)


@triton.jit(do_not_specialize=["row_count", "note_address", "rank", "base", "limit_ms"])
def perform_table(
    table, row_count, flags, gave_up, note_address, rank, base, limit_ms, WIDTH: tl.constexpr,
    SOURCES: tl.constexpr, ELEMENT: tl.constexpr, ACCUMULATOR: tl.constexpr, BLOCK: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """Performs `table` [row_count, WIDTH] of int64.

    flags           [world_size] of int64: addresses of every rank's flags, as this GPU reaches them
    gave_up         [1 + MOST_PROGRAMS] of int64, zeros while all is well: the first is the note, the others say which
                    program has seen a limit pass; `note_address` is that of another note, in the host's memory
    base            what the numbers of this operation are counted from, the same on all ranks
    limit_ms        of every wait; in nanoseconds its type, and so the compiled kernel, would depend on its size
    """
    limit_ns = limit_ms.to(tl.int64) * 1_000_000
    program = tl.program_id(0)
    my_flags = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    index = 0
    if tl.load(gave_up) != 0:
        index = row_count
    while index < row_count:
        row = table + index * WIDTH
        kind = tl.load(row)
        if kind == _SIGNAL:
            tl.debug_barrier()  # all threads of the program have written and read
            theirs = tl.load(flags + tl.load(row + 1)).to(tl.pointer_type(tl.int32)) + rank * FLAGS + program
            tl.atomic_xchg(theirs, base + tl.load(row + 2).to(tl.int32), sem="release", scope="sys")
        elif kind == _WAIT:
            peer = tl.load(row + 1)
            number = base + tl.load(row + 2).to(tl.int32)
            if _came(my_flags + peer * FLAGS + program, number, gave_up + 1 + program, limit_ns) == 2:
                note = (base.to(tl.int64) << 32) | (index * _PEERS_IN_A_NOTE + peer + 1)
                tl.store(gave_up, note)
                tl.store(note_address.to(tl.pointer_type(tl.int64)), note)
                index = row_count
        elif kind == _COPY:
            _share(row, program, 1, ELEMENT, ACCUMULATOR, BLOCK)
        else:
            _share(row, program, SOURCES, ELEMENT, ACCUMULATOR, BLOCK)
        index += 1
