"""Threads of one process: the transport for tests, and for reading. Memory is shared anyway; a signal is a counter."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from torch_parallel.status import StatusBoard, StatusReporter
from torch_parallel.topology import Topology
from torch_parallel.transport.base import Transport
from torch_parallel.transport.calls import CallBoard, Calls
from torch_parallel.transport.links import EmulatedLinks
from torch_parallel.transport.signals import SLICE_S, Patience, Signals


class LocalGroup:
    """What the threads of one group share. Give each thread `group.transport(rank)`."""

    def __init__(self, world_size: int, deadline_s: float = 10.0, links: Topology | None = None) -> None:
        self.world_size = world_size
        self.deadline_s = deadline_s
        self.changed = threading.Condition()
        self.counts: dict[tuple[int, int, int], int] = {}
        self.buffers: list[list[Tensor]] = []
        self.calls = CallBoard(memoryview(bytearray(CallBoard.bytes_needed(world_size))), world_size)
        self.board = StatusBoard(memoryview(bytearray(StatusBoard.bytes_needed(world_size))), world_size)
        self.links = links
        self.link_clocks = memoryview(bytearray(EmulatedLinks.bytes_needed(links)))
        self.link_lock = threading.Lock()

    def transport(self, rank: int) -> LocalTransport:
        return LocalTransport(self, rank)


class LocalSignals(Signals):
    """Counters under one lock, keyed by (kind, source, to)."""

    def __init__(self, group: LocalGroup, rank: int, status: StatusReporter) -> None:
        self._group = group
        self._rank = rank
        self._status = status
        self.waited_s = [0.0] * group.world_size

    def post(self, kind: int, peer: int) -> None:
        key = (kind, self._rank, peer)
        with self._group.changed:
            self._group.counts[key] = self._group.counts.get(key, 0) + 1
            self._group.changed.notify_all()

    def wait(self, kind: int, peer: int, doing: str, round_index: int) -> None:
        self.wait_any(kind, [peer], doing)
        with self._group.changed:
            self._group.counts[kind, peer, self._rank] -= 1

    def posted(self, kind: int, peer: int) -> bool:
        return self._group.counts.get((kind, peer, self._rank), 0) > 0

    def wait_any(self, kind: int, peers: list[int], doing: str) -> None:
        start_s = time.perf_counter()

        def come() -> bool:
            return any(self.posted(kind, peer) for peer in peers)

        with self._group.changed:
            if not come():
                self._wait_for(come, peers, doing)
            first = next(peer for peer in peers if self.posted(kind, peer))
        self.waited_s[first] += time.perf_counter() - start_s

    def _wait_for(self, come: Callable[[], bool], peers: list[int], doing: str) -> None:
        patience = Patience(self._status, peers, self._group.deadline_s, come, self.compare)
        self._status.waiting(peers[0], doing)
        while not self._group.changed.wait_for(come, min(SLICE_S, self._group.deadline_s / 4)):
            patience.check()
        self._status.done_waiting()


class LocalTransport(Transport):
    def __init__(self, group: LocalGroup, rank: int) -> None:
        self.status = group.board.reporter(rank)
        signals = LocalSignals(group, rank, self.status)
        super().__init__(rank, group.world_size, signals, Calls(group.calls, rank))
        self._group = group
        self._shares = 0
        if group.links is not None:
            links = EmulatedLinks(group.links, rank, group.link_clocks, group.link_lock, group.deadline_s)
            self.over_link, self.send_over_link, self.arrival_s = links.slowed, links.send, links.arrival_s
            self.one_memory = self.common_is_near = links.within_one_node

    def _allocate(self, count: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
        with self._group.changed:
            if len(self._group.buffers) == self._shares:  # the first rank to get here makes them for all
                self._group.buffers.append([torch.zeros(numel, dtype=dtype, device="cpu") for _ in range(count)])
        self._shares += 1
        return self._group.buffers[self._shares - 1]
