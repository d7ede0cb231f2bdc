"""Ranks on several nodes: those of one node reach each other's memory, the others exchange messages.

  node A   rank 0 == rank 1          ==  memory of the node, as on one machine
              |         |            |   a line: `process_group.py`
  node B   rank 2 == rank 3

The schedule is the same, and each of its messages goes its own way. Within the node a Send is a signal, and the Receive
reads the peer's memory; between nodes the chunk that the Send names goes along, into memory of its own at the receiver,
who adds or copies it from there in the schedule's order. So sums have the same bits as in one memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_parallel.collectives.schedule import Collective, Nodes
from torch_parallel.transport.buffer import Plan, Pull, SharedBuffer
from torch_parallel.transport.calls import ADVICE, TransportError
from torch_parallel.transport.process_group import PUSHED, SMALL_BYTES, Lines, WiredSignals
from torch_parallel.transport.shared_memory import SharedMemoryTransport, Wiring
from torch_parallel.transport.signals import READY

WORD_S = 1.0
"""So long may it take until it is known here what a call of another node is."""


class HybridTransport(SharedMemoryTransport):
    """The transport of one rank of several nodes; `wiring` is shared by those of its own.

    What lies in common memory is common to a node alone, so collectives that need memory in common are refused.
    """

    on_one_machine = False

    def __init__(self, wiring: Wiring, rank: int, deadline_s: float, nodes: Nodes, lines: Lines) -> None:
        self._mates = [peer for peer, node in enumerate(nodes) if node == nodes[rank]]
        super().__init__(wiring, rank, deadline_s)
        self._lines = lines.by_peer
        self._wired = WiredSignals(self._signals, lines, self.status, deadline_s)
        self._wired.compare = self._calls.compare  # type: ignore[method-assign]
        self._signals = self._wired
        self._calls.words_s = WORD_S
        for line in self._lines.values():
            line.listen(self._calls)
        self.over_link = partial(self._over_line, READY)
        self.one_memory = self.common_is_near = False

    def _take(self, offset: int, stride: int, count: int) -> None:
        """The lowest rank of a node takes what ranks of the node use; of the others' parts there is no more than the
        address."""
        if self.rank == self._mates[0]:
            for holder in self._mates if count == self.world_size else range(count):
                self._arena.take(offset + stride * holder, stride)

    def _reached(self, peer: int) -> bool:
        return peer not in self._lines

    def _post_of(self, peer: int, chunk: Tensor) -> Callable[[], None]:
        line = self._lines.get(peer)
        return super()._post_of(peer, chunk) if line is None else partial(line.send, READY, chunk)

    def _bind(self, collective: Collective, buffer: SharedBuffer) -> Plan:
        """Room for what comes from other nodes is made one round before."""
        plan = super()._bind(collective, buffer)
        room = [
            [partial(self._lines[source].expect, theirs.nbytes) for source, _, theirs, _ in self._large(pulls)]
            for _, pulls in plan.rounds
        ]
        for index, (posts, _) in enumerate(plan.rounds):
            posts[:0] = [*(room[0] if index == 0 else []), *(room[index + 1] if index + 1 < len(room) else [])]
        return plan

    def _large(self, pulls: list[Pull]) -> list[Pull]:
        return [pull for pull in pulls if pull[0] in self._lines and pull[2].nbytes > SMALL_BYTES]

    def _over_line(self, kind: int, pull: Pull) -> Pull:
        """The same receive; where it comes from another node, of what has arrived with the signal."""
        source, operation, theirs, reduce = pull
        line = self._lines.get(source)
        if line is None:
            return pull

        def of_what_came(theirs: Tensor) -> None:
            if kind == PUSHED:
                self._wait(PUSHED, source, "what it has pushed", 0)
            data = self._wired.take(source)
            if (data.nbytes if data is not None else 0) != theirs.nbytes:
                self._raise_unlike(source, data, theirs)
            if data is None:
                operation(theirs)
                return
            operation(data.view(theirs.dtype))
            line.give_back(data)

        of: Callable[[Tensor], Any] = of_what_came
        return source, of, theirs, reduce

    def _raise_unlike(self, source: int, data: Tensor | None, theirs: Tensor) -> None:
        """The ranks do not do the same."""
        self._calls.compare()
        sent = 0 if data is None else data.nbytes
        text = f"rank {source} has sent {sent} bytes to rank {self.rank}, which waits for {theirs.nbytes}: {ADVICE}"
        raise self._calls.told(TransportError(text, secondhand=False))

    def share_common(self, numel: int, dtype: torch.dtype, *, numbered: bool = True) -> Tensor:
        """Raises ValueError: there is none."""
        raise ValueError("the ranks are on several nodes, which have no memory in common")

    def tell(self, peer: int, pushed: Iterable[SharedBuffer] = ()) -> None:
        line = self._lines.get(peer)
        if line is None:
            super().tell(peer, pushed)
            return
        line.send(READY)
        for buffer in pushed:
            line.send(PUSHED, buffer.local)

    def hear(self, peer: int, doing: str, put: Iterable[SharedBuffer] = ()) -> None:
        if peer not in self._lines:
            super().hear(peer, doing, put)
            return
        self._wait(READY, peer, doing, 0)
        for buffer in put:
            self._take_pushed(buffer.local, peer, buffer.local.copy_, False, doing)

    def read(self, buffer: SharedBuffer, peer: int, add: bool, purpose: str) -> None:
        if peer not in self._lines:
            super().read(buffer, peer, add, purpose)
            return
        operation = buffer.local.add_ if add else buffer.local.copy_
        self._take_pushed(buffer.local, peer, operation, add, purpose)

    def drop(self, buffer: SharedBuffer, peer: int, purpose: str) -> None:
        if peer in self._lines:
            self._take_pushed(buffer.local, peer, lambda theirs: None, False, purpose)

    def put(self, buffer: SharedBuffer, peer: int) -> None:
        line = self._lines.get(peer)
        if line is None:
            super().put(buffer, peer)
        else:
            line.send(PUSHED, buffer.local.clone())  # this rank goes on to change it

    def _take_pushed(
        self, like: Tensor, peer: int, operation: Callable[[Tensor], Any], add: bool, purpose: str
    ) -> None:
        self._receive(self._over_line(PUSHED, (peer, operation, like, add)), purpose, time.perf_counter())

    def leave(self) -> None:
        """What was sent has left when this process ends."""
        super().leave()
        for line in self._lines.values():
            line.finish()

    def close(self) -> None:
        self._wired.lines.close()


def transport_of(
    wiring: Wiring, rank: int, deadline_s: float, nodes: Nodes = (), lines: Lines | None = None
) -> SharedMemoryTransport:
    """Of one node's memory, or of several nodes where there are lines to them."""
    if lines is None:
        return SharedMemoryTransport(wiring, rank, deadline_s)
    return HybridTransport(wiring, rank, deadline_s, nodes, lines)
