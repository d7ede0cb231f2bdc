"""What is trained: a function that makes the model, the task, and the samples."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
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

    def __reduce__(self) -> tuple[Any, ...]:
        """Functions and classes that have no name to import, lambdas say, are sent as they are."""
        return _received, (cloudpickle.dumps((self.make_model, self.task)), self.samples, self.model_name)

    def subset(self, train_size: int | None, seed: int, test_size: int | None = None) -> Workload:
        """The same with fewer samples: see `Samples.subset`."""
        return replace(self, samples=self.samples.subset(train_size, seed, test_size))

    @property
    def tokens_of_a_sample(self) -> tuple[float, float] | None:
        """How many tokens one has on average, for training and for testing; None where they are no texts."""
        counts = [self.task.token_counts(part) for part in (self.samples.train, self.samples.test)]
        if any(each is None for each in counts):
            return None
        train, test = (each.double().mean().item() for each in counts if each is not None)
        return train, test


def _received(functions: bytes, samples: Samples, model_name: str) -> Workload:
    make_model, task = pickle.loads(functions)
    return Workload(make_model, task, samples, model_name)
