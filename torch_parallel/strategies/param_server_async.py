"""The asynchronous parameter server: every push is an update of its own, applied as it comes.

  worker 1  [--- slice 0 ---]push [--- slice 2 ---]push [--- slice 3 ---]push
  worker 2  [------------- slice 1 -------------]push  [--- slice 4 ...
  server                       1                 2  3                  4          updates

Nobody waits for anybody but the server, and the price is staleness: while worker 2 worked on slice 1, the server made
updates 1 and 2, so its gradient is two updates old when it is applied as update 3 (Dean et al., "Large scale
distributed deep networks", 2012). All samples of an epoch are in one queue of slices: the next slice goes to whoever
comes, so a slow worker does fewer of them and does not hold up the epoch. A slice is what a worker would get of a
synchronous step, so `batch_size` samples are one round of all workers, and the learning rate belongs to a slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from torch_parallel.strategies.serving import NEXT, Serving
from torch_parallel.strategies.shares import Share, single_shares
from torch_parallel.strategies.tally import Tally

NOTHING = -1
"""In place of a slice: the epoch is used up."""


class ParamServerAsync(Serving):
    """The asynchronous parameter server: see the module's docstring. Needs at least two ranks."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._queue: Iterator[int] = count()  # slices that nobody has yet
        self._busy = list(self._workers)  # who has one

    @classmethod
    def in_step(cls, **options: Any) -> bool:
        return False

    @classmethod
    def adds_up_all(cls, **options: Any) -> bool:
        return False

    @staticmethod
    def update_count(sample_count: int, batch_size: int, worker_count: int) -> int:
        return len(single_shares(sample_count, batch_size, worker_count))

    def shares(self, sample_count: int, batch_size: int, first_sample: int = 0) -> Iterator[Share]:
        slices = single_shares(sample_count, batch_size, self.communicator.worker_count, first_sample)
        if first_sample == 0:  # not where an epoch is resumed
            self.tally = Tally()
        yield from self._serve(slices) if self.updates_here else self._work_off(slices)
        self._finish()

    def _serve(self, slices: list[Share]) -> Iterator[Share]:
        """As many updates as there are slices. The first slices are handed out already, one to each worker."""
        self._queue = iter(range(len(self._workers), len(slices)))
        self._busy = self._workers[: len(slices)]
        for each in slices:
            yield Share(slice(0, 0), each.count, each.done)

    def _work_off(self, slices: list[Share]) -> Iterator[Share]:
        words = self._control.local
        assert self.communicator.worker_index is not None
        number = self.communicator.worker_index
        while number != NOTHING and number < len(slices):
            yield slices[number]
            number = int(words[NEXT])

    def _finish(self) -> None:
        """All ranks take the parameters that the last update made."""
        self._given = dict.fromkeys(self._workers, self._version)
        with self.exchanging():
            for bucket in self.buckets:
                self._pull(bucket)

    def _choose_pushes(self) -> list[int]:
        return [self._next_push(self._busy)]

    def _answer_pushes(self) -> None:
        (worker,) = self._kept
        number = next(self._queue, NOTHING)
        if number == NOTHING:
            self._busy.remove(worker)
        self._answer(worker, number)
