"""An optimizer's state by parameter name: what a checkpoint holds, whoever updates what and in whichever pieces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from torch_parallel.gradients.buckets import NamedParameters

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
    """Gives each optimizer the state of its own parameters."""
    for parameters, optimizer in optimized:
        names = [name for name, _ in parameters]
        own = {index: states[name] for index, name in enumerate(names) if name in states}
        optimizer.load_state_dict({"state": own, "param_groups": optimizer.state_dict()["param_groups"]})
