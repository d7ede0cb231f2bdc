"""What every transport is: memory that peers reach, signals between ranks, and one way to perform a schedule on them.

A transport gives each rank a buffer that its peers can read (`share`), and performs any schedule on such a buffer
(`perform`). A `Send` of the schedule is only a signal; a `Receive` waits for it and then adds or copies straight from
the peer's memory. Nothing is packed, staged or sent: the receiver pulls.

The contract, which `tests/transport/test_conformance.py` holds against every transport:
- All ranks call `share`, `perform` and `agree` in the same order, with the same arguments. Each such call has a number
  and is compared over the ranks (`calls.py`): a difference raises TransportError at once, naming the call.
- `perform` returns this rank's result: its buffer where the collective works in place, else a region of its own, which
  stays as it is until this rank performs something on the buffer again, or on what was narrowed from the same.
- Peers may still be reading the buffer until `settle` returns; nobody may write into it before that. A rank that
  performs with `acknowledge=False` keeps its peers from settling until it calls `acknowledge`: what it wrote until
  then, anywhere, is visible to them when they have settled.
- A common result is one memory for all ranks, so nobody writes into it. A slow reader is safe: by beginning
  the next performance on the buffer a rank says that it is done with the last result, and whoever writes a common chunk
  has waited for all ranks to say so. That every schedule does wait is proved, not hoped for.
- `share_common` gives one buffer that all ranks write; who writes what and when is theirs to order by the signals of
  the schedules that they perform.
- Beside schedules, in which every rank knows what comes next, a rank may serve whoever comes first: `arrivals` waits
  for any of several peers, `read` copies or adds a peer's part, `put` writes over it, `tell` and `hear` are the signals
  around that. What a peer pushes is read once, or dropped. No rank but the two concerned takes part, and who may write
  a part when is the callers' affair.
- Every wait ends at the deadline with an error that names rank, peer, purpose and round; at once where the peer has
  returned or raised; and not while the peer is in long work (`StatusReporter.at_work`).
- A transport of GPUs (`cuda_ipc.py`) only enqueues: "returns when" means that what the stream is given afterwards sees
  it, and `synchronize` waits for it. All others do everything at once.
- `waited_s[peer]` adds up the seconds that this rank waited for that peer.
- An `observer`, which all ranks have or none, is called with a `Transfer` for each message received. Without one,
  nothing is paid.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from torch_parallel.collectives.schedule import Collective, Send
from torch_parallel.status import StatusReporter
from torch_parallel.transport.buffer import Memory, Plan, Pull, SharedBuffer, Transfer, nothing, unfinished_reads
from torch_parallel.transport.calls import TEXT_LIMIT, Calls, TransportError, at_most, schedule_signature, signature_of
from torch_parallel.transport.signals import READ, READY, PeerIsOver, Signals, WaitTimeout

__all__ = ["Transfer", "Transport", "TransportError"]


class Transport(ABC):
    """Performs schedules for one rank. See the module's docstring for the contract."""

    enqueues: ClassVar[bool] = False
    """Whether it gives everything to the current stream, and waits for nothing."""
    status: StatusReporter
    """This rank's words on the board that all ranks read."""
    on_one_machine: ClassVar[bool] = True
    """Whether what `share_common` gives is one memory, whatever links are emulated between the ranks."""

    def __init__(self, rank: int, world_size: int, signals: Signals, calls: Calls) -> None:
        self.rank = rank
        self.world_size = world_size
        self.observer: Callable[[Transfer], None] | None = None
        self.over_link: Callable[[Pull], Pull] = lambda pull: pull
        """What emulated links make of each receive, once, when a schedule is bound (see `links.py`)."""
        self.arrival_s: Callable[[int, int], float] = lambda source, nbytes: 0.0
        """When a message from `source` is there, of `time.perf_counter`: it takes its place on the emulated links."""
        self.send_over_link: Callable[[int, int], None] = lambda peer, nbytes: None
        """What they make of a push: the sender waits for it, so that who serves many waits for nobody's link."""
        self.one_memory = True
        """Whether what one rank writes into common memory is there for all at once; not where links lie between."""
        self.common_is_near = True
        """Whether that memory is as near as own memory; not where it lies on one rank's GPU."""
        self._signals = signals
        self._calls = calls
        self._buffers = 0  # shared so far
        signals.compare = calls.compare  # type: ignore[method-assign]
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._unsettled: list[tuple[int, str]] = []  # who still reads, and what
        self._unacknowledged: list[int] = []  # whose memory this rank has read, and has not said so
        self.received_bytes = [0] * world_size
        """Bytes read so far from the memory of each peer."""

    @property
    def waited_s(self) -> list[float]:
        """Seconds waited so far, by peer."""
        return self._signals.waited_s

    @abstractmethod
    def _allocate(self, count: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """This rank's views of the next `count` buffers, each [numel], zero-filled, and the same for all ranks."""

    def share(self, numel: int, dtype: torch.dtype, owner: int | None = None, *, numbered: bool = True) -> SharedBuffer:
        """A new zero-filled buffer [numel] of every rank, or of rank `owner` alone, while the others' parts are empty.

        All ranks call it, with the same arguments. Raises TransportError where they differ. The memory is freed when
        the last process of the run has ended.
        """
        holders = range(self.world_size) if owner is None else range(owner, owner + 1)
        what = f"share {numel} elements of {dtype}" + ("" if owner is None else f" of rank {owner}")
        held = self._allocate_together(len(holders), numel, dtype, what, numbered)
        parts = [held[holders.index(rank)] if rank in holders else held[0][:0] for rank in range(self.world_size)]
        self._buffers += 1
        return SharedBuffer(parts, self.rank, number=self._buffers)

    def share_common(self, numel: int, dtype: torch.dtype, *, numbered: bool = True) -> Tensor:
        """One new zero-filled buffer [numel] that all ranks have in common: what one writes is there for all.

        All ranks call it, with the same arguments. Raises TransportError where they differ.
        """
        what = f"share {numel} elements of {dtype} in common"
        (buffer,) = self._allocate_together(1, numel, dtype, what, numbered)
        return buffer

    def _allocate_together(self, count: int, numel: int, dtype: torch.dtype, what: str, numbered: bool) -> list[Tensor]:
        """As `_allocate`, once all ranks ask for the same; when it returns the memory is there on all of them."""
        held = self._allocate(count, numel, dtype)
        self.agree(what, numbered=numbered)
        return held

    def agree(self, text: str, *, numbered: bool = True) -> None:
        """A barrier that also compares what the ranks are about to do.

        Without a number of its own it is a part of the call before, and compares nothing. Raises TransportError naming
        the first call that differs, this rank's text and that of a rank whose text is another one.
        """
        self.settle()
        text = at_most(TEXT_LIMIT, text)
        if numbered:
            self._calls.enter(self._calls.say(signature_of(text), text))
        for peer in self._peers:
            self._signals.post(READY, peer)
        for peer in self._peers:
            self._wait(READY, peer, text, 0, in_call=True)
        if numbered:
            self._calls.compare(self._peers)

    def compare(self, text: str) -> None:
        """As `agree`, before an operation on a buffer that was used before: what is only enqueued is not waited for."""
        self.agree(text)

    def count_call(self, text: str) -> None:
        """Numbers a call that goes other ways than this transport's. Waits for nobody; else raises as `agree` does."""
        text = at_most(TEXT_LIMIT, text)
        self._calls.enter(self._calls.say(signature_of(text), text))
        self._calls.compare()

    def _begin(self, collective: Collective, buffer: SharedBuffer, purpose: str, numbered: bool) -> Plan:
        """The first call that performs something for this purpose begins, and then its memory is made."""
        what = f"perform {collective.name} on {buffer.local.numel()} elements of {buffer.local.dtype}"
        text = at_most(TEXT_LIMIT, f"{what} in buffer {buffer.number}" + (f" ({purpose})" if purpose else ""))
        signature = self._calls.say(signature_of(text) ^ schedule_signature(collective, self.world_size), text)
        if numbered:
            self._calls.enter(signature)
        plan = self._plan(collective, buffer)
        plan.purpose, plan.signature = purpose, signature
        doing = f"{purpose or collective.name}, end of the peer's reading"
        plan.unsettled = [(reader, doing) for reader in plan.readers]
        return plan

    def perform(
        self,
        collective: Collective,
        buffer: SharedBuffer,
        purpose: str = "",
        *,
        acknowledge: bool = True,
        numbered: bool = True,
    ) -> Tensor:
        """Performs this rank's part of the schedule on the buffer and returns its result, [numel].

        The first time, the memory that the collective needs besides the buffer is allocated; for a common result all
        ranks meet then. With `acknowledge=False` peers settle only when this rank calls `acknowledge`. Without a number
        of its own it is compared with nothing: as part of a call that was compared, or where ranks need not perform in
        the same order. Raises TransportError, and ValueError for a size that cannot be cut as the collective needs it.
        """
        plan, calls = buffer.plans.get(collective), self._calls
        if plan is None or plan.purpose != purpose:
            plan = self._begin(collective, buffer, purpose, numbered)
        elif numbered:
            calls.enter(plan.signature)
        wait, observer = self._signals.wait, self.observer
        doing = purpose or collective.name
        round_index = 0
        try:
            for round_index, (posts, pulls) in enumerate(plan.rounds):
                for post in posts:
                    post()
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
            raise self.failed(timeout, f"{doing}, round {round_index}", in_call=numbered) from None
        if numbered:
            words, entry = calls.words, calls.entry
            for index in calls.theirs:  # as `compare`, which takes longer to call
                if words[index] != entry:
                    calls.compare(plan.heard)
        for source, nbytes in plan.received:
            self.received_bytes[source] += nbytes
        if plan.acknowledge:
            if acknowledge:
                self._acknowledge(plan.acknowledge)
            else:
                self._unacknowledged += plan.acknowledge
        self._unsettled += plan.unsettled
        return plan.result

    def leave_room(self) -> None:  # noqa: B027  # the host's processors are not shared so
        """From now on operations run beside other work of the same device, and should take less of it."""

    def synchronize(self) -> None:  # noqa: B027  # most do everything at once
        """Returns when what was called before is done, for transports that only enqueue it. Raises TransportError."""

    def leave(self) -> None:  # noqa: B027  # memory of the host outlives its process
        """Called when the worker function has returned; waits for peers that read what goes with this process."""

    def close(self) -> None:  # noqa: B027  # memory is freed with the processes that map it
        """Called when nothing more is performed, also after an error. Waits for nothing."""

    def acknowledge(self) -> None:
        """Tells the peers that this rank is done with their memory, and with what it does before they may go on."""
        self._acknowledge(self._unacknowledged)
        self._unacknowledged.clear()

    @property
    def is_read(self) -> bool:
        """Whether peers may still be reading this rank's memory, until `settle` returns."""
        return bool(self._unsettled)

    def settle(self, leave: int = 0) -> None:
        """Returns when no peer reads this rank's memory any more, so that it may be written.

        With `leave`, the newest so many messages of which this is to be heard may still be being read.
        """
        unsettled, wait = self._unsettled, self._signals.wait
        reading = unsettled[:-leave] if leave else unsettled
        doing = ""
        try:
            for reader, doing in reading:
                wait(READ, reader, doing, 0)
        except WaitTimeout as timeout:
            raise self.failed(timeout, doing) from None
        del unsettled[: len(reading)]

    def tell(self, peer: int, pushed: Iterable[SharedBuffer] = ()) -> None:
        """Lets `peer` know that what this rank wrote for it is complete, and that it can read what is `pushed`."""
        for buffer in pushed:
            try:
                self.send_over_link(peer, buffer.local.nbytes)
            except WaitTimeout as timeout:
                raise self.failed(timeout, f"a push to rank {peer}") from None
        self._signals.post(READY, peer)

    def told(self, peer: int) -> bool:
        """Whether `peer` has told, or performed, something that this rank has not heard yet; does not wait."""
        return self._signals.posted(READY, peer)

    def hear(self, peer: int, doing: str, put: Iterable[SharedBuffer] = ()) -> None:
        """Waits until `peer` tells this rank; `put` are the buffers that it wrote over mine before, to be counted."""
        wait_start_s = time.perf_counter()
        self._wait(READY, peer, doing, 0)
        for buffer in put:
            self._receive(self.over_link((peer, nothing, buffer.local, False)), doing, wait_start_s)
            wait_start_s = time.perf_counter()

    def arrivals(self, peers: list[int], doing: str) -> list[int]:
        """Waits until any of the peers tells this rank, and returns all that have, in rank order, as heard."""
        try:
            self._signals.wait_any(READY, peers, doing)
        except WaitTimeout as timeout:
            raise self.failed(timeout, doing) from None
        came = [peer for peer in peers if self.told(peer)]
        for peer in came:
            self._wait(READY, peer, doing, 0)
        return came

    def read(self, buffer: SharedBuffer, peer: int, add: bool, purpose: str) -> None:
        """Adds the part that the peer has pushed to mine, or copies it over mine. It must leave it alone until then."""
        operation = buffer.local.add_ if add else buffer.local.copy_
        self._receive((peer, operation, buffer.parts[peer], add), purpose, time.perf_counter())

    def drop(self, buffer: SharedBuffer, peer: int, purpose: str) -> None:  # noqa: B027  # nothing has moved
        """In place of `read`, of a part that the peer has pushed and nobody wants."""

    def put(self, buffer: SharedBuffer, peer: int) -> None:
        """Copies my part over the peer's, which must be waiting to hear of me."""
        buffer.parts[peer].copy_(buffer.local)

    def _receive(self, pull: Pull, purpose: str, wait_start_s: float) -> None:
        """One message outside of schedules, whose sender has signalled."""
        source, operation, theirs, reduce = pull
        if self.observer is not None:
            self.synchronize()
        start_s = time.perf_counter()
        try:
            operation(theirs)
        except WaitTimeout as timeout:
            raise self.failed(timeout, purpose) from None
        self.received_bytes[source] += theirs.nbytes
        if self.observer is not None:
            self.synchronize()
            times = (wait_start_s, start_s, time.perf_counter())
            self.observer(Transfer(source, self.rank, theirs.nbytes, purpose, 0, *times, reduce))

    def _acknowledge(self, sources: list[int]) -> None:
        for source in sources:
            self._signals.post(READ, source)

    def _wait(self, kind: int, peer: int, doing: str, round_index: int, in_call: bool = False) -> None:
        try:
            self._signals.wait(kind, peer, doing, round_index)
        except WaitTimeout as timeout:
            raise self.failed(timeout, doing, in_call) from None

    def failed(self, timeout: WaitTimeout, doing: str, in_call: bool = False) -> TransportError:
        """The error of a wait, `in_call` where that has a number."""
        if isinstance(timeout, PeerIsOver):
            what = f"in call {self._calls.number}, {doing}" if in_call else f"({doing})"
            text = f"{timeout}, and rank {self.rank} waits for {timeout.whom} {what}"
            error = TransportError(text, timeout.raised, timeout.raised)
        else:
            error = TransportError(f"rank {self.rank}, {doing}: {timeout}")
        return self._calls.told(error)

    def _plan(self, collective: Collective, buffer: SharedBuffer) -> Plan:
        """Bound the first time, which allocates what the collective needs besides the buffer: a part of that call."""
        if collective not in buffer.plans:
            buffer.plans[collective] = self._bind(collective, buffer)
        return buffer.plans[collective]

    def _reached(self, peer: int) -> bool:
        """Whether this rank reads the peer's memory, at any time that the schedule leaves it."""
        return True

    def _post_of(self, peer: int, chunk: Tensor) -> Callable[[], None]:
        """What lets the peer have a chunk of this rank's: it reads it by itself, once it is told."""
        return partial(self._signals.post, READY, peer)

    def _bind(self, collective: Collective, buffer: SharedBuffer) -> Plan:
        if collective.common_result and not self.one_memory:
            raise ValueError(f"{collective.name} needs memory in common, and links lie between the ranks")
        share_common = partial(self.share_common, numbered=False)
        memory = Memory(collective, buffer, self.world_size, share_common, self._reached)
        rounds: list[tuple[list[Callable[[], None]], list[Pull]]] = []
        received: Counter[int] = Counter()
        for actions in collective.rounds(self.rank, self.world_size):
            sends = [action for action in actions if isinstance(action, Send)]
            posts = [self._post_of(send.to, memory.mine(send.chunks)) for send in sends]
            pulls = [self.over_link(pull) for pull in memory.pulls(actions)]
            rounds.append((posts, pulls))
            for source, _, theirs, _ in pulls:
                received[source] += theirs.nbytes
        # Only reads that the schedule's own messages do not prove finished need a signal of their own.
        unfinished = unfinished_reads(collective, self.world_size)
        return Plan(
            rounds,
            acknowledge=[source for reader, source in unfinished if reader == self.rank],
            readers=[reader for reader, source in unfinished if source == self.rank],
            received=list(received.items()),
            heard=[] if self.enqueues else list(received),
            regions=memory.regions,
            result=memory.result,
        )
