"""What every rank is doing right now, in shared memory: written by the ranks, read by the launcher.

When a worker dies or falls silent, the launcher can say what it was doing and who waited for whom, without asking
anybody. A rank pays a few stores a step; the text of a wait is written only by a rank that has to wait anyway.

Ranks read it too while they wait. Who has returned or raised will not come any more. And a peer that is in long work,
which is no wait, may take longer than the deadline, as long as it gives signs of life: see `StatusReporter.at_work`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

PHASES = (
    "starting",
    "computing",
    "exchanging",
    "updating",
    "evaluating",
    "saving a checkpoint",
    "returning its result",
)
STARTING, COMPUTING, EXCHANGING, UPDATING, EVALUATING, SAVING, RETURNING = range(len(PHASES))

RUNNING, RETURNED, RAISED, DIED = range(4)
"""Whether the function of a rank is over, and how. Of a process that died others write it down."""

WORK_BEAT_S = 0.25
"""How often a rank in long work gives a sign of life."""
WORK_SILENT_S = 2.0
"""Without one for so long it is not at work any more: it was stopped, or is stuck where no thread of it can run."""

# int64 fields of a rank's record, then text
_PHASE, _EPOCH, _STEP, _SAMPLES, _BEAT_NS, _WAITING_FOR, _TEXT_BYTES, _OVER, _WORK_NS, _FIELDS = range(10)
_RECORD_BYTES = 272
_TEXT_LIMIT = _RECORD_BYTES - 8 * _FIELDS


@dataclass(frozen=True)
class Status:
    """One rank's record. `waiting_for` is None unless the rank is in a wait; `doing` says what that wait is for, or
    what the rank does while it is `at_work`."""

    rank: int
    phase: int
    epoch: int
    step: int
    samples: int
    silent_s: float
    waiting_for: int | None
    doing: str
    at_work: bool = False

    def __str__(self) -> str:
        where = PHASES[self.phase] + (f" step {self.step} of epoch {self.epoch}" if self.epoch else "")
        if self.waiting_for is None:
            return f"rank {self.rank} was {where}" + (f", in long work ({self.doing})" if self.at_work else "")
        return f"rank {self.rank} was {where}, waiting for rank {self.waiting_for} ({self.doing})"


class StatusBoard:
    """The records of all ranks on `memory`, which holds `bytes_needed(world_size)` bytes."""

    def __init__(self, memory: memoryview, world_size: int) -> None:
        self._bytes = memory
        self._fields = memory.cast("q")
        self.world_size = world_size

    @staticmethod
    def bytes_needed(world_size: int) -> int:
        return world_size * _RECORD_BYTES

    def read(self, rank: int) -> Status:
        """What `rank` wrote last."""
        fields = self._fields[rank * _RECORD_BYTES // 8 :][:_FIELDS].tolist()
        waiting_for = fields[_WAITING_FOR] - 1
        return Status(
            rank,
            phase=fields[_PHASE],
            epoch=fields[_EPOCH],
            step=fields[_STEP],
            samples=fields[_SAMPLES],
            silent_s=(time.monotonic_ns() - fields[_BEAT_NS]) / 1e9,
            waiting_for=waiting_for if waiting_for >= 0 else None,
            doing=self._text(rank, fields[_TEXT_BYTES]),
            at_work=fields[_WORK_NS] > 0,
        )

    def over(self, rank: int) -> int:
        """Whether the function of `rank` is over, and how: RUNNING, RETURNED, RAISED or DIED."""
        return int(self._fields[rank * _RECORD_BYTES // 8 + _OVER])

    def note_end(self, rank: int, how: int) -> None:
        """For a rank that cannot do so itself any more."""
        self._fields[rank * _RECORD_BYTES // 8 + _OVER] = how

    def last_work_s(self, rank: int) -> float:
        """When, on the monotonic clock, `rank` or whoever it waits for, one after the other, was last known to be in
        long work; 0 where none of them is. To wait for each other in a circle is no work."""
        seen: set[int] = set()
        while rank not in seen and 0 <= rank < self.world_size:
            seen.add(rank)
            first = rank * _RECORD_BYTES // 8
            waiting_for = self._fields[first + _WAITING_FOR] - 1
            if waiting_for < 0:
                sign_s, now_s = self._fields[first + _WORK_NS] / 1e9, time.monotonic()
                return now_s if 0 <= now_s - sign_s < WORK_SILENT_S else sign_s
            rank = waiting_for
        return 0.0

    def reporter(self, rank: int) -> StatusReporter:
        return StatusReporter(self, rank)

    def record(self, rank: int) -> bytes:
        """All that a rank has written here."""
        return bytes(self._bytes[rank * _RECORD_BYTES : (rank + 1) * _RECORD_BYTES])

    def adopt(self, rank: int, record: bytes, sent_ns: int) -> None:
        """Writes what a rank of another machine had written there at `sent_ns` of that machine's monotonic clock."""
        ahead_ns = time.monotonic_ns() - sent_ns
        fields = list(memoryview(record).cast("q"))
        first = rank * _RECORD_BYTES // 8
        for field in (_BEAT_NS, _WORK_NS):
            fields[field] += ahead_ns if fields[field] else 0
        fields[_BEAT_NS] = fields[_BEAT_NS] or self._fields[first + _BEAT_NS]  # before its first sign of life
        if self._fields[first + _OVER] != RUNNING:
            fields[_OVER] = fields[_OVER] or self._fields[first + _OVER]  # known here, and not there yet
        for index, value in enumerate(fields):
            self._fields[first + index] = value

    def _text(self, rank: int, size: int) -> str:
        start = rank * _RECORD_BYTES + 8 * _FIELDS
        return bytes(self._bytes[start : start + min(size, _TEXT_LIMIT)]).decode(errors="replace")


class StatusReporter:
    """One rank's pen for its own record."""

    def __init__(self, board: StatusBoard, rank: int) -> None:
        self._fields = board._fields[rank * _RECORD_BYTES // 8 :][:_FIELDS]
        self._text = board._bytes[rank * _RECORD_BYTES + 8 * _FIELDS : (rank + 1) * _RECORD_BYTES]
        self.board = board
        self._work: str | None = None
        self.beat()

    def phase(self, phase: int) -> int:
        """One of the constants above. Returns the one before."""
        before: int = self._fields[_PHASE]
        self._fields[_PHASE] = phase
        return before

    def back_to(self, phase: int) -> None:
        """The phase before goes on."""
        self._fields[_PHASE] = phase

    def step(self, epoch: int, step: int, samples: int) -> None:
        """A new step, counted from 1, and the samples of this epoch that all workers have done before it."""
        self._fields[_EPOCH] = epoch
        self._fields[_STEP] = step
        self._fields[_SAMPLES] = samples
        self.beat()

    def beat(self) -> None:
        """A sign of life: a rank without one for the deadline is taken for stopped."""
        self._fields[_BEAT_NS] = time.monotonic_ns()

    def waiting(self, peer: int, doing: str) -> None:
        """From now on this rank waits for `peer`."""
        self._write(doing)
        self._fields[_WAITING_FOR] = peer + 1
        self.beat()

    def done_waiting(self) -> None:
        self._fields[_WAITING_FOR] = 0
        if self._work is not None:
            self._write(self._work)

    def _write(self, doing: str) -> None:
        text = doing.encode()[:_TEXT_LIMIT]
        self._text[: len(text)] = text
        self._fields[_TEXT_BYTES] = len(text)

    def is_over(self, how: int) -> None:
        """The function of this rank has RETURNED or RAISED: it will signal nothing any more."""
        self._fields[_OVER] = how

    @contextmanager
    def at_work(self, doing: str) -> Iterator[None]:
        """Around long work that is no wait. A thread gives signs of life, so that neither the launcher nor the peers
        take it for silence. A process that is stopped gives none."""
        if self._work is not None:  # the outer one's thread serves
            yield
            return
        self._work = doing
        self._write(doing)
        ended = threading.Event()
        thread = threading.Thread(target=self._give_signs, args=(ended,), name="signs of life", daemon=True)
        self._give_sign()
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self._work = None
            self._fields[_WORK_NS] = 0

    def _give_signs(self, ended: threading.Event) -> None:
        while not ended.wait(WORK_BEAT_S):
            self._give_sign()

    def _give_sign(self) -> None:
        self.beat()
        self._fields[_WORK_NS] = time.monotonic_ns()
