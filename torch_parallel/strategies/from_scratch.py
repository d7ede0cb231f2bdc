"""What our strategies have in common: gradients in buckets that peers can read, reduced and applied bucket by bucket.

A strategy says two things, for one bucket of gradients at a time:

- `reduce(bucket)` brings the sum of all workers' gradients to where the update is made;
- `update(bucket, scale)` makes it there, of `scale` times the gradient, and when it returns this rank's parameters hold
  the next step's values. A scale of None means that the step is skipped: parameters stay as they are.

Plain runs call the two back to back, bucket by bucket; with `overlap` they do so while backward is still at work on the
other buckets (`gradients/pipeline.py`), and otherwise after it. Clipping the global norm and skipping steps that are
not finite reduce all buckets first and agree on the scale, so that no step is half applied. They agree without a
message: the norm of the reduced gradients comes from the same bits everywhere.

Each worker's loss is the sum over its samples divided by the samples of all workers, so the plain sum of gradients is
the gradient of the mean over the whole batch, however unevenly the batch is split. A rank without samples, a server
among them, skips forward and backward and takes part in every exchange all the same.
"""

from __future__ import annotations

import math
import sys
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from torch_parallel.collectives import RING_ALL_REDUCE
from torch_parallel.gradients.buckets import Bucket, cut_into_buckets
from torch_parallel.gradients.finite import FiniteCheck, first_not_finite
from torch_parallel.gradients.layout import NamedParameters, read_by_others
from torch_parallel.gradients.pipeline import Pipeline
from torch_parallel.gradients.scheduler import SCHEDULES
from torch_parallel.status import EXCHANGING
from torch_parallel.strategies.base import OptimizerFactory, Strategy
from torch_parallel.strategies.optimizer_state import States
from torch_parallel.strategies.scheduled import Mark, Partition, ScheduledExchange
from torch_parallel.strategies.stopwatch import Stopwatch
from torch_parallel.transport.buffer import SharedBuffer
from torch_parallel.transport.channels import Steps

SCHEDULE_OPTIONS = ("schedule", "partition_mb", "credit_mb", "cross_barrier")
"""Of the strategies that a scheduler can exchange for."""
ONLY_READ_GRADIENTS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Optimizers that, fused, are known to leave `.grad` as it is. Others change it, such as Nesterov's SGD vectorised."""


class FromScratch(Strategy):
    """A strategy of ours: gradients in buckets that peers can read, and one optimizer a bucket where updates are made.

    With `overlap` buckets are exchanged during the last backward of a step, if that is wrapped in `synchronising`, on
    GPUs, if there are several, on a stream of their own. Raises ValueError for a model without trainable parameters,
    and for `overlap` of a strategy that exchanges all at once.
    """

    one_bucket: ClassVar[bool] = False
    """Whether all gradients of one type are exchanged together, whatever `bucket_bytes` says."""

    def __init__(
        self,
        model: nn.Module,
        optimizer_factory: OptimizerFactory,
        *arguments: Any,
        overlap: bool = False,
        schedule: str = "none",
        partition_mb: float | None = None,
        credit_mb: float | None = None,
        cross_barrier: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(model, optimizer_factory, *arguments, **options)
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule = {schedule!r}: choose from {', '.join(SCHEDULES)}")
        is_scheduled = schedule != "none"
        if not is_scheduled and (partition_mb, credit_mb, cross_barrier) != (None, None, False):
            raise ValueError("partition_mb, credit_mb and cross_barrier say how gradients are scheduled: give schedule")
        overlap = overlap or is_scheduled
        if overlap and "overlap" not in self.options:
            raise ValueError(f"{type(self).__name__} exchanges nothing before backward is over: leave overlap out")
        partition_bytes = math.inf if partition_mb is None else partition_mb * 2**20
        bucket_bytes = min(self.bucket_bytes, partition_bytes) if is_scheduled else self.bucket_bytes
        groups = cut_into_buckets(model.named_parameters(), sys.maxsize if self.one_bucket else int(bucket_bytes))
        self.buckets = [
            Bucket(index, self._in_order(group), self.transport.share, self._before_gradients)
            for index, group in enumerate(groups)
        ]
        enqueues = self.transport.enqueues
        self.overlap = overlap
        self._read_by_others = read_by_others(model.parameters())
        # One bucket alone is complete when backward is over: it has nothing to run beside.
        several = overlap and len(self.buckets) > 1 and not is_scheduled
        # Of high priority: whatever it is given comes before the rest of backward, which has all the time to catch up.
        stream = torch.cuda.Stream(self.communicator.device, priority=-1) if several and enqueues else None
        if stream is not None:
            self.transport.leave_room()
        self._pipeline = Pipeline(self.buckets, self._exchange, stream)
        # Until the order is found in which buckets leave: see `_agree_on_order`.
        self._order_buffer = self.transport.share(len(self.buckets), torch.float32) if several else None
        self._finite = FiniteCheck(self.buckets, self.communicator.device if enqueues else None)
        self.scheduled: ScheduledExchange | None = None
        self._prepare(optimizer_factory, is_scheduled)
        if is_scheduled:
            credit_bytes = math.inf if credit_mb is None else credit_mb * 2**20
            wanted = schedule == "priority", partition_bytes, credit_bytes, cross_barrier
            self.scheduled = ScheduledExchange(self, optimizer_factory, *wanted)
            self.optimizers = [each.optimizer for each in self.scheduled.partitions if each.optimizer is not None]

    def _prepare(self, optimizer_factory: OptimizerFactory, is_scheduled: bool) -> None:
        """Makes the optimizers, but where they come with the partitions of a scheduled exchange."""
        if self.updates_here and not is_scheduled:
            self.optimizers = [optimizer_factory(bucket.parameters) for bucket in self.buckets]

    def _in_order(self, parameters: NamedParameters) -> NamedParameters:
        """The parameters of a bucket as they are to lie in it."""
        return parameters

    @property
    def updates_here(self) -> bool:
        """Whether this rank holds optimizers."""
        return True

    @abstractmethod
    def reduce(self, bucket: Bucket) -> None:
        """Brings the sum of all workers' gradients to where the update is made."""

    @abstractmethod
    def update(self, bucket: Bucket, scale: float | None = 1.0) -> None:
        """Returns with the next parameters on this rank; with a scale of None, with the present ones."""

    def bind_partition(self, partition: Partition, optimizer_factory: OptimizerFactory) -> None:
        """Makes a partition ready: what `partition_steps` performs, and its optimizer, if this rank updates it."""
        raise NotImplementedError

    def partition_steps(self, partition: Partition) -> Steps:
        """In the exchanger: the exchange of one partition, and the update, where that can be made without the rest."""
        raise NotImplementedError

    def bind_mark(self, mark: Mark) -> None:
        """The same for the use mark of a bucket that is cut."""
        raise NotImplementedError

    def mark_steps(self, mark: Mark) -> Steps:
        """Brings the mark, summed, to where updates are made."""
        raise NotImplementedError

    def optimized(self) -> Iterable[tuple[NamedParameters, Optimizer]]:
        if self.scheduled is not None:
            yield from ((each.named_parameters, each.optimizer) for each in self.scheduled.updating)  # type: ignore[misc]
            return
        for bucket, optimizer in zip(self.buckets, self.optimizers, strict=False):
            yield bucket.parameters, optimizer

    def describe_buckets(self) -> list[dict[str, Any]]:
        return [{"bytes": bucket.gradients.nbytes} for bucket in self.buckets]

    def begin_step(self) -> None:
        """Clears the gradients, once no peer reads the last step's any more. Raises UnsupportedModel as all do."""
        if self.scheduled is not None:
            self.scheduled.note_pending()
        super().begin_step()
        if self.scheduled is not None:
            self.scheduled.begin_step()
            return
        self._pipeline.begin_step()
        self._settle()
        for bucket in self.buckets:
            bucket.zero()

    def synchronising(self, last: bool) -> AbstractContextManager[None]:
        if self.scheduled is not None:
            return self.scheduled.synchronising(last)
        return self._pipeline.during_backward() if last and self.overlap else nullcontext()

    def step(self) -> None:
        """Exchanges all gradients, unless they overlapped with backward, and updates all parameters.

        Raises UnsupportedModel where forward or backward wrote a parameter, and for one that was added or replaced.
        Without overlap, and but on GPUs, raises NotFinite before anything is exchanged, unless such steps are to be
        skipped. On GPUs backward, or this, raises NotFinite, `late`, for the step before.
        """
        if self.scheduled is not None:
            with self.exchanging():
                self.scheduled.wait_for_last()
        self.watch.look()
        self._before_gradients()
        if not self.overlap and not self.skip_not_finite:
            self._stop_if_not_finite()
        if self.scheduled is not None:
            with self.exchanging():
                self.scheduled.finish(wait=not self.bucket_by_bucket)
        else:
            with self._waiting_for_background():
                self._pipeline.finish()
        scale: float | None = 1.0
        if not self.bucket_by_bucket:
            scale = self._agreed_scale()
            for bucket in self.buckets:
                self.update(bucket, scale)
        self._finite.end_step()
        self._end_step(skipped=self._is_skipped(scale))
        if self._order_buffer is not None:
            self._agree_on_order(self._order_buffer)
            self._order_buffer = None

    def _end_step(self, skipped: bool) -> None:
        super()._end_step(skipped)
        for bucket in self.buckets:
            bucket.close(still_read=self._is_read_later(bucket))

    def _is_read_later(self, bucket: Bucket) -> bool:
        """Whether peers may still read, after a step, the memory in which the bucket's `.grad`s lie."""
        return self._sums_are_common(bucket)

    def _is_skipped(self, scale: float | None) -> bool:
        """Whether all ranks skip this step, where this one has agreed on that scale."""
        return scale is None

    def _agree_on_order(self, buffer: SharedBuffer) -> None:
        """From now on buckets leave in the order in which backward has just completed them, on the mean of all ranks.

        Which order that is changes no bit, but how much of the exchange lies beside backward.
        """
        with self.exchanging():
            buffer.local.copy_(torch.tensor(self._pipeline.places, dtype=torch.float32, device="cpu"))
            sums = self.transport.perform(RING_ALL_REDUCE, buffer, "the order of buckets")
            self._pipeline.leave_in_order_of(sums.tolist())

    def _before_gradients(self) -> None:
        """Backward is about to write the first gradient of a bucket."""
        self._finite.confirm(late=True)

    def confirm(self) -> None:
        super().confirm()
        if self.scheduled is not None:
            with self.exchanging():
                self.scheduled.wait()
        self._finite.confirm()

    def close(self) -> None:
        if self.scheduled is not None:
            self.scheduled.close()

    @property
    def updates_in_background(self) -> bool:
        return self._pipeline.stream is not None and self.bucket_by_bucket

    @property
    def bucket_by_bucket(self) -> bool:
        """Whether a bucket can be updated before all have been reduced, and in the midst of backward: not what backward
        may yet need of a parameter behind its back."""
        in_midst_of_backward_too = not (self.overlap and self._read_by_others)
        return self.clip_norm is None and not self.skip_not_finite and in_midst_of_backward_too

    def before_leaving(self, bucket: Bucket) -> None:
        """Backward has made its gradients, and it may be exchanged beside the rest. Raises NotFinite."""
        self.watch.look_at(bucket.parameters)
        if not self.skip_not_finite:
            self._look_at_own(bucket)

    def _exchange(self, bucket: Bucket) -> None:
        if self.overlap:
            self.before_leaving(bucket)
        self.reduce(bucket)
        if self.bucket_by_bucket:
            self.update(bucket)
            if self.overlap:  # neither fused optimizers nor a pull do so, and backward is to find out if it needs them
                increment_version(parameter for _, parameter in bucket.parameters)
                self.watch.accept(bucket.parameters)

    def stays_apart(self, bucket: Bucket) -> bool:
        """Whether parameters stay in the memory they came with, and are copied to where peers reach them and back.

        So they must where peers do not reach a GPU, and where something else looks into this memory and would not see
        other values: a view that forward reads, say.
        """
        return bucket.staged or any(id(each) in self._read_by_others for _, each in bucket.parameters)

    def _settle(self) -> None:
        """Returns when the gradients of this step may be written."""
        # Where nobody reads there is nothing to time, and to take the time on a GPU is not free.
        with self.exchanging() if self.transport.is_read else nullcontext():
            self._await_readers()

    def _await_readers(self) -> None:
        """Waits for those peers who may still read what this rank is about to write."""
        self.transport.settle()

    def _stop_if_not_finite(self) -> None:
        for bucket in self.buckets:
            self._look_at_own(bucket)

    def _own_are_finite(self) -> bool:
        """Whether all gradients of this rank are, for a strategy whose ranks do not learn of each other's."""
        for bucket in self.buckets:
            bucket.complete()
        return all(first_not_finite(bucket.named_views()) is None for bucket in self.buckets)

    def _look_at_own(self, bucket: Bucket) -> None:
        bucket.complete()
        self._finite.look_at_own(bucket)

    def _agreed_scale(self) -> float | None:
        """What the reduced gradients are multiplied by; None where they are not finite and the step is skipped."""
        if not self.updates_here:
            return 1.0
        self.last_norm = norm = self._norm_of_sums()
        if not math.isfinite(norm) and self.skip_not_finite:
            self.skipped_steps += 1
            return None
        # as torch.nn.utils.clip_grad_norm_ does
        return 1.0 if self.clip_norm is None else min(1.0, self.clip_norm / (norm + 1e-6))

    def _norm_of_sums(self) -> float:
        """The norm of the reduced gradients, the same bits wherever it is asked for."""
        if self.scheduled is not None:
            return norm_of([each.sums[: each.stop - each.start] for each in self.scheduled.partitions])
        return norm_of([bucket.result[: bucket.numel] for bucket in self.buckets])

    def update_partition(self, partition: Partition, scale: float = 1.0) -> None:
        """Makes the update of a partition of which this rank has the sums, and that nobody reads any more."""
        optimizer, start_s = partition.optimizer, time.perf_counter()
        assert optimizer is not None
        gradients, marks = partition.gradients(), partition.marks()
        for piece in partition.pieces:
            is_used = marks[piece.position]
            piece.parameter.grad = piece.gradient if is_used else None
        parts = ((piece.name, piece.gradient) for piece in partition.pieces)
        self._stop_if_overflown(partition.bucket.index, gradients, parts)
        if scale != 1.0:
            gradients.mul_(scale)
        if partition.lr is not None:
            for group in optimizer.param_groups:
                group["lr"] = partition.lr
        optimizer.step()
        increment_version(parameter for _, parameter in partition.bucket.parameters)
        if self.on_update is not None:
            self.on_update(partition.bucket.index, start_s, time.perf_counter())

    def _optimize(self, bucket: Bucket, scale: float) -> None:
        if self.scheduled is not None:
            for partition in self.scheduled.of_bucket(bucket):
                self.update_partition(partition, scale)
            return
        optimizer = self.optimizers[bucket.index]
        fused = all(group.get("fused") for group in optimizer.param_groups)
        only_reads = scale == 1.0 and fused and type(optimizer) in ONLY_READ_GRADIENTS
        self._settle()  # from here on the gradients may be written: by the scale, and by some optimizers
        with self._updating(bucket.index):
            bucket.collect(copy=self._sums_are_common(bucket) and self.transport.world_size > 1 and not only_reads)
            self._stop_if_overflown(bucket.index, bucket.gradients, bucket.named_views())
            if scale != 1.0:
                bucket.gradients.mul_(scale)
            optimizer.step()

    def _sums_are_common(self, bucket: Bucket) -> bool:
        """Whether they lie in one memory that all ranks read, which none may write."""
        return self.common_sums

    def _stop_if_overflown(self, index: int, sums: Tensor, parts: Iterable[tuple[str, Tensor]]) -> None:
        if not self.skip_not_finite:
            self._finite.look_at_sums(index, sums, parts)

    def optimizer_state(self) -> States:
        return super().optimizer_state() if self.scheduled is None else self.scheduled.optimizer_state()

    def load_optimizer_state(self, state: States) -> None:
        if self.scheduled is None:
            super().load_optimizer_state(state)
        else:
            self.scheduled.load_optimizer_state(state)

    def set_learning_rate(self, lr: float) -> None:
        if self.scheduled is None:
            super().set_learning_rate(lr)
        else:  # the last step's updates may not be made yet
            self.scheduled.lr = lr

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Around what counts as exchange: performing it, and waiting for it."""
        before = self.communicator.status.phase(EXCHANGING)
        with self._measured_by(self.exchange_clock):
            yield
        self.communicator.status.back_to(before)  # after an error it stays what it was

    def _waiting_for_background(self) -> AbstractContextManager[None]:
        """What has left during backward and is not over when backward is counts as exchange."""
        return self.exchanging() if self._pipeline.stream is not None else nullcontext()

    def _measured_by(self, clock: Stopwatch) -> AbstractContextManager[None]:
        return nullcontext() if self._pipeline.in_background else super()._measured_by(clock)


def norm_of(tensors: list[Tensor]) -> float:
    """The norm of all of them together, in float64, whose range holds the squares of any float32."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
    return float(torch.linalg.vector_norm(torch.stack(norms)))
