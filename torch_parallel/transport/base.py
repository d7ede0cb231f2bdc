"""What every transport is: memory that peers reach, signals between ranks, and one way to perform a schedule on them.

A transport gives each rank a buffer that its peers can read (`share`), and performs any schedule on such a buffer
(`perform`). A `Send` of the schedule is only a signal; a `Receive` waits for it and then adds or copies straight from
the peer's memory. Nothing is packed, staged or sent: the receiver pulls.

The contract, which `tests/transport/test_conformance.py` holds against every transport:
- All ranks call `share`, `perform` and `agree` in the same order; `agree` and `share` compare what the ranks ask for.
- `perform` returns this rank's result: its buffer where the collective works in place, else a region of its own, which
  stays as it is until this rank performs something on the buffer again, or on what was narrowed from the same.
- Peers may still be reading the buffer until `settle` returns; nobody may write into it before that.
- A common result is one memory for all ranks, so nobody writes into it. A slow reader is safe: by beginning
  the next performance on the buffer a rank says that it is done with the last result, and whoever writes a common chunk
  has waited for all ranks to say so. That every schedule does wait is proved, not hoped for.
- Every wait ends at the deadline with an error that names rank, peer, purpose and round.
- `waited_s[peer]` adds up the seconds that this rank waited for that peer.
- An `observer`, if there is one, is called with a `Transfer` for each message received. Without one, nothing is paid.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from torch_parallel.collectives.proof import examine
from torch_parallel.collectives.schedule import Collective, Send
from torch_parallel.transport.buffer import Memory, Plan, Pull, SharedBuffer

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
    def _allocate(self, numel: int, dtype: torch.dtype, count: int) -> list[Tensor]:
        """This rank's view of the next `count` pieces of memory that all ranks reach, each [numel] and zero-filled."""

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
        buffer = SharedBuffer(self._allocate(numel, dtype, self.world_size), self.rank)
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

    def perform(self, collective: Collective, buffer: SharedBuffer, purpose: str = "") -> Tensor:
        """Performs this rank's part of the schedule on the buffer and returns its result, [numel].

        The first time, the memory that the collective needs besides the buffer is allocated; for a common result all
        ranks meet then. Raises TransportError, and ValueError for a size that cannot be cut as the collective needs it.
        """
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
                        start_s = time.perf_counter()
                        operation(theirs)
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
        return plan.result

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
        memory = Memory(collective, buffer, self.world_size, self._common_region)
        rounds: list[tuple[list[int], list[Pull]]] = []
        received: Counter[int] = Counter()
        for actions in collective.rounds(self.rank, self.world_size):
            targets = [action.to for action in actions if isinstance(action, Send)]
            pulls = memory.pulls(actions)
            rounds.append((targets, pulls))
            for source, _, theirs, _ in pulls:
                received[source] += theirs.nbytes
        # Only reads that the schedule's own messages do not prove finished need a signal of their own.
        unfinished = _unfinished_reads(collective, self.world_size)
        return Plan(
            rounds,
            acknowledge=[source for reader, source in unfinished if reader == self.rank],
            readers=[reader for reader, source in unfinished if source == self.rank],
            received=list(received.items()),
            result=memory.result,
        )

    def _common_region(self, numel: int, dtype: torch.dtype) -> Tensor:
        (region,) = self._allocate(numel, dtype, 1)
        self.agree(f"share one result of {numel} elements of {dtype}")
        return region


@cache
def _unfinished_reads(collective: Collective, world_size: int) -> list[tuple[int, int]]:
    """(reader, source) pairs; worked out once a schedule, however many buffers it is performed on."""
    return sorted(examine(collective, world_size).unfinished_reads)
