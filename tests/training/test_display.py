"""What a run shows: who trains on what before it, one line an epoch, nothing at all where it is to be silent."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm

from torch_parallel.results import RunFolder
from torch_parallel.status import StatusBoard
from torch_parallel.training import display as module
from torch_parallel.training.config import RunConfig
from torch_parallel.training.display import Display
from torch_parallel.training.record import Epoch, RankEpoch, Saved, Started
from torch_parallel.workloads import Dataset
from torch_parallel.workloads.workload import Workload


@pytest.fixture(autouse=True)
def four_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "usable_cpus", lambda: 4)
    monkeypatch.setattr(module, "threads_per_worker", lambda n: max(1, 4 // n))


def display(
    tmp_path: Path, train_size: int = 100, verbose: bool = True, device: str = "cpu", **options: Any
) -> Display:
    targets = torch.zeros(train_size, dtype=torch.int64)
    dataset = Dataset("small", targets, targets, targets, targets, 2, (), (), "this test")
    config = RunConfig(**{"n_gpus": 2, "epochs": 3, **options}).resolved("small", train_size, train_size)
    workload = Workload(torch.nn.Identity, dataset.task, dataset.samples, "net")
    return Display(config, workload, RunFolder(str(tmp_path), "x"), device, verbose)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {},
            ["ring_all_reduce: 2 workers on cpu, 2 threads each; net, batch of 64 over all workers (at most 32 each), "
             "2 steps an epoch"],
        ),
        (
            {"strategy": "param_server", "n_gpus": 4, "batch_size": 10},
            ["param_server: 3 workers and 1 server on cpu, 1 thread each; net, batch of 10 over all workers (at most 4 "
             "each), 10 steps an epoch"],
        ),
        (
            {"n_gpus": 1, "batch_size": 1000},  # more than there are samples
            ["ring_all_reduce: 1 worker on cpu, 4 threads each; net, batch of 1000 over all workers (at most 100 "
             "each), 1 step an epoch"],
        ),
        (
            {"n_gpus": 6, "batch_size": 2},
            ["ring_all_reduce: 6 workers on cpu, 1 thread each; net, batch of 2 over all workers (at most 1 each), "
             "50 steps an epoch",
             "only 2 of the 6 workers get a sample in a step",
             "6 workers share 4 processors: expect no speed-up over fewer workers"],
        ),
    ],
)  # fmt: skip
def test_introduction(
    options: dict[str, Any], expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    display(tmp_path, **options).introduce(["the device", None, "the data"])
    assert capsys.readouterr() == ("\n".join(["the device", "the data", *expected, ""]), "")


@pytest.mark.parametrize(
    ("device", "strategy", "flags", "said"),
    [
        ("cuda", "ring_all_reduce", {"steps_csv"}, "--steps_csv: GPUs exchange by torch's operations"),
        ("cuda", "param_server", {"steps_csv", "trace"}, "--steps_csv and --trace: GPUs exchange"),
        ("cuda", "ring_all_reduce", set(), None),
        ("cuda", "ddp", {"trace"}, None),
        ("cpu", "ring_all_reduce", {"trace"}, None),
    ],
)
def test_what_is_watched_on_gpus_is_said_to_be_slower(
    device: str, strategy: str, flags: set[str], said: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {name: str(tmp_path / name) for name in flags}
    display(tmp_path, device=device, strategy=strategy, **options).introduce([])
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(said) if said else "exchange by" not in line


def an_epoch(**more: Any) -> Epoch:
    """With a server and two workers; each has a wait of its own."""
    ranks = [
        RankEpoch(0.0, 0.5, 9.0, 0.25, [0.0, 4.0, 5.0], [0, 8, 8]),
        RankEpoch(1.0, 0.5, 2.0, 0.0, [2.0, 0.0, 0.0], [4, 0, 0]),
        RankEpoch(2.0, 0.25, 4.0, 0.0, [4.0, 0.0, 0.0], [4, 0, 0]),
    ]
    values = {"epoch": 2, "steps": 5, "train_loss": 0.12345, "test_loss": 0.5, "test_accuracy": 0.98765}
    return Epoch(
        **{
            **values,
            "train_s": 9.0,
            "samples_per_s": 12345.6,
            "skipped_steps": 0,
            "ranks": ranks,
            "test_s": 1.0,
            **more,
        }
    )


def test_one_line_an_epoch_with_the_mean_over_the_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = display(tmp_path, strategy="param_server", n_gpus=3)
    shown.message(1, an_epoch())
    line = (
        "epoch 2/3  train loss 0.1235  test accuracy 98.77 %  12,346 samples/s  "
        "compute 1.50 s  exchange 0.38 s  wait 3.00 s  update 0.25 s"
    )
    assert capsys.readouterr() == (line + "\n", "")
    shown.message(1, an_epoch(skipped_steps=4))
    assert capsys.readouterr().out == line + "  4 steps skipped so far\n"
    shown.message(0, Saved(7, "runs/step_7.pt"))
    assert capsys.readouterr().out == "checkpoint of step 7: runs/step_7.pt\n"


@pytest.mark.parametrize(
    "untold, line",
    [
        (("exchange_s",), "compute and exchange 1.50 s  wait 3.00 s  update 0.25 s"),
        (("wait_s",), "compute 1.50 s  exchange and wait 0.38 s  update 0.25 s"),
        (("wait_s", "update_s"), "compute 1.50 s  exchange, wait and update 0.38 s"),
    ],
)
def test_what_cannot_be_told_apart_is_named_with_what_it_is_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], untold: tuple[str, ...], line: str
) -> None:
    """And is left blank in the table."""
    shown = display(tmp_path, strategy="param_server", n_gpus=3)
    epoch = an_epoch()
    for spent in epoch.ranks:
        for part in untold:
            setattr(spent, part, math.nan)
    shown.message(1, epoch)
    assert capsys.readouterr().out.endswith(f"samples/s  {line}\n")
    with open(shown.folder.path / "runs.csv", newline="") as file:
        assert all(
            (row[part] == "") == (part in untold)
            for row in csv.DictReader(file)
            for part in ("exchange_s", "wait_s", "update_s")
        )


def test_the_same_figures_are_written_down_by_rank(tmp_path: Path) -> None:
    shown = display(tmp_path, strategy="param_server", n_gpus=3, verbose=False)
    shown.message(1, an_epoch(skipped_steps=4))
    with open(shown.folder.path / "runs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["rank"], row["role"]) for row in rows] == [("0", "server"), ("1", "worker"), ("2", "worker")]
    assert [float(row["wait_s"]) for row in rows] == [9, 2, 4]
    assert json.loads(rows[0]["waited_for_s"]) == [0, 4, 5]
    assert json.loads(rows[2]["received_bytes"]) == [4, 0, 0]
    for row in rows:
        assert (row["epoch"], row["skipped_steps"], row["threads"]) == ("2", "4", "1")
        assert float(row["samples_per_s"]) == 12345.6


def test_the_bar_follows_the_first_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 samples in batches of 64 are two steps an epoch; it never goes back."""
    shown = display(tmp_path, strategy="param_server", n_gpus=3)
    board = StatusBoard(memoryview(bytearray(StatusBoard.bytes_needed(3))), 3)
    bar = tqdm(total=6, disable=True)
    monkeypatch.setattr(bar, "update", lambda steps: setattr(bar, "n", bar.n + steps))
    shown.bar = bar
    seen = []
    for epoch, step, samples in ((0, 0, 0), (1, 1, 0), (1, 2, 64), (1, 2, 100), (2, 1, 0), (2, 2, 64), (1, 1, 0)):
        board.reporter(1).step(epoch, step, samples)
        shown.tick(board)
        seen.append(bar.n)
    assert seen == [0, 0, 1, 1, 2, 3, 3]


def test_silence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = display(tmp_path, strategy="param_server", n_gpus=3, verbose=False)
    shown.introduce(["the device"])
    shown.message(1, an_epoch())
    shown.close()
    assert capsys.readouterr() == ("", "")


def test_no_output_to_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without one, started with `>&-`, has None for it."""
    monkeypatch.setattr("sys.stdout", None)
    shown = display(tmp_path, strategy="param_server", n_gpus=3)
    shown.introduce(["the device"])
    shown.message(1, an_epoch())
    assert (shown.folder.path / "runs.csv").exists()


def test_the_part_of_the_gpus_peak_is_operations_a_second_over_what_all_of_them_can_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two A100, 19.5 T in float32: 195 G operations a sample and 100 samples a second are one half of it."""
    monkeypatch.setattr(module, "card_names", lambda: ["NVIDIA A100-SXM4-40GB"] * 3)
    shown = display(tmp_path, verbose=False)
    shown.message(0, Started(0, [], True, 195e9, "full"))
    ranks = [RankEpoch(exchanged_part=0.25, waited_part=0.125), RankEpoch(exchanged_part=0.25)]
    shown.message(0, an_epoch(train_s=2.0, samples_per_s=100.0, test_s=4.0, ranks=ranks))
    with open(tmp_path.joinpath(shown.folder.path, "runs.csv"), newline="", encoding="utf-8") as file:
        row, other = csv.DictReader(file)
    assert (row["exchanged_part"], row["waited_part"], other["waited_part"]) == ("0.25", "0.125", "")
    assert float(row["flop_utilisation"]) == pytest.approx(0.5)
    assert float(row["test_samples_per_s"]) == 25.0 and row["tokens_per_s"] == ""
    assert (row["setup"], row["per_gpu_batch"], row["nodes"]) == ("1_2", "32", "1")
