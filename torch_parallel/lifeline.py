"""Has the kernel send a process a signal when the other end of a pipe closes: when whoever held that end is gone.

Needs only the standard library: the fork server uses it before it imports anything else, so that it ends with its
launcher even half-way through importing torch.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal


def end_with_pipe(read_fd: int) -> bool:
    """SIGKILL for this process once the pipe's other end closes; False where the kernel cannot do that.

    Works even while C code holds the interpreter. Nobody may write into the pipe: that would count as closing it.
    """
    if not _signal_at_close(read_fd, signal.SIGKILL):
        return False
    if is_closed(read_fd):
        os._exit(1)  # it was closed before the watch began
    return True


def wake_with_pipe(read_fd: int) -> None:
    """SIGCONT instead, from now on: a process that is stopped goes on, and can look for itself who is gone."""
    _signal_at_close(read_fd, signal.SIGCONT)


def is_closed(read_fd: int) -> bool:
    """Whether the pipe's other end is closed."""
    poller = select.poll()
    poller.register(read_fd, 0)  # hang-ups are always reported
    return bool(poller.poll(0))


def _signal_at_close(read_fd: int, number: int) -> bool:
    if not hasattr(fcntl, "F_SETSIG"):
        return False
    fcntl.fcntl(read_fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(read_fd, fcntl.F_SETSIG, number)
    fcntl.fcntl(read_fd, fcntl.F_SETFL, fcntl.fcntl(read_fd, fcntl.F_GETFL) | os.O_ASYNC)
    return True
