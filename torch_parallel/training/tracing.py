"""Records what a rank does while it trains, for `--trace`. All ranks of a machine read one clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torch_parallel.communicator import Communicator
from torch_parallel.strategies import Strategy
from torch_parallel.trace import Event
from torch_parallel.transport.base import Transfer


class Tracer:
    """The events of one rank; hangs itself on the transport's and the strategy's observers."""

    def __init__(self, communicator: Communicator, strategy: Strategy) -> None:
        self.rank = communicator.rank
        self._device = communicator.device
        self.events: list[Event] = []
        strategy.transport.observer = self._transfer
        strategy.on_update = self._update

    @contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        """An event that lasts as long as the block, and what it gives to a GPU."""
        start_s = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.events.append(Event(self.rank, lane, name, start_s, time.perf_counter()))

    def _transfer(self, transfer: Transfer) -> None:
        what = transfer.purpose or "control"
        waited = f"for rank {transfer.source}: {what}"
        done = f"{what}, round {transfer.round}, {transfer.bytes:,} bytes from rank {transfer.source}"
        sent = f"{what}, round {transfer.round}, {transfer.bytes:,} bytes to rank {self.rank}"
        lane = "reduce" if transfer.reduce else "copy"
        # the source does nothing while it is read from; only the reader knows when that was
        self.events.append(Event(transfer.source, "send", sent, transfer.start_s, transfer.end_s))
        self.events.append(Event(self.rank, "wait", waited, transfer.wait_start_s, transfer.start_s))
        self.events.append(Event(self.rank, lane, done, transfer.start_s, transfer.end_s))

    def _update(self, bucket: int, start_s: float, end_s: float) -> None:
        self.events.append(Event(self.rank, "update", f"bucket {bucket}", start_s, end_s))
