"""A started worker as the launcher sees it: is it alive, what did it say, how did it end."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import signal
import time
from pathlib import Path
from typing import Any

from torch_parallel import shm_files
from torch_parallel.forked import is_stopped
from torch_parallel.mailbox import Failure, Inbox

EXIT_CODE_S = 1.0
"""How long the fork server may take to pass on the exit code of a worker that has ended."""

LOOK_S = 1.0
"""How often its files in /dev/shm are looked for."""
_ROUNDS = 100
"""A process that goes on starting others is looked for again and again, a tenth of a second long at least."""


def descendants(pid: int) -> set[int]:
    """The living processes below one (Linux)."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            about = Path(f"/proc/{int(entry)}/stat").read_text(encoding="utf-8", errors="replace")
            state, parent = about.rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(entry))
    found, left = set[int](), [pid]
    while left:
        below = children.get(left.pop(), [])
        found.update(below)
        left += below
    return found


class Watched:
    """A rank, and what it has said."""

    def __init__(self, rank: int, inbox: Inbox) -> None:
        self.rank = rank
        self.inbox = inbox
        self.error: Failure | None = None
        self.result: Any = None
        self.finished = False
        self.finished_s = 0.0
        self.files: set[shm_files.Seen] = set()  # in /dev/shm, that it was seen to hold


class WorkerProcess(Watched):
    """A started worker, as the launcher sees it."""

    def __init__(self, rank: int, process: Any, inbox: Inbox) -> None:
        super().__init__(rank, inbox)
        self.process = process
        self._next_look_s = time.monotonic() + LOOK_S
        # A pidfd names this very process even after its number is used again, and does not depend on the fork server.
        self.pidfd: int | None = None
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self.pidfd = os.pidfd_open(process.pid)

    @property
    def handles(self) -> list[int]:
        """Descriptors that are ready to read when there is something to look at."""
        return [handle for handle in (self.inbox.fd, self.process.sentinel, self.pidfd) if handle is not None]

    def gone(self, timeout_s: float = 0.0) -> bool:
        """Whether the process has ended, waiting for it up to `timeout_s`."""
        handle = self.pidfd if self.pidfd is not None else self.process.sentinel
        return bool(multiprocessing.connection.wait([handle], timeout_s))

    def is_orphan(self) -> bool:
        """Whether the fork server, which holds the other end of the sentinel while the process runs, has ended."""
        return bool(multiprocessing.connection.wait([self.process.sentinel], 0)) and not self.gone()

    def look(self) -> None:
        """Notices which files it has in /dev/shm, once in LOOK_S."""
        if time.monotonic() >= self._next_look_s:
            self._next_look_s = time.monotonic() + LOOK_S
            self.files |= shm_files.held_by(self.process.pid)

    def kill(self, with_all_below: bool = False) -> None:
        """What it has started is killed by the fork server, or here where that has died."""
        if with_all_below:
            self._kill_what_is_below()
        self.files |= shm_files.held_by(self.process.pid)
        with contextlib.suppress(ProcessLookupError):
            if self.pidfd is not None:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            else:
                self.process.kill()

    def _kill_what_is_below(self) -> None:
        """The worker is stopped meanwhile. It has adopted what its descendants have left behind, so all is found."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGSTOP)
            for _ in range(_ROUNDS):
                if not (below := descendants(self.process.pid)):
                    break
                for pid in below:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.001)

    def close(self) -> None:
        """After its end: gives back descriptors, and what it has left in /dev/shm."""
        self.inbox.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
        shm_files.remove(self.files)
        with contextlib.suppress(ValueError):  # where it could not be killed, its end is waited for no longer
            self.process.close()

    def is_stopped(self) -> bool:
        """Whether somebody sent it SIGSTOP (Linux)."""
        return is_stopped(self.process.pid)

    def how_it_ended(self) -> str:
        self.process.join(EXIT_CODE_S)
        code = self.process.exitcode
        if code is None:
            return "ended before it returned a result; the fork server, which knows how, does not answer"
        if code < 0:
            try:
                name = signal.Signals(-code).name
            except ValueError:  # a real-time signal has no name
                name = str(signal.strsignal(-code))
            hint = ": probably too little shared memory" if name == "SIGBUS" else ""
            hint = ": probably too little memory, if nobody sent it" if name == "SIGKILL" else hint
            return f"was killed by signal {-code} ({name}){hint}"
        return f"ended with exit code {code} before it returned a result"
