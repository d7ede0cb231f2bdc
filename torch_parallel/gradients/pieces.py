"""Pieces of parameters: what an optimizer is given that updates a part of a bucket, cut anywhere.

A part of a bucket, elements [start, stop) of its gradients, ends in the middle of parameters. What it has of each of
them is a piece: a view of the parameter, flat unless it is the whole, beside a view of its gradient. An optimizer that
makes of an element what depends on that element alone gives the same bits, whoever updates which piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from torch_parallel.gradients.buckets import Bucket
from torch_parallel.gradients.layout import in_memory_order, laid_out

ELEMENTWISE = (SGD, Adam, AdamW, Adagrad, RMSprop)
"""What these make of an element depends on that element's gradient and state alone, so they may work on pieces."""


def check_elementwise(optimizer: Optimizer, why: str, instead: str) -> None:
    """Raises ValueError for an optimizer that is not one of ELEMENTWISE."""
    if type(optimizer) not in ELEMENTWISE:
        known = ", ".join(each.__name__ for each in ELEMENTWISE)
        raise ValueError(
            f"{why}, and {type(optimizer).__name__} may need whole ones: take one of {known}, or {instead}"
        )


@dataclass(frozen=True)
class Piece:
    """What a part of a bucket has of a parameter: elements [start, stop), as they lie; in its shape if that is all."""

    name: str
    position: int  # of the parameter in its bucket
    whole: Parameter
    start: int
    stop: int
    parameter: Parameter
    gradient: Tensor

    def cut_out(self, state: dict[str, Any]) -> dict[str, Any]:
        """Of the whole parameter's state. What is not a number for each element, the count of steps, each piece has."""
        return {key: self._cut(value) for key, value in state.items()}

    def _cut(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.ndim:
            return value.clone()  # an optimizer counts in it
        return laid_out(in_memory_order(value, self.whole)[self.start : self.stop], self.parameter)

    def copied(self, value: Any, first: int, last: int) -> Any:
        """Elements [first, last) of this piece's state, as they lie; what is not one number an element is as it is."""
        if not isinstance(value, Tensor):
            return value
        chosen = in_memory_order(value, self.parameter)[first:last] if value.ndim else value
        return chosen.detach().cpu().clone()


def pieces_of(
    bucket: Bucket, start: int, stop: int, values: Tensor | None, sums: Tensor | None = None
) -> Iterator[Piece]:
    """Those of elements [start, stop) of the bucket.

    The parameters lie in `values`, [numel], in the order of the bucket; None where each has memory of its own. Their
    gradients are `sums`, [stop - start]; None where they lie in the bucket itself.
    """
    sums = bucket.shared.local[start:stop] if sums is None else sums
    begin = 0
    for position, (name, parameter) in enumerate(bucket.parameters):
        end = begin + parameter.numel()
        first, last = max(begin, start), min(end, stop)
        if first < last:
            own = in_memory_order(parameter.detach(), parameter) if values is None else values[begin:end]
            value, gradient = own[first - begin : last - begin], sums[first - start : last - start]
            if last - first == parameter.numel():
                value = parameter.detach() if values is None else laid_out(value, parameter)
                gradient = laid_out(gradient, parameter)
            yield Piece(name, position, parameter, first - begin, last - begin, Parameter(value), gradient)
        begin = end


def put_together(values: list[Any], parameter: Parameter) -> Any:
    """The state of a whole parameter, of its parts in their order."""
    if not isinstance(values[0], Tensor) or not values[0].ndim:
        return values[0]
    return laid_out(torch.cat(values), parameter)
