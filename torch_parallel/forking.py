"""The fork server itself: a process that has imported torch, has computed nothing, and forks a worker when it is asked.

The launcher (`fork_server.py`) sends one short message for each worker, with three descriptors: a socket through which
the new worker gets its assignment, a pipe in which the server notes the worker's number and later its exit code, and
the pipe that the launcher holds open for as long as it lives. The server reads nothing else, so nothing that a launcher
or a worker does half-way can confuse it.

It also cleans up. What workers start (data loaders, commands, daemons) is adopted by the nearest "subreaper" above when
its parent ends: while the worker lives, by the worker; after that, by the server, which kills it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import io
import json
import multiprocessing
import multiprocessing.resource_tracker
import os
import select
import signal
import socket
import struct
import sys
import time
import traceback
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from torch_parallel import huge_pages, parcel
from torch_parallel.lifeline import end_with_pipe, wake_with_pipe
from torch_parallel.parcel import Descriptor

NUMBER = struct.Struct("<q")
REQUEST_FDS = 3
LAST_LIMIT_S = 5.0
"""How long the server sees to the end of what it has killed: one that waits for a device ends when that answers."""
CLEANERS = ("multiprocessing.resource_tracker", "torch_shm_manager")
"""Commands that remove what other processes leave in shared memory, and end by themselves after these."""

_PR_SET_CHILD_SUBREAPER = 36
_prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux


@dataclass
class Start:
    """What a worker process gets through its socket."""

    name: str
    launcher_name: str
    launcher_pid: int
    authkey: bytes
    tracker: Descriptor
    """The launcher's tracker of named shared memory and semaphores, as in any child of multiprocessing."""
    output: list[tuple[int, Descriptor]]
    """Where the launcher's standard output and error go at present: number, and descriptor."""
    target: Any
    argument: Any


def main(control_fd: int, lifeline_fd: int, preload: list[str]) -> NoReturn:
    """Runs the server until the launcher's end of the socket `control_fd` closes."""
    end_with_pipe(lifeline_fd)  # while it imports, nothing is below it
    huge_pages.ask_for_them()
    read = _imported(preload)
    from torch_parallel import surroundings  # not sooner, since it imports torch

    surroundings.note()
    gc.freeze()  # else a worker's first collections look at all of torch, and so copy the pages that it lies in
    _adopt_orphans()
    server = _Server(socket.socket(fileno=control_fd), lifeline_fd)
    wake_with_pipe(lifeline_fd)
    with contextlib.suppress(OSError):
        server.control.send(json.dumps(sorted(read)).encode())
        server.serve()
    server.end()


def _imported(preload: list[str]) -> set[str]:
    """Imports the modules. Which environment variables that has read: the next launch may have set them otherwise."""
    read: set[str] = set()
    plain: type = type(os.environ)

    class Noting(plain):  # type: ignore[misc]
        def __getitem__(self, name: str) -> str:
            read.add(name)
            return str(super().__getitem__(name))

        def copy(self) -> dict[str, str]:
            return {name: super(Noting, self).__getitem__(name) for name in self}

        def items(self) -> Any:  # of whoever looks for a beginning of names
            return self.copy().items()

    os.environ.__class__ = Noting
    try:
        for name in preload:
            with contextlib.suppress(ImportError):  # then whoever needs it will say so
                import_module(name)
    finally:
        os.environ.__class__ = plain
    return read


def _adopt_orphans() -> None:
    """Makes this process the parent of what its descendants leave behind."""
    assert _prctl is not None
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class _Server:
    def __init__(self, control: socket.socket, lifeline_fd: int) -> None:
        self.control = control
        self.lifeline_fd = lifeline_fd
        self.workers: dict[int, int] = {}
        """The pipe for its exit status, by the number of each worker that lives."""
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._handlers = {
            number: signal.signal(number, self._end_at_signal if number != signal.SIGCHLD else _note)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) is not signal.SIG_IGN  # nohup ignores SIGHUP, and so do we then
        }

    def serve(self) -> None:
        """Returns when the launcher has gone."""
        poller = select.poll()
        poller.register(self.control, select.POLLIN)
        poller.register(self._woken, select.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._woken in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 4096)
                self._see_to_ended()
            if self.control.fileno() in ready:
                message, fds, _, _ = socket.recv_fds(self.control, 1, REQUEST_FDS)
                if not message:
                    return
                self._start(fds)

    def _start(self, fds: list[int]) -> None:
        """A worker. Where too many files are open for its descriptors, the launcher sees its pipe close."""
        if len(fds) == REQUEST_FDS:
            try:
                pid = os.fork()
            except OSError as error:
                _tell(fds[1], -(error.errno or errno.EAGAIN))
            else:
                if pid == 0:
                    self._become_worker(*fds)
                self.workers[pid] = fds.pop(1)
                _tell(self.workers[pid], pid)
        for fd in fds:
            os.close(fd)

    def _become_worker(self, channel_fd: int, status_fd: int, lifeline_fd: int) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            end_with_pipe(lifeline_fd)
            _adopt_orphans()
            self.control.close()
            for fd in (status_fd, self.lifeline_fd, self._woken, self._wake, *self.workers.values()):
                os.close(fd)
            self.workers.clear()
            _work(channel_fd, lifeline_fd)
        except EOFError:
            pass  # the launcher has changed its mind
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _see_to_ended(self) -> None:
        """Passes exit statuses on, once what the workers have left behind is killed."""
        while ended := _reaped():
            self._kill_children(but=self.workers.keys() - {pid for pid, _ in ended})
            for pid, status in ended:
                if (status_fd := self.workers.pop(pid, None)) is not None:
                    _tell(status_fd, os.waitstatus_to_exitcode(status))
                    os.close(status_fd)

    def _kill_children(self, but: set[int]) -> None:
        for pid in set(_children()) - but:
            if not _is_cleaner(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def end(self) -> NoReturn:
        """Kills everything below, and then ends itself."""
        end_s = time.monotonic() + LAST_LIMIT_S
        while time.monotonic() < end_s:
            self._kill_children(but=set())
            _reaped()
            if all(_is_cleaner(pid) for pid in _children()):
                break
            time.sleep(0.002)
        os._exit(0)

    def _end_at_signal(self, number: int, frame: FrameType | None) -> None:
        self.end()


def _note(number: int, frame: FrameType | None) -> None:
    """The wake-up pipe is written to if there is a handler."""


def _tell(status_fd: int, number: int) -> None:
    with contextlib.suppress(OSError):  # the launcher has gone, and will be noticed to have
        os.write(status_fd, NUMBER.pack(number))


def _reaped() -> list[tuple[int, int]]:
    """Number and status of the children that have ended since the last call."""
    ended = []
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append(child)
    return ended


def _children() -> list[int]:
    """Of this process. Where the kernel has no list of them, everybody is asked for its parent."""
    me = os.getpid()
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{me}/children").read_text(encoding="ascii").split()]
    except FileNotFoundError:
        pids = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
        return [pid for pid in pids if _parent(pid) == me]


def _parent(pid: int) -> int | None:
    try:
        return int(
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1]
        )
    except (OSError, IndexError):
        return None


def _is_cleaner(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return False
    return any(name in command for name in CLEANERS)


def _work(channel_fd: int, lifeline_fd: int) -> None:
    """Gets the assignment and does it, as a child that multiprocessing has started would."""
    with socket.socket(fileno=channel_fd) as channel:
        start: Start = parcel.receive(channel)
    output: Any = start.output  # descriptors arrive as numbers
    for number, fd in output:
        os.dup2(fd, number)
        os.close(fd)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=os.isatty(1))
    tracker: Any = multiprocessing.resource_tracker
    tracker._resource_tracker._fd = start.tracker
    multiprocessing.current_process().authkey = start.authkey  # the next line takes it over
    process: Any = multiprocessing.Process(target=start.target, args=(start.argument,), name=start.name)
    process._parent_pid, process._parent_name = start.launcher_pid, start.launcher_name
    os._exit(process._bootstrap(parent_sentinel=lifeline_fd))
