"""Messages from a worker to the launcher: whole or not at all, and never a wait for a worker that stops half-way."""

from __future__ import annotations

import os
import struct
import threading
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

from torch_parallel import pickling

_LENGTH = struct.Struct("<Q")


class Failure(NamedTuple):
    """What a worker has to say of its end."""

    headline: str
    traceback: str
    """Empty where the headline says all: what a user's numbers have brought about is in no line of code."""
    secondhand: bool
    """Whether it may only be what another rank's failure looks like from this one."""
    says_nothing_new: bool = False
    """Whether it says only that another rank has failed."""


class CannotBeSent(TypeError):
    """What a worker returns or reports, and what cannot leave its process. One line, with the remedy."""


WORDS = {"result": ("result of the worker function", "return"), "message": ("message", "report")}


class Outbox:
    """The worker's end. `send` blocks while the pipe is full; the launcher reads all the time."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.last_error = ""
        """The headline of the error that was sent last."""
        self._one_at_a_time = threading.Lock()  # a worker may report from any of its threads

    def send(self, kind: str, content: Any) -> None:
        """Raises CannotBeSent for content of which `pickle` cannot make bytes; then nothing has been written."""
        if kind == "error":
            self.last_error = content.headline
        try:
            body = pickling.dumps((kind, content))
        except Exception as error:
            what, verb = WORDS.get(kind, (kind, "send"))
            why = " ".join(f"{type(error).__name__}: {error}".split())
            raise CannotBeSent(
                f"the {what}, of type {type(content).__name__}, cannot be sent to the launcher ({why}): {verb} "
                "tensors, numbers and texts, and containers of them"
            ) from error
        unsent = memoryview(_LENGTH.pack(len(body)) + body)
        with self._one_at_a_time:
            while unsent:
                unsent = unsent[os.write(self.fd, unsent) :]

    def __reduce__(self) -> tuple[object, ...]:
        return _arrive, (DupFd(self.fd),)


def _arrive(fd: object) -> Outbox:
    return Outbox(fd.detach())  # type: ignore[attr-defined]


class Inbox:
    """The launcher's end: takes what is there and returns the messages that are complete."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._received = bytearray()
        os.set_blocking(fd, False)

    def receive(self) -> list[tuple[str, Any]]:
        """All messages that have arrived whole since the last call; never waits.

        Raises whatever `pickle` raises for content that can be sent but not be read.
        """
        self._fill()
        messages = []
        while len(self._received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                break
            messages.append(pickling.loads(self._received[_LENGTH.size : end]))
            del self._received[:end]
        return messages

    def close(self) -> None:
        """Closing twice does no harm."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _fill(self) -> None:
        while True:
            try:
                piece = os.read(self.fd, 1 << 20)
            except BlockingIOError:
                return
            if not piece:
                return
            self._received += piece


def mailbox() -> tuple[Inbox, Outbox]:
    """Both ends of a new one."""
    read_fd, write_fd = os.pipe()
    return Inbox(read_fd), Outbox(write_fd)
