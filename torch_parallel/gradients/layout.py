"""How parameters lie in memory, and flat memory that is cut as they lie."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.nn import Parameter

NamedParameters = list[tuple[str, Parameter]]


def views_of(flat: Tensor, parameters: NamedParameters) -> Iterator[Tensor]:
    """One view of `flat` for each parameter, in order, in its shape; empty and 0-dim parameters included."""
    start = 0
    for _, parameter in parameters:
        yield laid_out(flat[start : start + parameter.numel()], parameter)
        start += parameter.numel()


def laid_out(elements: Tensor, parameter: Tensor) -> Tensor:
    """A view of `elements`, [numel], in the parameter's shape, and with its strides if those leave no gaps.

    So autograd lays gradients out, and fused optimizers go through parameter and gradient by place, not by index.
    """
    if not without_gaps(parameter):
        return elements.view(parameter.shape)
    return elements.as_strided(parameter.shape, parameter.stride())


def in_memory_order(values: Tensor, parameter: Tensor) -> Tensor:
    """The elements of `values`, which has the parameter's shape, as `laid_out` takes them: [numel]."""
    if not without_gaps(parameter):
        return values.reshape(-1)
    dims = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    return values.permute(dims).reshape(-1)


def without_gaps(tensor: Tensor) -> bool:
    """Whether each place of its memory, from the first to the last, holds one element."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
