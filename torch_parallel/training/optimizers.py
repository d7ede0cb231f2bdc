"""Optimizers by name. One instance updates one bucket, which gives the same bits as one instance for all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from torch_parallel.gradients.layout import NamedParameters

# fused=True: one pass over parameters, gradients and state, on the CPU too
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(torch.optim.SGD, fused=True),
    "adam": partial(torch.optim.Adam, fused=True),
    "adamw": partial(torch.optim.AdamW, fused=True),
}

DEFAULT_LR = {"sgd": 0.02, "adam": 0.001, "adamw": 0.001}


def make_optimizer(
    named_parameters: NamedParameters, name: str, lr: float, momentum: float, weight_decay: float
) -> Optimizer:
    """The optimizer `name` of OPTIMIZERS for these parameters; `momentum` is sgd's."""
    options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
    if name == "sgd":
        options["momentum"] = momentum
    optimizer = OPTIMIZERS[name]([parameter for _, parameter in named_parameters], **options)
    if name == "sgd" and momentum:
        optimizer.register_step_pre_hook(_give_momentum_to_the_late)
    return optimizer


def _give_momentum_to_the_late(optimizer: Optimizer, *_: Any) -> None:
    """Fused SGD wants a momentum of all parameters or of none, and some may get their first gradient after others.

    From zero it becomes what it is in the first step: the gradient.
    """
    state = optimizer.state
    for group in optimizer.param_groups:
        if 0 < len(state) < len(group["params"]):
            for parameter in group["params"]:
                if parameter.grad is not None and parameter not in state:
                    state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
