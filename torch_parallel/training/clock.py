"""Where a rank's time goes: the parts of an epoch as differences of counters that only grow."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from torch_parallel import nics
from torch_parallel.strategies import Strategy
from torch_parallel.training.record import RankEpoch

FEWEST_SAMPLES = 5
"""With fewer steps timed in an epoch its exchange is not told from its compute."""


@dataclass
class _Reading:
    at_s: float
    exchange_s: float  # waiting included
    exchange_samples: int | None
    update_s: float
    waited_s: list[float]
    received_bytes: list[int]
    nic_bytes: list[int]


class EpochClock:
    """Started when an epoch's training begins; `seconds` and `spent` leave out what was `off_the_clock`."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._transport = strategy.transport
        self._off_s = 0.0
        self._begin = self._read()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._begin.at_s - self._off_s

    @contextmanager
    def off_the_clock(self) -> Iterator[None]:
        """What is no part of training, a checkpoint say, leaves no trace in the figures."""
        transport, start_s = self._transport, time.perf_counter()
        waited_s, received_bytes = list(transport.waited_s), list(transport.received_bytes)
        yield
        transport.waited_s[:], transport.received_bytes[:] = waited_s, received_bytes
        self._off_s += time.perf_counter() - start_s

    def spent(self, train_s: float) -> RankEpoch:
        """What this rank spent of the `train_s` seconds since the start."""
        now, begin = self._read(), self._begin
        exchange_s, update_s = now.exchange_s - begin.exchange_s, now.update_s - begin.update_s
        waited_for_s = [late - early for late, early in zip(now.waited_s, begin.waited_s, strict=True)]
        received = zip(now.received_bytes, begin.received_bytes, strict=True)
        told = now.exchange_samples is None or now.exchange_samples - (begin.exchange_samples or 0) >= FEWEST_SAMPLES
        in_background = self._strategy.updates_in_background
        waits_are_seen = not in_background and not (self._transport.enqueues and self._transport.world_size > 1)
        return RankEpoch(
            compute_s=train_s - update_s - (exchange_s if told else 0.0),
            exchange_s=exchange_s - sum(waited_for_s) if told else math.nan,
            wait_s=sum(waited_for_s) if told and waits_are_seen else math.nan,
            update_s=math.nan if in_background else update_s,
            waited_for_s=waited_for_s,
            received_bytes=[late - early for late, early in received],
            nic_bytes=[late - early for late, early in zip(now.nic_bytes, begin.nic_bytes, strict=True)],
        )

    def _read(self) -> _Reading:
        transport = self._transport
        return _Reading(
            time.perf_counter(),
            self._strategy.exchange_clock.total_s,
            self._strategy.exchange_samples,
            self._strategy.update_clock.total_s,
            list(transport.waited_s),
            list(transport.received_bytes),
            self._read_nics(),
        )

    def _read_nics(self) -> list[int]:
        """Of the named cards of this rank's node, sent and received; zeros where another rank reads them."""
        communicator = self._strategy.communicator
        nodes, names = communicator.nodes, communicator.nics
        if not names or nodes.index(nodes[communicator.rank]) != communicator.rank:
            return [0] * (2 * len(names))
        traffic = nics.read()
        return [nbytes for name in names for nbytes in traffic.get(name, (0, 0))]


def peaks(device: torch.device) -> tuple[int, int]:
    """The most bytes of memory that this process has had at once so far, and of its GPU, 0 where it has none."""
    unit = 1 if sys.platform == "darwin" else 1024
    of_process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return of_process, torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
