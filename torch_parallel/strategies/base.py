"""What a strategy is: the way by which workers come to hold the next parameters.

The training loop is the same for all: `begin_step()`, forward, loss, backward, `step()`. A strategy says two things,
for one bucket of gradients at a time:

- `reduce(bucket)` brings the sum of all workers' gradients to where the update is made;
- `update(bucket, scale)` makes it there, of `scale` times the gradient, and when it returns this rank's parameters hold
  the next step's values.

Each worker's loss is the sum over its samples divided by the samples of all workers, so the plain sum of gradients is
the gradient of the mean over the whole batch, however unevenly the batch is split. A rank without samples, a server
among them, skips forward and backward and takes part in every exchange all the same.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torch_parallel.communicator import Communicator
from torch_parallel.gradients.buckets import Bucket, NamedParameters, cut_into_buckets
from torch_parallel.status import EXCHANGING, UPDATING

if TYPE_CHECKING:
    from collections.abc import Iterator

OptimizerFactory = Callable[[NamedParameters], Optimizer]


class NotFinite(ArithmeticError):
    """A gradient is NaN or infinite."""


class Strategy(ABC):
    """One rank's part in keeping the replicas equal.

    Set-up compares the models of all ranks, gives all of them rank 0's parameters and buffers, and makes one optimizer
    a bucket on the ranks that update. Raises TransportError naming the first parameter or buffer in which the ranks'
    models differ, ValueError for a model without trainable parameters.
    """

    server_count = 0

    def __init__(
        self,
        model: nn.Module,
        optimizer_factory: OptimizerFactory,
        communicator: Communicator,
        bucket_bytes: int = 25 << 20,
    ) -> None:
        self.model = model
        self.communicator = communicator
        self.transport = communicator.transport
        self.exchange_s = 0.0  # waiting included
        self.update_s = 0.0
        give_everyone_the_same(model, communicator)
        groups = cut_into_buckets(model.named_parameters(), bucket_bytes)
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
    def update(self, bucket: Bucket, scale: float = 1.0) -> None:
        """Returns with the next parameters on this rank."""

    def begin_step(self) -> None:
        """Clears the gradients, once no peer reads the last step's any more."""
        with self._exchanging():
            self.transport.settle()
        for bucket in self.buckets:
            bucket.zero()

    def step(self) -> None:
        """Exchanges all gradients and updates all parameters. Raises NotFinite before anything is exchanged."""
        for bucket in self.buckets:
            if not torch.isfinite(bucket.gradients.sum()):
                raise NotFinite(f"the gradient of {_first_not_finite(bucket)} is NaN or infinite")
        for bucket in self.buckets:
            self.reduce(bucket)
            self.update(bucket)

    def _optimize(self, bucket: Bucket, scale: float) -> None:
        start_s = time.perf_counter()
        self.communicator.status.phase(UPDATING)
        bucket.collect()
        if scale != 1.0:
            bucket.gradients.mul_(scale)
        self.optimizers[bucket.index].step()
        self.update_s += time.perf_counter() - start_s

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        start_s = time.perf_counter()
        self.communicator.status.phase(EXCHANGING)
        yield
        self.exchange_s += time.perf_counter() - start_s


def give_everyone_the_same(model: nn.Module, communicator: Communicator) -> None:
    """Compares names, shapes and dtypes over the ranks, then gives all ranks rank 0's parameters and buffers.

    Raises TransportError naming the first tensor that differs.
    """
    tensors = list(model.named_parameters()) + list(model.named_buffers())
    for name, tensor in tensors:
        trainable = " (trainable)" if tensor.requires_grad else ""
        communicator.transport.agree(f"set up {name[:120]} {list(tensor.shape)} {tensor.dtype}{trainable}")
    communicator.transport.agree(f"set up a model of {len(tensors)} tensors")
    broadcast_all([tensor for _, tensor in tensors], communicator, root=0)


def broadcast_all(tensors: list[Tensor], communicator: Communicator, root: int) -> None:
    """Replaces every tensor by rank `root`'s: one message for each dtype."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor.detach() for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        communicator.broadcast(flat, root)
        for tensor, values in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
            tensor.copy_(values.view(tensor.shape))


def _first_not_finite(bucket: Bucket) -> str:
    for (name, _), view in zip(bucket.parameters, bucket.views, strict=True):
        if not torch.isfinite(view).all():
            return name
    return "the sum of all parameters"
