"""Starts the process from which workers are forked, as early as possible: it then imports torch while we do.

Workers forked from a server that has torch loaded start in about 0.03 s each, and the server has never run autograd,
which a forked child of a process that has would hang in. It is the package's own (`forking.py`): multiprocessing's, of
which a process has one, is left to the caller. Import this module and call `start()` before anything that imports
torch; it needs only the standard library.

A server belongs to the process that started it: one that is forked from that process starts another. It is used as long
as what it has read of its environment is still so; then another one takes its place.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

from torch_parallel.files import fill_closed_streams
from torch_parallel.forked import ForkedWorker, ForkServer, ctrl_c_masked, is_stopped, tracker_fd

PRELOAD = [
    "torch_parallel.worker",
    "torch_parallel.training.loop",
    "torch_parallel.preflight",
    "torch._dynamo",  # a second's worth of modules that the first optimizer of a process imports
]
"""What the server imports, so that no worker has to."""

_server: ForkServer | None = None
_retired: list[ForkServer] = []
"""Servers in whose place another one has come, of which workers may still run."""
_one_at_a_time = threading.RLock()


def start_method() -> str:
    """forkserver on Linux; spawn elsewhere, where system libraries do not survive a fork."""
    return "forkserver" if sys.platform == "linux" else "spawn"


def start() -> None:
    """Makes sure that the server runs, where there is one. Returns at once; the server imports in its own time."""
    if start_method() == "forkserver":
        with _one_at_a_time:
            _running()


def _running() -> ForkServer:
    global _server
    if _server is None or not _server.is_alive():
        _give_up()
        fill_closed_streams()  # else a pipe of ours may become what a worker takes for its output
        _server = ForkServer(PRELOAD)
    return _server


def _give_up() -> None:
    """The next start makes another server."""
    global _server
    if _server is not None:
        _server.retire()
        _retired[:] = [server for server in (*_retired, _server) if server.workers]
        _server = None


def start_worker(target: Any, argument: Any, name: str, deadline_s: float) -> Any:
    """Starts a process that runs `target(argument)`, and returns what multiprocessing would: pid, sentinel, join, ...

    Raises EOFError or ConnectionError where the server died, or was found stopped after `deadline_s`; OSError where the
    system starts no more processes.
    """
    if start_method() != "forkserver":
        return _spawn(target, argument, name)
    with _one_at_a_time:
        try:
            if not _running().still_holds(deadline_s):
                _give_up()
            return _running().fork(target, argument, name, deadline_s)
        except (EOFError, ConnectionError):
            if _server is not None:
                _server.see_gone()
                _give_up()
            raise


def _spawn(target: Any, argument: Any, name: str) -> Any:
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=target, args=(argument,), name=name, daemon=True)
    tracker_fd()  # before the mask, from which its start would take SIGINT
    with _script_unnamed(), ctrl_c_masked():
        process.start()
    return process


@contextlib.contextmanager
def _script_unnamed() -> Iterator[None]:
    """Keeps multiprocessing from running the user's script once more in every worker that it spawns.

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


def pid() -> int | None:
    """Of this process's server, None where there is none."""
    return _server.pid if _server is not None else None


def kill() -> None:
    """Ends the server, stopped or not, and sees it gone; the next start makes a new one."""
    with _one_at_a_time:
        if _server is not None:
            _server.kill()
            _give_up()


def kill_if_stopped() -> None:
    """One that is would not even end with us."""
    if is_stopped(pid()):
        kill()


def kill_of(process: Any) -> None:
    """Ends the server of a worker, which does not say how that has ended."""
    if isinstance(process, ForkedWorker):
        process.server.kill()


def _forget() -> None:
    """In a process that was forked from this one: the server and the workers are not its own."""
    global _server, _one_at_a_time
    _one_at_a_time = threading.RLock()
    for server in [*_retired, *([_server] if _server is not None else [])]:
        server.forget()
    _retired.clear()
    _server = None


def _end() -> None:
    """Before the interpreter ends."""
    if _server is not None and multiprocessing.current_process().pid == os.getpid():
        _give_up()


atexit.register(_end)
os.register_at_fork(after_in_child=_forget)
