"""An optimizer's state by parameter name: what a checkpoint holds, whoever updates what and in whichever pieces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torch_parallel.gradients.layout import NamedParameters

Optimized = Iterable[tuple[NamedParameters, Optimizer]]
States = dict[str, dict[str, Any]]


def read(optimized: Optimized) -> States:
    """Parameter name -> a copy of its state in its optimizer, on the CPU; none where there was no update yet."""
    states: States = {}
    for parameters, optimizer in optimized:
        for name, parameter in parameters:
            if parameter in optimizer.state:
                states[name] = {
                    key: value.detach().cpu().clone() if isinstance(value, Tensor) else value
                    for key, value in optimizer.state[parameter].items()
                }
    return states


def restore(optimized: Optimized, states: States) -> None:
    """Gives each optimizer the state of its own parameters, laid out as they are: fused ones go by place."""
    for parameters, optimizer in optimized:
        own = {
            index: {key: _laid_out_as(parameter, value) for key, value in states[name].items()}
            for index, (name, parameter) in enumerate(parameters)
            if name in states
        }
        optimizer.load_state_dict({"state": own, "param_groups": optimizer.state_dict()["param_groups"]})


def _laid_out_as(parameter: Tensor, value: Any) -> Any:
    """A tensor of the parameter's shape gets its strides; what else there is stays as it is."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
