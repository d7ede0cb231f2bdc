"""Bounded staleness: no worker is more than K steps ahead of the slowest one.

  K = 2        complete        gradients are on their way     may not begin yet
  steps   ... [ t-1 ]         [ t ] [ t+1 ] [ t+2 ]           [ t+3 ]
                  version t: what step t+2 is worked out on at the latest

The server applies complete steps only, each the sum of all workers' gradients in rank order, as the synchronous server
does; version v of the parameters is what v steps have made. A worker does not wait for its own step: it works out step
t on any version from t - K on, the newest that is there (Ho et al., "More effective distributed ML via a stale
synchronous parallel parameter server", 2013). K = 0 is the synchronous server to the bit.

Each worker has K + 1 buffers of gradients and the server K + 1 of parameters, used in turn. That is enough for nobody
ever to wait for another's reading: a worker that writes the gradient of step t holds a version from t - K on, so step
t - K - 1, which lay in the same buffer, is applied; and version v + K + 1 comes only after every worker has pushed step
v + K, for which it needed version v or a newer one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torch_parallel.collectives import gather_to
from torch_parallel.gradients.buckets import Bucket
from torch_parallel.strategies.param_server import PULL, ParamServer
from torch_parallel.strategies.shares import Share
from torch_parallel.strategies.tally import Tally
from torch_parallel.transport.buffer import SharedBuffer

SERVER = 0
TELL_VERSIONS = gather_to(SERVER)


class ParamServerBounded(ParamServer):
    """The parameter server of bounded staleness: see the module's docstring. Needs at least two ranks."""

    options = ("staleness",)
    through_host = True
    knows_next_share = False
    tally: Tally

    def __init__(self, *arguments: Any, staleness: int = 0, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.staleness = staleness
        self.tally = Tally()
        self._slots = staleness + 1
        self._gradients = [self._gradient_slots(bucket) for bucket in self.buckets]
        self._versions = [self._version_slots(bucket) for bucket in self.buckets]
        ranks = self.communicator.world_size
        self._pulled = [self.transport.share(ranks, torch.int64) for _ in range(self._slots)]
        """By slot, the version on which each worker's gradient there was worked out."""
        # By slot, whether the step that would have made the version there was skipped; only the server can tell.
        self._skipped = self._slots_beside(self.transport.share(1, torch.int64)) if self.skip_not_finite else None
        self._last_was_skipped = False
        self._step = 0  # done by this rank
        self._version = 0  # of the parameters that it holds

    @classmethod
    def in_step(cls, **options: Any) -> bool:
        return bool(options["staleness"] == 0)

    def shares(self, sample_count: int, batch_size: int, first_sample: int = 0) -> Iterator[Share]:
        if first_sample == 0:  # not where an epoch is resumed
            self.tally = Tally()
        yield from super().shares(sample_count, batch_size, first_sample)
        if not self.updates_here:
            self._catch_up(self._step)

    def begin_step(self) -> None:
        slot = self._step % self._slots
        for bucket, gradients in zip(self.buckets, self._gradients, strict=True):
            bucket.move_to(gradients[slot])
        self._pulled[slot].local[self.communicator.rank] = self._version
        super().begin_step()

    def update(self, bucket: Bucket, scale: float | None = 1.0) -> None:
        """On the server; what it makes is given away when all buckets are done, so that a version is whole."""
        if self.updates_here and scale is not None:
            self._optimize(bucket, scale)

    def step(self) -> None:
        skipped_before = self.skipped_steps
        with self.exchanging():
            pulled = self._pulled[self._step % self._slots]
            self.transport.perform(TELL_VERSIONS, pulled, "the versions on which gradients were worked out")
        super().step()
        if self.updates_here:
            self._count(applied=self.skipped_steps == skipped_before)
            self._step += 1
            self._publish()
        else:
            self._step += 1
            self._catch_up(self._step - self.staleness)
            if self._version == self._step and self._last_was_skipped:
                self._end_step(skipped=True)

    def _count(self, applied: bool) -> None:
        self.tally.updates += applied
        for worker in range(self.communicator.first_worker, self.communicator.world_size):
            self.tally.count(self._step - int(self._pulled[self._step % self._slots].local[worker]))

    def _is_skipped(self, scale: float | None) -> bool:
        """A worker learns of its step here only if it waits for it; else it knows of its own gradients alone."""
        if self.updates_here:
            return scale is None
        return self.skip_not_finite and not self._own_are_finite()

    def _is_read_later(self, bucket: Bucket) -> bool:
        return True

    def _publish(self) -> None:
        """The server's parameters become the next version, and nobody is waited for."""
        self._version += 1
        with self.exchanging():
            self._pull_verdict()
            for bucket in self.buckets:
                self._offer(bucket)
                version = self._versions[bucket.index][self._version % self._slots]
                if self.staleness:
                    version.local.copy_(self.parameters[bucket.index].local)
                self._pull_version(bucket, version)

    def _catch_up(self, wanted: int) -> None:
        """Pulls version after version: up to the one that is wanted, and on while there are newer ones."""
        with self.exchanging():
            while self._version < wanted or (self._version < self._step and self.transport.told(SERVER)):
                self._version += 1
                self._pull_verdict()
                for bucket in self.buckets:
                    version = self._versions[bucket.index][self._version % self._slots]
                    self._pull_version(bucket, version)
                    self._adopt(bucket)

    # without a number: how many versions lie between two pushes is not the same on all ranks

    def _pull_version(self, bucket: Bucket, version: SharedBuffer) -> None:
        purpose = f"parameters of bucket {bucket.index}"
        self.transport.perform(PULL, version, purpose, numbered=False)

    def _pull_verdict(self) -> None:
        """Whether the step that would have made this version was skipped."""
        if self._skipped is not None:
            verdict = self._skipped[self._version % self._slots]
            if self.updates_here:
                verdict.local.fill_(self.step_was_skipped)
            self.transport.perform(PULL, verdict, "whether the step is skipped", numbered=False)
            self._last_was_skipped = bool(verdict.local)

    def _await_readers(self) -> None:
        """Never waits: the buffers are used in turn, see the module's docstring. Takes the signals of what was read."""
        buckets = len(self.buckets)
        if self.updates_here:
            a_version = buckets + (self._skipped is not None)
            self.transport.settle(leave=self._slots * a_version * self.communicator.worker_count)
        else:
            a_push = buckets + 1  # with the version on which it was worked out
            self.transport.settle(leave=self.staleness * a_push)

    def _gradient_slots(self, bucket: Bucket) -> list[SharedBuffer]:
        shared = bucket.shared
        more = [self.transport.share(shared.local.numel(), shared.local.dtype) for _ in range(self.staleness)]
        return [shared, *more]

    def _version_slots(self, bucket: Bucket) -> list[SharedBuffer]:
        """Buffers of the server's, each with the workers' parameters as their parts; with K = 0 its own parameters."""
        return self._slots_beside(self.parameters[bucket.index])

    def _slots_beside(self, shared: SharedBuffer) -> list[SharedBuffer]:
        if not self.staleness:
            return [shared]
        numel, dtype = shared.local.numel(), shared.local.dtype
        slots = [self.transport.share(numel, dtype, owner=SERVER) for _ in range(self._slots)]
        return [SharedBuffer([slot.parts[SERVER], *shared.parts[1:]], self.communicator.rank) for slot in slots]
