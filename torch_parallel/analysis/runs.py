"""What an experiment measured, read back from its folder, and the refusal to compare what is not alike.

    folder = newest("ring_all_reduce")              results/ring_all_reduce/<date>_<machine>
    runs = select(read_runs(folder), model="cnn")
    held_equal(runs)                                {"dataset": "mnist", "batch_size": 64, ...}, or Unequal

Seconds are those of training alone: start-up and evaluation are in none of them. The first epoch of every run warms up
(memory, caches, threads) and counts for accuracy, not for time.

A table that is empty, ends within a row or lacks a column is never taken for less data, nor is a folder that lacks its
manifest: who reads it raises DamagedResults.
"""

from __future__ import annotations

import copyreg
import csv
import io
import json
import shlex
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

PARTS = ("compute", "exchange", "wait", "update")

MEASURED = ("train_s", "samples_per_s", "train_loss", "test_accuracy")

PARTS_OF_TIME = ("exchanged_part", "waited_part")
"""Columns that older tables have not."""

HELD = (
    "kind",
    "dataset",
    "model",
    "train_size",
    "test_size",
    "batch_size",
    "steps",
    "epochs",
    "optimizer",
    "lr",
    "dtype",
    "device",
    "nodes",
    "seeds",
    "other_flags",
    "commit",
)
"""What runs that are compared must have in common, besides machine and versions, which one folder has in common."""


OTHER_FLAGS = (
    *("momentum", "weight_decay", "lr_schedule", "warmup_steps", "clip_norm", "accumulate", "not_finite"),
    *("length", "pretrained", "precision", "compile"),
)
"""Flags that change the training and have no column: they are read off the commands."""
COMMON_OPTIONS = (
    *("bucket_mb", "compute_ms", "latency", "timed_every"),
    *("gradient_as_bucket_view", "static_graph", "forward_sync_buffers", "broadcast_buffers"),
)
"""Options that tell no runs of an experiment apart."""


class ExperimentMissing(ValueError):
    """There is no folder with results of that experiment. One line."""


class Unequal(ValueError):
    """Runs that differ in what must be equal are not compared. One line names the setting and its values."""


class DamagedResults(ValueError):
    """A file of results is not as a run left it. One line says which, as far as that is known, and what to do."""

    def __init__(self, file: str | Path, what: str) -> None:
        super().__init__(f"{file}: {what}; restore it, or remove its folder and measure again")

    def __reduce__(self) -> tuple[Any, ...]:
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class NotMade(ValueError):
    """A figure or table cannot be made of what the files hold. One line says which, and why."""

    def __init__(self, what: str, error: Exception) -> None:
        why = f"{type(error).__name__}: {error}"
        super().__init__(f"{what} cannot be made of the results ({why}): restore those files that were changed")

    def __reduce__(self) -> tuple[Any, ...]:
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class Record(dict[str, Any]):
    """A row of a table, or entries of a manifest: what one has not is missing in its file. Raises DamagedResults."""

    def __init__(self, file: Path, entries: Any) -> None:
        super().__init__(entries)
        self.file = file

    def __missing__(self, name: str) -> Any:
        raise DamagedResults(self.file, f"it has no {name}")


@contextmanager
def making(what: str) -> Iterator[None]:
    """Around what is made of results: what else can be wrong with them is said in one line too. Raises NotMade."""
    try:
        yield
    except (ExperimentMissing, Unequal, DamagedResults):
        raise
    except (OSError, LookupError, ValueError, TypeError, ArithmeticError, StopIteration) as error:
        raise NotMade(what, error) from error


@dataclass(frozen=True)
class EpochFigures:
    """One epoch of one run."""

    epoch: int
    train_s: float
    samples_per_s: float
    train_loss: float
    test_accuracy: float
    parts_s: dict[str, float | None]  # mean over the workers; None where a program cannot tell it apart
    exchanged_part: float | None = None  # of the seconds, the mean over the workers; None where it is not known
    waited_part: float | None = None


@dataclass(frozen=True)
class Run:
    """One training run of an experiment."""

    run_id: str
    strategy: str
    n: int
    workers: int
    threads: int
    seed: int
    settings: dict[str, str]  # the other columns of runs.csv that an epoch does not change
    epochs: list[EpochFigures] = field(default_factory=list)

    @property
    def asked_for(self) -> int:
        """Workers, or what DataParallel, which is one process, has in their place: GPUs, and threads without any."""
        return self.n if self.strategy == "data_parallel" else self.workers

    @property
    def plain_module(self) -> bool:
        """Whether it is DataParallel without GPUs, which is the plain module in one process with several threads."""
        return self.strategy == "data_parallel" and self.setting("device") == "cpu"

    def setting(self, name: str) -> Any:
        """A column of runs.csv that is the same in every epoch, by its name; `processors`, `epochs` and others too.

        `batch_each` are the samples of one worker's step, `rate` is the learning rate as it was asked for, and `cards`
        are the network cards of a node.
        """
        if name == "processors":
            return self.workers * self.threads
        if name == "processors_each":
            return self.workers * self.threads / self.asked_for
        if name == "epochs":
            return len(self.epochs)
        if name == "batch_each":
            each = int(self.settings["batch_size"]) / self.workers
            return int(each) if each.is_integer() else each
        words = shlex.split(self.settings.get("command") or "")
        if name == "cards":
            return int(self.given("nics") or 1)
        if name == "rate":
            return f"{self.given('lr') or self.settings['lr']}{' x workers' if '--scale_lr' in words else ''}"
        if name == "other_flags":
            given = [f"{a} {b}" for a, b in pairwise(words) if a.removeprefix("--") in OTHER_FLAGS]
            return ", ".join(sorted(given)) or "none"
        if name in self.options:
            return self.options[name]
        return self.settings[name] if name in self.settings else getattr(self, name)

    def given(self, flag: str) -> str | None:
        """What the command says for a flag."""
        words = shlex.split(self.settings.get("command") or "")
        return next((value for name, value in pairwise(words) if name == f"--{flag}"), None)

    @property
    def options(self) -> dict[str, Any]:
        """The strategy's own and what was emulated, as far as it was given."""
        options: dict[str, Any] = json.loads(self.settings.get("options") or "{}")
        return options

    @property
    def epoch_s(self) -> float:
        """Median seconds of an epoch, the first one left out."""
        return statistics.median(epoch.train_s for epoch in self.warm_epochs)

    @property
    def per_1000_s(self) -> float:
        """Seconds in which the workers together do 1,000 samples; the first step, which warms up, is left out."""
        return 1000 / statistics.median(epoch.samples_per_s for epoch in self.warm_epochs)

    def part_s(self, part: str) -> float | None:
        """Median over the same epochs of what one part of them took; None where it cannot be told apart."""
        times = [seconds for epoch in self.warm_epochs if (seconds := epoch.parts_s[part]) is not None]
        return statistics.median(times) if times else None

    @property
    def warm_epochs(self) -> list[EpochFigures]:
        """All but the first; a single one is kept."""
        return self.epochs[1:] or self.epochs


def newest(experiment: str, results_dir: str | Path = "results") -> Path:
    """The folder of the last complete run of an experiment. Raises ExperimentMissing."""
    return complete(experiment, results_dir)[-1]


def complete(experiment: str, results_dir: str | Path = "results") -> list[Path]:
    """The folders of its complete runs, by when they were begun. Raises ExperimentMissing where there is none."""
    folders = sorted(each for each in (Path(results_dir) / experiment).glob("*") if each.is_dir())
    found = [folder for folder in folders if manifest(folder)["status"] == "completed"]
    if not found:
        raise ExperimentMissing(
            f"{Path(results_dir) / experiment}: no complete results there; make them with: {how_to_make(experiment)}"
        )
    return sorted(found, key=lambda folder: str(manifest(folder)["started"]))


def how_to_make(experiment: str) -> str:
    """The command for that folder of results/."""
    name, on_gpus, count = experiment.partition("_gpu")
    if name == "bench_nodes":
        in_the_lab = "python -m torch_parallel lab --nodes 2 --workers_per_node 4 --rate 100mbit -- "
        return f"{in_the_lab}-m torch_parallel bench nodes --link 100mbit --results_dir results/bench_nodes"
    by_hand = {"trace": "python train.py --trace trace.json", "waits": "python train.py --steps_csv steps.csv"}
    if name in by_hand:
        return by_hand[name]
    where = "on a machine with GPUs, " if on_gpus else ""
    kind, _, bench = name.partition("bench_")
    if not bench:
        return f"{where}python -m torch_parallel experiment {kind}"
    flags = f" --n_gpus {count.removeprefix('_n')}" if count else ""
    device = " --device cuda" if on_gpus else ""
    return f"{where}python -m torch_parallel bench {bench}{device}{flags} --results_dir results/{experiment}"


def manifest(folder: str | Path) -> Record:
    """Command, commit, machine, versions and grid of an experiment. Raises DamagedResults."""
    file = Path(folder) / "manifest.json"
    try:
        return Record(file, json.loads(file.read_text(encoding="utf-8"), object_hook=partial(Record, file)))
    except (OSError, ValueError, TypeError) as error:
        raise DamagedResults(file, f"it cannot be read ({error})") from None


def read_table(file: Path) -> list[Record]:
    """The rows of a table, at least one. Raises DamagedResults, for one that ends within a row too."""
    try:
        with open(file, newline="", encoding="utf-8") as opened:
            text = opened.read()
        header, *rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    except (OSError, ValueError, csv.Error) as error:
        raise DamagedResults(file, f"it cannot be read ({error})") from None
    if not rows or not text.endswith("\n") or any(len(row) != len(header) for row in rows):
        raise DamagedResults(file, "rows of it are missing, or not whole")
    return [Record(file, zip(header, row, strict=True)) for row in rows]


def commit_told(about: dict[str, Any], digits: int = 7) -> str:
    """Of a manifest; it has none where the code lay in no repository."""
    return (about["commit"] or "unknown")[:digits]


def bench_rows(folder: str | Path) -> list[Record]:
    """The rows of a bench."""
    return read_table(Path(folder) / "bench.csv")


def machine_told(about: dict[str, Any]) -> str:
    """Cards, processors and torch of a manifest, in a few words."""
    machine = about["machine"]
    cards = f"{len(about['cards'])} x {about['cards'][0]}, " if about["cards"] else ""
    return f"{cards}{machine['processors']} cores of {machine['processor']}, torch {about['versions']['torch']}"


def same_told(told: dict[Path, str]) -> None:
    """Raises Unequal where folders were not measured on the same, as it is told of each: no table has both."""
    if len(set(told.values())) > 1:
        raise Unequal("; ".join(f"{folder}: {what}" for folder, what in told.items()) + ": no table has both")


def read_runs(folder: str | Path) -> list[Run]:
    """All runs of an experiment, in the order in which they were made."""
    by_run: dict[str, list[Record]] = {}
    for row in read_table(Path(folder) / "runs.csv"):
        by_run.setdefault(row["run_id"], []).append(row)
    return [_run(run_id, of_run) for run_id, of_run in by_run.items()]


def _run(run_id: str, rows: list[Record]) -> Run:
    first = rows[0]
    settings = {name: value for name, value in first.items() if name not in ("run_id", "strategy", "n", "seed")}
    run = Run(
        run_id,
        first["strategy"],
        int(first["n"]),
        int(first["workers"]),
        int(first["threads"]),
        int(first["seed"]),
        settings,
    )
    for epoch in dict.fromkeys(row["epoch"] for row in rows):
        workers = [row for row in rows if row["epoch"] == epoch and row["role"] == "worker"]
        parts = {part: _mean([row[f"{part}_s"] for row in workers]) for part in PARTS}
        figures = {name: float(workers[0][name]) for name in MEASURED}
        exchanged, waited = (_mean([row.get(name) or "" for row in workers]) for name in PARTS_OF_TIME)
        run.epochs.append(
            EpochFigures(int(epoch), **figures, parts_s=parts, exchanged_part=exchanged, waited_part=waited)
        )
    return run


def _mean(values: list[str]) -> float | None:
    return None if "" in values else statistics.mean(map(float, values))


def select(runs: list[Run], **wanted: Any) -> list[Run]:
    """Those whose settings are the wanted ones: `model="cnn"`, `n=2`, `strategy=("ddp", "ring_all_reduce")`."""

    def fits(run: Run) -> bool:
        for name, value in wanted.items():
            allowed = value if isinstance(value, tuple) else (value,)
            if str(run.setting(name)) not in map(str, allowed):
                return False
        return True

    return [run for run in runs if fits(run)]


def by_label(runs: list[Run]) -> dict[str, list[Run]]:
    """Runs that differ in nothing but the seed, under one label."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(label(run), []).append(run)
    return groups


def by_setting(runs: list[Run], name: str) -> dict[str, list[Run]]:
    """Runs by one of their settings, in the order in which its values first occur, numbers in their own order."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(str(run.setting(name)), []).append(run)
    return dict(sorted(groups.items(), key=lambda item: (0, int(item[0])) if item[0].isdigit() else (1, 0)))


def label(run: Run) -> str:
    """The strategy, how many processes train, and its options: "ring_all_reduce, 2 workers, straggler 1:4x"."""
    told = {name: value for name, value in run.options.items() if name not in COMMON_OPTIONS and value is not None}
    if setup := run.settings.get("setup"):  # nodes, and workers of each
        told = {name: value for name, value in told.items() if name not in ("nodes", "workers_per_node", "setup")}
        told |= {"set-up": setup} if run.setting("nodes") != "1" else {}
    options = [f", {name} {value}" for name, value in told.items()]
    return _who(run) + "".join(options)


def _who(run: Run) -> str:
    if run.workers == 1 and run.strategy not in ("data_parallel", "ddp"):
        return "one process"
    if run.plain_module:
        return f"data_parallel, plain module, {run.threads} threads"
    count = run.asked_for
    noun = "GPU" if run.strategy == "data_parallel" else "worker"
    return f"{run.strategy}, {count} {noun}{'s' if count > 1 else ''}"


def held_equal(runs: list[Run], but: tuple[str, ...] = (), same: tuple[str, ...] = ("processors",)) -> dict[str, str]:
    """What all runs have in common, by the names of HELD and `same`. `but` names what a comparison is about.

    `processors` are those in use, workers times threads; `processors_each` are those of one worker. Raises Unequal.
    """
    common: dict[str, str] = {}
    for name in (*HELD, *same):
        if name in but:
            continue
        seen = {key: _values(of_label, name) for key, of_label in by_label(runs).items()}
        values = {value for of_label in seen.values() for value in of_label}
        if len(values) > 1:
            told = "; ".join(f"{key}: {', '.join(of_label)}" for key, of_label in seen.items())
            raise Unequal(f"these runs cannot be compared, for they differ in {name} ({told})")
        common[name] = values.pop()
    return common


def _values(runs: list[Run], name: str) -> list[str]:
    """All that runs of one label have; their seeds, which differ, together are one value."""
    if name == "seeds":
        return [", ".join(sorted({str(run.seed) for run in runs}, key=int))]
    return sorted({str(run.setting(name)) for run in runs})


def speed_ups(runs: list[Run], among: list[Run]) -> list[float]:
    """How many times as fast as the one process with the same seed, which is one of the runs `among`, each run is."""
    one = {run.seed: run.epoch_s for run in among if label(run) == "one process"}
    return [one[run.seed] / run.epoch_s for run in runs]


def accuracies(runs: list[Run]) -> list[float]:
    """Of the last epoch, in percent, in the order of the seeds."""
    return [100 * run.epochs[-1].test_accuracy for run in sorted(runs, key=lambda run: run.seed)]


def spread(values: list[float]) -> tuple[float, float, float]:
    """Median, least and largest."""
    return statistics.median(values), min(values), max(values)
