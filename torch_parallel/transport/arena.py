"""The memory that all processes of a run share: one anonymous file, inherited by every worker, mapped where needed.

Tensors could be shared one by one, each with a handle sent to each peer. One file for the whole run is simpler and
leaves nothing to go wrong: it has no name, so nothing is left in /dev/shm or the temporary folder whoever is killed;
it takes one descriptor for 64 MiB or more, not one per tensor and peer; and a rank computes where a peer's buffer lies
instead of being told. On Linux it is a memfd, which the 64 MB of a container's /dev/shm do not limit.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from multiprocessing.reduction import DupFd

import torch
from torch import Tensor

from torch_parallel.devices import free_memory_bytes

PAGE_BYTES = mmap.ALLOCATIONGRANULARITY
MAPPING_BYTES = 64 * 2**20
"""The file is mapped in steps of this size, since each mapping keeps a descriptor. It is address space, not memory."""


def page_aligned(nbytes: int) -> int:
    """The next multiple of the page size, at least one page: a mapping starts at a page and is never empty."""
    return max(1, -(-nbytes // PAGE_BYTES)) * PAGE_BYTES


class Arena:
    """An anonymous file that grows; `allocate` hands out addresses, `take` gets the memory, `map` makes it reachable.

    Pickled to a process being started, it arrives there as the same file with the same next free byte, so ranks that
    allocate in the same order agree on every address.
    """

    def __init__(self, fd: int, next_byte: int = 0) -> None:
        self.fd = fd
        self.next_byte = next_byte
        self._mappings: dict[int, mmap.mmap] = {}

    @classmethod
    def create(cls) -> Arena:
        if sys.platform == "linux":
            return cls(os.memfd_create("torch_parallel"))
        with tempfile.TemporaryFile(buffering=0) as file:  # already unlinked; we keep a descriptor of it
            return cls(os.dup(file.fileno()))

    def allocate(self, nbytes: int) -> int:
        """Reserves whole pages for `nbytes` bytes and returns their offset in the file."""
        size = page_aligned(nbytes)
        left = -self.next_byte % MAPPING_BYTES
        if size > left:  # it would reach beyond the mapping: it begins the next one
            self.next_byte += left
        offset = self.next_byte
        self.next_byte += size
        return offset

    def take(self, offset: int, nbytes: int) -> None:
        """Gets the memory for these bytes, for all processes: one of them calls it, before anybody writes there.

        Raises MemoryError where there is too little. Without this call it would be taken page by page as it is written,
        and the kernel would kill some process when there is no more.
        """
        free = free_memory_bytes()
        if free is not None and nbytes > free:
            raise MemoryError(f"{nbytes:,} bytes of shared memory are needed, and {free:,} bytes are free")
        if sys.platform == "linux":
            try:
                os.posix_fallocate(self.fd, offset, page_aligned(nbytes))
            except OSError as error:
                raise MemoryError(f"{nbytes:,} bytes of shared memory are not to be had: {error.strerror}") from error

    def map(self, offset: int, nbytes: int) -> memoryview:
        """The bytes [offset, offset + nbytes), as allocated. They read as zero until somebody writes them."""
        start = offset - offset % MAPPING_BYTES
        mapping = self._mapping(start, max(MAPPING_BYTES, offset - start + page_aligned(nbytes)))
        return memoryview(mapping)[offset - start : offset - start + nbytes]

    def _mapping(self, start: int, nbytes: int) -> mmap.mmap:
        """The common mapping of what lies there, or one of its own for what is larger: that is freed with its user."""
        if nbytes == MAPPING_BYTES and start in self._mappings:
            return self._mappings[start]
        self._grow_to(start + nbytes)
        mapping = mmap.mmap(self.fd, nbytes, offset=start)
        if nbytes == MAPPING_BYTES:
            self._mappings[start] = mapping
        return mapping

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor on the bytes from `offset` on. It keeps the mapping alive."""
        numel = torch.Size(shape).numel()
        if numel == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(self.map(offset, numel * dtype.itemsize), dtype=dtype, count=numel).view(shape)

    def store(self, tensor: Tensor) -> int:
        """Copies a tensor into new pages and returns their offset."""
        nbytes = tensor.numel() * tensor.element_size()
        offset = self.allocate(nbytes)
        self.take(offset, nbytes)
        self.tensor(offset, tuple(tensor.shape), tensor.dtype).copy_(tensor)
        return offset

    def close(self) -> None:
        """Gives back the descriptor; what is mapped stays until it is dropped."""
        self._mappings.clear()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _grow_to(self, end: int) -> None:
        if sys.platform == "linux":
            os.posix_fallocate(self.fd, end - 1, 1)  # never shrinks the file, so ranks may grow it at the same time
        elif os.fstat(self.fd).st_size < end:
            os.ftruncate(self.fd, end)

    def __reduce__(self) -> tuple[object, ...]:
        return _arrive, (DupFd(self.fd), self.next_byte)


def _arrive(fd: object, next_byte: int) -> Arena:
    return Arena(fd.detach(), next_byte)  # type: ignore[attr-defined]
