"""Gives every step its samples, on the device that trains: the same samples, in the same order, with the same bits.

On the CPU they are indexed where they lie, in memory that all ranks have in common. A GPU keeps a copy of data that is
small, and of the epoch's order. Of larger data, the next step's batch is collected and copied while the GPU computes:

  host        collects 2 | collects 3 |  collects 4 ...        pinned memory, two buffers in turn: batch 4 is written
                                                               over batch 2, of which the copy must be done
  copying                | copy 2 |   | copy 3 |               a stream of its own
  computing   step 1 ........ | step 2 ........ | step 3 ...   each waits for its copy
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_parallel.workloads.tree import Tree, leaves, nbytes, rebuilt, rows, to

RESIDENT_BYTES = 2 << 30
RESIDENT_PART = 4
"""Data stays on a GPU if it takes at most so many bytes, and at most one part in so many of the free memory."""


class Feeder:
    """Feeds from where the `samples`, a tree of tensors [n, ...], lie, and waits for every copy to the device."""

    def __init__(self, samples: Tree, device: torch.device) -> None:
        self.samples, self.device = samples, device
        self.leaves: list[Tensor] = list(leaves(samples).values())

    @property
    def index_device(self) -> torch.device:
        """Where the samples are indexed, so where their indices had better be from the start."""
        return self.leaves[0].device

    def feed(self, indices: Tensor, parts: int = 1) -> Iterator[tuple[Tree, int]]:
        """The samples at `indices`, int64 [b], as `parts` micro-batches on the device, and how many each has.

        They are cut as `tensor_split` cuts; some may be empty, and all are if b is 0.
        """
        for part in indices.tensor_split(parts):
            yield rows(self.samples, part, self.device), len(part)

    def prefetch(self, indices: Tensor) -> None:
        """Begins to fetch what the next `feed` is going to ask for, by the same tensor; a hint, which may be ignored.

        Call it when all work of the present step has been given to the GPU, which then computes meanwhile.
        """


def make_feeder(samples: Tree, device: torch.device, trains: bool = True) -> Feeder:
    """The fastest feeder for a rank on `device` that has all training samples in the host's memory.

    A rank that never `trains`, a server, leaves the memory of its GPU alone.
    """
    if device.type != "cuda" or not trains:
        return Feeder(samples, device)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    if stays_on_gpu(nbytes(samples), free_bytes):
        return ResidentFeeder(samples, device)
    return PrefetchingFeeder(samples, device, CopyStream(device))


def stays_on_gpu(data_bytes: int, free_bytes: int) -> bool:
    """Whether data of that size is copied to a GPU with so much free memory, of which training needs the most."""
    return data_bytes <= min(RESIDENT_BYTES, free_bytes // RESIDENT_PART)


class ResidentFeeder(Feeder):
    """The data lies on the device, in a copy of this rank's own."""

    def __init__(self, samples: Tree, device: torch.device) -> None:
        super().__init__(to(samples, device), device)


class PrefetchingFeeder(Feeder):
    """Copies one batch ahead. See the module's docstring."""

    def __init__(self, samples: Tree, device: torch.device, copies: CopyStream) -> None:
        super().__init__(samples, device)
        self._copies = copies
        self._buffers = [_Buffer([leaf[:0] for leaf in self.leaves]) for _ in range(2)]
        self._ahead: _Batch | None = None

    def feed(self, indices: Tensor, parts: int = 1) -> Iterator[tuple[Tree, int]]:
        batch, self._ahead = self._ahead, None
        if batch is None or batch.indices is not indices:  # the first step, or nobody knew what comes next
            batch = self._begin(indices)
        self._copies.hand_over(batch.tensors, batch.copied)
        for micro_batch in zip(*(tensor.tensor_split(parts) for tensor in batch.tensors), strict=True):
            yield rebuilt(self.samples, list(micro_batch)), len(micro_batch[0])

    def prefetch(self, indices: Tensor) -> None:
        self._ahead = self._begin(indices)

    def _begin(self, indices: Tensor) -> _Batch:
        self._buffers.reverse()
        tensors = self._collect(indices, self._buffers[0])
        copied, event = self._copies.begin(tensors)
        self._buffers[0].copied = event
        return _Batch(indices, copied, event)

    def _collect(self, indices: Tensor, buffer: _Buffer) -> list[Tensor]:
        """The samples, in the buffer as soon as the copy of what was there before is done."""
        if buffer.copied is not None:
            buffer.copied.synchronize()
        count = len(indices)
        if len(buffer.tensors[0]) < count:
            buffer.tensors = [self._copies.buffer(count, leaf) for leaf in self.leaves]
        for leaf, tensor in zip(self.leaves, buffer.tensors, strict=True):
            # index_select: of large images, it takes a tenth of the time of leaf[indices]
            torch.index_select(leaf, 0, indices, out=tensor[:count])
        return [tensor[:count] for tensor in buffer.tensors]


@dataclass
class _Buffer:
    """Host memory for one batch, and what says that the last copy from it is done."""

    tensors: list[Tensor]
    copied: Any = None


@dataclass
class _Batch:
    indices: Tensor
    tensors: list[Tensor]  # on the device once they are `copied`
    copied: Any


class CopyStream:
    """Copies from pinned host memory to a GPU, beside what the GPU computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def buffer(self, count: int, like: Tensor) -> Tensor:
        """Pinned memory for `count` rows of `like`: from other memory the host would wait for each copy."""
        return torch.empty((count, *like.shape[1:]), dtype=like.dtype, pin_memory=True, device="cpu")

    def begin(self, tensors: list[Tensor]) -> tuple[list[Tensor], torch.cuda.Event]:
        """Copies on the GPU, begun, and the event that says that they are done: read nothing, and write into
        `tensors` nothing, before."""
        with torch.cuda.stream(self._stream):
            copied = [tensor.to(self._device, non_blocking=True) for tensor in tensors]
            return copied, self._stream.record_event()

    def hand_over(self, tensors: list[Tensor], event: torch.cuda.Event) -> None:
        """From here on the stream that computes may read them: it waits for the event, and the host does not."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(stream)  # else a later copy gets this memory while it is still being read
