"""Processes with a GPU each: buffers lie in GPU memory that all of them map, so a receive reads the peer's over NVLink.

Everything is enqueued on the current stream, in the order of the calls, and runs without the host: `perform` and
`settle` return at once, and what the same stream is given afterwards sees their effect. `synchronize` and `agree` wait
for it. So an error of a wait is raised by a later call than the one that enqueued it; it names the earlier one.

A schedule is performed in one of two ways, with the same result, but that the kernel rounds a half-precision sum of
several sources once and the plain way at each:
- plain: each round is a write of a flag, a wait for a flag, and torch's `add_` or `copy_` on the peer's memory, as
  `base.py` reads (`stream_signals.py`);
- Triton: one kernel performs the whole schedule (`kernel.py`), faster above all for small buffers. It ends with the
  peers' reading, so `settle` has nothing left to wait for; and `told` does not see it.

All ranks must choose alike, so what decides is the same on all: what is asked for, the buffer, the schedule, and
whether somebody observes.

Control, texts to agree on and handles of memory, goes through the transport of the host.
"""

from __future__ import annotations

import inspect
import itertools
import math
import pickle
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from torch_parallel.collectives.schedule import Collective, Send
from torch_parallel.transport.base import Transport, TransportError
from torch_parallel.transport.buffer import SharedBuffer
from torch_parallel.transport.cuda_driver import DriverError, atomics_reach, streams_can_wait
from torch_parallel.transport.signals import READY
from torch_parallel.transport.stream_signals import StreamSignals, Watchdog, flag_words

if TYPE_CHECKING:
    from torch_parallel.transport.triton_performer import TritonPerformer

Handle = tuple[Any, dict[str, Any]]  # a function that rebuilds a tensor, and its arguments

PERFORMERS = ("auto", "plain", "triton")
"""Who performs schedules on GPUs; auto is triton where it is installed and can compile, and each rank has a GPU."""

THROUGH_HOST = "what GPUs exchange goes through the host's memory"

UP_TO_BYTES, COPIES_UP_TO_BYTES = 128 << 20, 32 << 20
"""With auto, larger buffers are performed the plain way: torch's own operations are mostly the faster ones then, and
the sooner where nothing is added. On two and four H200, by calls back to back."""

SLAB_BYTES = 32 << 20
"""Memory is shared in pieces of at least this size, since each costs every peer a mapping."""
ALIGNMENT = 512
NOTICE_BYTES = 4096


def connect_gpus(host: Transport, device: torch.device, deadline_s: float, performer: str) -> tuple[Transport, str]:
    """The transport between the ranks' GPUs, or the host's; and a line that says why it is not what was hoped for.

    It is the host's where these GPUs cannot reach each other's memory, and without the kernel where Triton cannot
    compile it. `device` is this rank's and the current one. All ranks get the same kind. `deadline_s` bounds every
    wait. Raises TransportError where `performer` is triton and there is none, or the first signals do not arrive.
    """
    board = Noticeboard(host)
    flags = host.share(flag_words(host.world_size), torch.int32, numbered=False).parts
    indices = board.exchange(device.index)
    signals, obstacle = _stream_signals(host.rank, flags, device, deadline_s, indices)
    arena = CudaArena(board, host.rank, device)
    obstacle = board.first(obstacle) or _mapping_obstacle(board, arena, host.world_size)
    if obstacle or signals is None:
        return host, without_kernel(performer, f"{THROUGH_HOST}: {obstacle}")
    why = ""
    if performer == "auto" and len(set(indices)) < len(indices):
        why = "processes share a GPU, and while one's kernel waits there, the other's do not run"
    elif performer != "plain":
        why = board.first(_atomics_obstacle(device, indices) or _kernel_obstacle(host, device, signals, deadline_s))
    if why:
        why = f"torch's own operations do what one kernel would do faster: {without_kernel(performer, why)}"
    transport = CudaIpcTransport(host, arena, signals, device, deadline_s, "plain" if why else performer)
    transport.meet()
    return transport, why


@cache
def kernel_up_to_bytes(collective: Collective, world_size: int) -> float:
    """The largest buffer that the kernel performs with auto; any, where all ranks add more than one whole buffer: what
    the kernel does in one pass takes torch several, as one_shot on four H200 twice the time."""
    added = [_chunks_added(collective, rank, world_size) for rank in range(world_size)]
    if not any(added):
        return COPIES_UP_TO_BYTES
    return math.inf if min(added) > collective.chunk_count(world_size) else UP_TO_BYTES


def _chunks_added(collective: Collective, rank: int, world_size: int) -> int:
    actions = itertools.chain.from_iterable(collective.rounds(rank, world_size))
    return sum(len(each.chunks) for each in actions if not isinstance(each, Send) and each.reduce)


def _stream_signals(
    rank: int, flags: list[Tensor], device: torch.device, deadline_s: float, indices: list[int]
) -> tuple[StreamSignals | None, str]:
    """This rank's; or why it cannot take part."""
    obstacle = _obstacle(device, indices)
    if obstacle:
        return None, obstacle
    try:
        torch.cuda.synchronize(device)  # the driver's calls need the context that this makes
        return StreamSignals(rank, flags, device, deadline_s), ""
    except RuntimeError as error:
        return None, f"GPU {device.index} cannot reach the host's memory: {_first_line(error)}"


def _mapping_obstacle(board: Noticeboard, arena: CudaArena, world_size: int) -> str:
    """Why GPU memory cannot be shared; an empty text where it can. All ranks call it, and get the same."""
    try:
        arena.allocate(world_size, 1, torch.int32)
        return board.first("")
    except RuntimeError as error:  # a container may forbid it
        return board.first(f"GPU memory cannot be shared: {_first_line(error)}")


def _obstacle(device: torch.device, indices: list[int]) -> str:
    """Why this rank cannot take part; an empty text where it can."""
    try:
        torch.cuda.init()
        if not streams_can_wait(device.index):
            return f"streams of {torch.cuda.get_device_name(device)} cannot wait for memory"
    except DriverError as error:
        return str(error)
    for index in indices:
        if index != device.index and not torch.cuda.can_device_access_peer(device, index):
            return f"GPU {device.index} cannot reach the memory of GPU {index}"
    return ""


def _atomics_obstacle(device: torch.device, indices: list[int]) -> str:
    """Why the kernel cannot signal: its signals are atomic operations on the peer's memory."""
    try:
        for index in indices:
            if index != device.index and not atomics_reach(device.index, index):
                return f"GPU {device.index} cannot make atomic operations on the memory of GPU {index}"
    except DriverError as error:
        return str(error)
    return ""


def _kernel_obstacle(host: Transport, device: torch.device, signals: StreamSignals, deadline_s: float) -> str:
    """Why this rank cannot compile and launch the kernel; an empty text where it has. Nothing is exchanged.

    What peers would else wait for at the first operation is so compiled while nobody waits on a GPU.
    """
    try:
        from torch_parallel.transport.triton_performer import try_out

        try_out(host.rank, host.world_size, device, signals.note_address, deadline_s)
        torch.cuda.synchronize(device)
    except Exception as error:  # Triton raises many kinds: without a C compiler, without Python's headers, ...
        return f"Triton does not work here: {_first_line(error)}"
    return ""


class Noticeboard:
    """Small objects from each rank to all, through the host's memory."""

    def __init__(self, host: Transport) -> None:
        self._host = host
        self._buffer = host.share(NOTICE_BYTES, torch.uint8, numbered=False)

    def exchange(self, thing: Any) -> list[Any]:
        """Everybody's picklable `thing`, by rank. All ranks call it."""
        data = pickle.dumps(thing)
        self._buffer.local[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._host.agree("read notices", numbered=False)
        everyones = [pickle.loads(part.numpy().tobytes()) for part in self._buffer.parts]
        self._host.agree("have read notices", numbered=False)
        return everyones

    def first(self, obstacle: str) -> str:
        """The obstacle of the lowest rank that has one, and which rank that is; empty where all texts are empty."""
        found = [f"{text} (rank {rank})" for rank, text in enumerate(self.exchange(obstacle)) if text]
        return found[0] if found else ""


class CudaArena:
    """GPU memory of every rank, mapped by all ranks and never given back: a peer may read it as long as it lives."""

    def __init__(self, board: Noticeboard, rank: int, device: torch.device) -> None:
        self._board = board
        self._rank = rank
        self._device = device
        self._slabs: dict[int, list[list[Tensor]]] = {}  # for each count: of that many ranks, the newest last
        self._next_byte: dict[int, int] = {}  # in the newest

    def allocate(self, count: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """[numel] of each of the first `count` ranks, zero-filled, as this GPU reaches it.

        All ranks call it, with the same arguments.
        """
        nbytes, start = numel * dtype.itemsize, self._next_byte.get(count, 0)
        slabs = self._slabs.setdefault(count, [])
        if not slabs or start + nbytes > slabs[-1][0].numel():
            slabs.append(self._new_slabs(count, max(SLAB_BYTES, nbytes)))
            start = 0
        self._next_byte[count] = start + -(-nbytes // ALIGNMENT) * ALIGNMENT
        return [slab[start : start + nbytes].view(dtype) for slab in slabs[-1]]

    def _new_slabs(self, count: int, nbytes: int) -> list[Tensor]:
        """Raises RuntimeError on all ranks where one of them lacks the memory, or may not share it."""
        mine, handle = self._slab(nbytes) if self._rank < count else (None, "")
        everyones = self._board.exchange(handle)
        for rank, obstacle in enumerate(everyones):
            if isinstance(obstacle, str) and obstacle:
                raise RuntimeError(f"{obstacle} on rank {rank}")
        return [
            self._open(each) if mine is None or rank != self._rank else mine
            for rank, each in enumerate(everyones[:count])
        ]

    def _slab(self, nbytes: int) -> tuple[Tensor | None, Handle | str]:
        """New memory and by what others map it; or why there is none, which the peers wait to hear."""
        try:
            mine = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
            torch.cuda.current_stream(self._device).synchronize()  # peers do not see a zero that is still being written
            return mine, _handle(mine)
        except RuntimeError as error:
            return None, _first_line(error)

    def _open(self, handle: Handle) -> Tensor:
        """A peer's tensor, as memory that *this* GPU reaches. With the peer's own number kernels here fault on it."""
        rebuild, arguments = handle
        tensor: Tensor = rebuild(**{**arguments, "storage_device": self._device.index})
        return tensor


def _handle(tensor: Tensor) -> Handle | str:
    """By what another process rebuilds the tensor, its arguments by name; or why there is no such thing."""
    try:
        rebuild, arguments = reduce_tensor(tensor)
    except RuntimeError as error:
        return _first_line(error)
    named = dict(zip(inspect.signature(rebuild).parameters, arguments, strict=False))
    if "storage_device" not in named:
        return f"torch {torch.__version__} shares CUDA tensors in a way that is not known here"
    return rebuild, named


def without_kernel(performer: str, why: str) -> str:
    """`why` there is no kernel. Raises TransportError where it was asked for."""
    if performer == "triton":
        raise TransportError(f"--performer triton: {why}; take --performer plain")
    return why


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0][:300] or type(error).__name__


class CudaIpcTransport(Transport):
    """The transport of one rank's GPU. Make it with `connect_gpus`.

    Memory that all ranks have in common, or that one of them has alone, lies on rank 0's GPU. Performed the plain way,
    whatever `performer` says: what is acknowledged later, what an observer looks at, and what the kernel cannot do
    (`TritonPerformer`).
    """

    enqueues = True

    def __init__(
        self,
        host: Transport,
        arena: CudaArena,
        signals: StreamSignals,
        device: torch.device,
        deadline_s: float,
        performer: str = "auto",
    ) -> None:
        super().__init__(host.rank, host.world_size, signals, host._calls)  # all calls of a rank have one order
        self._stream_signals = signals
        self.common_is_near = host.world_size == 1
        self.device = device
        self._host = host
        self._arena = arena
        self.triton = None if performer == "plain" else self._make_triton(deadline_s)
        self.performer = performer
        """One of PERFORMERS; may be changed between calls, on all ranks."""
        self._watchdog = Watchdog(signals)

    def _make_triton(self, deadline_s: float) -> TritonPerformer:
        from torch_parallel.transport.triton_performer import FLAGS_PER_PEER, TritonPerformer

        flags = self._arena.allocate(self.world_size, self.world_size * FLAGS_PER_PEER, torch.int32)
        return TritonPerformer(self.rank, flags, self._stream_signals.note_address, deadline_s)

    def meet(self) -> None:
        """Exchanges a first signal with every peer, which shows that flags written there arrive here."""
        peers = [peer for peer in range(self.world_size) if peer != self.rank]
        for peer in peers:
            self._signals.post(READY, peer)
        for peer in peers:
            self._signals.wait(READY, peer, "the first signal between GPUs", 0)
        self.synchronize()

    def perform(
        self,
        collective: Collective,
        buffer: SharedBuffer,
        purpose: str = "",
        *,
        acknowledge: bool = True,
        numbered: bool = True,
    ) -> Tensor:
        self._raise_failure()
        if self.triton is None or not acknowledge or not self._takes_the_kernel(self.triton, collective, buffer):
            self._stream_signals.begin()
            return super().perform(collective, buffer, purpose, acknowledge=acknowledge, numbered=numbered)
        plan = buffer.plans.get(collective)
        if plan is None or plan.purpose != purpose:
            plan = self._begin(collective, buffer, purpose, numbered)
        elif numbered:
            self._calls.enter(plan.signature)
        self._calls.compare()
        self.triton.perform(collective, buffer, plan, purpose or collective.name)
        for source, nbytes in plan.received:
            self.received_bytes[source] += nbytes
        return plan.result

    def _takes_the_kernel(self, triton: TritonPerformer, collective: Collective, buffer: SharedBuffer) -> bool:
        if self.performer == "plain" or self.observer is not None or not triton.can_perform(collective, buffer):
            return False
        return self.performer == "triton" or buffer.local.nbytes <= kernel_up_to_bytes(collective, self.world_size)

    def settle(self, leave: int = 0) -> None:
        self._raise_failure()
        super().settle(leave)

    def leave_room(self) -> None:
        """All ranks call it: the kernel needs as many programs on all."""
        if self.triton is not None:
            self.triton.settings = self.triton.beside

    def synchronize(self) -> None:
        """Returns when the current stream has done all that it was given. Raises TransportError."""
        torch.cuda.current_stream(self.device).synchronize()
        self._raise_failure()
        self._calls.compare()

    def leave(self) -> None:
        """This GPU's memory goes with the process: not before peers have read the last of it. Raises TransportError for
        a wait that failed, for what streams did since then is wrong, unless a call has raised it before."""
        if not self._calls.is_told:
            self.settle()
            self.synchronize()

    def agree(self, text: str, *, numbered: bool = True) -> None:
        self.settle()
        self.synchronize()
        self._host.agree(text, numbered=numbered)

    def compare(self, text: str) -> None:
        self.settle()
        self._host.agree(text)

    def _raise_failure(self) -> None:
        failure = self._watchdog.failure
        if failure is None:
            note = self._stream_signals.kernels_note
            if note and self.triton is not None:
                failure = self.triton.explain(note)
            else:
                failure = self._stream_signals.who_gave_up()
        if failure is not None:
            self._watchdog.failure = failure  # the first one stays
            raise self._calls.told(TransportError(f"rank {self.rank}, {failure}"))

    def _allocate_together(self, count: int, numel: int, dtype: torch.dtype, what: str, numbered: bool) -> list[Tensor]:
        self.agree(what, numbered=numbered)  # before memory is exchanged, not only after
        return super()._allocate_together(count, numel, dtype, what, numbered=False)

    def _allocate(self, count: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
        return self._arena.allocate(count, numel, dtype)
