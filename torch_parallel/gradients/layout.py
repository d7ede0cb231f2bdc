"""How parameters lie in memory, and flat memory that is cut as they lie."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, MutableMapping

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

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


def written_once(tensor: Tensor) -> Tensor:
    """A view that has the first element of each expanded dimension: what is written there, the whole tensor holds."""
    for dim, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def lies_over_itself(tensor: Tensor) -> bool:
    """Whether elements may have one place in memory, as those of an expanded tensor have, or of sliding windows."""
    reached = 0  # how far the dimensions with smaller strides reach
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reached:
                return True
            reached += stride * (size - 1)
    return False


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of its elements in the order of their indices, [numel * itemsize]; a copy where they do not lie so."""
    elements = tensor.resolve_conj().resolve_neg().reshape(-1)
    if elements.stride(0) != 1:  # one element of an expanded tensor, say
        elements = elements.clone(memory_format=torch.contiguous_format)
    return elements.view(torch.uint8)


def canonical_strides(tensor: Tensor) -> list[int]:
    """Its strides, but 0 for a dimension of at most one element, where they mean nothing."""
    return [stride if size > 1 else 0 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)]


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one storage have a byte in common."""
    if not one.numel() or not other.numel():
        return False
    first, second = _range(one), _range(other)
    if first.stop <= second.start or second.stop <= first.start:
        return False
    if without_gaps(one) and without_gaps(other):
        return True
    # columns of one table, say: marked byte by byte, which is exact
    start, stop = min(first.start, second.start), max(first.stop, second.stop)
    return bool((_marks(one, start, stop) & _marks(other, start, stop)).any())


_IN_COMMON: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()
"""Where a strategy has moved a parameter to, by its address, in memory that other ranks reach."""


def move_to_common(parameter: Parameter, memory: Tensor) -> None:
    """Gives the parameter this memory, of its shape, which other ranks reach."""
    parameter.data = memory
    _IN_COMMON[parameter] = memory.data_ptr()


def take_out_of_common(parameters: Iterable[Parameter]) -> None:
    """Gives parameters that an earlier strategy has moved memory of this rank's own: another one may write them."""
    for parameter in parameters:
        place = _IN_COMMON.pop(parameter, None)
        if place is not None and place == parameter.data_ptr():
            parameter.data = parameter.detach().clone()


def read_by_others(tensors: Iterable[Tensor]) -> set[int]:
    """The ids of those whose memory something else holds too: a view that was kept, a NumPy array, another process.

    What holds it would not see other memory that the tensor is given. Where it cannot be told, it is taken for so.
    """
    distinct = {id(tensor): tensor for tensor in tensors if tensor.layout == torch.strided}
    here = Counter(tensor.untyped_storage().data_ptr() for tensor in distinct.values())
    return {key for key, tensor in distinct.items() if _holders(tensor) > here[tensor.untyped_storage().data_ptr()]}


def _holders(tensor: Tensor) -> float:
    """How many tensors hold its memory; infinity for memory that torch did not allocate, and of a torch that does not
    count."""
    storage = tensor.untyped_storage()
    count = getattr(torch._C, "_storage_Use_Count", None)  # not public, but all that tells it
    if count is None or not storage.resizable():
        return math.inf
    return int(count(storage._cdata)) - 1  # `storage` itself


def _range(tensor: Tensor) -> range:
    """The bytes of the storage from its first element to its last."""
    start = tensor.storage_offset()
    last = start + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return range(start * tensor.itemsize, (last + 1) * tensor.itemsize)


def _marks(tensor: Tensor, start: int, stop: int) -> Tensor:
    """For each byte of the storage from `start` to `stop` whether the tensor has it."""
    marks = torch.zeros(stop - start, dtype=torch.bool, device="cpu")
    tensor, size = written_once(tensor), tensor.itemsize
    offset = tensor.storage_offset() * size - start
    strides = [stride * size for stride in tensor.stride()]
    marks.as_strided([*tensor.shape, size], [*strides, 1], offset).fill_(True)
    return marks
