"""One rank serves, the others train: the synchronous parameter server.

  worker 1 --gradients-->          --parameters--> worker 1
  worker 2 --gradients--> server   --parameters--> worker 2
  worker 3 --gradients-->          --parameters--> worker 3

Rank 0 keeps the parameters and the optimizer and never sees a sample. In each step the workers push their gradients,
the server adds them in rank order and makes one update, and the workers pull the new parameters. Workers hold no
optimizer state. All bytes cross the server's link: (P-1) S in each direction (Li et al., "Scaling distributed machine
learning with the parameter server", 2014).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.autograd.graph import increment_version

from torch_parallel.collectives import broadcast_from, reduce_to
from torch_parallel.gradients.buckets import Bucket
from torch_parallel.gradients.layout import move_to_common, views_of
from torch_parallel.strategies.base import OptimizerFactory
from torch_parallel.strategies.from_scratch import SCHEDULE_OPTIONS, FromScratch
from torch_parallel.strategies.scheduled import Mark, Partition
from torch_parallel.transport.buffer import SharedBuffer
from torch_parallel.transport.channels import Steps

PUSH = reduce_to(0, root_contributes=False)
PULL = broadcast_from(0)


class ParamServer(FromScratch):
    """The synchronous parameter server: see the module's docstring. Needs at least two ranks."""

    options: ClassVar[tuple[str, ...]] = ("overlap", *SCHEDULE_OPTIONS)
    server_count = 1

    def _prepare(self, optimizer_factory: OptimizerFactory, is_scheduled: bool) -> None:
        super()._prepare(optimizer_factory, is_scheduled)
        self._verdict = self.transport.share(1, torch.float32) if self.skip_not_finite else None
        self.parameters = [self._share_parameters(bucket) for bucket in self.buckets]
        self._parts: dict[Partition, SharedBuffer] = {}

    @property
    def updates_here(self) -> bool:
        return self.communicator.is_server

    def reduce(self, bucket: Bucket) -> None:
        with self.exchanging():
            bucket.publish()
            self.transport.perform(PUSH, bucket.shared, f"gradients of bucket {bucket.index}")

    def update(self, bucket: Bucket, scale: float | None = 1.0) -> None:
        if self.updates_here and scale is not None:
            # Nobody reads the old parameters any more: `begin_step` settled that, and every bucket has its own buffer.
            self._optimize(bucket, scale)
        with self.exchanging():
            self._pull(bucket)

    def bind_partition(self, partition: Partition, optimizer_factory: OptimizerFactory) -> None:
        partition.channel.bind(PUSH, partition.shared)
        partition.channel.bind(PULL, self._parameters_of(partition))
        if self.updates_here:
            partition.make_optimizer(optimizer_factory, partition.shared.local, is_common=False)

    def _parameters_of(self, partition: Partition) -> SharedBuffer:
        if partition not in self._parts:
            self._parts[partition] = self.parameters[partition.bucket.index].part(partition.start, partition.stop)
        return self._parts[partition]

    def partition_steps(self, partition: Partition) -> Steps:
        yield from partition.channel.steps(PUSH, partition.shared, f"gradients of {partition.name}")
        if self.bucket_by_bucket:
            if self.updates_here:
                yield from partition.await_mark()
                self.update_partition(partition)
                self._offer(partition.bucket)
            what = f"parameters of {partition.name}"
            yield from partition.channel.steps(PULL, self._parameters_of(partition), what)
            if not self.updates_here:
                self._adopt(partition.bucket)
                increment_version(parameter for _, parameter in partition.bucket.parameters)

    def bind_mark(self, mark: Mark) -> None:
        mark.channel.bind(PUSH, mark.shared)

    def mark_steps(self, mark: Mark) -> Steps:
        return mark.channel.steps(PUSH, mark.shared, mark.name)

    def _is_skipped(self, scale: float | None) -> bool:
        """Only the server sees the sum of gradients: it tells the workers whether it was finite."""
        if self._verdict is None:
            return False
        if self.updates_here:
            self._verdict.local.fill_(float(scale is None))
        with self.exchanging():
            self.transport.perform(PULL, self._verdict, "whether the step is skipped")
        return bool(self._verdict.local.item())

    def _pull(self, bucket: Bucket) -> None:
        if self.updates_here:
            self._offer(bucket)
        self.transport.perform(PULL, self.parameters[bucket.index], f"parameters of bucket {bucket.index}")
        if not self.updates_here:
            self._adopt(bucket)

    def _offer(self, bucket: Bucket) -> None:
        """Copies the parameters to the shared buffer, where they do not lie there."""
        if self.stays_apart(bucket):
            _copy_all(self._shared_values(bucket), [parameter.detach() for _, parameter in bucket.parameters])

    def _adopt(self, bucket: Bucket) -> None:
        """The reverse of `_offer`."""
        if self.stays_apart(bucket):
            _copy_all([parameter.detach() for _, parameter in bucket.parameters], self._shared_values(bucket))

    def _shared_values(self, bucket: Bucket) -> list[torch.Tensor]:
        return list(views_of(self.parameters[bucket.index].local, bucket.parameters))

    def _share_parameters(self, bucket: Bucket) -> SharedBuffer:
        shared = self.transport.share(bucket.numel, bucket.flat.dtype)
        if not self.stays_apart(bucket):
            for (_, parameter), view in zip(bucket.parameters, views_of(shared.local, bucket.parameters), strict=True):
                view.copy_(parameter.detach())
                move_to_common(parameter, view)
        return shared


def _copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
