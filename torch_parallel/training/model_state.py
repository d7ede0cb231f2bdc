"""A model's state beside its parameters, and a rank's own: taken out for a checkpoint, and taken up from one.

Buffers, extra state and random states differ by rank, and a server has none of what forward writes. So a checkpoint's
model is put together: parameters from rank 0, which has them under every strategy, and all else from the lowest rank
that trains.
"""

from __future__ import annotations

import contextlib
import copy
import io
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from torch_parallel.gradients.layout import lies_over_itself, written_once
from torch_parallel.strategies.replicas import described, make_missing_buffers
from torch_parallel.training.checkpoint import CheckpointError
from torch_parallel.workloads.whole_model import extra_state, set_extra_state


def on_cpu(state: Any) -> Any:
    """Copies that share no memory with the model, of all tensors in dicts, lists and tuples; of a tied one only one."""
    copies: dict[Any, Tensor] = {}

    def copied(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: copied(each) for key, each in value.items()}
        if type(value) in (list, tuple):
            return type(value)(map(copied, value))
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        place = (
            (value.device, value.data_ptr(), value.dtype, value.shape, value.stride()) if value.numel() else id(value)
        )
        if place not in copies:
            copies[place] = value.detach().cpu().clone()
        return copies[place]

    return copied(state)


def beside_parameters(model: nn.Module) -> dict[str, Any]:
    """The model's `state_dict()`, with None in place of every parameter: a server has these from elsewhere."""
    kept = model.state_dict(keep_vars=True)
    return {key: None if isinstance(value, nn.Parameter) else on_cpu(value) for key, value in kept.items()}


def put_together(model: nn.Module, others: dict[str, Any]) -> dict[str, Any]:
    """A `state_dict()` of this rank's parameters and what `beside_parameters` gave on another rank."""
    own = on_cpu(model.state_dict())
    return {key: own[key] if value is None else value for key, value in others.items()}


def load_model(model: nn.Module, saved: dict[str, Any]) -> None:
    """Takes up the model of a checkpoint: what its `state_dict()` held, and the buffers that are not in that.

    Buffers come from the lowest rank that trained, those that forward had made among them.
    """
    buffers = saved["ranks"][saved["server_count"]]["buffers"]
    make_missing_buffers(model, {name: described(value) for name, value in buffers.items()})
    with _expanded_set_aside(model):
        model.load_state_dict(saved["model"])
    _fill_buffers(model, buffers)


@contextlib.contextmanager
def _expanded_set_aside(model: nn.Module) -> Iterator[None]:
    """Puts clones in the places of expanded buffers, which torch does not write."""
    expanded = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        if lies_over_itself(buffer)
    ]
    for module, name, buffer in expanded:
        module._buffers[name] = buffer.clone()
    try:
        yield
    finally:
        for module, name, buffer in expanded:
            module._buffers[name] = buffer


def _fill_buffers(model: nn.Module, values: dict[str, Tensor]) -> None:
    buffers = dict(model.named_buffers())
    for name, value in values.items():
        target = written_once(buffers[name])
        target.copy_(value[tuple(slice(size) for size in target.shape)])


def check_plain(extra: dict[str, Any]) -> None:
    """Raises CheckpointError for a module's extra state that `torch.load` would refuse by default."""
    for name, state in extra.items():
        file = io.BytesIO()
        try:
            torch.save(on_cpu(state), file)
            torch.load(io.BytesIO(file.getvalue()))
        except Exception as error:
            raise CheckpointError(
                f"module {name or 'at the top'}: its extra state cannot be in a checkpoint, which holds "
                "tensors, numbers, texts and containers of them: let get_extra_state return such, or leave "
                "--checkpoint_every out"
            ) from error


def check_resumable(model: nn.Module) -> None:
    """Raises CheckpointError for a model that does not take up its own `state_dict()`."""
    try:
        with _expanded_set_aside(model):
            model.load_state_dict(model.state_dict())
    except Exception as error:
        raise CheckpointError(
            "no run could go on from a checkpoint of this model, whose load_state_dict does not take what its "
            f"state_dict gives ({' '.join(str(error).split())[:200]}): make both fit, or leave --checkpoint_every out"
        ) from error


def rank_state(model: nn.Module, loss_sum: float) -> dict[str, Any]:
    """What is this rank's alone: random states, buffers, extra state, and the losses of the epoch so far."""
    kind, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    return {
        "torch_rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "numpy_rng": [kind, torch.from_numpy(numpy.asarray(keys, dtype=numpy.int64)), position, has_gauss, gauss],
        "python_rng": random.getstate(),
        "buffers": on_cpu(dict(model.named_buffers())),
        "extra": on_cpu(extra_state(model)),
        "loss_sum": loss_sum,
    }


def restore_rank(model: nn.Module, state: dict[str, Any]) -> None:
    """The reverse of `rank_state`, for the rank that made it."""
    torch.set_rng_state(state["torch_rng"].clone())
    if state["cuda_rng"] is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda_rng"].clone())
    kind, keys, position, has_gauss, gauss = state["numpy_rng"]
    numpy.random.set_state((kind, keys.numpy().astype(numpy.uint32), position, has_gauss, gauss))
    random.setstate(state["python_rng"])
    _fill_buffers(model, state["buffers"])
    set_extra_state(model, state.get("extra", {}))
