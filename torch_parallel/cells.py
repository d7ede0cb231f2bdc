"""One command of a grid: what a reader would type, and what a grid must know of it."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, replace
from typing import Any

from torch_parallel.strategies import STRATEGIES

KEPT = (
    *("strategy", "n_gpus", "staleness", "backup_workers", "aggregate", "lr"),
    *("compute_ms", "straggler", "jitter", "link", "latency"),
    *("setup", "per_gpu_batch", "scale_lr"),
)
"""Flags of a cell that its quick form has too."""


@dataclass(frozen=True)
class Cell:
    """One command of a grid, without its seed."""

    program: str
    flags: tuple[tuple[str, Any], ...]
    threads: int  # OMP_NUM_THREADS, of one process: the same grid on a machine with more processors is the same
    lab: tuple[str, ...] = ()  # flags of the lab in which it runs, where it does

    @property
    def variables(self) -> dict[str, str]:
        """What is set in the environment of the program."""
        return {"OMP_NUM_THREADS": str(self.threads)}

    @property
    def workers(self) -> int:
        """Processes that train, or GPUs that one process trains on."""
        flags = dict(self.flags)
        servers = STRATEGIES[flags["strategy"]].server_count if "strategy" in flags else 0
        if "setup" in flags:  # nodes, and workers of each
            return math.prod(map(int, flags["setup"].split("_")))
        return int(flags["n_gpus"]) - servers

    def trains_on(self, dataset: str) -> bool:
        """Whether it is a transformer's on that data."""
        flags = dict(self.flags)
        return ("setup" in flags or bool(self.lab)) and flags["dataset"] == dataset

    def on_data(self, dataset: str, other: str) -> Cell:
        """The same on `other` data, where a transformer's is on `dataset`."""
        if not self.trains_on(dataset):
            return self
        return replace(self, flags=tuple((dict(self.flags) | {"dataset": other}).items()))

    def words(self, seed: int) -> list[str]:
        """The program and its arguments; what is True is a flag without a value."""
        flags = (*self.flags, ("seed", seed))
        given = ((f"--{name}",) if value is True else (f"--{name}", str(value)) for name, value in flags)
        return [*self.before, self.program, *(word for words in given for word in words)]

    @property
    def before(self) -> list[str]:
        """What stands before the program."""
        return ["-m", "torch_parallel", "lab", *self.lab, "--"] if self.lab else []

    def command(self, seed: int) -> str:
        """As a reader would type it."""
        return shlex.join([*(f"{name}={value}" for name, value in self.variables.items()), "python", *self.words(seed)])

    def with_flags(self, **flags: Any) -> Cell:
        """The same program, strategy, number of processes and what makes them slow, with other flags."""
        kept = {name: value for name, value in self.flags if name in KEPT}
        return replace(self, flags=tuple({**kept, **flags}.items()))


def train_py(strategy: str, n: int, **flags: Any) -> Cell:
    """A run of train.py, each process with one thread."""
    return Cell("train.py", (("strategy", strategy), ("n_gpus", n), *flags.items()), threads=1)


def ddp(n: int, **flags: Any) -> Cell:
    """A run of DistributedDataParallel's control, likewise."""
    return Cell("ring_all_reduce_builtin.py", (("n_gpus", n), *flags.items()), threads=1)


def data_parallel(n: int, **flags: Any) -> Cell:
    """A run of DataParallel's control: one process, which takes as many threads as there would be workers."""
    return Cell("param_server_builtin.py", (("n_gpus", n), *flags.items()), threads=n)
