"""What a model is beside its parameters: the types of its parts, what forward writes in it, and what it hides.

For who trains a model without a strategy of this package too, as the controls do.
"""

from __future__ import annotations

import copy
import hashlib
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


class ForwardState:
    """What forward may write in a model, buffers, extra state and modes, at one moment; after `keep` at a later one."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.keep()

    def keep(self) -> None:
        """From now on `restore` means this moment."""
        follow = of_parameters(self._model)
        self._kept: list[tuple[nn.Module, str, Tensor, Tensor]] = [
            (module, name, buffer, _once(buffer).detach().clone())
            for module in self._model.modules()
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
            if buffer.untyped_storage().data_ptr() not in follow
        ]
        self._extra = copy.deepcopy(extra_state(self._model))
        self._modes = modes_of(self._model)

    def restore(self) -> None:
        """Gives every buffer its value back, and its place, should forward have put another tensor there."""
        set_modes(self._modes)
        kept = {(id(module), name) for module, name, _, _ in self._kept}
        follow = of_parameters(self._model)
        for module in self._model.modules():
            for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
                if (id(module), name) not in kept and buffer.untyped_storage().data_ptr() not in follow:
                    setattr(module, name, None)  # made since
        with torch.no_grad():
            for module, name, buffer, value in self._kept:
                if buffer.is_inference():  # which nobody may write any more
                    module._buffers[name] = value.clone()
                    continue
                if getattr(module, name) is not buffer and not isinstance(module, torch.jit.ScriptModule):
                    module._buffers[name] = buffer
                _once(buffer).copy_(value)
        set_extra_state(self._model, copy.deepcopy(self._extra))


Modes = list[tuple[nn.Module, bool]]


def modes_of(model: nn.Module) -> Modes:
    """Of each module, whether it is in training mode."""
    return [(module, module.training) for module in model.modules()]


def set_modes(modes: Modes) -> None:
    for module, training in modes:
        module.training = training


@contextmanager
def left_as_it_is(model: nn.Module) -> Iterator[None]:
    """What forward writes in this block into buffers and extra state, and the modes, are taken back at its end."""
    state = ForwardState(model)
    try:
        yield
    finally:
        state.restore()


def of_parameters(model: nn.Module) -> set[int]:
    """The memory in which parameters lie, by its address: a buffer over one follows it, and is not written itself."""
    return {parameter.untyped_storage().data_ptr() for parameter in model.parameters() if not is_lazy(parameter)}


def extra_state(model: nn.Module) -> dict[str, Any]:
    """By module name, what modules that override `get_extra_state` return.

    What cannot be set again, since `set_extra_state` is not overridden, tells something and is no state.
    """
    return {
        name: module.get_extra_state()
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
        and type(module).set_extra_state is not nn.Module.set_extra_state
    }


def set_extra_state(model: nn.Module, states: dict[str, Any]) -> None:
    """The reverse of `extra_state`."""
    for name, state in states.items():
        model.get_submodule(name).set_extra_state(state)


def hidden(model: nn.Module) -> str | None:
    """What a model that overrides `parameters()` or `named_buffers()` keeps from who trains it, in words; else None."""
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        return None  # whose tensors are made anew for who asks
    given, named = {id(each) for each in model.parameters()}, {id(each) for _, each in model.named_parameters()}
    held = {id(each) for module in model.modules() for each in module._parameters.values() if each is not None}
    if not given == named == held:
        return (
            "parameters() or named_parameters() of the model does not give all parameters of its modules: leave both "
            "as torch has them, and freeze what is not to be trained by requires_grad_(False)"
        )
    buffers = {id(each) for module in model.modules() for each in module._buffers.values() if each is not None}
    if not {id(each) for each in model.buffers()} == {id(each) for _, each in model.named_buffers()} == buffers:
        return (
            "buffers() or named_buffers() of the model does not give all buffers of its modules: leave both as torch "
            "has them, and make what is no part of the model's state a plain attribute"
        )
    return None


def of_sparse_gradients(model: nn.Module) -> str | None:
    """A module whose gradients are sparse, which torch's fused optimizers do not take, in words; None without one."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            kind = type(module).__name__
            return (
                f"module {name or 'at the top'} ({kind}) gives sparse gradients, which torch's fused optimizers do not "
                "take: make it with sparse=False"
            )
    return None


def digests(model: nn.Module) -> dict[str, int]:
    """By name, 64 bits, signed, made of those of each parameter: replicas that hold the same have the same."""
    return {name: _digest(parameter.detach().cpu()) for name, parameter in model.named_parameters()}


def _digest(tensor: Tensor) -> int:
    """Of the elements in the order of their indices."""
    data = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    return int.from_bytes(hashlib.blake2b(data.data, digest_size=8).digest(), "little", signed=True)


def state_on_cpu(model: nn.Module) -> dict[str, Any]:
    """Its state_dict, to be saved; extra state may be no tensor."""
    return {name: each.cpu() if isinstance(each, Tensor) else each for name, each in model.state_dict().items()}


def _once(buffer: Tensor) -> Tensor:
    """Of an expanded buffer the part that lies in memory."""
    for dim, (size, stride) in enumerate(zip(buffer.shape, buffer.stride(), strict=True)):
        if size > 1 and stride == 0:
            buffer = buffer.narrow(dim, 0, 1)
    return buffer
