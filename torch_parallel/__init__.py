"""Data-parallel training in PyTorch, from scratch: every way to average gradients, proved, measured and explained.

The public names are loaded when they are first used, so that `import torch_parallel` alone is instant.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_parallel.communicator import Communicator as Communicator
    from torch_parallel.joined import join as join
    from torch_parallel.launcher import NotPicklable as NotPicklable
    from torch_parallel.launcher import WorkerFailure as WorkerFailure
    from torch_parallel.launcher import launch as launch
    from torch_parallel.training.config import RunConfig as RunConfig
    from torch_parallel.training.run import TrainingRun as TrainingRun
    from torch_parallel.training.run import train as train
    from torch_parallel.workloads import Dataset as Dataset
    from torch_parallel.workloads.samples import Samples as Samples
    from torch_parallel.workloads.task import Task as Task
    from torch_parallel.workloads.workload import Workload as Workload

__version__ = "0.1.0"

if sys.platform == "win32":
    raise ImportError("torch_parallel runs on Linux and macOS; on Windows, run it in WSL")

_HOMES = {
    "Communicator": "communicator",
    "Dataset": "workloads",
    "NotPicklable": "launcher",
    "WorkerFailure": "launcher",
    "Workload": "workloads.workload",
    "RunConfig": "training.config",
    "Samples": "workloads.samples",
    "Task": "workloads.task",
    "TrainingRun": "training.run",
    "join": "joined",
    "launch": "launcher",
    "train": "training.run",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"torch_parallel.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
