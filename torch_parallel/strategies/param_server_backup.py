"""Backup workers: a step does not wait for its B slowest workers.

  B = 1     step t                           step t+1
  worker 1  [--- 1/3 of batch t ---]push     [--- 1/3 of batch t+1 ---]push
  worker 2  [---- 1/3 of batch t ----]push   [--- 1/3 of batch t+1 ---]push
  worker 3  [----------- 1/3 of batch t --------------]push: late, thrown away; it joins step t+1

The server makes an update as soon as the first workers - B gradients of a step are there, of their mean over the
samples that are in it. A late push is known by its step number and is never added to a later step; the worker then goes
on with the newest parameters and the present step. The samples of those who were not waited for are lost for this epoch
(Chen et al., "Revisiting distributed synchronous SGD", 2016). B = 0 is the synchronous server to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch_parallel.gradients.buckets import Bucket
from torch_parallel.strategies.serving import NEXT, Serving
from torch_parallel.strategies.shares import Share, shard, synchronous_shares
from torch_parallel.strategies.tally import Tally


class ParamServerBackup(Serving):
    """The parameter server with backup workers: see the module's docstring. Needs at least two ranks.

    Raises ValueError where no worker would be waited for.
    """

    options = ("backup_workers",)

    def __init__(self, *arguments: Any, backup_workers: int = 0, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if backup_workers >= len(self._workers):
            raise ValueError(f"{backup_workers} backup workers of {len(self._workers)}: one must be waited for")
        self.backup_workers = backup_workers
        self._step = 0  # of the epoch, as the server sees it
        self._told = dict.fromkeys(self._workers, 0)  # which step each worker was given last
        self._samples = [1] * len(self._workers)  # of each worker in this step; equal where no epoch is asked for
        self._targets = self._samples

    @classmethod
    def in_step(cls, **options: Any) -> bool:
        return bool(options["backup_workers"] == 0)

    @classmethod
    def adds_up_all(cls, **options: Any) -> bool:
        return cls.in_step(**options)

    def shares(self, sample_count: int, batch_size: int, first_sample: int = 0) -> Iterator[Share]:
        communicator = self.communicator
        steps = list(
            synchronous_shares(
                sample_count, batch_size, communicator.worker_index, communicator.worker_count, first_sample
            )
        )
        if first_sample == 0:  # not where an epoch is resumed
            self.tally = Tally()
        yield from self._serve(steps) if self.updates_here else self._take_part(steps)

    def _serve(self, steps: list[Share]) -> Iterator[Share]:
        self._step, self._told = 0, dict.fromkeys(self._workers, 0)
        for each in steps:
            parts = [shard(each.count, index, len(self._workers)) for index in range(len(self._workers))]
            start = each.whole.start
            self._samples = [part.stop - part.start for part in parts]
            self._targets = [self.count_targets(slice(start + part.start, start + part.stop)) for part in parts]
            yield each
        self._release_the_late()

    def _take_part(self, steps: list[Share]) -> Iterator[Share]:
        """The steps that the server names; those that it has made meanwhile without this worker are left out."""
        words = self._control.local
        words[NEXT] = 0
        while int(words[NEXT]) < len(steps):
            yield steps[int(words[NEXT])]

    def _choose_pushes(self) -> list[int]:
        """The first workers - B of this step; where some have no samples, none of the B is one with samples more."""
        kept: list[int] = []
        while not self._enough(kept):
            worker = self._next_push([each for each in self._workers if each not in kept])
            if self._told[worker] < self._step:
                self._throw_away(worker)
                self._tell(worker)
            else:
                kept.append(worker)
        return sorted(kept)

    def _enough(self, kept: list[int]) -> bool:
        with_samples = sum(count > 0 for count in self._samples)
        kept_with_samples = sum(self._count_of(worker) > 0 for worker in kept)
        return len(kept) >= len(self._workers) - self.backup_workers and kept_with_samples >= min(
            with_samples, max(1, with_samples - self.backup_workers)
        )

    def _count_of(self, worker: int) -> int:
        return self._samples[worker - self.communicator.first_worker]

    def reduce(self, bucket: Bucket) -> None:
        """The sum of the gradients kept, each divided by the targets of all: made the mean over the targets kept."""
        super().reduce(bucket)
        kept = sum(self._targets[worker - self.communicator.first_worker] for worker in self._kept)
        if 0 < kept < sum(self._targets):
            bucket.shared.local[: bucket.numel].mul_(sum(self._targets) / kept)

    def _answer_pushes(self) -> None:
        left_out = [self._count_of(worker) for worker in self._workers if worker not in self._kept]
        self.tally.dropped += sum(count > 0 for count in left_out)
        self.tally.samples_lost += sum(left_out)
        self._step += 1
        for worker in self._kept:
            self._tell(worker)

    def _tell(self, worker: int) -> None:
        """Gives the worker the newest parameters, to work on the present step."""
        self._told[worker] = self._step
        self._answer(worker, self._step)

    def _release_the_late(self) -> None:
        """The epoch is over: whoever still works on a step of it is told so when it comes."""
        behind = [worker for worker in self._workers if self._told[worker] < self._step]
        while behind:
            worker = self._next_push(behind)
            behind.remove(worker)
            self._throw_away(worker)
            self._tell(worker)
