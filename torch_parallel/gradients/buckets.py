"""Gradients that are exchanged together lie together: flat buffers that peers can read, with every `.grad` a view.

Autograd adds each gradient into its view, so after backward a bucket is ready to be exchanged as it is; nothing is
packed. Behind the gradients a bucket has one element for each parameter, 1 where this rank used it in this step. The
exchange sums these too, so every rank learns, at no extra message, which parameters nobody used: those have
`grad = None` at the update, as in one process, and not a zero that weight decay or momentum would act on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from torch_parallel.transport.buffer import SharedBuffer

NamedParameters = list[tuple[str, Parameter]]
Share = Callable[[int, torch.dtype], SharedBuffer]


class Bucket:
    """Some parameters of one dtype and device, and the flat buffer of their gradients.

    `shared` holds [numel + len(parameters)] elements in host memory: gradients, then use marks. On the CPU the `.grad`s
    are views of it. On a GPU they are views of `flat`, a buffer of the same shape on the device, and `publish` and
    `collect` copy between the two.

    The exchange puts the sums into `result`: `shared` again, where it works in place, or memory of the same shape. Then
    the `.grad`s are views of that, until the next step begins.
    """

    def __init__(self, index: int, parameters: NamedParameters, share: Share) -> None:
        self.index = index
        self.parameters = parameters
        self.numel = sum(parameter.numel() for _, parameter in parameters)
        first = parameters[0][1]
        self.shared = share(self.numel + len(parameters), first.dtype)
        on_host = first.device.type == "cpu"
        self.flat = self.shared.local if on_host else torch.zeros_like(self.shared.local, device=first.device)
        self.result = self.shared.local
        self._own_views = self.views = list(views_of(self.flat, parameters))
        self._sums, self._sums_views = self.flat, self._own_views
        self.gradients = self.flat[: self.numel]
        """The flat gradients, [numel], without the use marks, wherever they are now."""
        self._used: set[int] = set()
        for position, (_, parameter) in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._accumulated, position))

    def zero(self) -> None:
        """Ready for a new step. The transport must be settled: peers read this memory in the last one."""
        self.flat.zero_()
        self._used.clear()
        self._hold(self.flat)

    def publish(self) -> None:
        """The gradients of this rank are complete: marks what it used and lets peers see it."""
        marks = [float(position in self._used) for position in range(len(self.parameters))]
        self.flat[self.numel :] = torch.tensor(marks, dtype=self.flat.dtype)
        if self.flat is not self.shared.local:
            self.shared.local.copy_(self.flat)

    def collect(self, copy: bool = False) -> None:
        """The sums have arrived: `.grad` is the sum over all workers, or None where no worker used the parameter.

        With `copy` they are this rank's own, to be changed as it likes: a common result is not to be written.
        """
        in_place = self.flat is self.shared.local and not copy
        if not in_place and self.flat is not self.result:
            self.flat.copy_(self.result)
        self._hold(self.result if in_place else self.flat)
        for (_, parameter), mark in zip(self.parameters, self.result[self.numel :].tolist(), strict=True):
            if not mark:
                parameter.grad = None

    def _hold(self, memory: Tensor) -> None:
        """Lets the gradients be those in `memory`."""
        if memory is self.flat:
            self.views = self._own_views
        else:
            if memory is not self._sums:  # the views are cut once, not once a step
                self._sums, self._sums_views = memory, list(views_of(memory, self.parameters))
            self.views = self._sums_views
        self.gradients = memory[: self.numel]
        for (_, parameter), view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view

    def _accumulated(self, position: int, parameter: Tensor) -> None:
        self._used.add(position)
        view = self.views[position]
        if parameter.grad is not view:  # somebody cleared .grad, so autograd made a new one
            assert parameter.grad is not None
            view.add_(parameter.grad)
            parameter.grad = view


def views_of(flat: Tensor, parameters: NamedParameters) -> Iterator[Tensor]:
    """One view of `flat` for each parameter, in order, in its shape; empty and 0-dim parameters included."""
    start = 0
    for _, parameter in parameters:
        yield flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()


def cut_into_buckets(named_parameters: Iterable[tuple[str, Parameter]], bucket_bytes: int) -> list[NamedParameters]:
    """The trainable parameters, each once, in reverse order of use, in groups of one dtype and at most `bucket_bytes`.

    A parameter larger than that is a group of its own. Raises ValueError where nothing is trainable.
    """
    groups: list[NamedParameters] = []
    open_groups: dict[tuple[torch.dtype, torch.device], tuple[NamedParameters, int]] = {}
    trainable = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    for name, parameter in reversed(trainable):
        kind = (parameter.dtype, parameter.device)
        nbytes = parameter.numel() * parameter.element_size()
        group, size = open_groups.get(kind, ([], 0))
        if not group or size + nbytes > bucket_bytes:
            group, size = [], 0
            groups.append(group)
        group.append((name, parameter))
        open_groups[kind] = (group, size + nbytes)
    if not groups:
        raise ValueError("the model has no trainable parameter: all are frozen (requires_grad=False), or there is none")
    return groups
