"""Compiles a model layer by layer, so that backward still makes gradients one after the other.

A model compiled as a whole has one backward that delivers all gradients at its end, when there is nothing left for an
exchange to overlap with.
"""

from __future__ import annotations

import torch
from torch import nn

CONTAINERS = (nn.Sequential, nn.ModuleList)
FEWEST_LAYERS = 4


def compile_layers(model: nn.Module) -> None:
    """Compiles each of the model's layers for itself, in place; names of parameters stay as they are."""
    layers = layers_of(model)
    # Layers of one class have their code in common. torch gives up compiling a piece of code anew after 8 times, and
    # runs the other layers as they are; each of ours needs one for training, one for evaluation and one for a last,
    # smaller batch.
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 4 * len(layers))
    for layer in layers:
        layer.compile()


def layers_of(model: nn.Module) -> list[nn.Module]:
    """What the outermost container of four or more layers holds; without one, the model."""
    level = [model]
    while level:
        for module in level:
            if isinstance(module, CONTAINERS) and len(module) >= FEWEST_LAYERS:
                return list(module)
        level = [child for module in level for child in module.children()]
    return [model]
