"""The fork server and the workers that it has forked, as their launcher sees them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import multiprocessing.spawn
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch_parallel import parcel
from torch_parallel.forking import NUMBER, Start

READ_BY_LIBRARIES = (
    *("PYTHON", "LD_", "MALLOC_", "GLIBC_", "LC_", "LANG", "TZ"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "DNNL_", "ONEDNN_", "NUMEXPR_", "TQDM_"),
    *("CUDA_", "NVIDIA_", "NCCL_", "CUBLAS_", "CUDNN_", "TORCH", "PYTORCH_", "ATEN_", "C10_", "THP_", "TRITON_"),
)
"""Beginnings of variables that libraries may read when they are loaded, without a way to watch them."""
SET_BY_LIBRARIES = {
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),  # by scikit-learn
    *("CUDA_MODULE_LOADING", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),  # by torch
}
"""Variables that libraries set in a caller who uses them. They are read late: any server will do for a worker."""

GONE_LIMIT_S = 2.0
"""A killed process is gone in milliseconds; one that waits for a device, say, may take longer and is left to itself."""


class ForkServer:
    """A running one, which imports the modules `preload` in its own time."""

    def __init__(self, preload: list[str]) -> None:
        self.environment = dict(os.environ)
        self.workers: set[ForkedWorker] = set()
        self._read: set[str] | None = None
        self._retired = False
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        watched, self._lifeline = os.pipe()
        control_fd, watched_fd = _not_standard(theirs.detach()), _not_standard(watched)
        call = f"main({control_fd}, {watched_fd}, {preload})"
        code = f"import sys; sys.path[:] = {_path()}; from torch_parallel.forking import main; {call}"
        try:
            with ctrl_c_masked():
                self._process = subprocess.Popen(
                    [multiprocessing.spawn.get_executable(), *_flags(), "-c", code],
                    stdin=subprocess.DEVNULL,
                    stdout=None if 1 in _outputs() else subprocess.DEVNULL,
                    stderr=None if 2 in _outputs() else subprocess.DEVNULL,
                    pass_fds=(control_fd, watched_fd),
                )
        except BaseException:
            self._hang_up()
            raise
        finally:
            os.close(control_fd)
            os.close(watched_fd)
        self.pid = self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def still_holds(self, deadline_s: float) -> bool:
        """Whether what it has read of its environment is still so. Waits until it has.

        Raises EOFError where it has died.
        """
        if self._read is None:
            self._wait_for(self._control.fileno(), deadline_s)
            message = self._control.recv(1 << 20)
            if not message:
                raise EOFError
            self._read = set(json.loads(message))
        now, then = dict(os.environ), self.environment
        changed = {name for name in now.keys() | then.keys() if now.get(name) != then.get(name)} - SET_BY_LIBRARIES
        return not any(name in self._read or name.startswith(READ_BY_LIBRARIES) for name in changed)

    def fork(self, target: Any, argument: Any, name: str, deadline_s: float) -> ForkedWorker:
        """Has a worker run `target(argument)`.

        Raises EOFError or ConnectionError where the server has gone, OSError where nothing more can be started, and
        TimeoutError where the worker does not take its argument within `deadline_s`.
        """
        start = Start(
            name,
            multiprocessing.current_process().name,
            os.getpid(),
            bytes(multiprocessing.current_process().authkey),
            parcel.Descriptor(tracker_fd()),
            [(fd, parcel.Descriptor(fd)) for fd in _outputs()],
            target,
            argument,
        )
        data, fds = parcel.pack(start)
        worker = ForkedWorker(self)
        try:
            with worker.ask(self._control) as channel:
                channel.settimeout(deadline_s)
                self._send(channel, data, fds)
                self._wait_for(worker.sentinel, deadline_s)
                worker.begun(read_number(worker.sentinel))
        except BaseException:
            worker.close()  # one of which nobody has the number ends by that
            raise
        return worker

    def _send(self, channel: socket.socket, data: bytes, fds: list[int]) -> None:
        """Before anything is heard of the worker, so that it need not wait for it."""
        try:
            with contextlib.suppress(
                ConnectionError
            ):  # the server has died, or the worker, and who listens learns that
                parcel.send(channel, data, fds)
        except TimeoutError:
            if not is_stopped(self.pid):
                raise
            self.kill()

    def _wait_for(self, fd: int, deadline_s: float) -> None:
        """For its answer. A server that is found stopped by the deadline is killed, and that hangs up."""
        while not multiprocessing.connection.wait([fd], deadline_s):
            if is_stopped(self.pid):
                self.kill()

    def retire(self) -> None:
        """It forks no more, and ends as soon as it has no workers."""
        self._retired = True
        self.released()

    def released(self) -> None:
        """One of its workers has been closed."""
        if self._retired and not self.workers:
            self._hang_up()
            self.see_gone()

    def kill(self) -> None:
        """Ends it, stopped or not, and sees it gone."""
        self._process.kill()
        self.see_gone()

    def see_gone(self) -> None:
        """Waits for a server that has been killed, or has hung up, which a process does before it is dead."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GONE_LIMIT_S)

    def forget(self) -> None:
        """In a process that was forked from the launcher: nothing of it may make it seem to be the launcher."""
        self._hang_up()
        self._process.returncode = 0  # else Popen would warn of a child that still runs
        for worker in [*self.workers]:
            worker.close()

    def _hang_up(self) -> None:
        self._control.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


class ForkedWorker:
    """A process that a fork server has forked, or is about to; used as one of multiprocessing is."""

    def __init__(self, server: ForkServer) -> None:
        self.server = server
        self.pid = -1
        self.sentinel = -1
        """Ready to read when the exit code has come, or the server has gone."""
        self._lifeline = -1
        self._exit_code: int | None = None

    def ask(self, control: socket.socket) -> socket.socket:
        """Sends the server its request with what it needs of three pairs; returns our end of the worker's socket."""
        with contextlib.ExitStack() as theirs:
            self.sentinel, status = os.pipe()
            theirs.callback(os.close, status)
            watched, self._lifeline = os.pipe()
            theirs.callback(os.close, watched)
            ours, channel = socket.socketpair()
            theirs.callback(channel.close)
            try:
                socket.send_fds(control, [b"\0"], [channel.fileno(), status, watched])
            except BaseException:
                ours.close()
                raise
        return ours

    def begun(self, pid: int) -> None:
        """What the server has answered. Raises OSError where it could not fork."""
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        self.pid = pid
        self.server.workers.add(self)

    @property
    def exitcode(self) -> int | None:
        """None while it runs, and where the server has died, which alone knows."""
        if self._exit_code is None and self.sentinel >= 0 and multiprocessing.connection.wait([self.sentinel], 0):
            with contextlib.suppress(EOFError):
                self._exit_code = read_number(self.sentinel)
        return self._exit_code

    def join(self, timeout: float | None = None) -> None:
        """Waits for its exit code."""
        if self._exit_code is None:
            multiprocessing.connection.wait([self.sentinel], timeout)

    def kill(self) -> None:
        if self.exitcode is None:
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Gives back the descriptors, which ends it if it still runs."""
        for fd in (self.sentinel, self._lifeline):
            if fd >= 0:
                os.close(fd)
        self.sentinel = self._lifeline = -1
        self.server.workers.discard(self)
        self.server.released()


def read_number(fd: int) -> int:
    """A worker's number or exit code. Raises EOFError where the server has gone."""
    data = os.read(fd, NUMBER.size)
    if len(data) < NUMBER.size:
        raise EOFError
    return int(NUMBER.unpack(data)[0])


def is_stopped(process_id: int | None) -> bool:
    """Whether a process is stopped, by SIGSTOP or a terminal (Linux); False where there is no such process."""
    try:
        with open(f"/proc/{process_id}/stat", "rb") as file:  # the name in it may be any bytes
            return file.read().rpartition(b")")[2].split()[0] in b"Tt"
    except (OSError, IndexError):
        return False


@contextlib.contextmanager
def ctrl_c_masked() -> Iterator[None]:
    """What is started in this block never sees Ctrl-C, which reaches every process of the terminal.

    Only the launcher acts on it; the server and the workers inherit the mask.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def tracker_fd() -> int:
    """Of multiprocessing's tracker, started with the first worker. That takes SIGINT out of this thread's mask."""
    with ctrl_c_masked():
        fd = multiprocessing.resource_tracker.getfd()
    assert fd is not None
    return fd


def _flags() -> list[str]:
    """The interpreter's own, such as -W and -X, as multiprocessing passes them on."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags


def _path() -> list[str]:
    """Where modules are found: as here, and this package in any case."""
    root = str(Path(__file__).resolve().parent.parent)
    path = [entry for entry in sys.path if isinstance(entry, str)]
    return path if root in path else [*path, root]


def _outputs() -> list[int]:
    """Standard output and error, but those that were closed when this program began: then they are other files now."""
    return [fd for fd, stream in ((1, sys.__stdout__), (2, sys.__stderr__)) if stream is not None and _is_open(fd)]


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _not_standard(fd: int) -> int:
    """The same file under another number, where a standard one was free."""
    if fd > 2:
        return fd
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return moved
