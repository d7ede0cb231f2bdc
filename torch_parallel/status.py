"""What every rank is doing right now, in shared memory: written by the ranks, read by the launcher.

When a worker dies or falls silent, the launcher can say what it was doing and who waited for whom, without asking
anybody. A rank pays a few stores a step; the text of a wait is written only by a rank that has to wait anyway.
"""

from __future__ import annotations

import time
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

# int64 fields of a rank's record, then text
_PHASE, _EPOCH, _STEP, _SAMPLES, _BEAT_NS, _WAITING_FOR, _TEXT_BYTES, _FIELDS = range(8)
_RECORD_BYTES = 256
_TEXT_LIMIT = _RECORD_BYTES - 8 * _FIELDS


@dataclass(frozen=True)
class Status:
    """One rank's record. `waiting_for` is None unless the rank is in a wait; `doing` says what that wait is for."""

    rank: int
    phase: int
    epoch: int
    step: int
    samples: int
    silent_s: float
    waiting_for: int | None
    doing: str

    def __str__(self) -> str:
        where = PHASES[self.phase] + (f" step {self.step} of epoch {self.epoch}" if self.epoch else "")
        if self.waiting_for is None:
            return f"rank {self.rank} was {where}"
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
        )

    def reporter(self, rank: int) -> StatusReporter:
        return StatusReporter(self, rank)

    def _text(self, rank: int, size: int) -> str:
        start = rank * _RECORD_BYTES + 8 * _FIELDS
        return bytes(self._bytes[start : start + min(size, _TEXT_LIMIT)]).decode(errors="replace")


class StatusReporter:
    """One rank's pen for its own record."""

    def __init__(self, board: StatusBoard, rank: int) -> None:
        self._fields = board._fields[rank * _RECORD_BYTES // 8 :][:_FIELDS]
        self._text = board._bytes[rank * _RECORD_BYTES + 8 * _FIELDS : (rank + 1) * _RECORD_BYTES]
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
        text = doing.encode()[:_TEXT_LIMIT]
        self._text[: len(text)] = text
        self._fields[_TEXT_BYTES] = len(text)
        self._fields[_WAITING_FOR] = peer + 1
        self.beat()

    def done_waiting(self) -> None:
        self._fields[_WAITING_FOR] = 0
