"""Comparisons that can be believed: grids of training runs, each run in fresh processes, in alternating order.

    python -m torch_parallel experiment                       what there is
    python -m torch_parallel experiment ring_all_reduce       the whole grid, into results/ring_all_reduce/
    python -m torch_parallel experiment scaling --quick       a small one, to see that it works

Every cell of a grid is a command that a reader can type. It runs once for each seed: each seed is a repeat, the same
for all cells, and every other repeat takes the cells in the reverse order. A grid that was stopped goes on where it
was, if code, machine and versions are still the same; runs.csv holds complete runs only.

On a machine with GPUs the same commands train on them, and NAME_gpu/ holds what they measured. `CUDA_VISIBLE_DEVICES=`
before the command keeps it on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import torch

from torch_parallel.analysis.findings import summary
from torch_parallel.analysis.runs import DamagedResults, Unequal, manifest
from torch_parallel.fetched import at_hand
from torch_parallel.grids import EXPERIMENTS, Cell, Experiment
from torch_parallel.results import COLUMNS, RunFolder, environment
from torch_parallel.usage import OneLineParser
from torch_parallel.workloads import DataError

RUN_LIMIT_S = 3600.0
"""No run of a grid takes longer: one that does is stuck."""


class ExperimentError(RuntimeError):
    """A run of a grid failed. One line: which, why, and how to go on."""


class Grid:
    """An experiment on its way: its folder, and which of its runs are done."""

    def __init__(self, name: str, experiment: Experiment, seeds: tuple[int, ...], results_dir: str) -> None:
        self.name, self.experiment, self.seeds = name, experiment, seeds
        commands = [cell.command(seed) for cell, seed in self.runs()]
        here = environment()
        self.must_match = {
            "grid": commands,
            **{key: here[key] for key in ("commit", "machine", "cards", "versions")},
        }
        place = Path(results_dir).expanduser() / name
        unfinished = [folder for folder in sorted(place.glob("*")) if self._goes_on_in(folder)]
        if unfinished:
            self.folder = RunFolder.reopened(unfinished[-1])
        else:
            self.folder = RunFolder(str(place), machine_name(here), with_time=False)
        self.here = here
        self.table = self.folder.path / "runs.csv"

    def _goes_on_in(self, folder: Path) -> bool:
        try:
            before = manifest(folder)
        except (OSError, ValueError):
            return False
        if not (before.get("commit") or "-").isalnum():  # none, or with changes that nobody can tell from others
            return False
        return before.get("status") != "completed" and all(
            before.get(key) == value for key, value in self.must_match.items()
        )

    def _commands_done(self) -> Iterator[str]:
        if self.table.exists():
            with open(self.table, newline="", encoding="utf-8") as file:
                yield from (row["command"] for row in csv.DictReader(file))

    def runs(self) -> Iterator[tuple[Cell, int]]:
        """Every cell once for each seed; every other time in the reverse order."""
        for repeat, seed in enumerate(self.seeds):
            cells = self.experiment.cells
            yield from ((cell, seed) for cell in (reversed(cells) if repeat % 2 else cells))

    def run(self) -> None:
        """Runs what is left."""
        total, in_one_repeat = len(self.must_match["grid"]), len(self.experiment.cells)
        started = self.folder.running(**(self.here | self.must_match), seeds=list(self.seeds))
        with _alone_in(self.folder.path), started:
            shutil.rmtree(self._runs, ignore_errors=True)  # of a run that was cut off
            done = set(self._commands_done())
            left = [(cell, seed) for cell, seed in self.runs() if cell.command(seed) not in done]
            print(f"{self.name}: {total} runs, {len(done)} done before; results in {self.folder.path}", flush=True)
            for number, (cell, seed) in enumerate(left, start=total - len(left) + 1):
                start_s = time.perf_counter()
                print(f"{number}/{total}  {cell.command(seed)}", end="", flush=True)
                try:
                    self._run_one(cell, seed)
                except BaseException:
                    print(flush=True)  # what is said next begins a line
                    raise
                print(f"  {time.perf_counter() - start_s:.0f} s", flush=True)
                if number == in_one_repeat < total:
                    self.summary()  # runs that cannot be compared are found now, not after the last repeat
            shutil.rmtree(self._runs, ignore_errors=True)

    @property
    def _runs(self) -> Path:
        return self.folder.path / "runs"

    def summary(self) -> str:
        """What was held equal and what came out so far. Raises Unequal."""
        experiment = self.experiment
        return summary(self.folder.path, experiment.apart, experiment.same, experiment.but)

    def _run_one(self, cell: Cell, seed: int) -> None:
        """One command in fresh processes; its rows are added when it has ended well, all of them or none."""
        place = self._runs / f"{time.time_ns()}"
        place.mkdir(parents=True)
        said = place / "said.txt"  # all of it: who speaks last need not be who failed first
        words = cell.words(seed)
        words[len(cell.before)] = str(_root() / cell.program)
        command = [sys.executable, *words, "--results_dir", str(place)]
        variables = {**os.environ, "PYTHONUNBUFFERED": "1", **cell.variables}  # its lines in the order of their writing
        with open(said, "w", encoding="utf-8") as opened, _ended_with_us(command, variables, opened) as process:
            try:
                how_it_ended = f"exit code {process.wait(RUN_LIMIT_S)}"
            except subprocess.TimeoutExpired:
                how_it_ended = f"not done after {RUN_LIMIT_S:.0f} s"
        if process.returncode:
            last = said.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it said nothing"]
            raise ExperimentError(
                f"{cell.command(seed)}: {how_it_ended}: {last[-1]} (all that it said: {said}); "
                "the runs before it are kept: the same command goes on"
            )
        (table,) = place.glob("*/runs.csv")
        with open(table, newline="", encoding="utf-8") as file:
            rows = [{**row, "experiment": self.name, "command": cell.command(seed)} for row in csv.DictReader(file)]
        self._add(rows)
        shutil.rmtree(place)

    def _add(self, rows: list[dict[str, str]]) -> None:
        before = self.table.read_text(encoding="utf-8") if self.table.exists() else ",".join(COLUMNS) + "\n"
        temporary = self.table.with_suffix(".tmp")
        with open(temporary, "w", newline="", encoding="utf-8") as file:
            file.write(before)
            csv.DictWriter(file, COLUMNS, lineterminator="\n").writerows(rows)
        os.replace(temporary, self.table)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """No other process goes on with the same grid meanwhile: it would run the same cells and share the processors."""
    directory = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ExperimentError(f"{folder}: another process is at it; wait, or take another --results_dir") from None
        yield
    finally:
        os.close(directory)


@contextlib.contextmanager
def _ended_with_us(command: list[str], variables: dict[str, str], output: TextIO) -> Iterator[subprocess.Popen[bytes]]:
    """A program that is ended if the block is left early, and all processes that it started with it."""
    process = subprocess.Popen(command, env=variables, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            with contextlib.suppress(ProcessLookupError):  # they may be gone with it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _root() -> Path:
    """Where train.py and the built-in scripts are: they are no part of the package. Raises ExperimentError."""
    root = Path(__file__).parents[1]
    if not (root / "train.py").exists():
        raise ExperimentError(
            f"it runs train.py and the built-in scripts, which are not in {root}: in a clone of the repository install "
            "the package by pip install -e ."
        )
    return root


def machine_name(here: dict[str, Any]) -> str:
    """Short, for the name of a folder: the cards, or how many processors of which kind."""
    if here["cards"]:
        words = f"{len(here['cards'])}x {here['cards'][0]}"
    else:
        words = f"{here['machine']['processors']}x {here['machine']['processor']}"
    words = re.sub(r"(?i)nvidia|processor|\(r\)|\(tm\)|cpu|@.*", " ", words)
    return "_".join(re.findall(r"[\w.]+", words)[:4]).lower()


def main(arguments: list[str]) -> None:
    """`python -m torch_parallel experiment NAME`"""
    parser = OneLineParser(
        prog="python -m torch_parallel experiment",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", nargs="?", choices=tuple(EXPERIMENTS), help="which; none lists them")
    parser.add_argument("--quick", action="store_true", help="the same programs on little data, one seed")
    parser.add_argument("--results_dir", help="folder for the results (default: results; with --quick results/runs)")
    options = parser.parse_args(arguments)
    if options.name is None:
        for name, each in EXPERIMENTS.items():
            print(f"{name:28}{each.what}; {len(each.cells)} cells, seeds {', '.join(map(str, each.seeds))}")
        return
    gpus = torch.cuda.device_count()
    experiment = EXPERIMENTS[options.name].on(gpus)
    if options.quick:
        experiment = experiment.quick()
    name = f"{options.name}_gpu" if gpus else options.name
    results_dir = options.results_dir or ("results/runs/quick" if options.quick else "results")
    try:
        if not experiment.cells:
            raise ExperimentError(
                f"all its cells need more GPUs than {gpus}; on the CPU it runs with CUDA_VISIBLE_DEVICES= before it"
            )
        _root()
        experiment, lines = at_hand(experiment)
        for line in lines:
            print(line, flush=True)
        grid = Grid(name, experiment, experiment.seeds, results_dir)
        grid.run()
        print(grid.summary())
    except (ExperimentError, Unequal, DamagedResults, DataError) as error:
        sys.exit(f"experiment {options.name}: {error}")
    if len(grid.seeds) < 3:
        print("one repeat only: nothing here is to be compared")
