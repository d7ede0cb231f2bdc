"""What the ranks of a run are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from torch_parallel.training.config import RunConfig
from torch_parallel.workloads.samples import Samples
from torch_parallel.workloads.task import Task, target_counts
from torch_parallel.workloads.tree import Tree, leaves, rebuilt
from torch_parallel.workloads.workload import Workload

TARGET_COUNTS = "target_counts"
PARTS = ("train", "test")


@dataclass(frozen=True)
class Job:
    """What every rank of a run is given. The tensors of the samples travel apart, in memory that all ranks map."""

    config: RunConfig
    data_name: str
    task: Task
    make_model: Callable[[], nn.Module]
    train_tree: Tree
    """Names in the place of tensors, and so `test_tree`."""
    test_tree: Tree
    checkpoint_folder: str = ""
    resume_from: str | None = None  # a checkpoint that was found complete

    def samples(self, tensors: Mapping[str, Tensor]) -> tuple[Tree, Tree]:
        """For training and for testing, of the tensors that came apart."""
        train, test = (
            rebuilt(tree, [tensors[name] for name in leaves(tree).values()])
            for tree in (self.train_tree, self.test_tree)
        )
        return train, test

    def workload(self, tensors: Mapping[str, Tensor]) -> Workload:
        """As it was, of the tensors that came apart."""
        return Workload(self.make_model, self.task, Samples(self.data_name, *self.samples(tensors)))


def make_job(
    config: RunConfig,
    task: Task,
    samples: Samples,
    make_model: Callable[[], nn.Module],
    checkpoint_folder: str = "",
    resume_from: str | None = None,
) -> tuple[Job, dict[str, Tensor]]:
    """The job, and the tensors to `launch(..., shared=...)` beside it."""
    train, test = ({f"{part}/{path}": leaf for path, leaf in leaves(getattr(samples, part)).items()} for part in PARTS)
    names = rebuilt(samples.train, list(train)), rebuilt(samples.test, list(test))
    counts = target_counts(task, f"the training part of {samples.name}", samples.train)
    target_counts(task, f"the test part of {samples.name}", samples.test)
    tensors = {**train, **test, **({} if counts is None else {TARGET_COUNTS: counts})}
    return Job(config, samples.name, task, make_model, *names, checkpoint_folder, resume_from), tensors
