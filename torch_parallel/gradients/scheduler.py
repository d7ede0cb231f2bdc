"""Which exchange comes next: in the order in which gradients come, or in that in which the next forward needs them.

Backward makes the gradients of the last layer first, and the next forward needs the first layer first. What is
exchanged is cut into units (a bucket, or a partition of a large one), and a unit that has begun is not interrupted:

    fifo       | 3 | 2 | 1 |            in the order in which they are ready
    priority   | 3 | 1 | 2 |            1 came while 3 was under way, and overtook 2

So that what is urgent does not wait behind what has just left, at most `credit_bytes` are under way at a time: a window
that is large fills the link, and one that is small lets others overtake. Which layer the next forward needs first is
seen in the first step (`first_use.py`), not assumed.

Ranks must start units in one order, or each would wait for what the other has not started. One worker decides it and
announces each unit when it starts it, in memory that all ranks read; a rank whose gradient is not ready yet waits.
(Peng et al., "A generic communication scheduler for distributed DNN training acceleration", 2019; Jayarajan et al.,
"Priority-based parameter propagation for distributed DNN training", 2019.)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch_parallel.gradients.exchanger import Exchanger, Operation
from torch_parallel.transport.base import Transport
from torch_parallel.transport.bells import Bells
from torch_parallel.transport.channels import Channel, Steps, Wait, common_words
from torch_parallel.transport.signals import WaitTimeout

SCHEDULES = ("none", "fifo", "priority")
CHANNELS = 8
"""So many units are under way at most, each on a channel of its own."""

ANNOUNCEMENT = "which gradients are exchanged next"
_INDEX_BITS = 24


@dataclass(frozen=True)
class Unit:
    """What is exchanged as one. Units of a bucket come one after the other, all of them on all ranks."""

    index: int
    bucket: int
    nbytes: int
    channel: Channel
    steps: Callable[[], Steps]
    after: int | None = None
    """The unit that begins before it, for it waits for what that brings."""


class Scheduler:
    """Of one rank. `ready` and `wait` are called by the thread that trains; the exchanger does the rest.

    Rank `announcer` decides; `units` are the same on all ranks. All ranks make it, in the same order.
    """

    def __init__(
        self,
        units: list[Unit],
        transport: Transport,
        bells: Bells,
        announcer: int,
        deadline_s: float,
        by_priority: bool,
        credit_bytes: float = math.inf,
    ) -> None:
        self._units = units
        self._transport, self._bells = transport, bells
        self._announcer, self._deadline_s = announcer, deadline_s
        self._by_priority, self._credit_bytes = by_priority, credit_bytes
        self._of_bucket: dict[int, list[Unit]] = {}
        for unit in units:
            self._of_bucket.setdefault(unit.bucket, []).append(unit)
        self._size = 1 << (4 * len(units) + 64).bit_length()
        self._log = common_words(transport, self._size)
        self._place: dict[int, int] = {}  # of each bucket in the order of use
        self._times = dict.fromkeys(self._of_bucket, 0)  # that each bucket has been ready: once a step
        self._came: deque[tuple[int, Unit]] = deque()  # ready, in which step, and not looked at by the exchanger yet
        self._ready: dict[int, tuple[int, int, int]] = {}  # what it may start: index -> step, priority and arrival
        self._arrivals = self._started = 0
        self._left = dict.fromkeys(self._of_bucket, 0)  # of each bucket, its units that are not done
        decides = transport.rank == announcer
        self._idle = None if decides else Wait(lambda: self._announced() is not None, announcer, ANNOUNCEMENT)
        self._exchanger = Exchanger(transport, bells, self._next, self._may_start, self._ended, deadline_s)
        self._exchanger.start()

    # ---- by the thread that trains ----

    def set_order(self, buckets: Iterable[int]) -> None:
        """In which the next forward needs them. It counts on the announcer alone."""
        self._place = {bucket: place for place, bucket in enumerate(buckets)}

    def ready(self, bucket: int) -> None:
        """Its gradients are there, and it may be exchanged."""
        units = self._of_bucket[bucket]
        self._left[bucket] = len(units)
        self._times[bucket] += 1
        self._came.extend((self._times[bucket], unit) for unit in units)
        self._exchanger.ring()

    def is_done(self, bucket: int) -> bool:
        return not self._left[bucket]

    def wait(self, buckets: Iterable[int]) -> None:
        """Until they have been exchanged. Raises what went wrong in the exchanger."""
        pending = [bucket for bucket in buckets if self._left[bucket]]
        try:
            self._exchanger.wait_until(lambda: not any(self._left[bucket] for bucket in pending), self._idle)
        except WaitTimeout as timeout:
            raise self._transport.failed(timeout, ANNOUNCEMENT) from None

    def close(self) -> None:
        self._exchanger.close()

    # ---- in the exchanger ----

    def _take_what_came(self) -> None:
        while self._came:
            step, unit = self._came.popleft()
            self._arrivals += 1
            place = self._place.get(unit.bucket, 0) if self._by_priority else 0
            self._ready[unit.index] = (step, place, self._arrivals)

    def _may_start(self) -> bool:
        return bool(self._came) or self._chosen() is not None

    def _next(self) -> Operation | None:
        """The unit that is to start now, announced."""
        self._take_what_came()
        index = self._chosen()
        if index is None:
            return None
        if self._transport.rank == self._announcer:
            self._announce(index)
        self._started += 1
        del self._ready[index]
        unit = self._units[index]
        return Operation(index, unit.channel, unit.steps(), self._deadline_s)

    def _chosen(self) -> int | None:
        under_way = self._exchanger.in_flight
        busy = {id(operation.channel) for operation in under_way}
        if self._transport.rank != self._announcer:
            index = self._announced()
            if index is None or index not in self._ready or id(self._units[index].channel) in busy:
                return None
            return index
        # A step's units do not overtake those of the step before, for which another rank may wait before it goes on.
        step = min((step for step, *_ in self._ready.values()), default=0)
        units = [self._units[index] for index, (its_step, *_) in self._ready.items() if its_step == step]
        free = [unit for unit in units if id(unit.channel) not in busy and unit.after not in self._ready]
        if not free:
            return None
        first = min(free, key=lambda unit: self._ready[unit.index])
        flying = sum(self._units[operation.number].nbytes for operation in under_way)
        fits = not flying or not first.nbytes or flying + first.nbytes <= self._credit_bytes
        return first.index if fits else None

    def _announced(self) -> int | None:
        """Which unit comes next, if that is known. An entry is read once: another one may be written meanwhile."""
        entry = self._log[self._started % self._size]
        return entry & ((1 << _INDEX_BITS) - 1) if entry >> _INDEX_BITS == self._started + 1 else None

    def _announce(self, index: int) -> None:
        self._log[self._started % self._size] = (self._started + 1) << _INDEX_BITS | index
        for peer in range(self._transport.world_size):
            self._bells.ring_if_asleep(peer)

    def _ended(self, index: int) -> None:
        self._left[self._units[index].bucket] -= 1


def meanwhile(come: Callable[[], bool], doing: str) -> Steps:
    """Waits for what another unit of this rank brings."""
    if not come():
        yield Wait(come, None, doing)
