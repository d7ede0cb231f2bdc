"""The model of a rank as the run trains it: made by the user's function, on its device, in the run's type."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torch_parallel.strategies.model_check import UnsupportedModel
from torch_parallel.workloads.whole_model import in_type


def build_replica(make_model: Callable[[], nn.Module], device: torch.device, dtype: torch.dtype) -> nn.Module:
    """What `make_model` makes, in the modes that it comes in, on `device`; for float64, of which float32 is made.

    Parts of another type than float32 have it on purpose and keep it. Raises UnsupportedModel for what is no module,
    and for a model of which nothing trainable is of `dtype`.
    """
    model = make_model()
    if not isinstance(model, nn.Module):
        raise UnsupportedModel(f"make_model returned a {type(model).__name__}, and a torch.nn.Module is needed")
    model = in_type(model.to(device), dtype)
    _check_type(model, dtype)
    return model


def _check_type(model: nn.Module, dtype: torch.dtype) -> None:
    trainable = [(name, each) for name, each in model.named_parameters() if each.requires_grad and not is_lazy(each)]
    if trainable and all(parameter.dtype != dtype for _, parameter in trainable):
        name, parameter = trainable[0]
        remedy = "give --dtype float64" if parameter.dtype == torch.float64 else "make the model in float32"
        half = "; --precision bf16 computes in bfloat16" if parameter.itemsize == 2 else ""
        raise UnsupportedModel(
            f"the model's parameters are {parameter.dtype} ({name}), and the run's type is {dtype}: {remedy}{half}"
        )


def seed_generators(seed: int) -> None:
    """Seeds every generator that a model, a dropout layer or an augmentation may draw from."""
    torch.manual_seed(seed % 2**63)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
