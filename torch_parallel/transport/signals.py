"""Signals between ranks: what they promise, and two kinds between processes: sequence numbers in shared memory, and
pipes where stores are not ordered.

A signal must become visible after the data it announces. x86 processors keep the order of plain stores (total store
order), so there a signal is one store to shared memory and a wait is a loop over one load. Other processors reorder
stores; there a signal is two bytes through the receiver's pipe, whose lock in the kernel orders what was written
before, and which wakes the receiver without any spinning.

Neither has a name in the file system, so neither can be left behind.
"""

from __future__ import annotations

import os
import platform
import select
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from multiprocessing.reduction import DupFd

from torch_parallel.status import DIED, RAISED, RETURNED, RUNNING, StatusReporter

READY, READ = 0, 1
"""The two kinds of signal: "my chunk is ready for you" and "I have read the last of yours"."""
KINDS = 2
LINE = 16  # int64s between two counters: two cache lines, since processors fetch lines in pairs

SPINS = 100
"""Looks at the counter before the processor is offered to others: about 10 microseconds."""
YIELDS = 50
"""How often a waiter then gives its processor to others before it says that it waits, and for whom. To say so takes as
long as a whole small exchange: a rank that did would be late itself, and its peer would come to say the same."""
YIELDS_S = 0.05
"""Seconds of yielding before a waiter takes naps; a nap of 1 ms then adds at most 2 % to the wait."""
NAP_S = 0.001
LOOK_S = 0.002
"""How often a waiter looks whether there is still somebody to wait for."""
SLICE_S = 0.02
"""So long does a waiter that sleeps in the kernel sleep at most, to look around then."""

LONGEST_DEADLINE_S = 2e6
"""Its milliseconds fit into 32 bits, which is what `poll`, and the kernel on GPUs, wait by."""
A_DEADLINE = f"a deadline is > 0 and at most {LONGEST_DEADLINE_S:,.0f} s, which are 23 days"


def stores_are_ordered() -> bool:
    """Whether this processor makes stores visible in program order."""
    return platform.machine().lower() in ("x86_64", "amd64", "i686", "i386")


class WaitTimeout(Exception):
    """Raised by `Signals.wait`; the transport adds what the wait was for and raises a `TransportError`."""


class PeerIsOver(WaitTimeout):
    """Raised by `Signals.wait` before the deadline: the peer is over, `how` says in which way, and will signal nothing
    more."""

    def __init__(self, peers: list[int], how: int) -> None:
        has = "has" if len(peers) == 1 else "have all"
        what = {RETURNED: "returned", RAISED: "raised an error", DIED: "died"}[how]
        super().__init__(f"{_named(peers)} {has} {what}")
        self.peers, self.how = peers, how
        self.raised = how != RETURNED
        self.whom = "it" if len(peers) == 1 else "them"

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.peers, self.how), vars(self)


def silence(peers: list[int], waited_s: float) -> str:
    """What is said when none of the peers has come."""
    whom = _named(peers) if len(peers) == 1 else f"any of {_named(peers)}"
    return f"no signal from {whom} for {waited_s:.1f} s"


def _named(peers: list[int]) -> str:
    return f"rank {peers[0]}" if len(peers) == 1 else f"ranks {', '.join(map(str, peers))}"


class Patience:
    """Of one wait for any of the peers: whether it goes on. `come` says whether one of them has signalled.

    It ends at the deadline, which counts from the last sign that a peer, or whoever it waits for, is in long work.
    """

    def __init__(
        self,
        status: StatusReporter,
        peers: list[int],
        deadline_s: float,
        come: Callable[[], bool],
        compare: Callable[[], None],
    ) -> None:
        self._status = status
        self._peers = peers
        self._deadline_s = deadline_s
        self._come = come
        self._compare = compare
        self._since_s = self._next_look_s = time.monotonic()

    def check(self) -> None:
        """Called again and again during the wait. Raises WaitTimeout, and what `compare` raises."""
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + LOOK_S
        self._compare()
        board = self._status.board
        ends = [board.over(peer) for peer in self._peers]
        if RUNNING not in ends and not self._come():  # they may have signalled before their end
            raise PeerIsOver(self._peers, max(ends))
        if now_s - self._since_s > self._deadline_s:
            self._since_s = max(self._since_s, *map(board.last_work_s, self._peers))
            if now_s - self._since_s > self._deadline_s:
                raise WaitTimeout(silence(self._peers, now_s - self._since_s))
            self._status.beat()  # nor is this rank to be taken for stopped


class Signals(ABC):
    """Counts of signals between every ordered pair of ranks. They only ever grow, so no signal can be taken twice."""

    waited_s: list[float]

    def compare(self) -> None:  # noqa: B027  # nothing where no transport is around
        """Called now and then during a wait; the transport puts a comparison of calls here, which may raise."""

    @abstractmethod
    def post(self, kind: int, peer: int) -> None:
        """Signals `peer`: everything this rank wrote before is visible to it once it has seen the signal."""

    @abstractmethod
    def wait(self, kind: int, peer: int, doing: str, round_index: int) -> None:
        """Returns once `peer` has posted one signal more than were waited for so far.

        Raises `WaitTimeout` at the deadline. `doing` and `round_index` say what for, to whoever watches this rank.
        """

    @abstractmethod
    def posted(self, kind: int, peer: int) -> bool:
        """Whether `wait` for this signal would return at once. Takes nothing."""

    @abstractmethod
    def wait_any(self, kind: int, peers: list[int], doing: str) -> None:
        """Returns once `posted` is true for any of the peers; whoever came is still to be waited for.

        Raises `WaitTimeout` at the deadline. `waited_s` grows for the first of the peers that came.
        """


class SequenceNumbers(Signals):
    """One growing int64 for each kind and ordered pair of ranks, each on cache lines of its own."""

    def __init__(self, memory: memoryview, rank: int, world_size: int, status: StatusReporter, deadline_s: float):
        self._counters = memory.cast("q")
        self._status = status
        self._deadline_s = deadline_s
        self.waited_s = [0.0] * world_size

        def index(kind: int, source: int, to: int) -> int:
            return ((kind * world_size + source) * world_size + to) * LINE

        ranks = range(world_size)
        self._outgoing = [[index(kind, rank, peer) for peer in ranks] for kind in range(KINDS)]
        self._incoming = [[index(kind, peer, rank) for peer in ranks] for kind in range(KINDS)]
        self._posted = [[0] * world_size for _ in range(KINDS)]
        self._awaited = [[0] * world_size for _ in range(KINDS)]

    @staticmethod
    def bytes_needed(world_size: int) -> int:
        return KINDS * world_size * world_size * LINE * 8

    def post(self, kind: int, peer: int) -> None:
        posted = self._posted[kind]
        posted[peer] += 1
        self._counters[self._outgoing[kind][peer]] = posted[peer]

    def wait(self, kind: int, peer: int, doing: str, round_index: int) -> None:
        awaited = self._awaited[kind]
        awaited[peer] += 1
        index, number = self._incoming[kind][peer], awaited[peer]
        if self._counters[index] < number:
            self._wait_for(index, number, peer, doing, round_index)

    def _wait_for(self, index: int, number: int, peer: int, doing: str, round_index: int) -> None:
        counters, start_s = self._counters, time.perf_counter()
        for _ in range(SPINS):
            if counters[index] >= number:
                break
        else:
            for _ in range(YIELDS):
                os.sched_yield()
                if counters[index] >= number:
                    break
            else:
                self._nap_until(lambda: counters[index] >= number, [peer], f"{doing}, round {round_index}")
        self.waited_s[peer] += time.perf_counter() - start_s

    def posted(self, kind: int, peer: int) -> bool:
        return self._counters[self._incoming[kind][peer]] > self._awaited[kind][peer]

    def wait_any(self, kind: int, peers: list[int], doing: str) -> None:
        start_s = time.perf_counter()
        self._nap_until(lambda: any(self.posted(kind, peer) for peer in peers), peers, doing)
        first = next(peer for peer in peers if self.posted(kind, peer))
        self.waited_s[first] += time.perf_counter() - start_s

    def _nap_until(self, come: Callable[[], bool], peers: list[int], doing: str) -> None:
        naps_from_s = time.perf_counter() + YIELDS_S
        patience = Patience(self._status, peers, self._deadline_s, come, self.compare)
        self._status.waiting(peers[0], doing)
        while not come():
            if time.perf_counter() < naps_from_s:
                os.sched_yield()
            else:
                time.sleep(NAP_S)
            patience.check()
        self._status.done_waiting()


class PipeSignals(Signals):
    """An inbox for each rank: a pipe into which peers write kind and sender, two bytes that arrive together."""

    _message = struct.Struct("<H")

    def __init__(self, inboxes: Inboxes, rank: int, world_size: int, status: StatusReporter, deadline_s: float):
        self._inboxes = inboxes
        self._rank = rank
        self._status = status
        self._deadline_s = deadline_s
        self.waited_s = [0.0] * world_size
        self._arrived = [[0] * world_size for _ in range(KINDS)]
        self._poller = select.poll()
        self._poller.register(inboxes.read_fds[rank], select.POLLIN)

    def post(self, kind: int, peer: int) -> None:
        os.write(self._inboxes.write_fds[peer], self._message.pack(kind << 15 | self._rank))

    def wait(self, kind: int, peer: int, doing: str, round_index: int) -> None:
        arrived = self._arrived[kind]
        if not arrived[peer]:
            self._wait_for(arrived, [peer], f"{doing}, round {round_index}")
        arrived[peer] -= 1

    def posted(self, kind: int, peer: int) -> bool:
        self._take(0)
        return self._arrived[kind][peer] > 0

    def wait_any(self, kind: int, peers: list[int], doing: str) -> None:
        self._wait_for(self._arrived[kind], peers, doing)

    def _wait_for(self, arrived: list[int], peers: list[int], doing: str) -> None:
        start_s = time.perf_counter()

        def come() -> bool:
            self._take(0)
            return any(arrived[peer] for peer in peers)

        patience = Patience(self._status, peers, self._deadline_s, come, self.compare)
        self._status.waiting(peers[0], doing)
        while not any(arrived[peer] for peer in peers):
            self._take(min(SLICE_S, self._deadline_s / 4))
            patience.check()
        self._status.done_waiting()
        first = next(peer for peer in peers if arrived[peer])
        self.waited_s[first] += time.perf_counter() - start_s

    def _take(self, timeout_s: float) -> bool:
        """Counts what has arrived in the inbox; False where nothing did for `timeout_s` seconds."""
        if not self._poller.poll(timeout_s * 1000):
            return False
        for (message,) in self._message.iter_unpack(os.read(self._inboxes.read_fds[self._rank], 65536)):
            self._arrived[message >> 15][message & 0x7FFF] += 1
        return True


class Inboxes:
    """The pipes of `PipeSignals`; made by the launcher, inherited by every worker."""

    def __init__(self, read_fds: list[int], write_fds: list[int]) -> None:
        self.read_fds = read_fds
        self.write_fds = write_fds

    @classmethod
    def create(cls, world_size: int) -> Inboxes:
        pipes = [os.pipe() for _ in range(world_size)]
        return cls([read_fd for read_fd, _ in pipes], [write_fd for _, write_fd in pipes])

    def close(self) -> None:
        for fd in self.read_fds + self.write_fds:
            os.close(fd)
        self.read_fds, self.write_fds = [], []

    def __reduce__(self) -> tuple[object, ...]:
        return _inboxes_arrive, ([DupFd(fd) for fd in self.read_fds], [DupFd(fd) for fd in self.write_fds])


def _inboxes_arrive(read_fds: list[object], write_fds: list[object]) -> Inboxes:
    detach = [[fd.detach() for fd in fds] for fds in (read_fds, write_fds)]  # type: ignore[attr-defined]
    return Inboxes(*detach)
