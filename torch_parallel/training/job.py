"""What the ranks of a run are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from torch_parallel.training.config import RunConfig
from torch_parallel.workloads import Dataset, DatasetForm

TENSORS = ("train_inputs", "train_targets", "test_inputs", "test_targets")


@dataclass(frozen=True)
class Job:
    """What every rank of a run is given. The data set's tensors travel apart, in memory that all ranks map."""

    config: RunConfig
    dataset: DatasetForm
    make_model: Callable[[], nn.Module]
    checkpoint_folder: str = ""
    resume_from: str | None = None  # a checkpoint that was found complete


def make_job(
    config: RunConfig,
    dataset: Dataset,
    make_model: Callable[[], nn.Module],
    checkpoint_folder: str = "",
    resume_from: str | None = None,
) -> tuple[Job, dict[str, Tensor]]:
    """The job, and the tensors to `launch(..., shared=...)` beside it."""
    tensors = {name: getattr(dataset, name) for name in TENSORS}
    return Job(config, dataset.form, make_model, checkpoint_folder, resume_from), tensors
