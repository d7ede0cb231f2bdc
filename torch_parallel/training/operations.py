"""How many operations training takes, for the part of what its GPUs can do that it makes use of."""

from __future__ import annotations

from torch import nn

from torch_parallel.communicator import Communicator
from torch_parallel.training.job import Job
from torch_parallel.workloads.flops import arithmetic, flops_of_step

BATCH = 8
"""Samples for which they are counted."""


def operations_of(job: Job, communicator: Communicator, model: nn.Module) -> tuple[float | None, str]:
    """Floating-point operations of forward and backward of one sample, and what a GPU does most of them in.

    None on the CPU, where it is not known how many it can do, and in float64.
    """
    flops = None
    if communicator.device.type == "cuda" and job.config.dtype == "float32":
        with communicator.long_work("counting the operations of a step"):
            flops = flops_of_step(job.workload(communicator.shared), BATCH)
    return None if flops is None else flops / BATCH, arithmetic(model, job.config.precision)
