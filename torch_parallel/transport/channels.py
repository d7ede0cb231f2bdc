"""Numbered channels beside a transport: several operations of the same ranks in flight, none mixing with another.

A transport has one counter of signals for each ordered pair of ranks, so its ranks perform one schedule after the
other. A channel has counters of its own, in memory that all ranks have in common: what one rank signals on a channel is
seen on that channel alone. Operations of one channel follow each other, in the same order on all ranks; operations on
different channels do not know of each other.

    channel 0   | bucket 7  round 0  .  round 1  . |           a dot is a wait
    channel 1      | bucket 3  .  round 0  .  round 1 |

A channel never waits. It performs a schedule in steps, as a generator that yields each wait (`Wait`), and whoever runs
it, the exchanger, goes on with another operation meanwhile, or sleeps until somebody rings (`bells.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_parallel.collectives.schedule import Collective
from torch_parallel.transport.base import Transport
from torch_parallel.transport.bells import Bells
from torch_parallel.transport.buffer import SharedBuffer, Transfer
from torch_parallel.transport.signals import READ, READY, SequenceNumbers, WaitTimeout, stores_are_ordered


@dataclass(frozen=True, slots=True)
class Wait:
    """What an operation waits for: a signal of `peer`, or a time of `time.perf_counter`, and then `peer` is None."""

    is_over: Callable[[], bool]
    peer: int | None
    doing: str
    until_s: float = 0.0


Steps = Iterator[Wait]


class ChannelSignals(SequenceNumbers):
    """Whoever sleeps is rung."""

    bells: Bells

    def post(self, kind: int, peer: int) -> None:
        super().post(kind, peer)
        self.bells.ring_if_asleep(peer)

    def take(self, kind: int, peer: int) -> None:
        """One that has come."""
        self._awaited[kind][peer] += 1


class Channel(Transport):
    """One channel of a rank. Buffers come from the transport that it belongs to."""

    _signals: ChannelSignals

    def __init__(self, base: Transport, memory: memoryview, bells: Bells, deadline_s: float) -> None:
        signals = ChannelSignals(memory, base.rank, base.world_size, base.status, deadline_s)
        signals.bells = bells
        before = base._signals.compare
        super().__init__(base.rank, base.world_size, signals, base._calls)
        signals.compare = before  # type: ignore[method-assign]
        self._base = base
        self.status = base.status
        self.one_memory, self.common_is_near = base.one_memory, base.common_is_near
        self.received_bytes = base.received_bytes

    def _allocate(self, count: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
        return self._base._allocate(count, numel, dtype)

    def agree(self, text: str, *, numbered: bool = True) -> None:
        """Ranks meet on the transport that the channel belongs to."""
        self._base.agree(text, numbered=numbered)

    def bind(self, collective: Collective, buffer: SharedBuffer) -> Tensor:
        """Makes ready to perform it; gives where the result will be. All ranks call it, in the same order, before
        anything is in flight."""
        return self._plan(collective, buffer).result

    def steps(self, collective: Collective, buffer: SharedBuffer, purpose: str) -> Steps:
        """Performs this rank's part of the schedule, which is bound; yields every wait. Then the buffer holds the
        result, or the memory that all have in common, and this rank's own has been read by all who read it."""
        plan, signals, observer = buffer.plans[collective], self._signals, self._base.observer
        for round_index, (posts, pulls) in enumerate(plan.rounds):
            for post in posts:
                post()
            for source, operation, theirs, reduce in pulls:
                wait_start_s = time.perf_counter()
                yield from self._signal(READY, source, f"{purpose}, round {round_index}")
                start_s = time.perf_counter()
                try:
                    arrives_s = self._base.arrival_s(source, theirs.nbytes)
                except WaitTimeout as timeout:
                    raise self.failed(timeout, f"{purpose}, round {round_index}") from None
                operation(theirs)
                if arrives_s > time.perf_counter():
                    yield Wait(lambda at=arrives_s: time.perf_counter() >= at, None, purpose, arrives_s)  # type: ignore[misc]
                self.received_bytes[source] += theirs.nbytes
                if observer is not None:
                    times = (wait_start_s, start_s, time.perf_counter())
                    observer(Transfer(source, self.rank, theirs.nbytes, purpose, round_index, *times, reduce))
        for source in plan.acknowledge:
            signals.post(READ, source)
        for reader in plan.readers:
            yield from self._signal(READ, reader, f"{purpose}, end of the peer's reading, round {len(plan.rounds) - 1}")

    def _signal(self, kind: int, peer: int, doing: str) -> Steps:
        signals = self._signals
        if not signals.posted(kind, peer):
            yield Wait(lambda: signals.posted(kind, peer), peer, doing)
        signals.take(kind, peer)


def open_channels(transport: Transport, count: int, deadline_s: float) -> tuple[list[Channel], Bells]:
    """All ranks call it. Raises ValueError where ranks have no memory in common, or its stores are not ordered."""
    if transport.enqueues or not transport.on_one_machine or not stores_are_ordered():
        raise ValueError("several operations in flight need processes of one x86-64 machine that compute on its CPU")
    size = SequenceNumbers.bytes_needed(transport.world_size)
    memory = common_words(transport, (count * size + Bells.bytes_needed(transport.world_size)) // 8).cast("B")
    bells = Bells(memory[count * size :], transport.rank)
    parts = [memory[number * size : (number + 1) * size] for number in range(count)]
    return [Channel(transport, part, bells, deadline_s) for part in parts], bells


def common_words(transport: Transport, count: int) -> memoryview:
    """So many int64s, zeros at first, that all ranks have in common. All ranks call it."""
    return memoryview(transport.share_common(count, torch.int64).numpy())  # type: ignore[arg-type]
