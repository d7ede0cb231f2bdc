"""What a strategy is: the way by which workers come to hold the next parameters.

The training loop is the same for all: `begin_step()`, forward, loss, backward, `step()`. A strategy says two things,
for one bucket of gradients at a time:

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
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from torch_parallel.communicator import Communicator
from torch_parallel.gradients.buckets import Bucket, NamedParameters, cut_into_buckets
from torch_parallel.status import EXCHANGING, UPDATING
from torch_parallel.strategies.replicas import give_everyone_the_same

if TYPE_CHECKING:
    from collections.abc import Iterator

OptimizerFactory = Callable[[NamedParameters], Optimizer]

ONLY_READ_GRADIENTS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Optimizers that are known to leave `.grad` as it is. Some others change it, such as Rprop where it is vectorised."""


class NotFinite(ArithmeticError):
    """A gradient is NaN or infinite."""


class Strategy(ABC):
    """One rank's part in keeping the replicas equal.

    Set-up compares the models of all ranks, gives all of them rank 0's parameters and buffers, and makes one optimizer
    a bucket on the ranks that update. Raises TransportError naming the first parameter or buffer in which the ranks'
    models differ, ValueError for a model without trainable parameters.
    """

    server_count = 0
    sums_are_common = False
    """Whether all ranks read the sums in one memory, which nobody may write."""

    def __init__(
        self,
        model: nn.Module,
        optimizer_factory: OptimizerFactory,
        communicator: Communicator,
        bucket_bytes: int = 25 << 20,
        clip_norm: float | None = None,
        skip_not_finite: bool = False,
    ) -> None:
        self.clip_norm = clip_norm
        self.skip_not_finite = skip_not_finite
        self.last_norm: float | None = None
        """With clipping, the norm of the last step's whole mean gradient, on the ranks that update."""
        self.skipped_steps = 0
        self.on_update: Callable[[int, float, float], None] | None = None
        """Called with bucket index, start and end (`time.perf_counter`) of each update made on this rank."""
        self.model = model
        self.communicator = communicator
        self.transport = communicator.transport
        self.exchange_s = 0.0  # waiting included
        self.update_s = 0.0
        give_everyone_the_same(model, communicator)
        groups = cut_into_buckets(model.named_parameters(), bucket_bytes)
        self._frozen = [(name, each) for name, each in model.named_parameters() if not each.requires_grad]
        self.buckets = [Bucket(index, group, self.transport.share) for index, group in enumerate(groups)]
        self.optimizers = [optimizer_factory(bucket.parameters) for bucket in self.buckets] if self.updates_here else []

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

    def set_learning_rate(self, lr: float) -> None:
        """For the steps to come; without effect on a rank that updates nothing."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr

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
            self.transport.settle()
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

    def _stop_if_not_finite(self) -> None:
        for bucket in self.buckets:
            if (name := _not_finite(bucket)) is not None:
                raise NotFinite(f"the gradient of {name} is NaN or infinite")

    def _agreed_scale(self) -> float | None:
        """What the reduced gradients are multiplied by; None where they are not finite and the step is skipped."""
        if not self.updates_here:
            return 1.0
        # in float64, whose range holds the squares of any float32
        norms = [
            torch.linalg.vector_norm(bucket.result[: bucket.numel], dtype=torch.float64) for bucket in self.buckets
        ]
        self.last_norm = norm = torch.linalg.vector_norm(torch.stack(norms)).item()
        if not math.isfinite(norm) and self.skip_not_finite:
            self.skipped_steps += 1
            return None
        # as torch.nn.utils.clip_grad_norm_ does
        return 1.0 if self.clip_norm is None else min(1.0, self.clip_norm / (norm + 1e-6))

    def _optimize(self, bucket: Bucket, scale: float) -> None:
        with self._exchanging():
            self.transport.settle()  # from here on the gradients may be written: by the scale, and by some optimizers
        start_s = time.perf_counter()
        self.communicator.status.phase(UPDATING)
        optimizer = self.optimizers[bucket.index]
        only_reads = scale == 1.0 and type(optimizer) in ONLY_READ_GRADIENTS
        bucket.collect(copy=self.sums_are_common and not only_reads)
        if not self.skip_not_finite and (name := _not_finite(bucket)) is not None:
            raise NotFinite(f"the sum of all workers' gradients of {name} is infinite, though each of them is not,")
        if scale != 1.0:
            bucket.gradients.mul_(scale)
        optimizer.step()
        end_s = time.perf_counter()
        self.update_s += end_s - start_s
        if self.on_update is not None:
            self.on_update(bucket.index, start_s, end_s)

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        start_s = time.perf_counter()
        self.communicator.status.phase(EXCHANGING)
        yield
        self.exchange_s += time.perf_counter() - start_s


def _not_finite(bucket: Bucket) -> str | None:
    """The first parameter whose gradient is not finite. One pass; a sum may also overflow, so then it looks again."""
    if torch.isfinite(bucket.gradients.sum()):
        return None
    for (name, _), view in zip(bucket.parameters, bucket.views, strict=True):
        if not torch.isfinite(view).all():
            return name
    return None
