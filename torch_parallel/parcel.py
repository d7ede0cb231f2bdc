"""A pickled object and the open files that it names, sent to another process through a socket.

Whatever pickles its descriptors as multiprocessing's `DupFd` can travel so; that serves multiprocessing's own ways to
start a process as well.
"""

from __future__ import annotations

import errno
import os
import pickle
import socket
import struct
from multiprocessing import context
from multiprocessing.reduction import DupFd
from typing import Any

_HEADER = struct.Struct("<QI")  # bytes of the pickle, number of descriptors
_AT_ONCE = 250
"""The kernel takes at most 253 descriptors with one message."""

_arrived: list[int] = []
"""Those of the parcel that is being opened. A worker opens one in its life."""


class _Packing:
    """What multiprocessing's `DupFd` asks for when a process is being started: here it only notes the descriptors."""

    def __init__(self) -> None:
        self.fds: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        self.fds.append(fd)
        return len(self.fds) - 1

    @staticmethod
    def DupFd(index: int) -> _Packed:
        return _Packed(index)


class _Packed:
    """A descriptor inside a parcel, by its number there."""

    def __init__(self, index: int) -> None:
        self.index = index

    def detach(self) -> int:
        return _arrived[self.index]


class Descriptor:
    """An open file of this process; in the other one it arrives as the number that it has there."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[object, ...]:
        return _detached, (DupFd(self.fd),)


def _detached(fd: Any) -> int:
    return int(fd.detach())


def pack(thing: Any) -> tuple[bytes, list[int]]:
    """The pickle of `thing`, and the descriptors that must travel with it. Raises what `pickle` raises."""
    packing, before = _Packing(), context.get_spawning_popen()
    context.set_spawning_popen(packing)  # type: ignore[arg-type]
    try:
        return pickle.dumps(thing), packing.fds
    finally:
        context.set_spawning_popen(before)


def send(channel: socket.socket, data: bytes, fds: list[int]) -> None:
    """Blocks until all is sent, or for the socket's timeout. Raises OSError."""
    channel.sendall(_HEADER.pack(len(data), len(fds)))
    for first in range(0, len(fds), _AT_ONCE):
        socket.send_fds(channel, [b"\0"], fds[first : first + _AT_ONCE])
    channel.sendall(data)


def receive(channel: socket.socket) -> Any:
    """The object, its descriptors open in this process. Raises EOFError where the sender has gone, and OSError."""
    size, count = _HEADER.unpack(_exactly(channel, _HEADER.size))
    _arrived.clear()
    while len(_arrived) < count:
        wanted = min(_AT_ONCE, count - len(_arrived))
        byte, fds, _, _ = socket.recv_fds(channel, 1, wanted)
        if not byte:
            raise EOFError
        _arrived.extend(fds)
        if len(fds) < wanted:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return pickle.loads(_exactly(channel, size))


def _exactly(channel: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    left = memoryview(data)
    while left:
        count = channel.recv_into(left)
        if not count:
            raise EOFError
        left = left[count:]
    return data
