"""What is trained: a function that makes the model, the task, and the samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from torch_parallel.workloads.samples import Samples
from torch_parallel.workloads.task import Task


@dataclass(frozen=True)
class Workload:
    """`make_model` is called in every worker process. It is sent there, so it must be picklable; most functions are."""

    make_model: Callable[[], nn.Module]
    task: Task
    samples: Samples
    model_name: str = "model"

    def subset(self, train_size: int | None, seed: int, test_size: int | None = None) -> Workload:
        """The same with fewer samples: see `Samples.subset`."""
        return replace(self, samples=self.samples.subset(train_size, seed, test_size))
