"""What every transport is: memory that peers reach, signals between ranks, and one way to perform a schedule on them.

A transport gives each rank a buffer that its peers can read (`share`), and performs any schedule on such a buffer
(`perform`). A `Send` of the schedule is only a signal; a `Receive` waits for it and then adds or copies straight from
the peer's memory. Nothing is packed, staged or sent: the receiver pulls.

The contract, which `tests/transport/test_conformance.py` holds against every transport:
- All ranks call `share`, `perform` and `agree` in the same order; `agree` and `share` compare what the ranks ask for.
- After `perform` returns, this rank's buffer holds its result. Peers may still be reading it until `settle` returns;
  nobody may write into a shared buffer before that.
- Every wait ends at the deadline with an error that names rank, peer, purpose and round.
- A transport of GPUs (`cuda_ipc.py`) only enqueues: "returns when" means that what the stream is given afterwards sees
  it, and `synchronize` waits for it. All others do everything at once.
- `waited_s[peer]` adds up the seconds that this rank waited for that peer.
- An `observer`, if there is one, is called with a `Transfer` for each message received. Without one, nothing is paid.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from torch_parallel.collectives.proof import examine
from torch_parallel.collectives.schedule import Collective, Receive, Send, chunk_bounds

TEXT_LIMIT = 200
"""Bytes (UTF-8) of a text that ranks agree on; what is longer is cut."""

READY, READ = 0, 1
"""The two kinds of signal: "my chunk is ready for you" and "I have read the last of yours"."""


class TransportError(RuntimeError):
    """A wait that reached its deadline, or ranks that do not ask for the same thing."""


class WaitTimeout(Exception):
    """Raised by `Signals.wait`; the transport adds what the wait was for and raises a `TransportError`."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message, seen by its receiver. Times are of `time.perf_counter`."""

    source: int
    to: int
    bytes: int
    purpose: str
    round: int
    wait_start_s: float
    start_s: float
    end_s: float
    reduce: bool  # added to the receiver's chunk, not copied over it


class Signals(ABC):
    """Counts of signals between every ordered pair of ranks. They only ever grow, so no signal can be taken twice."""

    waited_s: list[float]

    @abstractmethod
    def post(self, kind: int, peer: int) -> None:
        """Signals `peer`: everything this rank wrote before is visible to it once it has seen the signal."""

    @abstractmethod
    def wait(self, kind: int, peer: int, doing: str, round_index: int) -> None:
        """Returns once `peer` has posted one signal more than were waited for so far.

        Raises `WaitTimeout` at the deadline. `doing` and `round_index` say what for, to whoever watches this rank.
        """


# One receive, ready to perform: the source, the bound `add_` or `copy_` of my chunk, the peer's chunk, and which it is.
Pull = tuple[int, Callable[[Tensor], Any], Tensor, bool]


@dataclass
class Plan:
    """A schedule bound to the memory of one buffer: the views of all chunks are cut once, here."""

    rounds: list[tuple[list[int], list[Pull]]]
    acknowledge: list[int]  # whom to tell that I have read the last of theirs
    readers: list[int]  # who will tell me so
    received: list[tuple[int, int]]  # bytes read from each peer, once per performance


@dataclass
class SharedBuffer:
    """One buffer of every rank: `parts[r]` is rank r's, [numel], readable by all; `local` is this rank's own."""

    parts: list[Tensor]
    rank: int
    plans: dict[Collective, Plan] = field(default_factory=dict)
    tables: dict[Collective, Any] = field(default_factory=dict)  # the same, for the GPU's kernel

    @property
    def local(self) -> Tensor:
        return self.parts[self.rank]

    def narrow(self, numel: int) -> SharedBuffer:
        """The first `numel` elements of every rank's buffer."""
        return SharedBuffer([part[:numel] for part in self.parts], self.rank)


class Transport(ABC):
    """Performs schedules for one rank. See the module's docstring for the contract."""

    def __init__(self, rank: int, world_size: int, signals: Signals) -> None:
        self.rank = rank
        self.world_size = world_size
        self.observer: Callable[[Transfer], None] | None = None
        self._signals = signals
        self._unsettled: list[tuple[int, str]] = []  # who still reads, and what
        self.received_bytes = [0] * world_size
        """Bytes read so far from the memory of each peer."""

    @property
    def waited_s(self) -> list[float]:
        """Seconds waited so far, by peer."""
        return self._signals.waited_s

    @abstractmethod
    def _allocate(self, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """This rank's view of the next buffer of every rank, zero-filled."""

    @abstractmethod
    def _describe(self, text: str) -> None:
        """Writes down, for the peers to read, what this rank asks for."""

    @abstractmethod
    def _description(self, peer: int) -> str:
        """What `peer` wrote down last."""

    def share(self, numel: int, dtype: torch.dtype) -> SharedBuffer:
        """A new zero-filled buffer [numel] of every rank. All ranks call it, with the same arguments.

        Raises TransportError where they differ. The memory is freed when the last process of the run has ended.
        """
        buffer = SharedBuffer(self._allocate(numel, dtype), self.rank)
        self.agree(f"share {numel} elements of {dtype}")
        return buffer

    def agree(self, text: str) -> None:
        """A barrier that also compares what the ranks are about to do.

        Raises TransportError naming the first rank whose text differs from this rank's, and both texts.
        """
        self.settle()
        text = text.encode()[:TEXT_LIMIT].decode(errors="ignore")
        self._describe(text)
        peers = [peer for peer in range(self.world_size) if peer != self.rank]
        for peer in peers:
            self._signals.post(READY, peer)
        for peer in peers:
            self._wait(READY, peer, text, 0)
            if self._description(peer) != text:
                raise TransportError(
                    f"rank {self.rank} wants to {text}, but rank {peer} wants to {self._description(peer)}: "
                    "all ranks must call the same operations in the same order"
                )

    def compare(self, text: str) -> None:
        """As `agree`, before an operation on a buffer that was used before: what is only enqueued is not waited for."""
        self.agree(text)

    def perform(self, collective: Collective, buffer: SharedBuffer, purpose: str = "") -> None:
        """Performs this rank's part of the schedule on the buffer, in place."""
        plan = buffer.plans.get(collective)
        if plan is None:
            plan = buffer.plans[collective] = self._bind(collective, buffer)
        post, wait, observer = self._signals.post, self._signals.wait, self.observer
        doing = purpose or collective.name
        round_index = 0
        try:
            for round_index, (targets, pulls) in enumerate(plan.rounds):
                for peer in targets:
                    post(READY, peer)
                for source, operation, theirs, reduce in pulls:
                    if observer is None:
                        wait(READY, source, doing, round_index)
                        operation(theirs)
                    else:
                        wait_start_s = time.perf_counter()
                        wait(READY, source, doing, round_index)
                        self.synchronize()
                        start_s = time.perf_counter()
                        operation(theirs)
                        self.synchronize()
                        end_s = time.perf_counter()
                        times = (wait_start_s, start_s, end_s)
                        observer(Transfer(source, self.rank, theirs.nbytes, purpose, round_index, *times, reduce))
        except WaitTimeout as timeout:
            raise TransportError(f"rank {self.rank}, {doing}, round {round_index}: {timeout}") from None
        for source, nbytes in plan.received:
            self.received_bytes[source] += nbytes
        for source in plan.acknowledge:
            post(READ, source)
        self._unsettled += [(reader, doing) for reader in plan.readers]

    def synchronize(self) -> None:  # noqa: B027  # most do everything at once
        """Returns when what was called before is done, for transports that only enqueue it. Raises TransportError."""

    def settle(self) -> None:
        """Returns when no peer reads this rank's memory any more, so that it may be written."""
        for reader, doing in self._unsettled:
            self._wait(READ, reader, f"{doing}, end of the peer's reading", 0)
        self._unsettled.clear()

    def _wait(self, kind: int, peer: int, doing: str, round_index: int) -> None:
        try:
            self._signals.wait(kind, peer, doing, round_index)
        except WaitTimeout as timeout:
            raise TransportError(f"rank {self.rank}, {doing}: {timeout}") from None

    def _bind(self, collective: Collective, buffer: SharedBuffer) -> Plan:
        bounds = chunk_bounds(buffer.local.numel(), collective.chunk_count(self.world_size))
        rounds: list[tuple[list[int], list[Pull]]] = []
        for actions in collective.rounds(self.rank, self.world_size):
            targets = [action.to for action in actions if isinstance(action, Send)]
            pulls = [_pull(action, buffer, bounds) for action in actions if isinstance(action, Receive)]
            rounds.append((targets, pulls))
        # Only reads that the schedule's own messages do not prove finished need a signal of their own.
        unfinished = _unfinished_reads(collective, self.world_size)
        received: Counter[int] = Counter()
        for _, pulls in rounds:
            for source, _, theirs, _ in pulls:
                received[source] += theirs.nbytes
        return Plan(
            rounds,
            acknowledge=[source for reader, source in unfinished if reader == self.rank],
            readers=[reader for reader, source in unfinished if source == self.rank],
            received=list(received.items()),
        )


@cache
def _unfinished_reads(collective: Collective, world_size: int) -> list[tuple[int, int]]:
    """(reader, source) pairs; worked out once a schedule, however many buffers it is performed on."""
    return sorted(examine(collective, world_size).unfinished_reads)


def _pull(receive: Receive, buffer: SharedBuffer, bounds: list[int]) -> Pull:
    start, stop = bounds[receive.chunks.start], bounds[receive.chunks.stop]
    mine, theirs = buffer.local[start:stop], buffer.parts[receive.source][start:stop]
    operation = mine.add_ if receive.reduce else mine.copy_
    return receive.source, operation, theirs, receive.reduce
