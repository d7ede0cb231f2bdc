"""Starts the process from which workers are forked, as early as possible: it then imports torch while we do.

Workers forked from a server that has torch loaded start in about 0.03 s each, and the server has never run autograd,
which a forked child of a process that has would hang in. Import this module and call `start()` before anything that
imports torch; it needs only the standard library.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch_parallel.files import fill_closed_streams

PRELOAD = [
    "torch_parallel.lifeline",  # first, see there
    "torch_parallel.huge_pages",  # before torch
    "torch_parallel.worker",
    "torch_parallel.training.loop",
    "torch._dynamo",  # a second's worth of modules that the first optimizer of a process imports
]
"""What the server imports, so that no worker has to."""

GONE_LIMIT_S = 2.0
"""A killed process is gone in milliseconds; one that waits for a device, say, may take longer and is left to itself."""


def start_method() -> str:
    """forkserver on Linux; spawn elsewhere, where system libraries do not survive a fork."""
    return "forkserver" if sys.platform == "linux" else "spawn"


def start() -> None:
    """Makes sure that the server runs, where there is one. Returns at once; the server imports in its own time."""
    if start_method() != "forkserver":
        return
    fill_closed_streams()  # else a pipe of ours may become what a worker takes for its output
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    with _ctrl_c_masked(), _package_on_the_path():
        _start_unnamed()


def start_worker(process: BaseProcess) -> None:
    """Starts a process of `context()`: the server forks it, and it has the server's mask, or it is given that mask."""
    with _script_unnamed(), contextlib.nullcontext() if start_method() == "forkserver" else _ctrl_c_masked():
        process.start()


@contextlib.contextmanager
def _script_unnamed() -> Iterator[None]:
    """Keeps multiprocessing from running the user's script once more in every worker.

    What a script defines is sent by value, so no worker needs that; and a script that calls `launch` at its top level,
    without asking for `__name__`, would start workers from its workers.
    """
    script = sys.modules["__main__"].__dict__
    names = {name: script.pop(name, None) for name in ("__file__", "__spec__")}
    script["__spec__"] = None
    try:
        yield
    finally:
        script.update({name: value for name, value in names.items() if value is not None})


@contextlib.contextmanager
def _ctrl_c_masked() -> Iterator[None]:
    """What is started in this block never sees Ctrl-C, which reaches every process of the terminal.

    Only the launcher acts on it; the server and the workers inherit the mask.
    """
    multiprocessing.resource_tracker.ensure_running()  # the first start has it started, which takes SIGINT out again
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


@contextlib.contextmanager
def _package_on_the_path() -> Iterator[None]:
    """The server is a new interpreter, which must find this package where we found it.

    It does not say so if it cannot: every worker would then import torch for itself, at 50 times the start-up time.
    """
    root, before = Path(__file__).resolve().parent.parent, os.environ.get("PYTHONPATH")
    if root.name in ("site-packages", "dist-packages"):
        yield
        return
    os.environ["PYTHONPATH"] = os.pathsep.join([str(root), *([before] if before else [])])
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _start_unnamed() -> None:
    """Starts the server if there is none, and takes its socket's name out of the file system at once.

    Else a launcher that is killed would leave a socket in the temporary folder. An open descriptor still names the
    socket, to this process only; it also names the folder, whose path may be too long for a socket's.
    """
    server: Any = multiprocessing.forkserver._forkserver
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    address, usual_folder = server._forkserver_address, config.get("tempdir")
    with tempfile.TemporaryDirectory(prefix="torch_parallel-") as folder:
        folder_fd = os.open(folder, os.O_PATH)
        config["tempdir"] = f"/proc/self/fd/{folder_fd}"
        try:
            multiprocessing.forkserver.ensure_running()
            if server._forkserver_address != address:
                if address is not None and address.startswith("/proc/self/fd/"):
                    os.close(int(address.rpartition("/")[2]))  # of a server that has died
                socket_fd = os.open(server._forkserver_address, os.O_PATH)
                server._forkserver_address = f"/proc/self/fd/{socket_fd}"
        finally:
            config["tempdir"] = usual_folder
            os.close(folder_fd)


def context() -> BaseContext:
    """The multiprocessing context that workers are started from, with its server running."""
    start()
    return multiprocessing.get_context(start_method())


@contextlib.contextmanager
def given_up_after(deadline_s: float) -> Iterator[None]:
    """A start waits for the fork server. One that is found stopped by the deadline is killed, and the start fails."""
    started = threading.Event()

    def watch() -> None:
        while not started.wait(deadline_s):
            if is_stopped(pid()):
                kill()

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        started.set()


def pid() -> int | None:
    """Of this process's server, None where there is none."""
    return getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None)


def kill() -> None:
    """Ends the server, stopped or not, and sees it gone; the next start makes a new one."""
    server = pid()
    if server is None:
        return
    with contextlib.suppress(ProcessLookupError):  # another thread may have found it dead
        os.kill(server, signal.SIGKILL)
    wait_until_gone()


def wait_until_gone() -> None:
    """Sees the end of a server that has been killed, or has hung up, which a process does before it is dead.

    The next start would still find it, ask it for a worker and fail.
    """
    server = pid()
    if server is None or sys.platform != "linux":
        return
    end_s = time.monotonic() + GONE_LIMIT_S
    with contextlib.suppress(ChildProcessError):
        # multiprocessing takes the exit status when it starts the next one, so it is only looked at here
        while os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None and time.monotonic() < end_s:
            time.sleep(0.001)


def is_stopped(process_id: int | None) -> bool:
    """Whether a process is stopped, by SIGSTOP or a terminal (Linux); False where there is no such process."""
    try:
        with open(f"/proc/{process_id}/stat", "rb") as file:  # the name in it may be any bytes
            return file.read().rpartition(b")")[2].split()[0] in b"Tt"
    except (OSError, IndexError):
        return False
