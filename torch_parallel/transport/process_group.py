"""Messages between ranks of different nodes, carried by torch's process groups: gloo's, over TCP.

Each pair of ranks has two groups of its own, so that each pair can have its own network card, and each direction its
own connection: gloo sends when the receiver has said that there is room, and that word would stand in line behind what
goes the other way. A message is a kind and bytes. Small ones travel with their header; of large ones the header comes
first, and says how much will follow:

  rank 3   send(READY, chunk)   --- header: READY, 1,000,000 bytes --->   thread of rank 4: takes the header,
                                --- the bytes ------------------------>   takes the bytes, says that they are there

The thread that listens takes what comes as soon as it comes, and keeps it until its rank wants it; so senders are not
held up, and `WiredSignals` counts what has arrived as it counts signals of its own node. What was sent stays as it is
until the receiver has said that it has it: the same acknowledgement that in memory says that it has read.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from torch_parallel.status import RETURNED, StatusReporter
from torch_parallel.transport.calls import Calls
from torch_parallel.transport.process_groups import LONGEST_WORK, deadline_of
from torch_parallel.transport.signals import KINDS, NAP_S, READY, SLICE_S, Patience, PeerIsOver, Signals, WaitTimeout

PUSHED = KINDS
"""A third kind of message: bytes that are not part of a schedule, such as a push to a server."""
_BYE = KINDS + 1
_HEADERS, _BYTES, _PUSHED_BYTES, _NEVER = range(4)
"""Tags of messages: gloo keeps those of one tag in order. With the last one nothing is ever sent."""
HEADER_BYTES = 32  # four int64s: the kind, how many bytes follow, the number of the sender's last call, and its entry
SMALL_BYTES = 16 << 10
"""So much travels with its header."""
POSTED = 8
"""So many headers may come before the listener has looked at the first one."""
IN_FLIGHT, IN_FLIGHT_BYTES = 64, 16 << 20
"""Messages, and their bytes, that are kept for a peer which may not have them yet; who sends more waits."""
FREE_BYTES = 64 << 20
"""So much memory of messages that are done with is kept for the next ones."""
LAST_S = 1.0
"""When the program ends, the time in which peers may say that nothing more will come."""
LOST_S = 2.0
"""After a connection was lost, the time in which word may come of how the peer has ended."""


class Line:
    """What joins this rank with one rank of another node."""

    def __init__(
        self, outgoing: Any, incoming: Any, peer: int, other: int, changed: threading.Condition, deadline_s: float
    ) -> None:
        self.peer = peer
        self._deadline_s = deadline_s
        self._in_flight_bytes = self._free_bytes = 0
        self.arrived: list[deque[Tensor]] = [deque() for _ in range(KINDS + 1)]
        """By kind, the bytes of the messages that have come and that nobody has taken yet."""
        self.lost, self.lost_s = "", 0.0
        """Why nothing more can come, and since when."""
        self.calls: Calls | None = None
        """Of this rank: a message says which call its sender is in, and is so much as its own note of that."""
        self._outgoing, self._incoming, self._other = outgoing, incoming, other
        self._changed = changed
        self._in_flight: deque[tuple[Any, Tensor]] = deque()
        self._room: deque[tuple[Tensor, Any]] = deque()  # for large messages of schedules that have not come
        self._awaited = self._came = 0  # such messages, so far
        self._in_order = threading.Lock()
        self._free: dict[int, list[Tensor]] = {}  # memory of large messages that are done with, by size

    def listen(self, calls: Calls) -> None:
        """From now on takes what comes. `calls` are this rank's."""
        self.calls = calls
        self._listener = threading.Thread(target=self._listen, name=f"listener to rank {self.peer}", daemon=True)
        self._listener.start()
        _listening.add(self)

    def send(self, kind: int, data: Tensor | None = None) -> None:
        """Begins to send; `data`, contiguous, must stay as it is until the peer has said that it has it."""
        nbytes = 0 if data is None else data.nbytes
        small = nbytes <= SMALL_BYTES
        message = torch.empty(HEADER_BYTES + nbytes * small, dtype=torch.uint8, device="cpu")
        number, entry = (0, 0) if self.calls is None else (self.calls.number, self.calls.entry)
        message[:HEADER_BYTES].view(torch.int64).copy_(torch.tensor((kind, nbytes, number, entry), device="cpu"))
        if data is not None and nbytes and small:
            message[HEADER_BYTES:] = data.view(torch.uint8)
        self._begin(message, _HEADERS)
        if data is not None and not small:
            self._begin(data.view(torch.uint8), _PUSHED_BYTES if kind == PUSHED else _BYTES)

    def expect(self, nbytes: int) -> None:
        """Makes room for the next large message of a schedule, so that its sender need not wait for that; unless it has
        come already."""
        with self._in_order:
            self._awaited += 1
            if self._came < self._awaited and not self.lost:
                try:
                    self._room.append(self._make_room(nbytes, _BYTES))
                except RuntimeError as error:
                    self._note_lost(error)

    def give_back(self, data: Tensor) -> None:
        """The memory of a message that has been used."""
        if data.nbytes > SMALL_BYTES:
            if self._free_bytes + data.nbytes > FREE_BYTES:
                self._free.clear()
                self._free_bytes = 0
            self._free.setdefault(data.nbytes, []).append(data)
            self._free_bytes += data.nbytes

    def finish(self) -> None:
        """Returns when all that was sent has left this process, or the connection is lost."""
        self._let_go(0, 0)

    def _let_go(self, count: int, nbytes: int) -> None:
        """Waits until at most so many messages, of so many bytes, have not left."""
        try:
            while len(self._in_flight) > count or (self._in_flight_bytes > nbytes and len(self._in_flight) > 1):
                work, message = self._in_flight.popleft()
                self._in_flight_bytes -= message.nbytes
                work.wait(deadline_of(self._deadline_s))
        except RuntimeError as error:
            self._note_lost(error)

    def close(self) -> None:
        """Says that nothing more will come, so that the peer's listener ends. This one's ends when the peer says so."""
        self.send(_BYE)

    def end(self) -> None:
        """Makes the listener end: gloo closes a connection after a wait that was too long."""
        with contextlib.suppress(RuntimeError):
            nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
            self._incoming.recv([nothing], self._other, _NEVER).wait(timedelta(milliseconds=1))

    def is_listening(self, timeout_s: float) -> bool:
        """Whether the listener is still at work after so long."""
        self._listener.join(timeout_s)
        return self._listener.is_alive()

    def _begin(self, message: Tensor, tag: int) -> None:
        if self.lost:
            return  # whoever waits for an answer learns of it
        try:
            self._in_flight.append((self._outgoing.send([message], self._other, tag), message))
        except RuntimeError as error:
            self._note_lost(error)
            return
        self._in_flight_bytes += message.nbytes
        self._let_go(IN_FLIGHT, IN_FLIGHT_BYTES)

    def _listen(self) -> None:
        try:
            posted = deque(self._post() for _ in range(POSTED))
            while True:
                message, work = posted.popleft()
                work.wait(LONGEST_WORK)
                posted.append(self._post())
                kind, nbytes, number, entry = message[:HEADER_BYTES].view(torch.int64).tolist()
                if kind == _BYE:
                    self._note_lost(RuntimeError("] it has said that nothing more comes"))
                    return
                if self.calls is not None:
                    self.calls.hear(self.peer, number, entry)
                small = nbytes <= SMALL_BYTES
                data = message[HEADER_BYTES : HEADER_BYTES + nbytes] if small else self._receive(kind, nbytes)
                with self._changed:
                    self.arrived[kind].append(data)
                    self._changed.notify_all()
        except RuntimeError as error:
            self._note_lost(error)

    def _post(self) -> tuple[Tensor, Any]:
        message = torch.empty(HEADER_BYTES + SMALL_BYTES, dtype=torch.uint8, device="cpu")
        return message, self._incoming.recv([message], self._other, _HEADERS)

    def _receive(self, kind: int, nbytes: int) -> Tensor:
        with self._in_order:
            self._came += kind == READY
            if kind == READY and self._room:
                data, work = self._room.popleft()
            else:
                data, work = self._make_room(nbytes, _PUSHED_BYTES if kind == PUSHED else _BYTES)
        work.wait(LONGEST_WORK)
        return data[:nbytes]

    def _make_room(self, nbytes: int, tag: int) -> tuple[Tensor, Any]:
        free = self._free.get(nbytes)
        if free:
            self._free_bytes -= nbytes
        data = free.pop() if free else torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return data, self._incoming.recv([data], self._other, tag)

    def _note_lost(self, error: RuntimeError) -> None:
        with self._changed:
            if not self.lost:
                said = str(error).split("\n")[0].rpartition("] ")[2]  # behind the place in gloo's source
                self.lost, self.lost_s = said.partition(". This is typically")[0], time.monotonic()
            self._changed.notify_all()


_listening: weakref.WeakSet[Line] = weakref.WeakSet()


@atexit.register
def _end_listeners() -> None:
    """None of them may be at work when the interpreter ends: it would end the process with SIGABRT."""
    lines = list(_listening)
    for line in lines:
        line.close()
    until_s = time.monotonic() + LAST_S
    left = [line for line in lines if line.is_listening(max(0.0, until_s - time.monotonic()))]
    for line in left:
        line.end()
    for line in left:
        line.is_listening(LAST_S)


class Lines:
    """All lines of one rank, by peer, and what makes known that something has come."""

    def __init__(self, by_peer: dict[int, Line], changed: threading.Condition) -> None:
        self.by_peer = by_peer
        self.changed = changed

    @classmethod
    def connect(cls, store: Store, rank: int, peers: dict[int, dict[str, str]], deadline_s: float, run: str) -> Lines:
        """Meets each of the peers, in the store. `peers` says by which card: the arguments of gloo's `create_device`.

        Raises ConnectionError, which names the peer.
        """
        changed, lines, gloo = threading.Condition(), {}, cast(Any, dist.ProcessGroupGloo)
        devices: dict[tuple[tuple[str, str], ...], Any] = {}
        # all ranks go through the pairs in one order, so the first pair that is not joined has both its ranks waiting
        for peer in sorted(peers, key=lambda peer: (min(rank, peer), max(rank, peer))):
            card = tuple(peers[peer].items())
            low, high = min(rank, peer), max(rank, peer)
            try:
                options = gloo._Options()
                if card not in devices:
                    devices[card] = gloo.create_device(**peers[peer])
                options._devices, options._timeout, options._threads = [devices[card]], deadline_of(deadline_s), 1
                upward, downward = (
                    gloo(PrefixStore(f"torch_parallel/{run}/{low}, {high}, {way}", store), int(rank > peer), 2, options)
                    for way in ("upward", "downward")
                )
            except (RuntimeError, ValueError) as error:
                by = " ".join(f"{key} {value}" for key, value in card)
                why = " ".join(str(error).split()).rpartition("] ")[2][:200]  # behind the place in gloo's source
                raise ConnectionError(
                    f"rank {rank} cannot reach rank {peer} by {by} ({why}): is it a card of both machines, and are "
                    "ports above 1023 open between them?"
                ) from None
            ways = (upward, downward) if rank == low else (downward, upward)
            lines[peer] = Line(*ways, peer, int(rank < peer), changed, deadline_s)
        return cls(lines, changed)

    def close(self) -> None:
        for line in self.by_peer.values():
            line.close()


class WiredSignals(Signals):
    """Signals of a rank that has peers in its own node, by `near`, and others at the end of lines."""

    def __init__(self, near: Signals, lines: Lines, status: StatusReporter, deadline_s: float) -> None:
        self.near, self.lines = near, lines
        self.taken: dict[int, Tensor] = {}
        """By peer, the bytes that came with the signal that was waited for last."""
        self.waited_s = near.waited_s
        self._status, self._deadline_s = status, deadline_s

    def post(self, kind: int, peer: int) -> None:
        line = self.lines.by_peer.get(peer)
        if line is None:
            self.near.post(kind, peer)
        else:
            line.send(kind)

    def wait(self, kind: int, peer: int, doing: str, round_index: int) -> None:
        line = self.lines.by_peer.get(peer)
        if line is None:
            self.near.wait(kind, peer, doing, round_index)
            return
        arrived = line.arrived[kind]
        if not arrived:
            start_s = time.perf_counter()
            self._sleep_until(lambda: bool(arrived), [line], f"{doing}, round {round_index}", SLICE_S)
            self.waited_s[peer] += time.perf_counter() - start_s
        data = arrived.popleft()
        if data.nbytes:
            self.taken[peer] = data

    def posted(self, kind: int, peer: int) -> bool:
        line = self.lines.by_peer.get(peer)
        return self.near.posted(kind, peer) if line is None else bool(line.arrived[kind])

    def wait_any(self, kind: int, peers: list[int], doing: str) -> None:
        if not any(peer in self.lines.by_peer for peer in peers):
            self.near.wait_any(kind, peers, doing)
            return
        start_s = time.perf_counter()
        lines = [self.lines.by_peer[peer] for peer in peers if peer in self.lines.by_peer]
        slice_s = SLICE_S if len(lines) == len(peers) else NAP_S  # those of the own node wake nobody up
        self._sleep_until(lambda: any(self.posted(kind, peer) for peer in peers), lines, doing, slice_s, peers)
        first = next(peer for peer in peers if self.posted(kind, peer))
        self.waited_s[first] += time.perf_counter() - start_s

    def take(self, peer: int) -> Tensor | None:
        """What came with the signal that was waited for last; None where nothing did."""
        return self.taken.pop(peer, None)

    def _sleep_until(
        self,
        come: Callable[[], bool],
        lines: list[Line],
        doing: str,
        slice_s: float,
        peers: list[int] | None = None,
    ) -> None:
        peers = peers or [line.peer for line in lines]
        patience = Patience(self._status, peers, self._deadline_s, come, self.compare)
        self._status.waiting(peers[0], doing)
        changed, since_s = self.lines.changed, time.monotonic()
        while True:
            with changed:
                if come() or changed.wait_for(come, min(slice_s, self._deadline_s / 4)):
                    break
            try:
                patience.check()
            except PeerIsOver as over:
                # word of its return is faster than what it has sent before, and that ends with its goodbye
                late = time.monotonic() - since_s > self._deadline_s
                if over.how != RETURNED or late or all(line.lost for line in lines):
                    raise
            lost = [line for line in lines if line.lost]
            if len(lost) == len(peers) and time.monotonic() - max(line.lost_s for line in lost) > LOST_S:
                raise WaitTimeout(f"the connection to rank {lost[0].peer} was lost ({lost[0].lost})")
        self._status.done_waiting()
