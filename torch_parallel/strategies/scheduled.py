"""Exchanging beside backward and the next forward, in an order that a scheduler decides: what strategies share of it.

    bucket      | partition 0 | partition 1 | partition 2 |      cut anywhere, by elements
    each        exchanged on a channel of its own, then updated, in the exchanger's thread (`gradients/exchanger.py`)

A strategy says what is done with a partition, by `partition_steps`: the exchange, and the update where that is made.
A bucket that is cut is one large parameter; whether anybody used it, its mark, is exchanged before its partitions.

With `cross_barrier` a step does not wait for its exchange. The next forward does, parameter by parameter, at the first
use of each (`gradients/first_use.py`). What needs the whole gradient (clipping, skipping) waits for all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from torch_parallel.gradients.buckets import Bucket
from torch_parallel.gradients.finite import NotFinite
from torch_parallel.gradients.first_use import FirstUse
from torch_parallel.gradients.layout import NamedParameters, without_gaps
from torch_parallel.gradients.pieces import Piece, check_elementwise, pieces_of, put_together
from torch_parallel.gradients.scheduler import CHANNELS, Scheduler, Unit, meanwhile
from torch_parallel.strategies import optimizer_state
from torch_parallel.strategies.base import OptimizerFactory
from torch_parallel.strategies.model_check import UnsupportedModel
from torch_parallel.strategies.optimizer_state import States
from torch_parallel.transport.buffer import SharedBuffer
from torch_parallel.transport.channels import Channel, Steps, open_channels

if TYPE_CHECKING:
    from torch_parallel.strategies.from_scratch import FromScratch


class Mark:
    """Whether anybody has used the one parameter of a bucket that is cut into partitions, which wait for it."""

    def __init__(self, bucket: Bucket, shared: SharedBuffer, channel: Channel) -> None:
        self.bucket, self.shared, self.channel = bucket, shared, channel
        self.name = f"use mark of bucket {bucket.index}"
        self.result = shared.local
        self.has_come = False


class Partition:
    """Elements [start, stop) of a bucket; with them the use marks, if that is the whole bucket."""

    def __init__(self, bucket: Bucket, start: int, stop: int, channel: Channel) -> None:
        self.bucket, self.start, self.stop = bucket, start, stop
        self.channel = channel
        self.is_whole = stop - start == bucket.numel
        self.shared = bucket.shared if self.is_whole else bucket.shared.part(start, stop)
        self.mark: Mark | None = None
        self.sums = self.shared.local
        self.pieces: list[Piece] = []
        self.optimizer: Optimizer | None = None
        self.lr: float | None = None
        """For the next update; None for the optimizer's own."""
        self._own_sums: Tensor | None = None

    @property
    def name(self) -> str:
        part = "" if self.is_whole else f", elements {self.start} to {self.stop}"
        return f"bucket {self.bucket.index}{part}"

    def make_optimizer(self, factory: OptimizerFactory, result: Tensor, is_common: bool) -> None:
        """The exchange puts the sums into `result`, of which nobody may write what is common."""
        self.sums = result
        self._own_sums = torch.empty_like(result) if is_common else None
        gradients = self.sums if self._own_sums is None else self._own_sums
        numel = self.stop - self.start
        self.pieces = list(pieces_of(self.bucket, self.start, self.stop, None, gradients[:numel]))
        self.optimizer = factory([(piece.name, piece.parameter) for piece in self.pieces])
        if not self.is_whole:
            check_elementwise(self.optimizer, "--partition_mb cuts parameters into pieces", "leave it out")

    @property
    def named_parameters(self) -> NamedParameters:
        return [(piece.name, piece.parameter) for piece in self.pieces]

    def await_mark(self) -> Steps:
        """Until it is known which ranks have used the parameter of a bucket that is cut."""
        if self.mark is not None:
            mark = self.mark
            yield from meanwhile(lambda: mark.has_come, mark.name)

    def gradients(self) -> Tensor:
        """The sums, [stop - start], of this rank's own."""
        if self._own_sums is not None:
            self._own_sums.copy_(self.sums)
            return self._own_sums[: self.stop - self.start]
        return self.sums[: self.stop - self.start]

    def marks(self) -> list[float]:
        """For each piece how many ranks have used its parameter."""
        where = self.sums[self.stop - self.start :] if self.mark is None else self.mark.result
        marks: list[float] = where.tolist()
        return marks


class ScheduledExchange:
    """In the place of `Pipeline`, for one strategy that exchanges by a scheduler."""

    def __init__(
        self,
        strategy: FromScratch,
        factory: OptimizerFactory,
        by_priority: bool,
        partition_bytes: float,
        credit_bytes: float,
        cross_barrier: bool,
    ) -> None:
        self._strategy, self._buckets = strategy, strategy.buckets
        transport = strategy.transport
        self._channels, bells = open_channels(transport, CHANNELS, strategy.communicator.deadline_s)
        self.marks: dict[int, Mark] = {}  # by bucket
        self.partitions = [each for bucket in self._buckets for each in self._cut(bucket, partition_bytes)]
        self._of_bucket: dict[int, list[Partition]] = {}
        for number, partition in enumerate(self.partitions):
            self._of_bucket.setdefault(partition.bucket.index, []).append(partition)
            partition.channel = self._channels[number % CHANNELS]
            strategy.bind_partition(partition, factory)
        for mark in self.marks.values():
            strategy.bind_mark(mark)
        transport.agree("exchange by a scheduler")
        self._cross_barrier = cross_barrier
        self._by_priority = by_priority
        self.lr: float | None = None
        self._is_first = True
        self._armed = False
        self._left: set[int] = set()  # buckets of this step
        self._pending: set[int] = set()  # buckets of the step before that were not awaited
        self._used: dict[int, None] = {}  # buckets, in the order in which a forward has used them
        self._first_use = FirstUse(self._before_use)
        announcer = strategy.communicator.first_worker
        deadline_s = strategy.communicator.deadline_s
        self._scheduler = Scheduler(self._units(), transport, bells, announcer, deadline_s, by_priority, credit_bytes)
        self._places: dict[str, int] = {}  # of parameters in memory, where their pieces are
        for bucket in self._buckets:
            bucket.renew = self._renew
            self._places |= {name: parameter.data_ptr() for name, parameter in bucket.parameters}

    def _cut(self, bucket: Bucket, partition_bytes: float) -> Iterator[Partition]:
        """At equal distances; whole, where it is small, or its parameter does not lie in one row."""
        size = bucket.numel * bucket.flat.itemsize
        whole = size <= partition_bytes or len(bucket.parameters) > 1 or self._strategy.stays_apart(bucket)
        whole = whole or not without_gaps(bucket.parameters[0][1])
        count = 1 if whole else min(math.ceil(size / partition_bytes), bucket.numel)
        bounds = [bucket.numel * number // count for number in range(count + 1)]
        mark = None
        if count > 1:
            shared = self._strategy.transport.share(1, bucket.flat.dtype)
            mark = Mark(bucket, shared, self._channels[bucket.index % CHANNELS])
            self.marks[bucket.index] = mark
        for start, stop in pairwise(bounds):
            partition = Partition(bucket, start, stop, self._channels[0])
            partition.mark = mark
            yield partition

    def _units(self) -> list[Unit]:
        units: list[Unit] = []

        def add(what: Mark | Partition, nbytes: int, steps: Callable[[], Steps], after: int | None = None) -> None:
            units.append(Unit(len(units), what.bucket.index, nbytes, what.channel, steps, after))

        for partition in self.partitions:
            mark, after = partition.mark, None
            if mark is not None and partition.start == 0:
                add(mark, 0, partial(self._mark_steps, mark))
            if mark is not None:
                after = next(unit.index for unit in units if unit.bucket == mark.bucket.index)
            nbytes = partition.shared.local.nbytes
            add(partition, nbytes, partial(self._strategy.partition_steps, partition), after)
        return units

    def _mark_steps(self, mark: Mark) -> Steps:
        yield from self._strategy.mark_steps(mark)
        mark.has_come = True

    def of_bucket(self, bucket: Bucket) -> list[Partition]:
        return self._of_bucket[bucket.index]

    # ---- a step ----

    def note_pending(self) -> None:
        """A new step begins: what the last one has left is awaited later, bucket by bucket."""
        self._pending = {bucket.index for bucket in self._buckets if not self._scheduler.is_done(bucket.index)}

    def begin_step(self) -> None:
        self._left.clear()
        self._armed = False
        keys = []
        for bucket in self._buckets:
            self._check_places(bucket)
            if bucket.index in self._pending:
                bucket.reopen()
                self._strategy.watch.exempt(bucket.parameters)
            else:
                bucket.zero()
            keys += [(parameter, bucket.index) for _, parameter in bucket.parameters]
        self._first_use.watch(keys if self._cross_barrier or (self._by_priority and self._is_first) else [])

    def _check_places(self, bucket: Bucket) -> None:
        for name, parameter in bucket.parameters:
            if parameter.data_ptr() != self._places[name]:
                raise UnsupportedModel(
                    f"parameter {name} was given other memory, by `.data = ` or `.to()`, and a scheduled exchange "
                    "updates it where it was: copy into it instead (copy_), or make a new strategy"
                )

    @contextmanager
    def synchronising(self, last: bool) -> Iterator[None]:
        """Around forward and backward of a micro-batch; what the last one's backward completes is ready."""
        if last:
            self._armed = True
            for bucket in self._buckets:
                bucket.await_gradients(self._completed)
        with self._first_use if self._first_use.is_watching else nullcontext():
            yield

    def finish(self, wait: bool) -> None:
        """Backward is over: what it did not complete is ready too. With `wait` all of it is exchanged at return."""
        for bucket in self._buckets:
            if bucket.index not in self._left:
                self._completed(bucket)
        if self._is_first and self._used:
            unused = [bucket.index for bucket in reversed(self._buckets) if bucket.index not in self._used]
            self._scheduler.set_order([*self._used, *unused])
        self._is_first = False
        if wait or not self._cross_barrier:
            self.wait()

    def wait(self) -> None:
        """Until everything that has left has been exchanged."""
        self._scheduler.wait(bucket.index for bucket in self._buckets)

    def wait_for_last(self) -> None:
        """Until what the step before has left has been exchanged: this one's has not left yet."""
        for index in [*self._pending]:
            self._await(index)

    def close(self) -> None:
        """What is under way is finished first."""
        try:
            self.wait()
        finally:
            self._scheduler.close()

    def _before_use(self, index: int) -> None:
        if self._is_first:
            self._used[index] = None
        with self._strategy.exchanging() if index in self._pending else nullcontext():
            self._await(index)

    def _await(self, index: int) -> None:
        """Until the bucket of the last step has been exchanged, and its parameters have their next values."""
        if index in self._pending:
            self._pending.discard(index)
            try:
                self._scheduler.wait([index])
            except NotFinite as error:
                error.late = True  # it is of the step before
                raise
            self._strategy.watch.accept(self._buckets[index].parameters)

    def _renew(self, bucket: Bucket) -> bool:
        """A gradient has come for a bucket that has left. Whether it is the first of the next step."""
        if bucket.index in self._left:
            return False
        if bucket.index in self._pending:  # so it was used, and nobody has waited for its value
            raise RuntimeError(
                f"with cross_barrier forward has used {bucket.parameters[0][0]}, or others of its bucket, before they "
                "had their next values: run forward and backward within strategy.synchronising(...), or leave "
                "cross_barrier out where code that is not torch's reads parameters"
            )
        bucket.zero()
        if self._armed:
            bucket.await_gradients(self._completed)
        return True

    def _completed(self, bucket: Bucket) -> None:
        """All its gradients are there."""
        if bucket.has_left:  # in the step before, and nothing came for it in this one
            self._await(bucket.index)
            self._renew(bucket)
        self._left.add(bucket.index)
        self._strategy.before_leaving(bucket)
        self._strategy.watch.exempt(bucket.parameters)
        bucket.leave()
        bucket.publish()
        for partition in self.of_bucket(bucket):
            partition.lr = self.lr
        if bucket.index in self.marks:
            mark = self.marks[bucket.index]
            mark.has_come = False
            mark.shared.local.copy_(bucket.shared.local[bucket.numel :])
        for _, parameter in bucket.parameters:
            parameter.grad = None  # the next step's is made anew
        if self._strategy.bucket_by_bucket:
            # here, and not when they are written, so that backward surely finds out if it still needs the old values
            increment_version(parameter for _, parameter in bucket.parameters)
        self._scheduler.ready(bucket.index)

    # ---- optimizers ----

    @property
    def updating(self) -> list[Partition]:
        return [partition for partition in self.partitions if partition.optimizer is not None]

    def optimizer_state(self) -> States:
        """Of whole parameters, put together of their pieces."""
        parts: dict[str, dict[str, list[Any]]] = {}
        wholes = {name: parameter for bucket in self._buckets for name, parameter in bucket.parameters}
        for partition in self.updating:
            assert partition.optimizer is not None
            for piece in partition.pieces:
                for key, value in partition.optimizer.state.get(piece.parameter, {}).items():
                    copied = piece.copied(value, 0, piece.stop - piece.start)
                    parts.setdefault(piece.name, {}).setdefault(key, []).append(copied)
        return {
            name: {key: put_together(values, wholes[name]) for key, values in state.items()}
            for name, state in parts.items()
        }

    def load_optimizer_state(self, states: States) -> None:
        for partition in self.updating:
            assert partition.optimizer is not None
            own = {piece.name: piece.cut_out(states[piece.name]) for piece in partition.pieces if piece.name in states}
            optimizer_state.restore([(partition.named_parameters, partition.optimizer)], own)
