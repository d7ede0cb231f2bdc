"""How many floating-point operations a training step takes, counted once from the shapes.

Counted are matrix multiplications and convolutions of forward and backward, 2 operations for each pair of numbers that
is multiplied and added. For a linear layer that is 2 * parameters * rows in forward, the same again for the gradient of
its weight, and again for that of its input, where this is asked for: the first layer needs none. So a step takes nearly
6 * parameters * rows. The two products of attention have no parameters and are counted too, as if nothing was masked.

Not counted: biases, norms, activations, dropout, embeddings, the loss and the optimizer, which are little beside them.
What an implementation does twice to save memory counts once. So the figure tells of the model and not of who runs it,
and divided by the seconds of a step and the peak of the cards (`cards.py`) it is their utilisation.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from torch_parallel.workloads.tree import Tree, map_tree, rows
from torch_parallel.workloads.workload import Workload

META = torch.device("meta")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
FEW = 2
"""Samples that are counted with numbers in them, where shapes alone do not do. BatchNorm may want more than one."""


def flops_of_step(workload: Workload, batch_size: int) -> int | None:
    """Floating-point operations of forward and backward for `batch_size` samples; None where they cannot be counted.

    Tensors without memory are used if the model and the task can be called with them, else a few samples on the CPU,
    which are counted for all: the operations grow as the samples do. torch's generator is left as it was.

    It runs backward, so torch looks for GPUs, and a process that has done so can start no others by fork: call it in a
    worker.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; a whole number of at least 1 is wanted")
    for count in (_count_shapes, _count_few):
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they come again in the training itself, if they matter
            try:
                return count(workload, batch_size)
            except Exception:  # of any class: a model may be anything, and a step is trained without the figure too
                continue
    return None


def arithmetic(model: nn.Module, precision: str) -> str:
    """What most products of a model are computed in on a GPU, by the names that `cards.peak_flops` knows.

    In full precision torch lets convolutions have tf32, and matrix multiplications float32, unless it is told
    otherwise. One convolution alone cuts images into patches.
    """
    if precision != "full":
        return precision
    convolutions = sum(isinstance(layer, _CONVOLUTIONS) for layer in model.modules())
    if convolutions > 1:
        return "tf32" if torch.backends.cudnn.allow_tf32 else "full"
    return "full" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _count_shapes(workload: Workload, batch_size: int) -> int:
    """Without memory."""
    batch = map_tree(
        lambda leaf: torch.empty((batch_size, *leaf.shape[1:]), dtype=leaf.dtype, device=META), workload.samples.train
    )
    model = _without_memory(workload.make_model)
    with _AllIsThere() if type(model).__module__.startswith("transformers.") else nullcontext():
        return _counted(workload, model, batch)


class _AllIsThere(TorchFunctionMode):
    """Says yes where a condition is asked of a tensor without memory, which else raises.

    The models of the library `transformers` ask so whether a mask hides anything. What they multiply does not depend
    on the answer. Of other models nobody knows, so they are asked with numbers.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (Tensor.__bool__, Tensor.item) and args[0].is_meta:
            return True
        return function(*args, **(kwargs or {}))


def _without_memory(make_model: Callable[[], nn.Module]) -> nn.Module:
    """A model that reads its weights from a file cannot be made so, and gives its memory back."""
    try:
        with META:
            model = make_model()
    except Exception:
        model = make_model()
    return model.to(META)


def _count_few(workload: Workload, batch_size: int) -> int:
    """A few samples on the CPU, taken for all."""
    few = min(FEW, batch_size, workload.samples.train_size)
    batch = rows(workload.samples.train, slice(few), torch.device("cpu"))
    return _counted(workload, workload.make_model(), batch) * batch_size // few


def _counted(workload: Workload, model: nn.Module, batch: Tree) -> int:
    """The operations of one step on a batch as it is stored."""
    dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)
    model.train()
    batch = workload.task.prepare(batch, dtype)
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.convolution_backward: _of_convolution})
    # Attention as plain products: the fast kernels do some of them twice in backward, and not all are counted.
    with counter, sdpa_kernel(SDPBackend.MATH):
        workload.task.loss_sum(workload.task.forward(model, batch), batch).backward()
    return int(counter.get_total_flops())


def _of_convolution(
    gradient: Sequence[int],
    inputs: Sequence[int],
    weight: Sequence[int],
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    wanted: Sequence[bool],
    **kwargs: Any,
) -> int:
    """Operations of a convolution's backward, from shapes: as many as forward for each gradient of the two.

    torch's own formula takes no notice of groups, so it counts those of mobilenet_v2 up to 960 times.
    """
    places = math.prod(inputs[2:] if transposed else gradient[2:])
    return 2 * gradient[0] * places * math.prod(weight) * (bool(wanted[0]) + bool(wanted[1]))
