"""What a run needs, compared with what there is, before anything is started.

A machine that runs out of memory or descriptors half-way kills workers without a word. Here the user is told in one
line what is missing and what would help. The size of /dev/shm does not matter: on Linux the shared memory is an
anonymous file, which takes the machine's memory, or the container's.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from torch_parallel.collectives.schedule import chunk_bounds
from torch_parallel.communicator import Communicator
from torch_parallel.devices import free_memory_bytes
from torch_parallel.gradients.buckets import cut_into_buckets
from torch_parallel.launcher import launch
from torch_parallel.status import StatusBoard
from torch_parallel.usage import UserError


class PreflightError(UserError, ValueError):
    """The machine has not what the run needs. One line: what is missing, and the remedy."""


WORKER_BYTES = {"cpu": 96 << 20, "cuda": 256 << 20}
"""What a worker takes of the host's memory beside what it shares. On the CPU, with the smallest model, 101 to 106 MiB
were measured, with 8 workers and with 40; a large model takes more, which nobody knows before it has run. To use a GPU
takes a process that has torch 42 MiB more, and a convolution and a linear layer with their backward 267 MiB (private
memory; one H200, torch 2.11). Less than that is counted: a run is not to be refused for what it may not need."""
DRY_BUILD_LIMIT_S = 5.0
"""A model that takes longer to build is not measured before."""
TRIAL_LIMIT_S = 15.0
"""A trial that takes longer is given up."""
LARGEST_TRIED = 1 << 28
"""A model of more elements is not built for a trial: it may take the memory that the run needs."""

Trial = Callable[[Callable[[], nn.Module]], str | None]
"""Tells what is wrong with what `make_model` makes, in one line; None if nothing."""


@dataclass(frozen=True)
class ModelSize:
    """Trainable elements and parameters of a model, and whether it has BatchNorm."""

    elements: int
    parameters: int
    has_batch_norm: bool


def dry_build(make_model: Callable[[], nn.Module], of_the_user: bool = True) -> ModelSize | None:
    """What the model is like, built without memory; None where that fails, in whatever way: the real build tells.

    One `of_the_user` is built in a process of its own: what `make_model` draws, sets or registers, the caller never
    sees. One of ours leaves nothing behind.
    """
    try:
        if not of_the_user:
            return _size_of(make_model)
        size: ModelSize = launch(_measured, 1, make_model, threads=1, on_tick=_giving_up(DRY_BUILD_LIMIT_S))[0]
    except Exception:
        return None
    return size


def _measured(communicator: Communicator, make_model: Callable[[], nn.Module]) -> ModelSize:
    _be_silent()
    return _size_of(make_model)


def _size_of(make_model: Callable[[], nn.Module]) -> ModelSize:
    with torch.device("meta"):  # tensors with shapes and no memory
        model = make_model()
    parameters = [parameter for group in cut_into_buckets(model.named_parameters(), 1 << 62) for _, parameter in group]
    elements = sum(parameter.numel() for parameter in parameters)
    return ModelSize(elements, len(parameters), any(isinstance(each, _BatchNorm) for each in model.modules()))


def try_out(make_model: Callable[[], nn.Module], trial: Trial) -> str | None:
    """What a trial tells of a user's model, which is built for it on the CPU, in a process of its own.

    None where nothing is wrong, and where it fails or takes long, in whatever way: the run itself tells.
    """
    try:
        fault: str | None = launch(_tried, 1, make_model, trial, threads=1, on_tick=_giving_up(TRIAL_LIMIT_S))[0]
    except Exception:
        return None
    return fault


def _tried(communicator: Communicator, make_model: Callable[[], nn.Module], trial: Trial) -> str | None:
    _be_silent()
    return trial(make_model)


def _giving_up(limit_s: float) -> Callable[[StatusBoard], None]:
    """For `on_tick`: raises TimeoutError so long after the process has been started."""
    end_s = float("inf")

    def give_up(board: StatusBoard) -> None:
        nonlocal end_s
        end_s = min(end_s, time.monotonic() + limit_s)
        if time.monotonic() > end_s:
            raise TimeoutError

    return give_up


def _be_silent() -> None:
    """What a model has to say it says when it is built for the run."""
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


def batch_norm_line(train_size: int, batch_size: int, workers: int, accumulate: int = 1) -> str | None:
    """A warning where BatchNorm may fail, for a step in which a worker has one sample, or one at a time; else None.

    Of one value a channel there is no variance, and torch's BatchNorm raises ValueError in training. Of one image there
    are as many values as it has places when it comes to BatchNorm: more than one, it works, and each sample is
    normalised by itself.
    """
    for count in sorted({min(batch_size, train_size), train_size % batch_size or batch_size}, reverse=True):
        parts = _parts([count], workers)
        if 1 in _parts(parts, accumulate):
            which = "each step" if count == min(batch_size, train_size) else "the last step"
            return (
                f"BatchNorm: in {which}, of {count} sample{'s' if count > 1 else ''}, a worker has 1 sample"
                f"{'' if 1 in parts else ' at a time'}; training fails where BatchNorm then has one value per channel: "
                "take another --batch_size or --train_size, or fewer workers"
            )
    return None


def _parts(counts: list[int], parts: int) -> list[int]:
    return [stop - start for count in counts for start, stop in pairwise(chunk_bounds(count, parts))]


@dataclass(frozen=True)
class Needs:
    """What memory one run takes of the host. `shared_bytes` is what all processes map."""

    ranks: int
    bytes_per_rank: int
    data_bytes: int
    common_bytes: int = 0
    """Of what all processes have in one memory: parameters, or sums of gradients."""
    server_bytes: int = 0
    """What the server shares beyond what every rank does."""
    worker_bytes: int = WORKER_BYTES["cpu"]

    @property
    def shared_bytes(self) -> int:
        return self.ranks * self.bytes_per_rank + self.common_bytes + self.server_bytes + self.data_bytes

    @property
    def memory_bytes(self) -> int:
        """Of all processes together."""
        return self.shared_bytes + self.ranks * self.worker_bytes


def needs(
    model: ModelSize,
    itemsize: int,
    n: int,
    has_server: bool,
    data_bytes: int,
    common_parameters: bool = False,
    common_sums: bool = False,
    staleness: int = 0,
    device: str = "cpu",
    through_host: bool = True,
) -> Needs:
    """What a run of `n` processes takes of the host's memory.

    Every rank shares its gradients and a use mark for each parameter; with a server also its parameters. What all ranks
    have in common, their parameters or the sums of gradients and marks, is there once. A staleness of K takes K more
    buffers of gradients on every rank, and K + 1 of parameters on the server. Of GPUs all this lies on them, unless
    they exchange `through_host`: the host holds the data, and what the processes themselves take.
    """
    elements, marks = model.elements, model.parameters
    if device != "cpu" and not through_host:
        elements = marks = 0
    return Needs(
        ranks=n,
        bytes_per_rank=((staleness + 1) * (elements + marks) + (elements if has_server else 0)) * itemsize,
        data_bytes=data_bytes,
        common_bytes=(elements * common_parameters + (elements + marks) * common_sums) * itemsize,
        server_bytes=(staleness + 1) * elements * itemsize if staleness else 0,
        worker_bytes=WORKER_BYTES[device],
    )


LAUNCHER_DESCRIPTORS, DESCRIPTORS_PER_WORKER, WORKER_DESCRIPTORS = 40, 6, 60
"""Generous counts: standard streams, pipes, sentinels, and a descriptor for every 64 MiB of shared memory."""


def check(required: Needs) -> None:
    """Raises PreflightError where memory does not suffice."""
    free = free_memory_bytes()
    if free is not None and required.memory_bytes > free:
        raise PreflightError(
            f"the run needs {_mb(required.memory_bytes)} of memory ({required.ranks} processes with "
            f"{_mb(required.worker_bytes)} each and {_mb(required.bytes_per_rank)} that they share, "
            f"{_mb(required.data_bytes)} of data), and {_mb(free)} are free: take fewer processes "
            "(--n_gpus), a smaller model or less data (--train_size), or give the container more memory"
        )


def check_open_files(n: int) -> None:
    """Raises PreflightError where the limit of open files does not suffice for `n` processes."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    wanted = max(LAUNCHER_DESCRIPTORS + n * DESCRIPTORS_PER_WORKER, WORKER_DESCRIPTORS)
    if limit != resource.RLIM_INFINITY and wanted > limit:
        raise PreflightError(
            f"the run may need {wanted} open files in one process, and the limit is {limit}: raise it "
            f"(ulimit -n {2 * wanted}), or take fewer processes (--n_gpus)"
        )


def _mb(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"
