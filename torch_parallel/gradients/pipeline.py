"""Buckets leave while backward still computes: each as soon as its gradients are there, in one order on all ranks.

    computing     | backward of layer 3 | of layer 2 | of layer 1 |           | next step
    exchanging                          | bucket 0   | bucket 1   | bucket 2  |

Buckets are cut in reverse of the order in which the model has registered its parameters, which is mostly that of use:
then the first is complete when backward has hardly begun. Autograd tells each of them when a gradient has come; a
bucket that is complete leaves unless an earlier one has not left yet, so all ranks exchange in the same order,
whatever order their gradients come in. What no gradient came for leaves when backward is over. The first step shows in
which order backward completes buckets, and all ranks agree on one: from the second on they leave in that. Those that
the first backward did not complete, or not for good, leave last.

On GPUs buckets leave, if there are several, on a stream of their own. It waits for the gradients, and the stream that
computes waits for it when backward is over: until then both have work. Where the host itself exchanges, it does so in
the middle of backward, which overlaps with nothing, but finds the gradients in its caches.
(Li et al., "PyTorch Distributed: experiences on accelerating data parallel training", 2020, section 3.2.3.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from torch_parallel.gradients.buckets import Bucket


class Pipeline:
    """Launches the exchange of every bucket, once a step. `launch(bucket)` is called in the same order on all ranks.

    With a `stream` it is called with that as the current one, and `in_background` is true meanwhile.
    """

    def __init__(
        self, buckets: list[Bucket], launch: Callable[[Bucket], None], stream: torch.cuda.Stream | None
    ) -> None:
        self.stream = stream
        self.in_background = False
        self._buckets = list(buckets)  # in the order in which they leave
        self._launch = launch
        self._left = 0  # how many have left in this step: the first so many
        self._complete: dict[int, None] = {}  # in this step, by index, in the order in which they came
        self._held: set[int] = set()  # got a gradient more when they were complete: they wait for the end of backward

    @property
    def places(self) -> list[int]:
        """By index, the place in which this step's backward has completed each bucket; all others share the last."""
        place = {index: place for place, index in enumerate(self._complete)}
        return [place.get(index, len(self._buckets)) for index in range(len(self._buckets))]

    def leave_in_order_of(self, places: list[float]) -> None:
        """From the next step on, the bucket with the lowest leaves first. They must be the same on all ranks."""
        self._buckets.sort(key=lambda bucket: places[bucket.index])

    def begin_step(self) -> None:
        """If the last step raised, what it had sent off is awaited, and stays applied."""
        if self._left:
            self._end()
        self._complete.clear()

    @contextmanager
    def during_backward(self) -> Iterator[None]:
        """Around the last backward of a step: what it completes leaves at once.

        Raises RuntimeError where backward needs a parameter that has been updated, since its gradient was complete.
        """
        for bucket in self._buckets:
            bucket.await_gradients(self._completed)
        try:
            yield
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise RuntimeError(
                "backward needs a parameter, say one that forward also used detached, after its gradient was complete "
                "and it had been updated: exchange when backward is over (--no_overlap, or overlap=False)"
            ) from error

    def finish(self) -> None:
        """Backward is over: the rest leaves, and the current stream waits for all that has left."""
        self._leave(len(self._buckets))
        self._end()

    def _end(self) -> None:
        self._left = 0
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device_index).wait_stream(self.stream)

    def _completed(self, bucket: Bucket) -> None:
        if bucket.index in self._complete:
            self._held.add(bucket.index)
            del self._complete[bucket.index]
        elif bucket.index not in self._held:
            self._complete[bucket.index] = None
        ready = self._left
        while ready < len(self._buckets) and self._buckets[ready].index in self._complete:
            ready += 1
        self._leave(ready)

    def _leave(self, stop: int) -> None:
        """All buckets before number `stop` that have not left do so."""
        leaving, self._left = self._buckets[self._left : stop], stop
        if leaving:
            # Autograd's own tensors are read on the stream that made them, which may give their memory to others next.
            for bucket in leaving:
                bucket.leave()
            with self._on_stream():
                for bucket in leaving:
                    self._launch(bucket)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """What is enqueued here comes after all that the current stream has been given, and runs beside what it gets
        next."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device_index))
        with torch.cuda.stream(self.stream):
            self.in_background = True
            try:
                yield
            finally:
                self.in_background = False
