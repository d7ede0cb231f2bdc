"""What a run needs, compared with what there is, before anything is started.

A machine that runs out of memory or descriptors half-way kills workers without a word. Here the user is told in one
line what is missing and what would help. The size of /dev/shm does not matter: on Linux the shared memory is an
anonymous file, which takes the machine's memory, or the container's.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from torch_parallel.devices import free_memory_bytes
from torch_parallel.gradients.buckets import cut_into_buckets


class PreflightError(ValueError):
    """The machine has not what the run needs. One line: what is missing, and the remedy."""


WORKER_BYTES = 96 << 20
"""What a worker takes beside what it shares: with the smallest model 101 to 106 MiB of the CPU's memory were measured,
with 8 workers and with 40. A large model takes more, which nobody knows before it has run."""


@dataclass(frozen=True)
class Needs:
    """What one run takes. `shared_bytes` is memory that all processes map; descriptors are per process."""

    ranks: int
    bytes_per_rank: int
    data_bytes: int
    launcher_descriptors: int
    worker_descriptors: int
    common_bytes: int = 0
    """Of what all processes have in one memory: parameters, or sums of gradients."""
    server_bytes: int = 0
    """What the server shares beyond what every rank does."""

    @property
    def shared_bytes(self) -> int:
        return self.ranks * self.bytes_per_rank + self.common_bytes + self.server_bytes + self.data_bytes

    @property
    def memory_bytes(self) -> int:
        """Of all processes together."""
        return self.shared_bytes + self.ranks * WORKER_BYTES


def needs(
    make_model: Callable[[], nn.Module],
    itemsize: int,
    n: int,
    has_server: bool,
    bucket_bytes: int,
    data_bytes: int,
    common_parameters: bool = False,
    common_sums: bool = False,
    staleness: int = 0,
) -> Needs | None:
    """What a run of `n` processes takes; None for a model that cannot be built without memory to find out.

    Every rank shares its gradients and a use mark for each parameter; with a server also its parameters. What all ranks
    have in common, their parameters or the sums of gradients and marks, is there once. A staleness of K takes K more
    buffers of gradients on every rank, and K + 1 of parameters on the server.
    """
    try:
        with torch.device("meta"):  # tensors with shapes and no memory
            model = make_model()
        groups = cut_into_buckets(model.named_parameters(), bucket_bytes)
        elements = sum(parameter.numel() for group in groups for _, parameter in group)
    except Exception:
        return None
    marks = sum(len(group) for group in groups)
    return Needs(
        ranks=n,
        bytes_per_rank=((staleness + 1) * (elements + marks) + (elements if has_server else 0)) * itemsize,
        data_bytes=data_bytes,
        launcher_descriptors=LAUNCHER_DESCRIPTORS + n * DESCRIPTORS_PER_WORKER,
        worker_descriptors=WORKER_DESCRIPTORS,
        common_bytes=(elements * common_parameters + (elements + marks) * common_sums) * itemsize,
        server_bytes=(staleness + 1) * elements * itemsize if staleness else 0,
    )


LAUNCHER_DESCRIPTORS, DESCRIPTORS_PER_WORKER, WORKER_DESCRIPTORS = 40, 6, 60
"""Generous counts: standard streams, pipes, sentinels, and a descriptor for every 64 MiB of shared memory."""


def check(required: Needs) -> None:
    """Raises PreflightError where memory or the limit of open files does not suffice."""
    free = free_memory_bytes()
    if free is not None and required.memory_bytes > free:
        raise PreflightError(
            f"the run needs {_mb(required.memory_bytes)} of memory ({required.ranks} processes with "
            f"{_mb(WORKER_BYTES)} each and {_mb(required.bytes_per_rank)} that they share, {_mb(required.data_bytes)} "
            f"of data), and {_mb(free)} are free: take fewer processes (--n_gpus), a smaller model or less data "
            "(--train_size), or give the container more memory"
        )
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    wanted = max(required.launcher_descriptors, required.worker_descriptors)
    if limit != resource.RLIM_INFINITY and wanted > limit:
        raise PreflightError(
            f"the run may need {wanted} open files in one process, and the limit is {limit}: raise it "
            f"(ulimit -n {2 * wanted}), or take fewer processes (--n_gpus)"
        )


def _mb(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"
