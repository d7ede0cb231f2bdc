"""Has the kernel end a process when the other end of a pipe closes, that is, when whoever held that end is gone.

Needs only the standard library. In the fork server this module is the first to be imported, so that the server ends
with its launcher even half-way through importing torch.
"""

from __future__ import annotations

import fcntl
import multiprocessing.forkserver
import os
import re
import select
import signal
import sys


def end_with_pipe(read_fd: int) -> bool:
    """SIGKILL for this process once the pipe's other end closes; False where the kernel cannot do that.

    Works even while C code holds the interpreter. Nobody may write into the pipe: that would count as closing it.
    """
    if not hasattr(fcntl, "F_SETSIG"):
        return False
    fcntl.fcntl(read_fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(read_fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(read_fd, fcntl.F_SETFL, fcntl.fcntl(read_fd, fcntl.F_GETFL) | os.O_ASYNC)
    poller = select.poll()
    poller.register(read_fd, 0)  # hang-ups are always reported
    if poller.poll(0):
        os._exit(1)  # it was closed before the watch began
    return True


def _fork_server_pipe() -> int | None:
    """In the fork server, the pipe that the launcher and the workers hold open: its command line tells which."""
    if multiprocessing.forkserver.get_inherited_fds() is not None:
        return None  # one of its children, which have the same command line
    call = re.search(r"multiprocessing\.forkserver import main; main\(\d+, (\d+),", " ".join(sys.orig_argv))
    return int(call[1]) if call else None


_pipe = _fork_server_pipe()
if _pipe is not None:
    end_with_pipe(_pipe)
