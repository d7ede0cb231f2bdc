"""Compiles a model layer by layer, so that backward still makes gradients one after the other.

A model compiled as a whole has one backward that delivers all gradients at its end, when there is nothing left for an
exchange to overlap with.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys

import torch
from torch import nn

from torch_parallel.usage import ConfigError

CONTAINERS = (nn.Sequential, nn.ModuleList)
NOT_CALLED = (nn.ModuleList, nn.ModuleDict)
"""Containers without a forward of their own, so there is nothing in them to compile but what they hold."""
FEWEST_LAYERS = 4


def check_compiler(device: str) -> None:
    """Raises ConfigError where torch.compile would find no compiler of C++, which it says in a hundred lines."""
    command = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # as torch looks for it
    program = next(iter(shlex.split(command)), "")
    if device == "cpu" and shutil.which(program) is None:
        raise ConfigError(
            f"--compile: on the CPU torch.compile needs a compiler of C++, and there is no '{program}': install one "
            "(g++), name one in CXX, or leave --compile out"
        )


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
    """What every outermost container of four or more layers holds, and what lies outside of them, piece by piece.

    Without such a container it is the model. What has no parameters stays as it is, unless it is such a layer.
    """
    if _is_long(model):
        return list(model.children())
    if not isinstance(model, NOT_CALLED) and not any(map(_is_long, model.modules())):
        return [model]
    return [layer for child in model.children() if any(True for _ in child.parameters()) for layer in layers_of(child)]


def _is_long(module: nn.Module) -> bool:
    return isinstance(module, CONTAINERS) and len(module) >= FEWEST_LAYERS
