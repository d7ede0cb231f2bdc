"""The named experiments: which commands are compared, and what their comparisons have in common."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch_parallel.analysis.transformers import COMPARED
from torch_parallel.cells import Cell as Cell
from torch_parallel.cells import data_parallel, ddp, train_py
from torch_parallel.collectives import HIERARCHICAL
from torch_parallel.strategies import BUILTIN, SYNCHRONOUS
from torch_parallel.transformer_grids import BARE, STUDIED, batches, learning, learning_rates, propagation

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


LAB_RATE = "200mbit"
DDP_AT_ITS_BEST = {"bucket_mb": 4}
"""What it is fastest with there, of 4, 25 and 100 MiB."""


def _machines() -> list[Cell]:
    """Two nodes of four workers with one card each, and with four."""
    flags = {"model": "bert", "model_size": "tiny", "dataset": "bbc_text", "length": 32, "batch_size": 32}
    flags |= {"optimizer": "adamw", "lr": 2e-4, "test_size": 32, "epochs": 1, "max_steps": 20}
    layouts = [name for name, each in SYNCHRONOUS.items() if getattr(each, "algorithm", None) in HIERARCHICAL]
    cells = [train_py(name, 8, **flags) for name in layouts]
    cells.append(train_py("ddp", 8, **flags, **DDP_AT_ITS_BEST))
    lab = ("--nodes", "2", "--workers_per_node", "4", "--rate", LAB_RATE, "--nics")
    return [replace(cell, lab=(*lab, cards)) for cards in ("1", "4") for cell in cells]


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
        name
        for name, each in SYNCHRONOUS.items()
        if name not in (*BUILTIN, *SERVED)
        and not each.common_sums
        and getattr(each, "algorithm", None) not in HIERARCHICAL  # which are of nodes with several ranks
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
    cells_of_gpus: list[Cell] = field(default_factory=list)
    """The cells on GPUs, where they are others: larger models, and more steps."""
    may_share_gpus: bool = False
    """Whether workers may share a GPU: only where what is compared is no time."""

    def on(self, gpus: int) -> Experiment:
        """On a machine with GPUs, where the same commands train on them: those cells that find one for each worker."""
        cells = self.cells_of_gpus if gpus and self.cells_of_gpus else self.cells
        any_number = not gpus or self.may_share_gpus
        return replace(self, cells=[cell for cell in cells if any_number or cell.workers <= gpus])

    def quick(self) -> Experiment:
        """The same strategies and numbers of processes, on little data that every machine has."""
        cells = dict.fromkeys(cell.with_flags(**_little(cell)) for cell in self.cells)
        return replace(self, cells=list(cells), seeds=self.seeds[:1])


def _little(cell: Cell) -> dict[str, Any]:
    """The digits with cnn, and a transformer, where the cell has one, for a few steps of an epoch."""
    flags = dict(cell.flags)
    model = flags["model"]
    if model not in STUDIED:
        return {"dataset": "digits", "train_size": 200, "epochs": 2, "model": "cnn"}
    same = {name: flags[name] for name in ("model", "batch_size", "optimizer") if name in flags}
    ends = {"epochs": 2, "train_size": 64} if "epochs" in flags else {"epochs": 1, "max_steps": 3}
    length = {"length": 16} if model == "bert" else {}
    return same | {"dataset": BARE[STUDIED[model]], "model_size": "tiny", "test_size": 16} | length | ends


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
    "machines": Experiment(
        "five layouts of the all-reduce, and DistributedDataParallel, on two nodes with one card each and with four",
        _machines(),
        apart=("cards",),
        same=("processors",),
    ),
    "transformers_batch": Experiment(
        "bert and vit on nodes and workers: seconds by the batch of a worker, and at an equal batch of all",
        batches(on_gpus=False),
        **COMPARED["transformers_batch"],
        cells_of_gpus=batches(on_gpus=True),
    ),
    "transformers_learning_rate": Experiment(
        "bert with two learning rates on 1, 2 and 4 workers, as they are and times the workers: accuracy over seeds",
        learning_rates(on_gpus=False),
        **COMPARED["transformers_learning_rate"],
        cells_of_gpus=learning_rates(on_gpus=True),
        may_share_gpus=True,
    ),
    "propagation": Experiment(
        "two nodes near and far, and one without links between its workers: where the seconds of a step go",
        propagation(on_gpus=False),
        **COMPARED["propagation"],
        cells_of_gpus=propagation(on_gpus=True),
    ),
    **{
        f"learning_{model}": Experiment(
            f"{model} from fresh weights: how well it learns, and in how many minutes",
            learning(model, on_gpus=False),
            cells_of_gpus=learning(model, on_gpus=True),
            seeds=(0, 1, 2, 3, 4) if model == "bert" else SEEDS,
        )
        for model in STUDIED
    },
}
