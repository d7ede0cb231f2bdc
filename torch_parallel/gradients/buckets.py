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

from torch_parallel.transport.base import SharedBuffer

NamedParameters = list[tuple[str, Parameter]]
Share = Callable[[int, torch.dtype], SharedBuffer]


class Bucket:
    """Some parameters of one dtype and device, and the flat buffer of their gradients.

    `shared` holds [numel + len(parameters)] elements that peers reach: gradients, then use marks. The `.grad`s are
    views of it. Only where GPUs do not reach each other's memory it lies in the host's; then the `.grad`s are views of
    `flat`, a buffer of the same shape on the GPU, and `publish` and `collect` copy between the two.
    """

    def __init__(self, index: int, parameters: NamedParameters, share: Share) -> None:
        self.index = index
        self.parameters = parameters
        self.numel = sum(parameter.numel() for _, parameter in parameters)
        first = parameters[0][1]
        self.shared = share(self.numel + len(parameters), first.dtype)
        in_place = self.shared.local.device == first.device
        self.flat = self.shared.local if in_place else torch.zeros_like(self.shared.local, device=first.device)
        self.views = list(views_of(self.flat, parameters))
        self._used: set[int] = set()
        for position, (_, parameter) in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._accumulated, position))

    @property
    def gradients(self) -> Tensor:
        """The flat gradients, [numel], without the use marks."""
        return self.flat[: self.numel]

    def zero(self) -> None:
        """Ready for a new step. The transport must be settled: peers read this memory in the last one."""
        self.flat.zero_()
        self._used.clear()
        for (_, parameter), view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view

    def publish(self) -> None:
        """The gradients of this rank are complete: marks what it used and lets peers see it."""
        if len(self._used) == len(self.parameters):
            self.flat[self.numel :] = 1.0  # a GPU fills it by itself; anything else it has to be sent
        else:
            marks = [float(position in self._used) for position in range(len(self.parameters))]
            self.flat[self.numel :] = torch.tensor(marks, dtype=self.flat.dtype)
        if self.flat is not self.shared.local:
            self.shared.local.copy_(self.flat)

    def collect(self) -> None:
        """The sums have arrived: `.grad` is the sum over all workers, or None where no worker used the parameter."""
        if self.flat is not self.shared.local:
            self.flat.copy_(self.shared.local)
        if len(self._used) == len(self.parameters):
            return  # what this rank used counts, whatever the others did; and nobody waits for the GPU to say so
        for (_, parameter), mark in zip(self.parameters, self.shared.local[self.numel :].tolist(), strict=True):
            if not mark:
                parameter.grad = None

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
