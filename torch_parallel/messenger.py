"""How the nodes of a run hear of each other: one connection from each other node's lowest rank to rank 0.

Each node has memory of its own, with a status board and a board of calls for all ranks, and its ranks write and read
there. What they write, the node's messenger passes on, and it writes what it hears of other nodes' ranks on its own
boards; so waits, errors and the launcher's part look at one place, wherever a rank stands. Results and errors of ranks
go the same way to rank 0.

  node A: boards, rank 0 <-- connection --> rank 4, boards: node B
                         <-- connection --> rank 8, boards: node C      what B says, A passes on to C

A connection that closes, or is silent for the deadline, means that the node behind it is lost.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import numpy

from torch_parallel import pickling
from torch_parallel.collectives.schedule import Nodes
from torch_parallel.status import DIED, RUNNING, StatusBoard
from torch_parallel.transport.calls import CallBoard
from torch_parallel.transport.shared_memory import Wiring

BEAT_S = 0.02
"""How often what has changed is passed on."""
SIGN_S = 1.0
"""How often a sign of life is given where nothing has changed."""
HANDSHAKE_S = 2.0
"""So long may who connects take to say who it is."""
PIECE_BYTES = 1 << 20
"""The longest piece of what a rank says that is passed on at a time."""


@dataclass
class _Run:
    """A run on this node: its boards, and what was last passed on of them."""

    status: StatusBoard
    calls: CallBoard
    own: list[int]
    outboxes: dict[int, int]  # by rank of another node, where its words are to be put
    inboxes: dict[int, int]  # by rank of this node, where its words are to be had
    passed_on: dict[int, numpy.ndarray[Any, Any]] = field(default_factory=dict)
    records: dict[int, bytes] = field(default_factory=dict)

    def news(self) -> list[tuple[int, bytes, list[tuple[int, bytes]]]]:
        """Of each rank here that has written something: its status, and the words of its calls that have changed."""
        found = []
        for rank in self.own:
            record, words = self.status.record(rank), numpy.array(self.calls.record(rank))
            before = self.passed_on.get(rank)
            changed = numpy.flatnonzero(words if before is None else words != before)
            if len(changed) or record != self.records.get(rank):
                found.append((rank, record, _pieces(words, changed)))
            self.passed_on[rank], self.records[rank] = words, record
        return found

    def adopt(self, news: list[tuple[int, bytes, list[tuple[int, bytes]]]], sent_ns: int) -> None:
        for rank, record, pieces in news:
            for start, data in reversed(pieces):  # what calls are lies behind their numbers, and is to be there first
                self.calls.adopt(rank, start, memoryview(data).cast("Q"))
            self.status.adopt(rank, record, sent_ns)


def _pieces(words: numpy.ndarray[Any, Any], changed: numpy.ndarray[Any, Any]) -> list[tuple[int, bytes]]:
    """The changed words, side by side where they lie so: where each piece begins, and its bytes."""
    if not len(changed):
        return []
    parts = numpy.split(changed, numpy.flatnonzero(numpy.diff(changed) > 1) + 1)
    return [(int(part[0]), words[part[0] : part[-1] + 1].tobytes()) for part in parts]


class Messenger:
    """Of one node, in the process of its lowest rank. `connections` are those to other nodes, by node."""

    def __init__(self, nodes: Nodes, node: int, connections: dict[int, Connection], deadline_s: float) -> None:
        self._nodes, self._node, self._deadline_s = nodes, node, deadline_s
        for connection in connections.values():
            _limit_waits(connection, deadline_s)
        self._connections = connections
        self._heard_s = dict.fromkeys(connections, time.monotonic())
        self._said_s = 0.0
        self._runs: dict[int, _Run] = {}
        self._early: dict[int, list[tuple[Any, ...]]] = {}  # of runs that have not begun here
        self._over: set[int] = set()
        self._lost: set[int] = set()  # nodes
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._serve, name="messenger of the node", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> set[int]:
        """The nodes that cannot be reached any more."""
        return set(self._lost)

    def begin(
        self,
        number: int,
        wiring: Wiring,
        outboxes: Mapping[int, int] | None = None,
        inboxes: Mapping[int, int] | None = None,
    ) -> None:
        """A run has its memory on this node."""
        own = [rank for rank, node in enumerate(self._nodes) if node == self._node]
        with self._lock:
            boards = wiring.status_board(), wiring.call_board()
            self._runs[number] = _Run(*boards, own, dict(outboxes or {}), dict(inboxes or {}))
            for word in self._early.pop(number, []):
                self._take(*word)
            for node in self._lost:
                self._note_lost(self._runs[number], node)

    def end(self, number: int) -> None:
        """It is over on this node; what its ranks have said until now is passed on before."""
        with self._lock:
            self._pass_on()
            self._runs.pop(number, None)
            self._over.add(number)

    def say_over(self, number: int, rank: int, how: int) -> None:
        """Writes on all boards that a rank of any node is over."""
        with self._lock:
            self._say(("over", number, rank, how))

    def close(self) -> None:
        """There are no more runs of these nodes."""
        with self._lock:
            connections, self._connections = self._connections, {}
        self._thread.join()
        for connection in connections.values():
            connection.close()

    # ---- the thread ----

    def _serve(self) -> None:
        while self._connections:
            with self._lock:
                watched = {connection: node for node, connection in self._connections.items()}
                mail = {fd: (number, rank) for number, run in self._runs.items() for rank, fd in run.inboxes.items()}
            with contextlib.suppress(OSError):  # a descriptor may have been closed meanwhile
                ready = multiprocessing.connection.wait([*watched, *mail], BEAT_S)
                with self._lock:
                    for each in ready:
                        if isinstance(each, int):
                            self._forward(*mail[each], each)
                        elif isinstance(each, Connection):
                            self._receive(watched[each], each)
            with self._lock:
                self._pass_on()
                self._look_for_silence()

    def _forward(self, number: int, rank: int, fd: int) -> None:
        """What a rank of this node has said, to rank 0; after what it has written, which may explain it."""
        run = self._runs.get(number)
        if run is None or run.inboxes.get(rank) != fd:
            return  # it is over meanwhile
        try:
            piece = os.read(fd, PIECE_BYTES)
        except BlockingIOError:
            return
        if not piece:
            run.inboxes.pop(rank)
            return
        self._pass_on()
        self._say(("mail", number, rank, piece))

    def _receive(self, node: int, connection: Connection) -> None:
        try:
            while node in self._connections and connection.poll():
                word = pickling.loads(connection.recv_bytes())
                self._heard_s[node] = time.monotonic()
                self._take(*word)
                for other in list(self._connections):
                    if other != node and word[0] != "mail":  # those of others are at the other end of this one
                        self._send(other, word)
        except (EOFError, OSError):
            self._lose(node)

    def _take(self, kind: str, number: int, *content: Any) -> None:
        run = self._runs.get(number)
        if run is None:
            if number not in self._over and number:
                self._early.setdefault(number, []).append((kind, number, *content))
        elif kind == "news":
            run.adopt(*content)
        elif kind == "over":
            rank, how = content
            if run.status.over(rank) == RUNNING:
                run.status.note_end(rank, how)
        elif kind == "mail":
            rank, piece = content
            _write_all(run.outboxes[rank], piece)

    def _pass_on(self) -> None:
        for number, run in self._runs.items():
            news = run.news()
            if news:
                self._say(("news", number, news, time.monotonic_ns()))
        if time.monotonic() - self._said_s > SIGN_S:
            self._say(("sign", 0))

    def _say(self, word: tuple[Any, ...]) -> None:
        self._said_s = time.monotonic()
        for node in list(self._connections):
            self._send(node, word)

    def _send(self, node: int, word: tuple[Any, ...]) -> None:
        if node not in self._connections:
            return
        try:
            self._connections[node].send_bytes(pickling.dumps(word))
        except (OSError, ValueError):
            self._lose(node)

    def _look_for_silence(self) -> None:
        for node in list(self._connections):
            if time.monotonic() - self._heard_s[node] > self._deadline_s:
                self._lose(node)

    def _lose(self, node: int) -> None:
        """Behind rank 0's node are all others: who cannot reach it reaches none of them."""
        connection = self._connections.pop(node, None)
        if connection is None:
            return
        with contextlib.suppress(OSError):
            connection.close()
        lost = {node} if self._node == self._nodes[0] else set(self._nodes) - {self._node}
        self._lost |= lost
        for number, run in list(self._runs.items()):
            for each in lost:
                self._note_lost(run, each)
                for rank, at in enumerate(self._nodes):
                    if at == each:
                        self._say(("over", number, rank, DIED))

    def _note_lost(self, run: _Run, node: int) -> None:
        for rank, at in enumerate(self._nodes):
            if at == node and run.status.over(rank) == RUNNING:
                run.status.note_end(rank, DIED)


def _limit_waits(connection: Connection, seconds: float) -> None:
    """Who falls silent within a message, or takes none, is lost after so long: reading and writing raise OSError."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            same.setsockopt(socket.SOL_SOCKET, option, _as_time(seconds))


def _as_time(seconds: float) -> bytes:
    whole = max(1, round(seconds))
    return struct.pack("ll", whole, 0)


def _write_all(fd: int, data: bytes) -> None:
    left = memoryview(data)
    with contextlib.suppress(BrokenPipeError):  # nobody hears any more
        while left:
            left = left[os.write(fd, left) :]


# ---- the connections ----


class Hub:
    """Rank 0's end: others connect to it. `address` is what they are to be told."""

    def __init__(self) -> None:
        self._token = secrets.token_bytes(16)
        self._listener = Listener(("", 0), backlog=128, authkey=self._token)
        self.port: int = self._listener.address[1]

    @property
    def told(self) -> tuple[int, bytes]:
        return self.port, self._token

    def connections(self, nodes: set[int], deadline_s: float) -> dict[int, Connection]:
        """Of each of the nodes, once they have come. Raises ConnectionError, which names one that has not."""
        came: dict[int, Connection] = {}
        # who connects and says nothing is none of ours; what is accepted has the limits of who accepts
        server = self._listener._listener._socket  # type: ignore[attr-defined]  # no other way to a limit
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _as_time(HANDSHAKE_S))
        until_s = time.monotonic() + deadline_s
        while set(came) != nodes:
            server.settimeout(max(0.01, until_s - time.monotonic()))
            try:
                connection = self._listener.accept()
                came[connection.recv()] = connection
            except TimeoutError:
                missing = min(nodes - set(came))
                raise ConnectionError(f"node {missing} did not connect to rank 0 within {deadline_s:.0f} s") from None
            except (OSError, EOFError, multiprocessing.AuthenticationError):
                continue  # somebody else's
        self._listener.close()
        return came


def connect_to_hub(hosts: list[str], port: int, token: bytes, node: int) -> Connection:
    """To rank 0, by the first of the hosts where it listens. Raises ConnectionError."""
    why = ""
    for host in hosts:
        try:
            with socket.create_connection((host, port), timeout=5.0):
                pass
            connection = Client((host, port), authkey=token)
            connection.send(node)
            return connection
        except (OSError, EOFError, multiprocessing.AuthenticationError) as error:
            why = f"{host}:{port}: {error}"
    raise ConnectionError(f"node {node} cannot connect to rank 0 ({why}): are ports above 1023 open between the nodes?")
