"""Signals between GPUs: numbers in the receiver's GPU memory, which a stream of the sender writes and one of the
receiver waits for. The host only enqueues; while a stream waits, no event, handshake, thread or multiprocessor is busy.

A stream cannot give up by itself. So a thread looks now and then at the oldest wait, and past the deadline it writes
the awaited number itself, from another stream: the waiter goes on with whatever is there, and the next call of the
transport raises an error that says who did not come. Since what it goes on with is wrong, and its peers would take it
for right, the thread first leaves a mark with all of them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_parallel.transport.base import READ, Signals, TransportError
from torch_parallel.transport.cuda_driver import stream_wait, stream_write

KINDS = 2
WORDS = 32
"""int32s between two flags: 128 bytes, a cache line of the GPU."""


def flag_words(world_size: int) -> int:
    """int32s that each rank needs: the flags, then its two notes."""
    return KINDS * world_size * WORDS + WORDS


@dataclass(eq=False, slots=True)
class Wait:
    """What a stream of this rank was told to wait for: the flag `word` is to reach `number`."""

    word: int
    number: int
    peer: int
    purpose: str


class StreamSignals(Signals):
    """One flag for each kind and ordered pair of ranks. `flags[r]`, int32, lies in rank r's memory, zero at first.

    Signals are posted and awaited on the current stream. `waited_s` stays zero: the host does not see a stream wait.
    """

    def __init__(self, rank: int, flags: list[Tensor]) -> None:
        self.device = flags[rank].device
        self.flags = flags[rank]
        self.waited_s = [0.0] * len(flags)
        self.notes = flags[rank][-4:].view(torch.int64)
        """[0] what a kernel of this rank gave up to wait for; [1] a peer that gave up a wait, rank + 1; else zeros."""
        self.pending: deque[Wait] = deque()
        """Oldest first; the watchdog takes out those that are over."""
        self._rank = rank
        self._bases = [part.data_ptr() for part in flags]
        self._posted = [[0] * len(flags) for _ in range(KINDS)]
        self._awaited = [[0] * len(flags) for _ in range(KINDS)]

    def post(self, kind: int, peer: int) -> None:
        self._posted[kind][peer] += 1
        stream = torch.cuda.current_stream(self.device).cuda_stream
        stream_write(stream, self._bases[peer] + 4 * self._word(kind, self._rank), self._posted[kind][peer])

    def wait(self, kind: int, peer: int, doing: str, round_index: int) -> None:
        self._awaited[kind][peer] += 1
        purpose = doing if kind == READ else f"{doing}, round {round_index}"
        wait = Wait(self._word(kind, peer), self._awaited[kind][peer], peer, purpose)
        self.pending.append(wait)
        stream_wait(torch.cuda.current_stream(self.device).cuda_stream, self._address(wait), wait.number)

    def give_up(self, stream: torch.cuda.Stream) -> None:
        """Tells all peers so, and ends all waits."""
        for rank, base in enumerate(self._bases):
            if rank != self._rank:
                stream_write(stream.cuda_stream, base + 4 * (self.flags.numel() - 2), self._rank + 1)
        for wait in list(self.pending):
            stream_write(stream.cuda_stream, self._address(wait), wait.number)

    def _address(self, wait: Wait) -> int:
        return self._bases[self._rank] + 4 * wait.word

    def _word(self, kind: int, source: int) -> int:
        return (kind * len(self._bases) + source) * WORDS


class Watchdog:
    """Ends the waits of one rank at the deadline. `failure` says what for; None while all is well."""

    def __init__(
        self, rank: int, signals: StreamSignals, deadline_s: float, complaint: Callable[[], str | None]
    ) -> None:
        """`complaint` says what the notes of this rank say, None while they are zero."""
        self.failure: str | None = None
        self._rank = rank
        self._signals = signals
        self._deadline_s = deadline_s
        self._complaint = complaint
        self._oldest: Wait | None = None
        self._oldest_since_s = 0.0
        self._seen = torch.zeros(signals.flags.numel(), dtype=torch.int32, pin_memory=True)
        threading.Thread(target=self._watch, name="watchdog of the GPU's waits", daemon=True).start()

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise TransportError(self.failure)

    def read_notes(self) -> None:
        """Waits for the current stream."""
        complaint = self._complaint()
        if complaint is not None:
            self._fail(complaint)

    def _fail(self, complaint: str) -> None:
        if self.failure is None:
            self.failure = f"rank {self._rank}, {complaint}"

    def _watch(self) -> None:
        torch.cuda.set_device(self._signals.device)  # else this thread would start a context on GPU 0
        stream = torch.cuda.Stream(priority=-1)  # waits of other streams do not hold it up
        while True:
            time.sleep(min(0.5, self._deadline_s / 10))
            try:
                with torch.cuda.stream(stream):
                    self._look(stream)
            except RuntimeError as error:  # the GPU itself failed, and so will whatever the other threads ask of it
                self._fail(f"watching the GPU: {error}")
                return

    def _look(self, stream: torch.cuda.Stream) -> None:
        self._seen.copy_(self._signals.flags, non_blocking=True)
        stream.synchronize()
        if self._seen[-4:].any():
            self.read_notes()
        pending = self._signals.pending
        while pending and _reached(int(self._seen[pending[0].word]), pending[0].number):
            pending.popleft()
        if not pending:
            self._oldest = None
        elif pending[0] is not self._oldest:
            self._oldest, self._oldest_since_s = pending[0], time.monotonic()
        else:
            self._check_oldest(stream, pending[0], time.monotonic() - self._oldest_since_s)

    def _check_oldest(self, stream: torch.cuda.Stream, oldest: Wait, waited_s: float) -> None:
        if waited_s > self._deadline_s:
            self._fail(f"{oldest.purpose}: no signal from rank {oldest.peer} for {waited_s:.1f} s")
        if self.failure is not None:
            self._signals.give_up(stream)


def _reached(value: int, number: int) -> bool:
    """Of numbers of 32 bits that wrap around."""
    return (value - number) % 2**32 < 2**31
