"""What a model is beside its parameters: the types of its parts, and what forward writes in it.

For who trains a model without a strategy of this package, as the controls do.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

IN_FLOAT64 = {torch.float32: torch.float64, torch.complex64: torch.complex128}
"""What becomes of a model's tensors in a run of float64. All other types, and in other runs all, stay as they are."""


def in_type(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model itself: for float64, of what is made for float32. Parts of another type have it on purpose."""
    if dtype == torch.float64:
        for tensor in (*model.parameters(), *model.buffers()):
            if not is_lazy(tensor) and tensor.dtype in IN_FLOAT64:
                tensor.data = tensor.data.to(IN_FLOAT64[tensor.dtype])
    return model


@contextmanager
def left_as_it_is(model: nn.Module) -> Iterator[None]:
    """What forward writes in this block into buffers and extra state is taken back at its end."""
    buffers = [
        (module, name, buffer, _once(buffer).detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
    ]
    extra = [(module, copy.deepcopy(module.get_extra_state())) for module in model.modules() if _has_extra(module)]
    yield
    with torch.no_grad():
        for module, name, buffer, value in buffers:
            module._buffers[name] = buffer
            _once(buffer).copy_(value)
    for module, state in extra:
        module.set_extra_state(state)


def state_on_cpu(model: nn.Module) -> dict[str, Any]:
    """Its state_dict, to be saved; extra state may be no tensor."""
    return {name: each.cpu() if isinstance(each, Tensor) else each for name, each in model.state_dict().items()}


def _has_extra(module: nn.Module) -> bool:
    """Extra state that can be set again."""
    kind = type(module)
    return (
        kind.get_extra_state is not nn.Module.get_extra_state and kind.set_extra_state is not nn.Module.set_extra_state
    )


def _once(buffer: Tensor) -> Tensor:
    """Of an expanded buffer the part that lies in memory."""
    for dim, (size, stride) in enumerate(zip(buffer.shape, buffer.stride(), strict=True)):
        if size > 1 and stride == 0:
            buffer = buffer.narrow(dim, 0, 1)
    return buffer
