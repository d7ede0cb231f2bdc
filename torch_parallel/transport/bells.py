"""Sleeping until another process rings: a word of shared memory for each rank, on which it sleeps in the kernel.

    rank 1, which waits                      rank 0, which comes
    asleep[1] = 1                            counter = counter + 1
    fence, look at the counter again         fence (for which rank 1 has cared), look at asleep[1]
    sleep while bell[1] is what it was       if it sleeps: bell[1] += 1, wake it

Whoever comes pays one load, and a call of the kernel only where somebody sleeps. Processors may move a load before an
earlier store, and then both sides would look too early and the ring would be lost. So the one that has time, for it is
about to sleep, makes all processes pass a fence (membarrier, Linux 4.16). Where that is not to be had a sleep is a
short nap, as it is where there is no futex.

futex(2) and membarrier(2) are the sources.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import sys
import time

_FUTEX, _MEMBARRIER = 202, 324  # numbers of system calls of Linux on x86-64
_WAIT, _WAKE, _EVERYBODY = 0, 1, 2**31 - 1
_FENCE_ALL, _TAKE_PART = 2, 4  # MEMBARRIER_CMD_GLOBAL_EXPEDITED, and to be among those that are fenced

LINE = 16  # int64s from one rank's words to the next: two cache lines
NAP_S = 0.001


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


class Bells:
    """Those of all ranks, on `memory` of `bytes_needed(world_size)` bytes, zeros at first; `rank` sleeps by it."""

    def __init__(self, memory: memoryview, rank: int) -> None:
        self.words = memory.cast("q")
        self.rank = rank
        self._asleep, self._bell = LINE * rank, LINE * rank + 1
        self._address = 0
        self._call = _kernel()
        if self._call is not None:
            held = (ctypes.c_char * len(memory)).from_buffer(memory)
            self._address = ctypes.addressof(held)  # the memory stays where it is as long as `words` are

    @staticmethod
    def bytes_needed(world_size: int) -> int:
        return world_size * LINE * 8

    def lie_down(self) -> int:
        """Says that this rank is about to sleep. Returns what `sleep` wants, after the last look whether to."""
        self.words[self._asleep] = 1
        if self._call is not None:
            self._call(_MEMBARRIER, _FENCE_ALL, 0, 0)
        return self.words[self._bell]

    def sleep(self, heard: int, seconds: float) -> None:
        """Until somebody rings, or has rung since `lie_down` returned `heard`; at most so long."""
        if self._call is None:
            time.sleep(min(seconds, NAP_S))
            return
        at_most = _Time(int(seconds), int(seconds % 1 * 1e9))
        word = ctypes.c_void_p(self._address + 8 * self._bell)
        self._call(_FUTEX, word, _WAIT, heard & 0xFFFFFFFF, ctypes.byref(at_most), None, 0)

    def get_up(self) -> None:
        self.words[self._asleep] = 0

    @staticmethod
    def place_of(peer: int) -> int:
        """Where in `words` it stands whether a rank sleeps: what is not 0 says so."""
        return LINE * peer

    def ring_if_asleep(self, peer: int) -> None:
        """After what it may wait for has been written."""
        if self.words[self.place_of(peer)]:
            self.ring(peer)

    def ring(self, peer: int) -> None:
        """Wakes a rank that sleeps."""
        place = LINE * peer + 1
        self.words[place] += 1
        if self._call is not None:
            self._call(_FUTEX, ctypes.c_void_p(self._address + 8 * place), _WAKE, _EVERYBODY, None, None, 0)


def _kernel() -> ctypes._NamedFuncPointer | None:
    """How to call it, once this process takes part in fences; None where this is not Linux on x86-64, or it cannot."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or struct.calcsize("P") != 8:
        return None
    call = ctypes.CDLL(None).syscall  # which lets other threads of Python run meanwhile
    call.restype = ctypes.c_long
    return call if call(_MEMBARRIER, _TAKE_PART, 0, 0) == 0 else None
