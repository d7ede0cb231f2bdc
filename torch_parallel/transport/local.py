"""Threads of one process: the transport for tests, and for reading. Memory is shared anyway; a signal is a counter."""

from __future__ import annotations

import threading
import time

import torch
from torch import Tensor

from torch_parallel.transport.base import Signals, Transport, WaitTimeout


class LocalGroup:
    """What the threads of one group share. Give each thread `group.transport(rank)`."""

    def __init__(self, world_size: int, deadline_s: float = 10.0) -> None:
        self.world_size = world_size
        self.deadline_s = deadline_s
        self.changed = threading.Condition()
        self.counts: dict[tuple[int, int, int], int] = {}
        self.buffers: list[list[Tensor]] = []
        self.texts: dict[tuple[int, int], str] = {}

    def transport(self, rank: int) -> LocalTransport:
        return LocalTransport(self, rank)


class LocalSignals(Signals):
    """Counters under one lock, keyed by (kind, source, to)."""

    def __init__(self, group: LocalGroup, rank: int) -> None:
        self._group = group
        self._rank = rank
        self.waited_s = [0.0] * group.world_size

    def post(self, kind: int, peer: int) -> None:
        key = (kind, self._rank, peer)
        with self._group.changed:
            self._group.counts[key] = self._group.counts.get(key, 0) + 1
            self._group.changed.notify_all()

    def wait(self, kind: int, peer: int, doing: str, round_index: int) -> None:
        key, counts, start_s = (kind, peer, self._rank), self._group.counts, time.perf_counter()
        with self._group.changed:
            if not self._group.changed.wait_for(lambda: counts.get(key, 0) > 0, self._group.deadline_s):
                raise WaitTimeout(f"no signal from rank {peer} for {self._group.deadline_s:.1f} s")
            counts[key] -= 1
        self.waited_s[peer] += time.perf_counter() - start_s


class LocalTransport(Transport):
    def __init__(self, group: LocalGroup, rank: int) -> None:
        super().__init__(rank, group.world_size, LocalSignals(group, rank))
        self._group = group
        self._shares = 0
        self._agreements = 0

    def _allocate(self, numel: int, dtype: torch.dtype, count: int) -> list[Tensor]:
        with self._group.changed:
            if len(self._group.buffers) == self._shares:  # the first rank to get here makes it for all
                self._group.buffers.append([torch.zeros(numel, dtype=dtype) for _ in range(count)])
        self._shares += 1
        return self._group.buffers[self._shares - 1]

    def _describe(self, text: str) -> None:
        self._agreements += 1
        self._group.texts[self.rank, self._agreements] = text

    def _description(self, peer: int) -> str:
        return self._group.texts[peer, self._agreements]
