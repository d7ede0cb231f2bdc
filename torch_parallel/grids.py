"""The named experiments: which commands are compared, and what their comparisons have in common."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import Any

from torch_parallel.strategies import BUILTIN, STRATEGIES, SYNCHRONOUS

KEPT = (
    *("strategy", "n_gpus", "staleness", "backup_workers", "aggregate", "lr"),
    *("compute_ms", "straggler", "jitter", "link", "latency"),
)
"""Flags of a cell that its quick form has too."""


@dataclass(frozen=True)
class Cell:
    """One command of a grid, without its seed."""

    program: str
    flags: tuple[tuple[str, Any], ...]
    threads: int  # OMP_NUM_THREADS, of one process: the same grid on a machine with more processors is the same

    @property
    def variables(self) -> dict[str, str]:
        """What is set in the environment of the program."""
        return {"OMP_NUM_THREADS": str(self.threads)}

    @property
    def workers(self) -> int:
        """Processes that train, or GPUs that one process trains on."""
        flags = dict(self.flags)
        servers = STRATEGIES[flags["strategy"]].server_count if "strategy" in flags else 0
        return int(flags["n_gpus"]) - servers

    def words(self, seed: int) -> list[str]:
        """The program and its arguments."""
        flags = (*self.flags, ("seed", seed))
        return [self.program, *(word for name, value in flags for word in (f"--{name}", str(value)))]

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


SEEDS = (0, 1, 2)
CNN: dict[str, Any] = {"model": "cnn", "dataset": "mnist"}
MOBILENET: dict[str, Any] = CNN | {"model": "mobilenet_v2", "optimizer": "adamw", "batch_size": 16, "test_size": 500}
"""AdamW and small batches: with fewer steps than these BatchNorm's averages are still of the first, random weights. 500
test images, since testing all of them would take longer than training."""


def _param_server() -> list[Cell]:
    return [
        cell
        for flags in (CNN | {"epochs": 3}, MOBILENET | {"train_size": 1000, "epochs": 4})
        for cell in (train_py("param_server", 3, **flags), data_parallel(2, **flags))
    ]


def _ring() -> list[Cell]:
    return [
        cell
        for flags in (CNN | {"epochs": 3}, MOBILENET | {"train_size": 1000, "epochs": 3})
        for cell in (train_py("ring_all_reduce", 2, **flags), ddp(2, **flags))
    ]


def _scaling() -> list[Cell]:
    cells = []
    for size in (1_000, 10_000, 60_000):
        flags = CNN | {"train_size": size, "epochs": 4 if size == 1_000 else 2}
        cells += [train_py("ring_all_reduce", n, **flags) for n in (1, 2)]
        cells += [train_py("param_server", 3, **flags), ddp(2, **flags), data_parallel(2, **flags)]
    cells += [train_py("ring_all_reduce", 4, **flags), ddp(4, **flags)]
    return cells


def _scaling_mobilenet() -> list[Cell]:
    """An experiment of its own, for it takes long. One epoch of 10,000 images is 625 steps: the first one is little."""
    return [
        cell
        for size, epochs in ((1_000, 2), (10_000, 1))
        for flags in [MOBILENET | {"train_size": size, "epochs": epochs}]
        for cell in (*(train_py("ring_all_reduce", n, **flags) for n in (1, 2)), ddp(2, **flags))
    ]


def _aggregation() -> list[Cell]:
    """Batches of 8 over three workers, 3 + 3 + 2, so that a mean of means is another mean."""
    flags = CNN | {"train_size": 4000, "epochs": 2, "batch_size": 8}
    rate = 0.005  # a rate that batches of 8 bear; with SGD's default some seeds learn nothing
    ways: list[dict[str, Any]] = [{"aggregate": way, "lr": rate} for way in ("weighted", "mean", "sum")]
    return [train_py("ring_all_reduce", 3, **flags, **way) for way in (*ways, ways[2] | {"lr": round(rate / 3, 6)})]


WORKERS = 4
SMALL: dict[str, Any] = {"model": "cnn", "dataset": "digits", "epochs": 2}
SERVED: dict[str, dict[str, Any]] = {
    "param_server": {},
    "param_server_bounded": {"staleness": 2},
    "param_server_backup": {"backup_workers": 1},
    "param_server_async": {},
}


def _of_four_workers(strategy: str, **flags: Any) -> Cell:
    own = SERVED.get(strategy)
    return train_py(strategy, WORKERS + (own is not None), **(own or {}), **flags)


def _stragglers() -> list[Cell]:
    """Compute is a sleep of 10 ms, so that slow workers do not make room for the others on few processors."""
    flags = SMALL | {"train_size": 1280, "batch_size": 16, "compute_ms": 10}
    cells = []
    for strategy in ("ring_all_reduce", "sharded_param_server", *SERVED):
        slow = WORKERS - 1 + (strategy in SERVED)  # the last rank
        cells += [_of_four_workers(strategy, **flags, straggler=f"{slow}:{times}x") for times in (1, 2, 4, 8)]
        cells += [_of_four_workers(strategy, **flags, jitter="10ms")]
    return cells


def _links() -> list[Cell]:
    """Every rank behind a link of its own that costs nothing, then of 100 Mbit/s, all alike, and for some strategies
    with one of a quarter of that. The first is what a step takes besides: the same program, memory not shared."""
    flags = SMALL | {"train_size": 640, "batch_size": 64, "compute_ms": 10}
    slow = flags | {"latency": "1ms"}
    strategies = [
        name for name, each in SYNCHRONOUS.items() if name not in (*BUILTIN, *SERVED) and not each.common_sums
    ]
    strategies += list(SERVED)
    return [
        *(_of_four_workers(name, **flags, latency="0s") for name in strategies),
        *(_of_four_workers(name, **slow, link="100mbit") for name in strategies),
        *(_of_four_workers(name, **slow, link="100mbit,3:25mbit") for name in ("ring_all_reduce", *SERVED)),
    ]


@dataclass(frozen=True)
class Experiment:
    """A named grid: what it is for, its cells, and what tells its comparisons apart."""

    what: str
    cells: list[Cell]
    apart: tuple[str, ...] = ("model",)
    """Columns whose values are not compared with each other: each model is a comparison of its own."""
    same: tuple[str, ...] = ("processors",)
    """What runs of one comparison have in common besides HELD."""
    but: tuple[str, ...] = ()
    """What of HELD they have not: what the comparison is about, or what follows from that."""
    seeds: tuple[int, ...] = SEEDS

    def on(self, gpus: int) -> Experiment:
        """On a machine with GPUs, where the same commands train on them: those cells that find one for each worker."""
        return replace(self, cells=[cell for cell in self.cells if not gpus or cell.workers <= gpus])

    def quick(self) -> Experiment:
        """The same strategies and numbers of processes, on the digits."""
        small = {"dataset": "digits", "train_size": 200, "epochs": 2, "model": "cnn"}
        cells = dict.fromkeys(cell.with_flags(**small) for cell in self.cells)
        return replace(self, cells=list(cells), seeds=self.seeds[:1])


EXPERIMENTS = {
    "param_server": Experiment(
        "the parameter server from scratch beside torch.nn.DataParallel: accuracy", _param_server()
    ),
    "ring_all_reduce": Experiment(
        "the ring from scratch beside DistributedDataParallel: an epoch and its parts", _ring()
    ),
    "scaling": Experiment(
        "all of them, with more data and more workers",
        _scaling(),
        apart=("model", "train_size"),
        same=("processors_each",),
    ),
    "scaling_mobilenet_v2": Experiment(
        "the ring and DistributedDataParallel with more data, for mobilenet_v2",
        _scaling_mobilenet(),
        apart=("model", "train_size"),
        same=("processors_each",),
    ),
    "aggregation": Experiment(
        "three ways to average the gradients of shares of different sizes: accuracy over seeds",
        _aggregation(),
        apart=("model", "lr"),
        seeds=(0, 1, 2, 3, 4),
    ),
    "stragglers": Experiment(
        "one slow worker, and jitter, under strategies that wait for everybody and strategies that do not",
        _stragglers(),
        same=(),
        but=("steps",),
    ),
    "links": Experiment(
        "each strategy over emulated links, and over one that is slower", _links(), same=(), but=("steps", "nodes")
    ),
}
