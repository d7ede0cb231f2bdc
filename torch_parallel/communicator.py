"""What a worker function is given: who this process is, and collective operations on ordinary tensors.

All ranks make the same collective calls, in the same order. Each call is compared over the ranks by its number, what
it is, and the size and type of its tensors: a rank that calls something else, or leaves a call out, is found at once.
Calls that are alike in all of that, but mean different things, only a `name` tells apart:

    communicator.all_reduce(loss, name="loss")
    communicator.all_reduce(accuracy, name="accuracy")     # a rank that leaves the first one out raises TransportError
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from torch_parallel import pickling
from torch_parallel.collectives import (
    ALL_REDUCE,
    COLLECTIVES,
    HIERARCHICAL,
    Collective,
    broadcast_from,
    gather_to,
    reduce_to,
    scatter_from,
)
from torch_parallel.collectives.registry import is_all_reduce
from torch_parallel.collectives.schedule import Nodes
from torch_parallel.mailbox import Outbox
from torch_parallel.status import StatusReporter
from torch_parallel.transport.base import Transport, TransportError
from torch_parallel.transport.buffer import SharedBuffer

_REMEMBERED_SIZES = 64
GATHER_BYTES = 4 << 20
"""The largest piece of an object that is gathered; so large a buffer each rank keeps for it."""


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
    deadline_s: float = 300.0
    """How long a wait may take."""
    nodes: Nodes = ()
    """The node on which each rank stands; empty where all stand on one."""
    store: Store | None = None
    """At which the processes have met, where others have started them."""
    nics: tuple[str, ...] = ()
    """The network cards by which nodes exchange, where they are named."""
    ending: Callable[[bool], None] | None = None
    """Gives back what a rank holds that others have started, told whether it ends by an error; None else."""
    _in_call: threading.Lock = field(default_factory=threading.Lock)
    _scratch: dict[tuple[str, torch.dtype], SharedBuffer] = field(default_factory=dict)
    _narrowed: dict[tuple[str, torch.dtype, int], SharedBuffer] = field(default_factory=dict)
    _last_stream: torch.cuda.Stream | None = None

    def close(self) -> None:
        """Tells the others that this rank makes no more calls, and gives back what it holds, where `join` has made it:
        memory, connections and threads. All ranks call it, or their programs end. A worker of `launch` need not."""
        self._close(has_raised=False)

    def _close(self, has_raised: bool) -> None:
        ending, self.ending = self.ending, None
        if ending is not None:
            ending(has_raised)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        self._close(has_raised=kind is not None)

    def placed(self, collective: Collective) -> Collective:
        """The collective for ranks that stand where these do."""
        if collective.on_nodes is None:
            return collective
        return collective.placed(self.nodes or (0,) * self.world_size)

    @property
    def through_host(self) -> Transport:
        """The transport whose buffers lie in the host's memory, whatever `device` is."""
        return self.host_transport or self.transport

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

    def all_reduce(self, tensor: Tensor, algorithm: str | Collective = "ring", *, name: str | None = None) -> Tensor:
        """Replaces `tensor`, of any shape and device, by its sum over all ranks, the same bits on each; returns it.

        `algorithm` is the name of one of `collectives.ALL_REDUCE`, of one of `collectives.HIERARCHICAL`, which goes by
        the nodes on which the ranks stand, or a collective of your own. All ranks call it with
        tensors of one size and dtype and, as all collectives here, with the same `name`: what this call is, compared
        over the ranks. Raises ValueError for an unknown algorithm and for a collective that is no all-reduce,
        ProofError for a wrong one, TransportError where the ranks' calls or tensors differ or a peer does not come.
        Where the same tensor is reduced again and again, a buffer from `share` saves the two copies.
        """
        if not isinstance(algorithm, Collective):
            if algorithm not in ALL_REDUCE | HIERARCHICAL:
                known = ", ".join((*ALL_REDUCE, *HIERARCHICAL))
                raise ValueError(f"unknown algorithm {algorithm!r}: choose from {known}")
            algorithm = self.placed(COLLECTIVES[algorithm])
        elif not is_all_reduce(algorithm, self.world_size):
            raise ValueError(f"{algorithm.name} is no all-reduce: it does not promise the sum of all to every rank")
        return self._perform(algorithm, tensor, "all_reduce", name)

    def broadcast(self, tensor: Tensor, root: int = 0, *, name: str | None = None) -> Tensor:
        """Replaces `tensor` by that of rank `root`; returns it. Raises as `all_reduce` does."""
        self._check_root(root)
        return self._perform(broadcast_from(root), tensor, f"broadcast from rank {root}", name)

    def reduce(self, tensor: Tensor, root: int = 0, *, name: str | None = None) -> Tensor:
        """Replaces `tensor` on rank `root` by its sum over all ranks, added in rank order; returns it.

        Elsewhere it stays as it is. Raises as `all_reduce` does, and ValueError for a root that is no rank.
        """
        self._check_root(root)
        return self._perform(reduce_to(root), tensor, f"reduce to rank {root}", name)

    def gather_tensor(self, tensor: Tensor, root: int = 0, *, name: str | None = None) -> Tensor | None:
        """Everybody's tensor, [world_size, *tensor.shape], by rank, on `root`; None elsewhere. Raises as `reduce`."""
        self._check_root(root)
        table = self._perform(gather_to(root), self._own_row(tensor), f"gather to rank {root}", name)
        return table if self.rank == root else None

    def scatter(self, table: Tensor, root: int = 0, *, name: str | None = None) -> Tensor:
        """This rank's row, [*shape], of rank `root`'s table [world_size, *shape].

        All ranks pass a table of that shape; what it holds counts on `root` only. Raises as `reduce` does, and
        ValueError for a table of another length.
        """
        self._check_root(root)
        table = self._copied(table)
        return self._perform(scatter_from(root), table, f"scatter from rank {root}", name)[self.rank]

    def all_gather(self, tensor: Tensor, *, name: str | None = None) -> Tensor:
        """Everybody's tensor, [world_size, *tensor.shape], by rank, on all ranks. Raises TransportError as others."""
        return self._perform(COLLECTIVES["direct_all_gather"], self._own_row(tensor), "all_gather", name)

    def reduce_scatter(self, table: Tensor, *, name: str | None = None) -> Tensor:
        """The sum over all ranks of this rank's row, [*shape], of everybody's table [world_size, *shape].

        Raises ValueError for a table of another length, TransportError as others do.
        """
        table = self._copied(table)
        return self._perform(COLLECTIVES["direct_reduce_scatter"], table, "reduce_scatter", name)[self.rank]

    def all_to_all(self, table: Tensor, *, name: str | None = None) -> Tensor:
        """In row k what rank k's table holds in this rank's row: [world_size, *shape], as everybody's table.

        Raises ValueError for a table of another length, TransportError as others do.
        """
        return self._perform(COLLECTIVES["all_to_all"], self._copied(table), "all_to_all", name)

    def barrier(self, *, name: str | None = None) -> None:
        """Returns once every rank has called it."""
        with self._by_one_thread():
            self.transport.agree("meet at a barrier" + _named(name))

    def share(self, numel: int, dtype: torch.dtype = torch.float32) -> SharedBuffer:
        """A new buffer [numel] of every rank that peers can read, on `device` where GPUs reach each other's memory.

        See `Transport.share`.
        """
        return self.transport.share(numel, dtype)

    def all_ranks(self, mine: Tensor, *, name: str | None = None) -> Tensor:
        """`all_gather`, by its older name."""
        return self.all_gather(mine, name=name)

    def gather(self, thing: Any, root: int = 0, *, name: str | None = None) -> list[Any] | None:
        """Every rank's picklable `thing`, by rank, on `root`; None elsewhere. All ranks call it.

        Things of any size go through a buffer of at most GATHER_BYTES on each rank, one piece after the other.
        """
        data = pickling.dumps(thing)
        # Everybody has left what came before this exchange, so nobody uses the buffer of bytes any more.
        own_size = self._own_row(torch.tensor(len(data), dtype=torch.int64, device="cpu"))
        verb = f"gather objects to rank {root}, of sizes in"
        sizes = self._perform(COLLECTIVES["direct_all_gather"], own_size, verb, name).tolist()
        received = [bytearray() for _ in sizes]
        for start in range(0, max(sizes), GATHER_BYTES):
            self._gather_piece(data[start : start + GATHER_BYTES], [size - start for size in sizes], received, root)
        return [pickling.loads(each) for each in received] if self.rank == root else None

    def _gather_piece(self, piece: bytes, left: list[int], received: list[bytearray], root: int) -> None:
        """Adds every rank's piece to what `root` has received, of which so many bytes were `left` before."""
        host = self._transport_for("cpu")
        buffer = self._buffer("cpu", min(max(left), GATHER_BYTES), torch.uint8)
        purpose = "the objects gathered"
        if self.rank == root:
            received[root] += piece
            for source, size in enumerate(left):
                if source != root and size > 0:
                    part = buffer.narrow(min(size, GATHER_BYTES))
                    host.hear(source, purpose)
                    host.read(part, source, add=False, purpose=purpose)
                    received[source] += part.local.numpy().tobytes()
        elif piece:
            part = buffer.narrow(len(piece))
            part.local.copy_(torch.frombuffer(bytearray(piece), dtype=torch.uint8))
            host.tell(root, pushed=[part])
        if max(left) > GATHER_BYTES:
            host.agree("write the next piece of the objects gathered", numbered=False)

    def broadcast_object(self, thing: Any, root: int = 0, *, name: str | None = None) -> Any:
        """Rank `root`'s picklable `thing`, on all ranks. All ranks call it; what the others pass does not count."""
        self._check_root(root)
        if self.world_size == 1:
            return thing
        data = pickling.dumps(thing) if self.rank == root else b""
        size = int(self.broadcast(torch.tensor(len(data), dtype=torch.int64, device="cpu"), root, name=name))
        flat = torch.zeros(size, dtype=torch.uint8, device="cpu")
        if self.rank == root:
            flat.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.broadcast(flat, root, name=name)
        return thing if self.rank == root else pickling.loads(flat.numpy().tobytes())

    @contextmanager
    def long_work(self, doing: str) -> Iterator[None]:
        """Around work of this rank that may take longer than the deadline while others wait for it:

            with communicator.long_work("reading the data"):
                ...

        As long as this process is alive in it, nobody takes it for stopped, neither the launcher nor the peers that
        wait for this rank. `doing` says what the rank does, in errors. Between GPUs, peers are to wait at a `barrier`
        behind it: what streams wait for has the deadline all the same.
        """
        with self.status.at_work(doing):
            yield

    def report(self, message: Any) -> None:
        """Sends a picklable message to `on_message` of the launcher."""
        self.status.beat()
        self.outbox.send("message", message)

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.world_size:
            raise ValueError(f"root {root} is not a rank: ranks are 0..{self.world_size - 1}")

    def _own_row(self, tensor: Tensor) -> Tensor:
        """A table with a row for each rank, of which this rank's is filled."""
        table = tensor.new_zeros(self.world_size, *tensor.shape)
        table[self.rank] = tensor.detach()
        return table

    def _copied(self, table: Tensor) -> Tensor:
        if table.dim() == 0 or len(table) != self.world_size:
            raise ValueError(
                f"a table of shape {list(table.shape)} has not one row for each of {self.world_size} ranks"
            )
        return table.detach().clone()

    def _perform(self, collective: Collective, tensor: Tensor, verb: str, name: str | None) -> Tensor:
        if self.world_size == 1:
            return tensor
        with self._by_one_thread():
            return self._performed(collective, tensor, verb, name)

    @contextmanager
    def _by_one_thread(self) -> Iterator[None]:
        """Raises TransportError where another thread is in a call: peers could not tell which of the two is meant."""
        if not self._in_call.acquire(blocking=False):
            text = f"rank {self.rank}: two threads are in calls of one communicator; let them take turns, by a lock"
            raise TransportError(text, secondhand=False)
        try:
            yield
        finally:
            self._in_call.release()

    def _performed(self, collective: Collective, tensor: Tensor, verb: str, name: str | None) -> Tensor:
        dtype, kind = tensor.dtype, tensor.device.type
        transport = self._transport_for(kind)
        if transport.enqueues:
            self._follow_last_stream()
        # Everybody has left the previous operation when all have come to this one: the buffer may be filled again.
        shape = f" {list(tensor.shape)}" if tensor.dim() > 1 else ""
        transport.compare(f"{verb} {tensor.numel()} elements{shape} of {dtype} by {collective.name}{_named(name)}")
        buffer = self._buffer(kind, tensor.numel(), dtype)
        with torch.no_grad():
            buffer.local.copy_(tensor.reshape(-1))
            result = transport.perform(collective, buffer, verb, numbered=False)
            tensor.copy_(result.view(tensor.shape))
        return tensor

    def _follow_last_stream(self) -> None:
        """The operations of all streams have buffers and signals in common: each waits for the one before."""
        stream = torch.cuda.current_stream(self.device)
        if self._last_stream is not None and self._last_stream != stream:
            stream.wait_stream(self._last_stream)
        self._last_stream = stream

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
            scratch = self._transport_for(device_type).share(capacity, dtype, numbered=False)
            self._scratch[device_type, dtype] = scratch
            self._narrowed = {key: each for key, each in self._narrowed.items() if key[:2] != (device_type, dtype)}
        if (device_type, dtype, numel) not in self._narrowed:
            if len(self._narrowed) >= _REMEMBERED_SIZES:
                self._narrowed.clear()
            self._narrowed[device_type, dtype, numel] = scratch.narrow(numel)
        return self._narrowed[device_type, dtype, numel]


def _named(name: str | None) -> str:
    return "" if name is None else f", named {name!r}"
