"""What is trained: a function that makes the model, the task, and the samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from torch_parallel.workloads.data import load_dataset
from torch_parallel.workloads.dataset import Dataset
from torch_parallel.workloads.models import build_model
from torch_parallel.workloads.samples import Samples
from torch_parallel.workloads.task import Task


@dataclass(frozen=True)
class Workload:
    """`make_model` is called in every worker process, so it must be picklable; cloudpickle takes most functions."""

    make_model: Callable[[], nn.Module]
    task: Task
    samples: Samples
    model_name: str = "model"

    def subset(self, train_size: int | None, seed: int, test_size: int | None = None) -> Workload:
        """The same with fewer samples: see `Samples.subset`."""
        return replace(self, samples=self.samples.subset(train_size, seed, test_size))


def workload_of(dataset: Dataset, model: str) -> Workload:
    """A model by its name, for classes of images. Raises DataError for samples that are no images."""
    make_model = partial(build_model, model, dataset.image_shape, dataset.class_count)
    return Workload(make_model, dataset.task, dataset.samples, model)


def load_workload(
    model: str,
    dataset: str | None,
    data_dir: str | None,
    train_size: int | None,
    seed: int,
    test_size: int | None = None,
) -> tuple[Workload, str]:
    """A model and data by their names, and one line that says which data it is and where it came from.

    See `load_dataset` for the data, and for what it raises.
    """
    loaded, line = load_dataset(dataset, data_dir, train_size, seed, test_size)
    return workload_of(loaded, model), line
