"""What a strategy is: the way by which workers come to hold the next parameters.

The training loop is the same for all: `begin_step()`, forward, loss, backward, `step()`. A strategy of ours, a
`FromScratch`, says two things, for one bucket of gradients at a time:

- `reduce(bucket)` brings the sum of all workers' gradients to where the update is made;
- `update(bucket, scale)` makes it there, of `scale` times the gradient, and when it returns this rank's parameters hold
  the next step's values. A scale of None means that the step is skipped: parameters stay as they are.

Plain runs call the two back to back, bucket by bucket. Clipping the global norm and skipping steps that are not finite
reduce all buckets first and agree on the scale, so that no step is half applied. They agree without a message: the
norm of the reduced gradients comes from the same bits everywhere.

Each worker's loss is the sum over its samples divided by the samples of all workers, so the plain sum of gradients is
the gradient of the mean over the whole batch, however unevenly the batch is split. A rank without samples, a server
among them, skips forward and backward and takes part in every exchange all the same.
"""

from __future__ import annotations

import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torch_parallel.communicator import Communicator
from torch_parallel.gradients.buckets import Bucket, NamedParameters, cut_into_buckets
from torch_parallel.status import EXCHANGING, UPDATING
from torch_parallel.strategies import optimizer_state
from torch_parallel.strategies.replicas import give_everyone_the_same
from torch_parallel.strategies.shares import Share, synchronous_shares
from torch_parallel.strategies.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Iterator

OptimizerFactory = Callable[[NamedParameters], Optimizer]

ONLY_READ_GRADIENTS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Optimizers that, fused, are known to leave `.grad` as it is. Others change it, such as Nesterov's SGD vectorised."""


class NotFinite(ArithmeticError):
    """A gradient is NaN or infinite."""


class Strategy(ABC):
    """One rank's part in keeping the replicas equal: what the training loop calls.

    Set-up gives all ranks rank 0's parameters and buffers. Raises TransportError naming the first parameter or buffer
    in which the ranks' models differ.
    """

    server_count: ClassVar[int] = 0
    options: ClassVar[tuple[str, ...]] = ()
    """Fields of the run's configuration that this strategy is made with, beside those that all have."""
    common_parameters: ClassVar[bool] = False
    """Whether the parameters of all ranks are one memory, where ranks have memory in common."""
    common_sums: ClassVar[bool] = False
    """Whether all ranks read the sums of the gradients in one memory, which nobody may write."""
    through_host: ClassVar[bool] = False
    """Whether it exchanges through the host's memory even where GPUs reach each other's: to look at who has come."""
    every_rank_computes: ClassVar[bool] = False
    """Whether a rank without samples takes part in forward and backward too, with an empty batch."""
    knows_next_share: ClassVar[bool] = True
    """Whether `shares` may be asked for the next step's share, or the end, before the present step is done."""

    def __init__(
        self,
        model: nn.Module,
        optimizer_factory: OptimizerFactory,
        communicator: Communicator,
        bucket_bytes: int = 25 << 20,
        clip_norm: float | None = None,
        skip_not_finite: bool = False,
    ) -> None:
        self.bucket_bytes = bucket_bytes
        self.clip_norm = clip_norm
        self.skip_not_finite = skip_not_finite
        self.last_norm: float | None = None
        """With clipping, the norm of the last step's whole mean gradient, on the ranks that update."""
        self.skipped_steps = 0
        self.tally: Tally | None = None
        """Of this epoch, where the server may go on without some workers; it counts on the server alone."""
        self.on_update: Callable[[int, float, float], None] | None = None
        """Called with bucket index, start and end (`time.perf_counter`) of each update made on this rank."""
        self.model = model
        self.forward: Callable[..., Any] = model
        """Maps a batch to logits: the model, or what a strategy put around it."""
        self.loss_factor = 1.0
        """By what the loss is multiplied before backward, for a strategy that takes means where ours take sums."""
        self.communicator = communicator
        self.transport = communicator.through_host if self.through_host else communicator.transport
        self.exchange_s = 0.0  # waiting included
        self.update_s = 0.0
        self.optimizers: list[Optimizer] = []
        give_everyone_the_same(model, communicator)

    @staticmethod
    def process_count(n: int) -> int:
        """How many processes drive `n` GPUs, or CPU workers."""
        return n

    @classmethod
    def in_step(cls, **options: Any) -> bool:
        """Whether, with these values of its `options`, all ranks hold the same parameters after every step."""
        return True

    @classmethod
    def adds_up_all(cls, **options: Any) -> bool:
        """Whether, with these values of its `options`, every update is of the sum of all workers' gradients."""
        return True

    @staticmethod
    def update_count(sample_count: int, batch_size: int, worker_count: int) -> int:
        """Updates of the parameters in one epoch."""
        return -(-sample_count // batch_size)

    def shares(self, sample_count: int, batch_size: int, first_sample: int = 0) -> Iterator[Share]:
        """What this rank trains on, step by step, in one epoch of which `first_sample` samples have been used before.

        A server's shares are empty, one for each of its updates. When it ends, all ranks hold the same parameters.
        """
        communicator = self.communicator
        return synchronous_shares(
            sample_count, batch_size, communicator.worker_index, communicator.worker_count, first_sample
        )

    @abstractmethod
    def optimized(self) -> Iterable[tuple[NamedParameters, Optimizer]]:
        """Each optimizer of this rank with its parameters, in its order; nothing on a rank that updates nothing."""

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """On rank 0, parameter name -> its whole state in the optimizer, on the CPU. All ranks call it."""
        return optimizer_state.read(self.optimized())

    def load_optimizer_state(self, state: dict[str, dict[str, Any]]) -> None:
        """Gives this rank's optimizers the state of their own parameters, however and by whomever it was saved."""
        optimizer_state.restore(self.optimized(), state)

    def set_learning_rate(self, lr: float) -> None:
        """For the steps to come; without effect on a rank that updates nothing."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr

    @abstractmethod
    def begin_step(self) -> None:
        """Clears the gradients."""

    def synchronising(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch; `last` says whether it is the last one of its step."""
        return nullcontext()

    @abstractmethod
    def step(self) -> None:
        """Makes of the gradients on all ranks the next parameters on all ranks. Raises NotFinite."""

    def _updated(self, bucket_index: int, start_s: float) -> None:
        """An update that began at `start_s` is done."""
        end_s = time.perf_counter()
        self.update_s += end_s - start_s
        if self.on_update is not None:
            self.on_update(bucket_index, start_s, end_s)

    def close(self) -> None:  # noqa: B027  # most have nothing to do
        """After the last step, on all ranks."""


class FromScratch(Strategy):
    """A strategy of ours: gradients in buckets that peers can read, and one optimizer a bucket where updates are made.

    Raises ValueError for a model without trainable parameters.
    """

    one_bucket: ClassVar[bool] = False
    """Whether all gradients of one type are exchanged together, whatever `bucket_bytes` says."""

    def __init__(self, model: nn.Module, optimizer_factory: OptimizerFactory, *arguments: Any, **options: Any) -> None:
        super().__init__(model, optimizer_factory, *arguments, **options)
        groups = cut_into_buckets(model.named_parameters(), sys.maxsize if self.one_bucket else self.bucket_bytes)
        self._frozen = [(name, each) for name, each in model.named_parameters() if not each.requires_grad]
        self.buckets = [Bucket(index, group, self.transport.share) for index, group in enumerate(groups)]
        self._make_optimizers(optimizer_factory)

    def _make_optimizers(self, optimizer_factory: OptimizerFactory) -> None:
        if self.updates_here:
            self.optimizers = [optimizer_factory(bucket.parameters) for bucket in self.buckets]

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

    def optimized(self) -> Iterable[tuple[NamedParameters, Optimizer]]:
        for bucket, optimizer in zip(self.buckets, self.optimizers, strict=False):
            yield bucket.parameters, optimizer

    def begin_step(self) -> None:
        """Clears the gradients, once no peer reads the last step's any more.

        Raises RuntimeError for a parameter that was frozen at set-up and is not any more: nobody would exchange it.
        """
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise RuntimeError(
                    f"parameter {name} was frozen when the strategy was made and is trainable now: unfreeze it before, "
                    "or make a new strategy"
                )
        with self._exchanging():
            self._settle()
        for bucket in self.buckets:
            bucket.zero()

    def step(self) -> None:
        """Exchanges all gradients and updates all parameters.

        Raises NotFinite before anything is exchanged, unless such steps are to be skipped.
        """
        if not self.skip_not_finite:
            self._stop_if_not_finite()
        if self.clip_norm is None and not self.skip_not_finite:
            for bucket in self.buckets:
                self.reduce(bucket)
                self.update(bucket)
            return
        for bucket in self.buckets:
            self.reduce(bucket)
        scale = self._agreed_scale()
        for bucket in self.buckets:
            self.update(bucket, scale)

    def _settle(self) -> None:
        """Returns when the gradients of this step may be written."""
        self.transport.settle()

    def _stop_if_not_finite(self) -> None:
        for bucket in self.buckets:
            bucket.complete()
            if (name := _not_finite(bucket.gradients, bucket.named_views())) is not None:
                raise NotFinite(f"the gradient of {name} is NaN or infinite")

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
        return norm_of([bucket.result[: bucket.numel] for bucket in self.buckets])

    def _optimize(self, bucket: Bucket, scale: float) -> None:
        with self._exchanging():
            self._settle()  # from here on the gradients may be written: by the scale, and by some optimizers
        with self._updating(bucket):
            optimizer = self.optimizers[bucket.index]
            fused = all(group.get("fused") for group in optimizer.param_groups)
            only_reads = scale == 1.0 and fused and type(optimizer) in ONLY_READ_GRADIENTS
            bucket.collect(copy=self.common_sums and self.transport.world_size > 1 and not only_reads)
            self._stop_if_overflown(bucket.gradients, bucket.named_views())
            if scale != 1.0:
                bucket.gradients.mul_(scale)
            optimizer.step()

    def _stop_if_overflown(self, sums: Tensor, parts: Iterable[tuple[str, Tensor]]) -> None:
        if not self.skip_not_finite and (name := _not_finite(sums, parts)) is not None:
            raise NotFinite(f"the sum of all workers' gradients of {name} is infinite, though each of them is not,")

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        start_s = time.perf_counter()
        self.communicator.status.phase(EXCHANGING)
        yield
        self.exchange_s += time.perf_counter() - start_s

    @contextmanager
    def _updating(self, bucket: Bucket) -> Iterator[None]:
        start_s = time.perf_counter()
        self.communicator.status.phase(UPDATING)
        yield
        self._updated(bucket.index, start_s)


def norm_of(tensors: list[Tensor]) -> float:
    """The norm of all of them together, in float64, whose range holds the squares of any float32."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
    return float(torch.linalg.vector_norm(torch.stack(norms)))


def _not_finite(gradients: Tensor, parts: Iterable[tuple[str, Tensor]]) -> str | None:
    """The first part that is not finite, by name. One pass; a sum may also overflow, so then it looks again."""
    return None if torch.isfinite(gradients.sum()) else first_not_finite(parts)


def first_not_finite(parts: Iterable[tuple[str, Tensor]]) -> str | None:
    """The name of the first that holds a NaN or an infinity."""
    return next((name for name, part in parts if not torch.isfinite(part).all()), None)
