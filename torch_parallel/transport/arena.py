"""The memory that all processes of a run share: one anonymous file, inherited by every worker, mapped where needed.

Tensors could be shared one by one, each with a handle sent to each peer. One file for the whole run is simpler and
leaves nothing to go wrong: it has no name, so nothing is left in /dev/shm or the temporary folder whoever is killed;
it takes one descriptor per mapping, not one per tensor and peer; and a rank computes where a peer's buffer lies instead
of being told. On Linux it is a memfd, which the 64 MB of a container's /dev/shm do not limit.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from multiprocessing.reduction import DupFd

import torch
from torch import Tensor

PAGE_BYTES = mmap.ALLOCATIONGRANULARITY


def page_aligned(nbytes: int) -> int:
    """The next multiple of the page size, at least one page: a mapping starts at a page and is never empty."""
    return max(1, -(-nbytes // PAGE_BYTES)) * PAGE_BYTES


class Arena:
    """An anonymous file that grows; `allocate` hands out pages, `map` makes them a tensor.

    Pickled to a process being started, it arrives there as the same file with the same next free byte, so ranks that
    allocate in the same order agree on every address.
    """

    def __init__(self, fd: int, next_byte: int = 0) -> None:
        self.fd = fd
        self.next_byte = next_byte

    @classmethod
    def create(cls) -> Arena:
        if sys.platform == "linux":
            return cls(os.memfd_create("torch_parallel"))
        with tempfile.TemporaryFile(buffering=0) as file:  # already unlinked; we keep a descriptor of it
            return cls(os.dup(file.fileno()))

    def allocate(self, nbytes: int) -> int:
        """Reserves whole pages for `nbytes` bytes and returns their offset in the file."""
        offset = self.next_byte
        self.next_byte += page_aligned(nbytes)
        return offset

    def map(self, offset: int, nbytes: int) -> mmap.mmap:
        """The bytes [offset, offset + nbytes) as memory. They read as zero until somebody writes them.

        Raises MemoryError where the machine has not that much left.
        """
        try:
            self._grow_to(offset + page_aligned(nbytes), offset)
            return mmap.mmap(self.fd, page_aligned(nbytes), offset=offset)
        except OSError as error:
            raise MemoryError(f"{nbytes:,} bytes of shared memory are not to be had ({error.strerror})") from error

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor on the bytes from `offset` on. It keeps the mapping alive."""
        numel = torch.Size(shape).numel()
        if numel == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self.map(offset, numel * dtype.itemsize), dtype=dtype, count=numel).view(shape)

    def store(self, tensor: Tensor) -> int:
        """Copies a tensor into new pages and returns their offset."""
        offset = self.allocate(tensor.numel() * tensor.element_size())
        self.tensor(offset, tuple(tensor.shape), tensor.dtype).copy_(tensor)
        return offset

    def close(self) -> None:
        """Gives back the descriptor; what is mapped stays until it is dropped."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _grow_to(self, end: int, start: int) -> None:
        if sys.platform == "linux":
            # Takes the pages now: memory that is missing is an error here rather than a SIGBUS at some later write.
            # It never shrinks the file, so ranks may grow it at the same time.
            os.posix_fallocate(self.fd, start, end - start)
        elif os.fstat(self.fd).st_size < end:
            os.ftruncate(self.fd, end)

    def __reduce__(self) -> tuple[object, ...]:
        return _arrive, (DupFd(self.fd), self.next_byte)


def _arrive(fd: object, next_byte: int) -> Arena:
    return Arena(fd.detach(), next_byte)  # type: ignore[attr-defined]
