"""What a strategy relies on, looked at once before training: each part of the model is held, or refused by its name.

Held means that training is what it is in one process. Refused means one line that names the tensor or module and says
what helps, on the rank that finds it, before anything is exchanged. What may still go wrong later, in forward, is
noticed by `watch.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_parallel.gradients.layout import lies_over_itself, overlap, read_by_others, without_gaps, written_once
from torch_parallel.workloads.whole_model import hidden

WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")


class UnsupportedModel(ValueError):
    """A model, or what its forward does, that would not train as in one process. One line, with the remedy."""

    headline_suffices = True  # see mailbox.Failure


def check_model(model: nn.Module, *, alone: bool, in_process_group: bool) -> None:
    """Raises UnsupportedModel for the first part of the model that cannot be held.

    `alone` says that there is one worker and no server, `in_process_group` that modules find a process group of torch
    in forward.
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
    _check_common_memory(model)
    if (fault := hidden(model)) is not None:
        raise UnsupportedModel(fault)


def _fault_of(kind: str, tensor: Tensor) -> str | None:
    if is_lazy(tensor):
        return "has no shape yet: run a batch through the lazy module in make_model"
    if tensor.is_meta:
        return "has no memory (it is on the device meta): give it values in make_model"
    if tensor.is_inference():
        return "was made in inference mode, where nothing may be written later: make it outside, or make it a clone"
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
    if tensor.requires_grad and tensor.itemsize == 1:
        return f"is trainable and of {tensor.dtype}, of which torch makes no sums: make it torch.bfloat16"
    if not _can_be_copied(tensor.dtype):
        return f"is of {tensor.dtype}, which torch cannot copy: keep its bytes (torch.uint8), and view them in forward"
    if lies_over_itself(tensor if kind == "parameter" and tensor.requires_grad else written_once(tensor)):
        return "has elements that lie over each other in memory: make it a clone, which has its own"
    return None


@cache
def _can_be_copied(dtype: torch.dtype) -> bool:
    """Not those of four bits, so far."""
    try:
        torch.empty(1, dtype=dtype, device="cpu").copy_(torch.empty(1, dtype=dtype, device="cpu"))
    except NotImplementedError:
        return False
    return True


def _fault_of_module(module: nn.Module, alone: bool, in_process_group: bool) -> str | None:
    name = type(module).__name__
    if name in WRAPPERS:
        return "exchanges by torch's own means already: give the module in it"
    if not _takes_as_torchs(module.state_dict):
        return (
            "has a state_dict that does not take what torch's takes: write def state_dict(self, *args, **kwargs), and "
            "hand them on"
        )
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


def _takes_as_torchs(state_dict: Callable[..., object]) -> bool:
    """Whether it can be asked as torch's own modules ask their parts; taken for so where it does not tell."""
    try:
        inspect.signature(state_dict).bind(prefix="", keep_vars=True)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def _check_common_memory(model: nn.Module) -> None:
    """Parameters may not lie over each other; nothing else may hold the memory of one that is given other memory."""
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, parameter in model.named_parameters():
        here = by_storage.setdefault(parameter.untyped_storage().data_ptr(), [])
        for other, tensor in here:
            if overlap(parameter, tensor):
                raise UnsupportedModel(
                    f"parameters {other} and {name} share memory, so each is updated by the other's gradient too: make "
                    "both the same parameter (tie them), or copy one"
                )
        here.append((name, parameter))
    with_gaps = {id(each): name for name, each in _with_gaps(model)}
    for key in read_by_others(model.parameters()) & with_gaps.keys():
        raise UnsupportedModel(
            f"parameter {with_gaps[key]} has gaps in its memory and is copied, and something else that holds this "
            "memory (a buffer, an attribute, a NumPy array) would keep the old values: make the parameter of a "
            ".clone(), and what shows it anew in forward"
        )


def _with_gaps(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters with gaps that are trained."""
    return ((name, each) for name, each in model.named_parameters() if each.requires_grad and not without_gaps(each))


def make_dense(model: nn.Module) -> None:
    """Gives every parameter with gaps, such as some columns of a table, memory without: fused optimizers, and buckets,
    go through parameter and gradient by place."""
    for _, parameter in _with_gaps(model):
        parameter.data = parameter.detach().clone(memory_format=torch.contiguous_format)
