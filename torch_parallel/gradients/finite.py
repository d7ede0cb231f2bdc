"""Stops a run whose gradients are NaN or infinite, and says which one is, and whose.

The host looks at its own tensors at once. To ask a GPU and wait for the answer would keep the host from enqueueing the
next step, so there the answers of a step are read when the next one's backward is about to write its first gradient:
as late as those of the step are still there to be named. Until then the host has enqueued the next forward, so the GPU
does not run out of work while the host waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Self

import torch
from torch import Tensor

from torch_parallel.gradients.buckets import Bucket

Parts = Iterable[tuple[str, Tensor]]


class NotFinite(ArithmeticError):
    """A gradient is NaN or infinite; with `late`, one of the step before the present one."""

    text = "the gradient of {} is NaN or infinite"

    def __init__(self, message: str, late: bool = False) -> None:
        super().__init__(message)
        self.late = late

    @classmethod
    def of(cls, name: str, late: bool = False) -> Self:
        return cls(cls.text.format(name), late)


class SumNotFinite(NotFinite):
    """A sum is, to which this rank has added what is finite: another rank may know more."""

    text = "the sum of all workers' gradients of {} is NaN or infinite, though what this rank gave is finite,"
    secondhand = True  # see mailbox.Failure


class FiniteCheck:
    """Looks at every bucket twice a step: at this rank's gradients, and at the sums. Raises NotFinite, sooner or later.

    Later is where `device` is a GPU: of what was looked at before `end_step`, `confirm` says what there was to say. It
    is due before the gradients are written again, and before the next `end_step`.
    """

    def __init__(self, buckets: list[Bucket], device: torch.device) -> None:
        self._buckets = buckets
        self._later = _Sums(2 * len(buckets), device) if device.type == "cuda" else None
        self._parts: dict[int, tuple[Parts, type[NotFinite]]] = {}  # of what the sums are, by their numbers

    def look_at_own(self, bucket: Bucket) -> None:
        """At the gradients that this rank is about to send."""
        self._look(bucket.index, bucket.gradients, bucket.named_views(), NotFinite)

    def look_at_sums(self, index: int, sums: Tensor, parts: Parts) -> None:
        """At what has been summed for bucket `index`, whose named `parts` are views of `sums`."""
        self._look(len(self._buckets) + index, sums, parts, SumNotFinite)

    def _look(self, number: int, tensor: Tensor, parts: Parts, error: type[NotFinite]) -> None:
        # The sum, in one pass; it may also overflow, so what is found is looked at again.
        if self._later is not None:
            self._later.put_sum(number, tensor)
            self._parts[number] = parts, error
        elif not math.isfinite(tensor.sum()) and (name := first_not_finite(parts)) is not None:
            raise error.of(name)

    def end_step(self) -> None:
        if self._later is not None and self._parts:
            self._later.send()

    def confirm(self, late: bool = False) -> None:
        """Raises NotFinite for what the last step's looks have shown, if that has not been asked yet."""
        if self._later is None or not self._later.sent:
            return
        sums = self._later.read()
        for number, (parts, error) in self._parts.items():
            if not math.isfinite(sums[number]) and (name := first_not_finite(parts)) is not None:
                raise error.of(name, late)


class _Sums:
    """Sums that a GPU makes, and brings to the host."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._sums = torch.zeros(count, device=device)
        self._places = self._sums.unbind()
        self._on_host = torch.zeros(count, pin_memory=True)
        self._arrival = torch.cuda.Event()
        self.sent = False
        """Whether there is something to read."""

    def put_sum(self, number: int, tensor: Tensor) -> None:
        torch.sum(tensor, dim=0, dtype=torch.float32, out=self._places[number])

    def send(self) -> None:
        self._on_host.copy_(self._sums, non_blocking=True)
        self._arrival.record(torch.cuda.current_stream(self._sums.device.index))
        self.sent = True

    def read(self) -> list[float]:
        """Those that were sent last, once they are there."""
        self._arrival.synchronize()
        self.sent = False
        sums: list[float] = self._on_host.tolist()
        return sums


def first_not_finite(parts: Parts) -> str | None:
    """The name of the first that holds a NaN or an infinity."""
    return next((name for name, part in parts if not torch.isfinite(part).all()), None)
