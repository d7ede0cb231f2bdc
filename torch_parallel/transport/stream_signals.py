"""Signals between GPUs: numbers in memory that all of them reach, which a stream of the sender writes and one of the
receiver waits for. The host only enqueues; while a stream waits, no event, handshake, thread or multiprocessor is busy.

The numbers lie in the host's memory, which costs half a microsecond a signal more than the receiver's GPU memory would
(two H200: 14.7 against 13.7 a round trip) and lets the host see them, and end a wait that the GPU cannot give up
itself, without asking the GPU: a thread looks now and then at the oldest wait, and past the deadline it stores the
awaited number. The stream goes on with whatever is there, and the next call of the transport raises an error that says
who did not come. Since what it goes on with is wrong, the thread first leaves a mark with all peers. It is no peer's
fault if this rank's own stream comes late to a wait: time counts from when the last signal that lies before is seen.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_parallel.transport.cuda_driver import current_stream, device_address, stream_wait, stream_write
from torch_parallel.transport.signals import NAP_S, READ, READY, Signals, WaitTimeout, silence

KINDS = 2
WORDS = 32
"""int32s between two flags: 128 bytes."""


def flag_words(world_size: int) -> int:
    """int32s that each rank needs: the flags, then its two notes."""
    return KINDS * world_size * WORDS + WORDS


@dataclass(frozen=True, slots=True)
class Post:
    """What a stream of this rank was told to write: `number` to the flag `word` of rank `to`."""

    to: int
    word: int
    number: int


@dataclass(eq=False, slots=True)
class Wait:
    """What a stream of this rank was told to wait for: the flag `word` is to reach `number`."""

    word: int
    number: int
    peer: int
    doing: str
    round: int | None  # None for the end of the peer's reading, which `doing` says
    after: Post  # the last one before: once it is seen, whatever lay before its operation is done

    def __str__(self) -> str:
        return self.doing if self.round is None else f"{self.doing}, round {self.round}"


class StreamSignals(Signals):
    """One flag for each kind and ordered pair of ranks. `flags[r]`, int32 in host memory that all map, is rank r's.

    Signals are posted and awaited on the current stream; what was posted is seen when the peer's stream has got there.
    `waited_s` counts what the host waits: it does not see a stream wait. `deadline_s` bounds every wait.
    """

    def __init__(self, rank: int, flags: list[Tensor], device: torch.device, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.flags = flags
        self.waited_s = [0.0] * len(flags)
        self.notes = [part[-4:].view(torch.int64) for part in flags]
        """Of each rank: [0] what its kernel gave up to wait for; [1] a peer that gave up, rank + 1; zeros else."""
        # twenty times faster to look at than tensors
        self._words = [_words(part) for part in flags]
        self._own_flags, self._own_notes = self._words[rank], _words(self.notes[rank])
        self.pending: deque[Wait] = deque()
        """Oldest first; the watchdog takes out those that are over, as long as none has failed."""
        self._rank = rank
        self._device_index = device.index
        self._bases = [device_address(part) for part in flags]
        self._posted = [[0] * len(flags) for _ in range(KINDS)]
        self._awaited = [[0] * len(flags) for _ in range(KINDS)]
        self._last_post: Post | None = None  # of the operation that is being enqueued

    @property
    def note_address(self) -> int:
        """Of this rank's first note, for its kernels."""
        return self._bases[self._rank] + 4 * (self.flags[self._rank].numel() - 4)

    @property
    def kernels_note(self) -> int:
        """What this rank's kernel gave up to wait for; 0 while all is well."""
        return self._own_notes[0]

    def begin(self) -> None:
        """A new operation, behind whatever the stream has been given since the last: no earlier post tells of that.

        To wait for the readers of the last one is none: they do not wait for what this rank has been given since.
        """
        self._last_post = None

    def post(self, kind: int, peer: int) -> None:
        self._posted[kind][peer] += 1
        word, number = self._word(kind, self._rank), self._posted[kind][peer]
        self._last_post = Post(peer, word, number)
        stream_write(current_stream(self._device_index), self._bases[peer] + 4 * word, number)

    def wait(self, kind: int, peer: int, doing: str, round_index: int) -> None:
        if self._last_post is None:
            self.post(READY, self._rank)  # nobody waits for it
        assert self._last_post is not None
        self._awaited[kind][peer] += 1
        word, number = self._word(kind, peer), self._awaited[kind][peer]
        round_or_none = None if kind == READ else round_index
        self.pending.append(Wait(word, number, peer, doing, round_or_none, self._last_post))
        stream_wait(current_stream(self._device_index), self._bases[self._rank] + 4 * word, number)

    def posted(self, kind: int, peer: int) -> bool:
        return self._has_come(self._word(kind, peer), self._awaited[kind][peer] + 1)

    def wait_any(self, kind: int, peers: list[int], doing: str) -> None:
        """The host waits here, since nobody can enqueue what depends on who comes."""
        start_s = time.monotonic()
        while not (came := [peer for peer in peers if self.posted(kind, peer)]):
            if time.monotonic() - start_s > self.deadline_s:
                raise WaitTimeout(silence(peers, self.deadline_s))
            time.sleep(NAP_S)
        self.waited_s[came[0]] += time.monotonic() - start_s

    def who_gave_up(self) -> str | None:
        """What a peer left on this rank's notes when it gave up; None where none did."""
        peer = self._own_notes[1] - 1
        return f"exchanging with rank {peer}: it gave up waiting for another rank" if peer >= 0 else None

    def give_up(self) -> None:
        """Tells all peers so, and ends all waits. May be called again, for flags that a late peer has set back."""
        for peer, notes in enumerate(self.notes):
            if peer != self._rank:
                notes[1] = self._rank + 1
        for wait in list(self.pending):
            if not self._has_come(wait.word, wait.number):
                self._own_flags[wait.word] = as_int32(wait.number)

    def take_out_what_is_over(self) -> None:
        while self.pending and self._has_come(self.pending[0].word, self.pending[0].number):
            self.pending.popleft()

    def is_reached(self, wait: Wait) -> bool:
        """Whether this rank's stream has come to the operation that this wait belongs to."""
        return _has_reached(self._words[wait.after.to][wait.after.word], wait.after.number)

    def _has_come(self, word: int, number: int) -> bool:
        return _has_reached(self._own_flags[word], number)

    def _word(self, kind: int, source: int) -> int:
        return (kind * len(self._bases) + source) * WORDS


class Watchdog:
    """Ends the waits of one rank's streams at the deadline. `failure` says what for; None while all is well.

    From then on it ends every wait at the next look, those that are over too: a late peer's stream may still write the
    number that it had come to, which is less than what waits here.
    """

    def __init__(self, signals: StreamSignals) -> None:
        self.failure: str | None = None
        self._signals = signals
        self._deadline_s = signals.deadline_s
        self._oldest: Wait | None = None
        self._oldest_since_s = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog of stream waits", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stops watching. A worker need not call it, since it ends without waiting for its threads."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(min(0.5, self._deadline_s / 10)):
            self._look(time.monotonic())

    def _look(self, now_s: float) -> None:
        if self.failure is not None:
            self._signals.give_up()
            return
        self._signals.take_out_what_is_over()
        oldest = self._signals.pending[0] if self._signals.pending else None
        if oldest is None or oldest is not self._oldest or not self._signals.is_reached(oldest):
            self._oldest, self._oldest_since_s = oldest, now_s
        elif now_s - self._oldest_since_s > self._deadline_s:
            silent = f"{oldest}: {silence([oldest.peer], now_s - self._oldest_since_s)}"
            self.failure = self._signals.who_gave_up() or silent
            self._signals.give_up()


def _words(tensor: Tensor) -> memoryview:
    """The elements of a tensor in host memory."""
    array: Any = tensor.numpy()
    return memoryview(array)


def _has_reached(flag: int, number: int) -> bool:
    """As a stream's wait compares them: both wrap around."""
    return as_int32(flag - number) >= 0


def as_int32(number: int) -> int:
    """As an integer of 32 bits, which wraps around."""
    return (number + 2**31) % 2**32 - 2**31
