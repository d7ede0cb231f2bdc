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
MAGNITUDE_BYTES = 8


class NotFinite(ArithmeticError):
    """A gradient is NaN or infinite; with `late`, one of the step before the present one."""

    text = "the gradient of {} is NaN or infinite"
    headline_suffices = True  # see mailbox.Failure

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

    Later is where `enqueues_on` is the device that gradients are on: of what was looked at before `end_step`, `confirm`
    says what there was to say. It is due before the gradients are written again, and before the next `end_step`.
    """

    def __init__(self, buckets: list[Bucket], enqueues_on: torch.device | None = None) -> None:
        self._buckets = buckets
        self._later = _Largest(2 * len(buckets), enqueues_on) if enqueues_on is not None else None
        self._looks: dict[int, tuple[Parts, type[NotFinite]]] = {}  # since the last `confirm`, by number

    def look_at_own(self, bucket: Bucket) -> None:
        """At the gradients that this rank is about to send."""
        self._look(bucket.index, bucket.gradients, bucket.named_views(), NotFinite)

    def look_at_sums(self, index: int, sums: Tensor, parts: Parts) -> None:
        """At what has been summed for bucket `index`, whose named `parts` are views of `sums`."""
        self._look(len(self._buckets) + index, sums, parts, SumNotFinite)

    def _look(self, number: int, tensor: Tensor, parts: Parts, error: type[NotFinite]) -> None:
        if self._later is not None:
            self._later.put(number, tensor)
            self._looks[number] = parts, error
        # The sum takes a fraction of the time here, but may overflow: what is found is looked at again.
        elif not math.isfinite(tensor.sum()) and (name := first_not_finite(parts)) is not None:
            raise error.of(name)

    def end_step(self) -> None:
        if self._later is not None and self._looks:
            self._later.send()

    def confirm(self, late: bool = False) -> None:
        """Raises NotFinite for what the last step's looks have shown, if that has not been asked yet."""
        if self._later is None or not self._later.sent:
            return
        largest, looks, self._looks = self._later.magnitudes(), self._looks, {}
        for number, (parts, error) in looks.items():
            if not math.isfinite(largest[number]):
                # An in-place exchange has put the sums over this rank's own by now. They are not finite either; where a
                # peer had a NaN in the same bucket too, the name may be that of the peer's.
                raise error.of(first_not_finite(parts) or "a parameter", late)


class NamedCheck:
    """Looks once a step at gradients that lie anywhere on a device, and tells a step later: the host need not wait.

    It keeps a magnitude of each, so they need not be there any more when the answer is read.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        """For at most `count` gradients."""
        self._answers = _Answers(count * MAGNITUDE_BYTES, device)
        self._places = list(self._answers.on_device.view(torch.float64).unbind())
        self._names: list[str] = []

    def look(self, gradients: list[tuple[str, Tensor]]) -> None:
        """Raises NotFinite for those that it looked at before."""
        self.confirm(late=True)
        some = [(name, gradient) for name, gradient in gradients if gradient.numel()]
        self._names = [name for name, _ in some]
        if some:
            norms = torch._foreach_norm([gradient for _, gradient in some], math.inf)
            torch._foreach_copy_(self._places[: len(some)], norms)
            self._answers.send()

    def confirm(self, late: bool = False) -> None:
        """Raises NotFinite for what the last look has shown, if that has not been asked yet."""
        if self._answers.sent:
            for name, magnitude in zip(self._names, self._answers.read().view(torch.float64).tolist(), strict=False):
                if not math.isfinite(magnitude):
                    raise NotFinite.of(name, late)


class _Answers:
    """Bytes that are written on a device, brought to the host without its waiting, and read there."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.on_device = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.on_host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=on_gpu, device="cpu")
        self._arrival = torch.cuda.Event() if on_gpu else None
        self.sent = False
        """Whether there is something to read."""

    def send(self) -> None:
        self.on_host.copy_(self.on_device, non_blocking=True)
        if self._arrival is not None:
            self._arrival.record(torch.cuda.current_stream(self.on_device.device.index))
        self.sent = True

    def read(self) -> Tensor:
        """What was sent last, once it is there."""
        if self._arrival is not None:
            self._arrival.synchronize()
        self.sent = False
        return self.on_host


class _Largest(_Answers):
    """The largest magnitudes in tensors: not finite where an element is not.

    A magnitude has its tensor's type, whose range it may need, so each has the bytes of the largest type.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        super().__init__(count * MAGNITUDE_BYTES, device)
        self._places: dict[int, tuple[Tensor, Tensor]] = {}  # of each number that was put: on the device, on the host

    def put(self, number: int, tensor: Tensor) -> None:
        if number not in self._places:
            start, stop = number * MAGNITUDE_BYTES, number * MAGNITUDE_BYTES + tensor.itemsize
            on_device, on_host = (each[start:stop].view(tensor.dtype)[0] for each in (self.on_device, self.on_host))
            self._places[number] = on_device, on_host
        if tensor.numel():
            torch.linalg.vector_norm(tensor, math.inf, out=self._places[number][0])

    def magnitudes(self) -> dict[int, float]:
        """Those that were sent last, by number, once they are there."""
        self.read()
        return {number: on_host.item() for number, (_, on_host) in self._places.items()}


def first_not_finite(parts: Parts) -> str | None:
    """The name of the first that holds a NaN or an infinity."""
    return next((name for name, part in parts if not torch.isfinite(part).all()), None)
