"""What a strategy relies on, looked at once before training: each part of the model is held, or refused by its name.

Held means that training is what it is in one process. Refused means one line that names the tensor or module and says
what helps, on the rank that finds it, before anything is exchanged. What may still go wrong later, in forward, is
noticed by `watch.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_parallel.gradients.layout import lies_over_itself, overlap, without_gaps, written_once

WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")
LOOKED_INTO = (list, tuple, set, dict)
DEPTH = 3
"""So many containers within each other are looked into for tensors that a module keeps beside parameters."""


class UnsupportedModel(ValueError):
    """A model, or what its forward does, that would not train as in one process. One line, with the remedy."""

    headline_suffices = True  # see mailbox.Failure


def check_model(model: nn.Module, *, alone: bool, in_process_group: bool, moves: str | None) -> None:
    """Raises UnsupportedModel for the first part of the model that cannot be held.

    `alone` says that there is one worker and no server, `in_process_group` that modules find a process group of torch
    in forward; `moves` is the name of a strategy that gives parameters other memory, None for one that leaves them.
    """
    tensors: list[tuple[str, str, Tensor]] = [("parameter", *each) for each in model.named_parameters()]
    tensors += [("buffer", *each) for each in model.named_buffers()]
    for kind, name, tensor in tensors:
        fault = _fault_of(kind, tensor)
        if fault is not None:
            raise UnsupportedModel(f"{kind} {name} {fault}")
    for name, module in model.named_modules():
        fault = _fault_of_module(module, alone, in_process_group)
        if fault is not None:
            raise UnsupportedModel(f"module {name or 'at the top'} ({type(module).__name__}) {fault}")
    _check_common_memory(model, moves)


def _fault_of(kind: str, tensor: Tensor) -> str | None:
    if is_lazy(tensor):
        return "has no shape yet: run a batch through the lazy module in make_model"
    if tensor.is_meta:
        return "has no memory (it is on the device meta): give it values in make_model"
    if is_traceable_wrapper_subclass(tensor):
        return f"is a {type(tensor).__name__}, whose memory nobody but its class knows: make it a plain tensor"
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_quantized:
        what = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else f"sparse ({tensor.layout})"
        return f"is {what}: keep what it consists of (indices and values, say) as dense tensors"
    if tensor.is_complex() and tensor.requires_grad:
        return (
            f"is complex ({tensor.dtype}) and trainable: make it real, [..., 2], and use torch.view_as_complex in "
            "forward"
        )
    if lies_over_itself(tensor if kind == "parameter" and tensor.requires_grad else written_once(tensor)):
        return "has elements that lie over each other in memory: make it a clone, which has its own"
    return None


def _fault_of_module(module: nn.Module, alone: bool, in_process_group: bool) -> str | None:
    name = type(module).__name__
    if name in WRAPPERS:
        return "exchanges by torch's own means already: give the module in it"
    if alone or in_process_group:
        return None
    if "sync" in name.lower() and "norm" in name.lower():
        return (
            "needs a process group of torch, and without one takes each worker's own statistics: take BatchNorm, "
            "whose statistics are each worker's, or GroupNorm, which needs none"
        )
    if dist.is_available() and any(isinstance(value, dist.ProcessGroup) for value in vars(module).values()):
        return "holds a process group of torch, in which its ranks are not"
    return None


def _check_common_memory(model: nn.Module, moves: str | None) -> None:
    """Parameters may not lie over each other; other tensors over one only where it stays where it is."""
    others = list(_beside_parameters(model))
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    parameters: list[tuple[str, Tensor]] = list(model.named_parameters())
    for name, parameter in parameters:
        here = by_storage.setdefault(parameter.untyped_storage().data_ptr(), [])
        for other, tensor in here:
            if overlap(parameter, tensor):
                raise UnsupportedModel(
                    f"parameters {other} and {name} share memory, so each is updated by the other's gradient too: make "
                    "both the same parameter (tie them), or copy one"
                )
        here.append((name, parameter))
    for what, tensor in others:
        for over, parameter in by_storage.get(tensor.untyped_storage().data_ptr(), ()):
            moved = moves or (None if without_gaps(parameter) else "what has gaps in its memory is copied, which")
            if moved and overlap(parameter, tensor):
                raise UnsupportedModel(
                    f"{what} shares memory with parameter {over}, and {moved} gives the parameter other memory: make "
                    f"{what.split()[-1]} anew from the parameter in forward, or take an all-reduce strategy"
                )


def _beside_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers, and tensors that modules keep as plain attributes, in lists and dicts too, each with what it is."""
    parameters = {id(parameter) for parameter in model.parameters()}
    for name, buffer in model.named_buffers():
        yield f"buffer {name}", buffer
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in ("_parameters", "_buffers", "_modules"):
                for tensor in _tensors_in(value, DEPTH):
                    if id(tensor) not in parameters:
                        yield f"attribute {f'{path}.' if path else ''}{key}", tensor


def _tensors_in(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.layout == torch.strided and not is_lazy(value) and not value.is_meta:
            yield value
    elif depth and isinstance(value, LOOKED_INTO):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(each, depth - 1)


def make_dense(model: nn.Module) -> None:
    """Gives every parameter with gaps, such as some columns of a table, memory without: fused optimizers, and buckets,
    go through parameter and gradient by place."""
    for parameter in model.parameters():
        if parameter.requires_grad and not without_gaps(parameter):
            parameter.data = parameter.detach().clone(memory_format=torch.contiguous_format)
