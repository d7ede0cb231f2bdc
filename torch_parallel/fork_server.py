"""Starts the process from which workers are forked, as early as possible: it then imports torch while we do.

Workers forked from a server that has torch loaded start in about 0.03 s each, and the server has never run autograd,
which a forked child of a process that has would hang in. Import this module and call `start()` before anything that
imports torch; it needs only the standard library.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import signal
import sys
from multiprocessing.context import BaseContext


def start_method() -> str:
    """forkserver on Linux; spawn elsewhere, where system libraries do not survive a fork."""
    return "forkserver" if sys.platform == "linux" else "spawn"


def start() -> None:
    """Makes sure that the server runs, where there is one. Returns at once; the server imports in its own time."""
    if start_method() != "forkserver":
        return
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch_parallel.worker"])
    # Ctrl-C reaches every process of the terminal. Only the launcher acts on it; the server and the workers, which
    # inherit this mask, never see it.
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def context() -> BaseContext:
    """The multiprocessing context that workers are started from, with its server running."""
    start()
    return multiprocessing.get_context(start_method())
