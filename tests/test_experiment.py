"""Grids of runs: their order, what they write, and that a grid that was stopped goes on."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from torch_parallel import experiment
from torch_parallel.analysis.runs import Unequal, by_label, read_runs
from torch_parallel.experiment import Grid
from torch_parallel.grids import EXPERIMENTS, SEEDS, Cell, Experiment, ddp, train_py
from torch_parallel.results import COLUMNS

ROOT = Path(__file__).parents[1]
TWO = Experiment("two cells", [train_py("ring_all_reduce", 2, epochs=1), ddp(2)])


def commands(grid: Grid) -> list[str]:
    return [cell.command(seed) for cell, seed in grid.runs()]


def test_every_other_repeat_takes_the_cells_in_the_reverse_order(tmp_path: Path) -> None:
    ours, theirs = (
        "OMP_NUM_THREADS=1 python train.py --strategy ring_all_reduce --n_gpus 2 --epochs 1",
        "OMP_NUM_THREADS=1 python ring_all_reduce_builtin.py",
    )
    assert commands(Grid("two", TWO, (0, 1, 2), str(tmp_path))) == [
        f"{ours} --seed 0",
        f"{theirs} --n_gpus 2 --seed 0",
        f"{theirs} --n_gpus 2 --seed 1",
        f"{ours} --seed 1",
        f"{ours} --seed 2",
        f"{theirs} --n_gpus 2 --seed 2",
    ]


def test_threads_are_part_of_the_command() -> None:
    assert Cell("train.py", (), threads=1).command(7) == "OMP_NUM_THREADS=1 python train.py --seed 7"


@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_grids_repeat_each_cell_at_least_three_times_and_no_two_cells_are_one(name: str) -> None:
    cells = EXPERIMENTS[name].cells
    assert len(EXPERIMENTS[name].seeds) >= len(SEEDS) == 3 and len(set(cells)) == len(cells)
    assert all(cell.threads >= 1 for cell in cells)
    models = {dict(cell.flags)["model"] for cell in cells}
    others = {name: {"cnn", "mobilenet_v2"} for name in ("param_server", "ring_all_reduce")}
    others |= {name: {"bert", "vit"} for name in ("transformers_batch", "propagation")}
    others |= {"scaling_mobilenet_v2": {"mobilenet_v2"}, "transformers_learning_rate": {"bert"}, "machines": {"bert"}}
    others |= {f"learning_{model}": {model} for model in ("bert", "vit", "gpt2")}
    assert models == others.get(name, {"cnn"})


def test_the_grids_are_those_that_were_asked_for() -> None:
    sizes = {
        dict(cell.flags)["train_size"] for cell in EXPERIMENTS["scaling"].cells if dict(cell.flags)["model"] == "cnn"
    }
    assert sizes == {1_000, 10_000, 60_000}
    programs = {cell.program for each in EXPERIMENTS.values() for cell in each.cells}
    assert programs == {"train.py", "param_server_builtin.py", "ring_all_reduce_builtin.py"}


def test_on_gpus_each_worker_has_one_and_a_server_shares() -> None:
    """Of 17 cells of the scaling grid, those of 4 workers need 4 GPUs; of one, the ring's with one worker is left."""
    cells = EXPERIMENTS["scaling"].cells
    assert len(cells) == 17 and EXPERIMENTS["scaling"].on(0).cells == EXPERIMENTS["scaling"].on(4).cells == cells
    flags = [dict(cell.flags) for cell in EXPERIMENTS["scaling"].on(2).cells]
    assert [each["n_gpus"] for each in flags] == [1, 2, 3, 2, 2] * 3
    assert {each["n_gpus"] for each in flags if each.get("strategy") == "param_server"} == {3}
    alone = [dict(cell.flags) for cell in EXPERIMENTS["scaling"].on(1).cells]
    assert [each["strategy"] for each in alone] == ["ring_all_reduce"] * 3


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs write one row and are remembered, in place of being run; the third one fails. The code is committed."""
    here = experiment.environment()
    monkeypatch.setattr(experiment, "environment", lambda: here | {"commit": "abc"})
    seen: list[str] = []

    def run_one(grid: Grid, cell: Cell, seed: int) -> None:
        if len(seen) == 2:
            seen.append("failed")
            raise experiment.ExperimentError("the third one fails")
        seen.append(cell.command(seed))
        grid._add([{"run_id": str(len(seen)), "command": cell.command(seed)}])

    monkeypatch.setattr(Grid, "_run_one", run_one)
    monkeypatch.setattr(Grid, "summary", lambda grid: "")
    return seen


def test_a_grid_that_was_stopped_goes_on(tmp_path: Path, written: list[str]) -> None:
    grid = Grid("two", TWO, (0, 1), str(tmp_path))
    with pytest.raises(experiment.ExperimentError):
        grid.run()
    assert json.loads((grid.folder.path / "manifest.json").read_text())["status"] == "failed"
    again = Grid("two", TWO, (0, 1), str(tmp_path))
    assert again.folder.path == grid.folder.path
    again.run()
    assert not (grid.folder.path / "runs").exists()
    assert written == [*commands(grid)[:2], "failed", *commands(grid)[2:]]
    with open(again.table, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["command"] for row in rows] == commands(grid) and list(rows[0]) == list(COLUMNS)
    assert json.loads((grid.folder.path / "manifest.json").read_text())["status"] == "completed"


def test_two_processes_do_not_make_the_same_grid(tmp_path: Path, written: list[str]) -> None:
    grid = Grid("two", TWO, (0,), str(tmp_path))
    grid.folder.write_manifest(**(grid.here | grid.must_match), status="running")
    with experiment._alone_in(grid.folder.path):  # as the first of them does
        second = Grid("two", TWO, (0,), str(tmp_path))
        assert second.folder.path == grid.folder.path
        with pytest.raises(experiment.ExperimentError, match="another process is at it"):
            second.run()
    assert json.loads((grid.folder.path / "manifest.json").read_text())["status"] == "running"
    second.run()


def test_runs_that_cannot_be_compared_end_the_grid_after_the_first_repeat(
    tmp_path: Path, written: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def differ(grid: Grid) -> str:
        raise Unequal("they differ in steps")

    monkeypatch.setattr(Grid, "summary", differ)
    with pytest.raises(Unequal):
        Grid("two", TWO, (0, 1, 2), str(tmp_path)).run()
    assert len(written) == 2


def test_but_not_with_other_code_or_another_grid(
    tmp_path: Path, written: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = Grid("two", TWO, (0, 1), str(tmp_path))
    with pytest.raises(experiment.ExperimentError):
        grid.run()
    assert Grid("two", TWO, (0, 1, 2), str(tmp_path)).folder.path != grid.folder.path
    here = experiment.environment()
    monkeypatch.setattr(experiment, "environment", lambda: here | {"commit": "another"})
    assert Grid("two", TWO, (0, 1), str(tmp_path)).folder.path != grid.folder.path


@pytest.mark.parametrize("commit", [None, "0123abc-with-changes"])
def test_nor_with_code_of_which_nobody_knows_whether_it_has_changed(
    tmp_path: Path, written: list[str], monkeypatch: pytest.MonkeyPatch, commit: str | None
) -> None:
    """A copy outside of a repository, and uncommitted changes."""
    here = experiment.environment()
    monkeypatch.setattr(experiment, "environment", lambda: here | {"commit": commit})
    grid = Grid("two", TWO, (0, 1), str(tmp_path))
    with pytest.raises(experiment.ExperimentError):
        grid.run()
    assert Grid("two", TWO, (0, 1), str(tmp_path)).folder.path != grid.folder.path


def test_a_finished_grid_is_not_touched_again(tmp_path: Path, written: list[str]) -> None:
    first = Grid("two", TWO, (0,), str(tmp_path))
    first.run()
    assert Grid("two", TWO, (0,), str(tmp_path)).folder.path != first.folder.path


def test_a_run_that_fails_is_named_with_its_own_words(tmp_path: Path) -> None:
    broken = Experiment("broken", [train_py("ring_all_reduce", 2, dataset="digits", train_size=10**6)])
    with pytest.raises(
        experiment.ExperimentError, match=r"1 python train.py .* exit code 2: .*train_size.*goes on"
    ) as raised:
        Grid("broken", broken, (0,), str(tmp_path)).run()
    (said,) = tmp_path.glob("*/*/runs/*/said.txt")
    assert str(said) in str(raised.value) and "\n" not in str(raised.value)
    # who speaks last need not be who failed first, so every line is kept
    assert "train.py: error: " in said.read_text()


def test_a_run_that_does_not_end_is_ended_and_named_with_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that speaks within a fraction of a second, and would then sleep for an hour."""
    program = tmp_path / "endless.py"
    program.write_text("import os, time\nprint(os.getpid())\nprint('epoch 1')\ntime.sleep(3600)\n")
    monkeypatch.setattr(experiment, "RUN_LIMIT_S", 5.0)
    endless = Experiment("endless", [Cell(str(program), (), threads=1)])
    with pytest.raises(
        experiment.ExperimentError,
        match=r"endless\.py --seed 0: not done after 5 s: epoch 1 \(all that it said: .*goes on",
    ):
        Grid("endless", endless, (0,), str(tmp_path)).run()
    (said,) = tmp_path.glob("*/*/runs/*/said.txt")
    pid, epoch = said.read_text().splitlines()
    assert epoch == "epoch 1" and not Path(f"/proc/{pid}").exists()


@pytest.mark.exhaustive
def test_the_command_runs_a_small_grid_for_real(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch_parallel", "experiment", "ring_all_reduce", "--quick"]
    done = subprocess.run(
        [*command, "--results_dir", str(tmp_path)], capture_output=True, text=True, timeout=110, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert "held equal: kind measured; dataset digits" in done.stdout
    (folder,) = (tmp_path / "ring_all_reduce").iterdir()
    runs = read_runs(folder)
    assert list(by_label(runs)) == ["ring_all_reduce, 2 workers", "ddp, 2 workers"]
    assert all(run.setting("command").startswith("OMP_NUM_THREADS=1 python ") for run in runs)
    # the same training: the same accuracy after every epoch
    ours, theirs = ([epoch.test_accuracy for epoch in run.epochs] for run in runs)
    assert ours == theirs and len(ours) == 2


def test_the_quick_form_has_every_slow_worker_and_link_too() -> None:
    quick = EXPERIMENTS["stragglers"].quick()
    assert quick.seeds == (0,) and len(quick.cells) == len(EXPERIMENTS["stragglers"].cells)
    assert {dict(cell.flags).get("straggler") for cell in quick.cells} >= {"3:8x", "4:8x", None}


def test_slow_workers_under_every_kind_of_strategy_at_1_2_4_and_8_times() -> None:
    cells = [dict(cell.flags) for cell in EXPERIMENTS["stragglers"].cells]
    for strategy in {cell["strategy"] for cell in cells}:
        slow = [cell["straggler"] for cell in cells if cell["strategy"] == strategy and "straggler" in cell]
        assert [each.partition(":")[2] for each in slow] == ["1x", "2x", "4x", "8x"]
    assert {"ring_all_reduce", "param_server", "param_server_async"} < {cell["strategy"] for cell in cells}


def test_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    experiment.main([])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(EXPERIMENTS)
