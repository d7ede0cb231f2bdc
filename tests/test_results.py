"""What a run leaves behind: a folder of its own, how it ended, and figures that add up."""

from __future__ import annotations

import csv
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torch_parallel import RunConfig, results, train
from torch_parallel.results import COLUMNS, ResultsError, RunFolder, environment
from torch_parallel.strategies import FROM_SCRATCH
from torch_parallel.workloads import Dataset

FLOAT = 4


def manifest_of(folder: RunFolder | str) -> dict[str, Any]:
    path = folder.path if isinstance(folder, RunFolder) else Path(folder)
    content: dict[str, Any] = json.loads((path / "manifest.json").read_text())
    return content


def rows_of(folder: RunFolder | str) -> list[dict[str, str]]:
    path = folder.path if isinstance(folder, RunFolder) else Path(folder)
    with open(path / "runs.csv", newline="") as file:
        return list(csv.DictReader(file))


# The folder.


def test_runs_that_start_in_the_same_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Clock:
            return cls(2001, 2, 3, 4, 5, 6)

    monkeypatch.setattr(results.datetime, "datetime", Clock)
    folders = [RunFolder(str(tmp_path / "runs"), "ring_n2") for _ in range(3)]
    names = ["2001-02-03_040506_ring_n2", "2001-02-03_040506_ring_n2_2", "2001-02-03_040506_ring_n2_3"]
    assert [folder.run_id for folder in folders] == names
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == names


def test_names_from_outside_cannot_leave_the_folder(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path / "runs"), "ring_<lambda>_../../my data_n2")
    assert folder.path.parent == tmp_path / "runs"
    assert folder.run_id.endswith("_ring_lambda_....mydata_n2")


def test_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--results_dir=~/runs` is not expanded by every shell."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RunFolder("~/runs", "x").path.parent == tmp_path / "runs"


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_folder_that_cannot_be_made(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ResultsError) as raised:
        RunFolder(str(tmp_path / place), "x")
    assert f"--results_dir {tmp_path / place}: " in str(raised.value) and "\n" not in str(raised.value)
    assert (tmp_path / "file").read_text() == "mine"


# manifest.json


def test_a_run_that_ends_well(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "x")
    with folder.running(strategy="ring"):
        assert manifest_of(folder)["status"] == "running"
        assert manifest_of(folder)["strategy"] == "ring"
    assert manifest_of(folder)["status"] == "completed"
    assert manifest_of(folder)["strategy"] == "ring"
    started = datetime.datetime.fromisoformat(manifest_of(folder)["started"])
    assert abs(datetime.datetime.now().astimezone() - started) < datetime.timedelta(minutes=1)
    assert [path.name for path in folder.path.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("rank 1 died"), {"status": "failed", "error": "rank 1 died"}),
        (KeyboardInterrupt(), {"status": "interrupted", "error": None}),
        (SystemExit(143), {"status": "interrupted", "error": None}),
    ],
)
def test_a_run_that_does_not(error: BaseException, expected: dict[str, str | None], tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "x")
    with pytest.raises(type(error)), folder.running():
        raise error
    assert {key: manifest_of(folder).get(key) for key in expected} == expected


def test_the_first_error_is_told_even_if_it_cannot_be_written_down(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "x")
    with pytest.raises(RuntimeError, match="the first"), folder.running():
        (folder.path / "manifest.json").unlink()
        folder.path.rmdir()
        raise RuntimeError("the first")


def test_what_is_needed_to_repeat_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["/usr/bin/python3", "-m", "torch_parallel", "bench", "--results_dir", "my runs"]
    monkeypatch.setattr(sys, "orig_argv", arguments)
    told = environment()
    assert shlex.split(told["command"]) == ["python", *arguments[1:]]
    assert told["versions"]["torch"] == torch.__version__
    assert told["versions"]["python"] == platform.python_version()
    assert told["machine"]["processors"] == os.cpu_count()
    assert told["machine"]["memory_bytes"] > 1e8 and told["machine"]["processor"]
    assert len(told["cards"]) == torch.cuda.device_count()
    json.dumps(told)


def test_the_commit_is_that_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(tmp_path), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    code = tmp_path / "package" / "results.py"
    code.parent.mkdir()
    code.write_text("one")
    monkeypatch.setattr(results, "__file__", str(code))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert results._commit() is None  # no repository
    git("init")
    (tmp_path / "other").write_text("")
    git("add", "other")
    git("commit", "-m", "first")
    assert results._commit() is None  # a repository of something else, in which the package is installed
    git("add", "package")
    git("commit", "-m", "second")
    commit = git("rev-parse", "HEAD")
    assert results._commit() == commit and len(commit) == 40
    code.write_text("two")
    assert results._commit() == f"{commit}+changes"


# runs.csv


def test_rows_have_the_columns_in_their_order(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "x")
    folder.append_rows([{"rank": 1, "epoch": 2}])
    folder.append_rows([{"rank": 0, "epoch": 3}])
    lines = (folder.path / "runs.csv").read_text().splitlines()
    assert lines[0] == ",".join(COLUMNS) and len(lines) == 3
    rows = rows_of(folder)
    assert [(row["run_id"], row["epoch"], row["rank"]) for row in rows] == [
        (folder.run_id, "2", "1"),
        (folder.run_id, "3", "0"),
    ]
    assert rows[0]["strategy"] == ""
    with pytest.raises(ValueError, match="no_such_column"):
        folder.append_rows([{"no_such_column": 1}])


def small(count: int) -> Dataset:
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    targets = (inputs.sum(1) > 0).long()
    return Dataset("small", inputs, targets, inputs, targets, 2, (), (), "this test")


def model_of_14() -> nn.Module:
    """14 trainable elements in four tensors; a buffer and a frozen weight, which no step sends."""
    model = nn.Sequential(nn.Linear(4, 2), nn.PReLU(2), nn.BatchNorm1d(2, affine=False))
    assert sum(each.numel() for each in model.parameters()) == 12
    model.append(nn.Linear(2, 1, bias=False))  # 2 more, in a fourth tensor
    return nn.Sequential(model, nn.Linear(1, 2, bias=False).requires_grad_(False))


def a_run(folder: Path, strategy: str, n: int, **options: Any) -> tuple[str, list[dict[str, Any]]]:
    """Folder and rows of a run with 3 epochs of 5 steps."""
    config = RunConfig(
        strategy=strategy,
        n_gpus=n,
        device="cpu",
        epochs=3,
        batch_size=12,
        results_dir=str(folder),
        deadline_s=30,
        **options,
    )
    trained = train(config, make_model=model_of_14, dataset=small(60), verbose=False)
    assert [each["epoch"] for each in trained.history] == [1, 2, 3]
    return trained.folder, list(rows_of(trained.folder))


@pytest.mark.parametrize("strategy", ("ring_all_reduce", "param_server", "sharded_param_server"))
def test_one_row_for_each_epoch_and_rank(strategy: str, tmp_path: Path) -> None:
    folder, rows = a_run(tmp_path, strategy, 3, optimizer="adam", seed=4)
    assert [(int(row["epoch"]), int(row["rank"])) for row in rows] == [(e, r) for e in (1, 2, 3) for r in (0, 1, 2)]
    served = FROM_SCRATCH[strategy].server_count
    assert [row["role"] for row in rows[:3]] == ["server"] * served + ["worker"] * (3 - served)
    for row in rows:
        told = {
            "run_id": Path(folder).name,
            "kind": "measured",
            "strategy": strategy,
            "model": "model_of_14",
            "dataset": "small",
            "train_size": "60",
            "n": "3",
            "nodes": "1",
            "batch_size": "12",
            "seed": "4",
            "device": "cpu",
            "dtype": "float32",
            "optimizer": "adam",
            "lr": "0.001",
            "steps": "5",
        }
        assert {name: row[name] for name in told} == told
        assert int(row["threads"]) >= 1 and json.loads(row["options"])
        assert 0 <= float(row["test_accuracy"]) <= 1 and float(row["train_loss"]) > 0
        # the parts of the time are those of the whole, and the waiting is somebody's
        parts = [float(row[part]) for part in ("compute_s", "exchange_s", "wait_s", "update_s")]
        assert all(part >= -1e-6 for part in parts)
        waited = json.loads(row["waited_for_s"])
        assert len(waited) == 3 and sum(waited) == pytest.approx(parts[2]) and waited[int(row["rank"])] == 0
    first_worker = [row for row in rows if int(row["rank"]) == served]
    for row in first_worker:
        parts = [float(row[part]) for part in ("compute_s", "exchange_s", "wait_s", "update_s")]
        assert sum(parts) == pytest.approx(float(row["train_s"]), rel=1e-6)
    manifest = manifest_of(folder)
    assert manifest["status"] == "completed" and manifest["config"]["optimizer"] == "adam"
    assert {"command", "commit", "machine", "cards", "versions", "started", "run_id"} <= manifest.keys()


def bytes_by_source(rows: list[dict[str, Any]], epoch: int) -> list[list[int]]:
    """By receiver and source."""
    return [json.loads(row["received_bytes"]) for row in rows if int(row["epoch"]) == epoch]


def test_bytes_of_the_ring(tmp_path: Path) -> None:
    """14 gradients and 4 marks are 18 elements, in chunks of 6, 6, 6: two halves of two rounds, each with a chunk."""
    _, rows = a_run(tmp_path, "ring_all_reduce", 3)
    per_epoch = 5 * (2 * 2 * 6) * FLOAT
    for epoch in (1, 2, 3):
        assert bytes_by_source(rows, epoch) == [[0, 0, per_epoch], [per_epoch, 0, 0], [0, per_epoch, 0]]


def test_bytes_of_a_ring_with_uneven_chunks(tmp_path: Path) -> None:
    """Chunks of 5, 5, 4, 4. Rank r sends all but its own to be added, then all but its right neighbour's."""
    _, rows = a_run(tmp_path, "ring_all_reduce", 4)
    sizes = [5, 5, 4, 4]
    sent = [5 * FLOAT * (36 - sizes[rank] - sizes[(rank + 1) % 4]) for rank in range(4)]
    assert sent == [520, 540, 560, 540]
    received = bytes_by_source(rows, 2)
    for rank in range(4):
        expected = [0, 0, 0, 0]
        expected[(rank - 1) % 4] = sent[(rank - 1) % 4]
        assert received[rank] == expected
    assert sum(map(sum, received)) == 5 * FLOAT * 2 * 3 * 18  # 2 (P-1) S


def test_bytes_of_the_parameter_server(tmp_path: Path) -> None:
    """Workers push 14 gradients and 4 marks, and pull 14 parameters."""
    _, rows = a_run(tmp_path, "param_server", 3)
    push, pull = 5 * 18 * FLOAT, 5 * 14 * FLOAT
    for epoch in (1, 2, 3):
        assert bytes_by_source(rows, epoch) == [[0, push, push], [pull, 0, 0], [pull, 0, 0]]


def test_figures_are_on_disk_when_an_epoch_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted run keeps the epochs that it finished."""
    seen: list[int] = []
    append_rows = RunFolder.append_rows

    def interrupt_after_two(folder: RunFolder, rows: list[dict[str, Any]]) -> None:
        append_rows(folder, rows)
        seen.append(len(rows_of(folder)))
        if len(seen) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "append_rows", interrupt_after_two)
    with pytest.raises(KeyboardInterrupt):
        a_run(tmp_path, "ring_all_reduce", 2)
    assert seen == [2, 4]
    (folder,) = tmp_path.iterdir()
    assert len(rows_of(str(folder))) == 4
    assert manifest_of(str(folder))["status"] == "interrupted"
