"""What a worker function is given: who this process is, and collective operations on ordinary tensors."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_parallel.collectives import ALL_REDUCE, Collective, broadcast_from
from torch_parallel.mailbox import Outbox
from torch_parallel.status import StatusReporter
from torch_parallel.transport.base import SharedBuffer, Transport

_REMEMBERED_SIZES = 64


@dataclass
class Communicator:
    """One rank of a run. Ranks below `server_count` are servers; the others are workers, numbered from 0."""

    transport: Transport
    status: StatusReporter
    outbox: Outbox
    server_count: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    shared: dict[str, Tensor] = field(default_factory=dict)
    """The tensors that were given to `launch(..., shared=...)`: one copy in the memory of all processes."""
    host_transport: Transport | None = None
    """Of host memory, where `transport` is one of GPUs; None where `transport` itself serves."""
    _scratch: dict[tuple[str, torch.dtype], SharedBuffer] = field(default_factory=dict)
    _narrowed: dict[tuple[str, torch.dtype, int], SharedBuffer] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def world_size(self) -> int:
        return self.transport.world_size

    @property
    def worker_count(self) -> int:
        return self.world_size - self.server_count

    @property
    def worker_index(self) -> int | None:
        """0 .. worker_count - 1; None on a server."""
        return self.rank - self.server_count if self.rank >= self.server_count else None

    @property
    def is_server(self) -> bool:
        return self.rank < self.server_count

    @property
    def first_worker(self) -> int:
        """The lowest rank that trains."""
        return self.server_count

    def all_reduce(self, tensor: Tensor, algorithm: str = "ring") -> Tensor:
        """Replaces `tensor`, of any shape and device, by its sum over all ranks, the same bits on each; returns it.

        All ranks call it with tensors of one size and dtype. Raises ValueError for an unknown algorithm, TransportError
        where the ranks' tensors differ or a peer does not come. Where the same tensor is reduced again and again, a
        buffer from `share` saves the two copies.
        """
        if algorithm not in ALL_REDUCE:
            raise ValueError(f"unknown algorithm {algorithm!r}: choose from {', '.join(ALL_REDUCE)}")
        return self._perform(ALL_REDUCE[algorithm], tensor, "all_reduce")

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Replaces `tensor` by that of rank `root`; returns it. Raises as `all_reduce` does."""
        if not 0 <= root < self.world_size:
            raise ValueError(f"root {root} is not a rank: ranks are 0..{self.world_size - 1}")
        return self._perform(broadcast_from(root), tensor, f"broadcast from rank {root}")

    def barrier(self) -> None:
        """Returns once every rank has called it."""
        self.transport.agree("meet at a barrier")

    def share(self, numel: int, dtype: torch.dtype = torch.float32) -> SharedBuffer:
        """A new buffer [numel] of every rank that peers can read, on `device` where GPUs reach each other's memory.

        See `Transport.share`.
        """
        return self.transport.share(numel, dtype)

    def all_ranks(self, mine: Tensor) -> Tensor:
        """Everybody's tensor, [world_size, *mine.shape], by rank, on all ranks; all have one shape and dtype."""
        table = torch.zeros(self.world_size, *mine.shape, dtype=mine.dtype)
        table[self.rank] = mine
        return self.all_reduce(table)

    def gather(self, thing: Any, root: int = 0) -> list[Any] | None:
        """Every rank's picklable `thing`, by rank, on `root`; None elsewhere. All ranks call it."""
        data = pickle.dumps(thing)
        # Everybody has left what came before this exchange, so nobody uses the buffer of bytes any more.
        sizes = self.all_ranks(torch.tensor(len(data)))
        host = self._transport_for("cpu")
        buffer = self._buffer("cpu", int(sizes.max()), torch.uint8)
        buffer.local[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        host.agree("read the objects gathered")
        if self.rank != root:
            return None
        return [
            pickle.loads(part[:size].numpy().tobytes()) for part, size in zip(buffer.parts, sizes.tolist(), strict=True)
        ]

    def report(self, message: Any) -> None:
        """Sends a picklable message to `on_message` of the launcher."""
        self.status.beat()
        self.outbox.send("message", message)

    def _perform(self, collective: Collective, tensor: Tensor, verb: str) -> Tensor:
        if self.world_size == 1:
            return tensor
        dtype, kind = tensor.dtype, tensor.device.type
        transport = self._transport_for(kind)
        # Everybody has left the previous operation when all have come to this one: the buffer may be filled again.
        transport.compare(f"{verb} {tensor.numel()} elements of {dtype} by {collective.name}")
        buffer = self._buffer(kind, tensor.numel(), dtype)
        with torch.no_grad():
            buffer.local.copy_(tensor.reshape(-1))
            transport.perform(collective, buffer, verb)
            tensor.copy_(buffer.local.view(tensor.shape))
        return tensor

    def _transport_for(self, device_type: str) -> Transport:
        """The one whose buffers lie where the tensor does. The host's is used once the GPU has caught up."""
        if device_type != "cpu" or self.host_transport is None:
            return self.transport
        self.transport.synchronize()
        return self.host_transport

    def _buffer(self, device_type: str, numel: int, dtype: torch.dtype) -> SharedBuffer:
        """The first `numel` elements of a buffer that doubles when it must; its views are remembered."""
        scratch = self._scratch.get((device_type, dtype))
        if scratch is None or scratch.local.numel() < numel:
            capacity = max(1024, 1 << max(numel - 1, 0).bit_length())
            scratch = self._transport_for(device_type).share(capacity, dtype)
            self._scratch[device_type, dtype] = scratch
            self._narrowed = {key: each for key, each in self._narrowed.items() if key[:2] != (device_type, dtype)}
        if (device_type, dtype, numel) not in self._narrowed:
            if len(self._narrowed) >= _REMEMBERED_SIZES:
                self._narrowed.clear()
            self._narrowed[device_type, dtype, numel] = scratch.narrow(numel)
        return self._narrowed[device_type, dtype, numel]
