"""A server that serves whoever comes first, and waits for nobody in particular.

  worker 1 --push------------>  server     the server looks at all workers at once; it reads the gradients, makes an
  worker 2 (still computing)      |        update when its strategy says so, and answers
  worker 1 <--answer------------  |        the answer: new parameters, written into the worker's own buffer, and two
                                           control words beside them

A worker waits for the server alone, from its push to the answer. In that time the server reads its gradients and writes
its parameters; at all other times both are the worker's. So no worker waits for another's reading, and one that is slow
or stopped holds nobody up, as far as the strategy does not ask for its gradient.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from typing import Any, ClassVar

import torch

from torch_parallel.gradients.buckets import Bucket
from torch_parallel.strategies.param_server import ParamServer
from torch_parallel.strategies.tally import Tally

SERVER = 0
NEXT, SKIPPED, WORDS = range(3)
"""Control words of a worker, int64, as the server told it last: what it works on, and whether its push was skipped."""


class Serving(ParamServer):
    """What the servers that serve as pushes come have in common. See the module's docstring."""

    options: ClassVar[tuple[str, ...]] = ()
    through_host = True
    knows_next_share = False
    tally: Tally

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.tally = Tally()
        self._control = self.transport.share(WORDS, torch.int64)
        self._workers = list(range(self.communicator.first_worker, self.communicator.world_size))
        self._version = 0  # updates made
        self._given = dict.fromkeys(self._workers, 0)  # the version on which each worker works, as the server knows it
        self._arrived: deque[int] = deque()  # who has pushed and was not looked at yet
        self._kept: list[int] = []  # whose gradients make the present update, in rank order

    @abstractmethod
    def _choose_pushes(self) -> list[int]:
        """Waits for the pushes that make the next update, and returns whose they are, in rank order."""

    @abstractmethod
    def _answer_pushes(self) -> None:
        """Answers those whose gradients have been used."""

    def step(self) -> None:
        """On a worker a push and the answer; on the server one update, and answers. Raises NotFinite."""
        if not self.updates_here:
            self.watch.look()
            finite = not self.skip_not_finite or self._own_are_finite()
            self._push()
            self._end_step(skipped=not finite or bool(self._control.local[SKIPPED]))
            return
        with self.exchanging():
            self._kept = self._choose_pushes()
        skipped_before = self.skipped_steps
        super().step()
        self._count(applied=self.skipped_steps == skipped_before)
        with self.exchanging():
            for bucket in self.buckets:
                self._offer(bucket)
            self._answer_pushes()

    def _is_skipped(self, scale: float | None) -> bool:
        return scale is None

    def reduce(self, bucket: Bucket) -> None:
        """On the server: the sum of the gradients that are kept, in rank order."""
        with self.exchanging():
            for position, worker in enumerate(self._kept):
                purpose = f"gradients of bucket {bucket.index}"
                self.transport.read(bucket.shared, worker, add=position > 0, purpose=purpose)

    def update(self, bucket: Bucket, scale: float | None = 1.0) -> None:
        if scale is not None:
            self._optimize(bucket, scale)

    def _push(self) -> None:
        if not self.skip_not_finite:
            self._stop_if_not_finite()
        with self.exchanging():
            for bucket in self.buckets:
                bucket.publish()
            self.transport.tell(SERVER, pushed=[bucket.shared for bucket in self.buckets])
            self.transport.hear(SERVER, "the server's answer to a push", put=[self._control, *self.parameters])
            for bucket in self.buckets:
                self._adopt(bucket)

    def _next_push(self, workers: list[int]) -> int:
        """One of the workers, who has pushed; waits until one has."""
        if not self._arrived:
            self._arrived.extend(self.transport.arrivals(workers, "a push of any worker"))
        return self._arrived.popleft()

    def _throw_away(self, worker: int) -> None:
        """The worker's push, which comes too late."""
        for bucket in self.buckets:
            self.transport.drop(bucket.shared, worker, f"gradients of bucket {bucket.index}, which come too late")

    def _answer(self, worker: int, number: int) -> None:
        """Gives the worker the newest parameters, and the number of what it is to work on."""
        words = self._control.local
        words[NEXT], words[SKIPPED] = number, self.step_was_skipped
        self._given[worker] = self._version
        for buffer in (self._control, *self.parameters):
            self.transport.put(buffer, worker)
        self.transport.tell(worker)

    def _count(self, applied: bool) -> None:
        for worker in self._kept:
            self.tally.count(self._version - self._given[worker])
        self.tally.updates += applied
        self._version += applied
