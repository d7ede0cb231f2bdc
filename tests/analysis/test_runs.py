"""Figures of an experiment read back, against values worked out by hand, and the refusal to compare unlike runs."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.container import ErrorbarContainer

from torch_parallel.analysis import findings, plots
from torch_parallel.analysis.figure import Figure
from torch_parallel.analysis.runs import ExperimentMissing, Unequal, by_label, held_equal, newest, read_runs, select
from torch_parallel.results import COLUMNS

COMMON = {
    "experiment": "made",
    "kind": "measured",
    "model": "cnn",
    "dataset": "digits",
    "train_size": 100,
    "test_size": 50,
    "nodes": 1,
    "batch_size": 10,
    "device": "cpu",
    "dtype": "float32",
    "optimizer": "sgd",
    "lr": 0.1,
    "steps": 10,
    "commit": "abc",
}


def made(strategy: str, seed: int, train_s: list[float], workers: int = 2, **other: Any) -> list[dict[str, Any]]:
    """The rows of a run: its worker 0 computes for half of each epoch and updates for a tenth, worker 1 computes for
    all of it; accuracy grows by 0.1 an epoch from seed / 100."""
    rows = []
    for epoch, seconds in enumerate(train_s, start=1):
        for rank in range(workers):
            parts = [(0.5, 0.3, 0.1, 0.1), (1.0, 0.0, 0.0, 0.0)][rank % 2]
            names = ("compute_s", "exchange_s", "wait_s", "update_s")
            rows.append(
                COMMON
                | {"run_id": f"{strategy} {workers} {seed}", "strategy": strategy, "n": workers, "workers": workers}
                | {"threads": 1, "seed": seed, "epoch": epoch, "rank": rank, "role": "worker", "train_s": seconds}
                | {"samples_per_s": 100 / seconds, "train_loss": 1.0, "test_loss": 1.0}
                | {"test_accuracy": epoch / 10 + seed / 100}
                | {name: part * seconds for name, part in zip(names, parts, strict=True)}
                | other
            )
    return rows


def written(folder: Path, *runs: list[dict[str, Any]], status: str = "completed") -> Path:
    folder.mkdir(parents=True)
    with open(folder / "runs.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        for rows in runs:
            writer.writerows(rows)
    about = {"started": f"2026-01-01T00:00:00 {folder.name}", "status": status, "commit": "abc", "command": "python x"}
    about |= {"machine": {"processors": 2, "processor": "a processor"}, "cards": []}
    (folder / "manifest.json").write_text(json.dumps(about | {"versions": {"torch": "2", "python": "3"}}))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(
        tmp_path / "a",
        *(made("ring_all_reduce", seed, [9.0, 2.0 + seed, 4.0 + seed]) for seed in (0, 1, 2)),
        *(made("ddp", seed, [9.0, 5.0, 7.0], exchange_s=1.5, wait_s="") for seed in (0, 1, 2)),
    )


def test_runs_with_other_options_have_other_labels(tmp_path: Path) -> None:
    place = written(
        tmp_path / "options",
        made("ring_all_reduce", 0, [1.0], options='{"bucket_mb": 25.0, "compute_ms": 10, "straggler": "1:4x"}'),
        made("ring_all_reduce", 1, [1.0], options='{"bucket_mb": 25.0, "aggregate": "sum"}'),
        made("ring_all_reduce", 2, [1.0], options='{"bucket_mb": 25.0}'),
    )
    assert list(by_label(read_runs(place))) == [
        "ring_all_reduce, 2 workers, straggler 1:4x",
        "ring_all_reduce, 2 workers, aggregate sum",
        "ring_all_reduce, 2 workers",
    ]


def test_times_leave_the_first_epoch_out(folder: Path) -> None:
    ring = select(read_runs(folder), strategy="ring_all_reduce")
    assert [run.epoch_s for run in ring] == [3.0, 4.0, 5.0]  # the medians of 2 and 4, of 3 and 5, of 4 and 6
    assert [epoch.test_accuracy for epoch in ring[2].epochs] == pytest.approx([0.12, 0.22, 0.32])


def test_parts_are_means_over_the_workers(folder: Path) -> None:
    first, *_ = select(read_runs(folder), strategy="ring_all_reduce")
    assert first.epochs[1].parts_s == pytest.approx({"compute": 1.5, "exchange": 0.3, "wait": 0.1, "update": 0.1})
    assert first.part_s("compute") == pytest.approx(0.75 * 3.0)
    ddp, *_ = select(read_runs(folder), strategy="ddp")
    assert ddp.part_s("wait") is None and ddp.part_s("exchange") == 1.5


def test_what_is_held_equal_is_told(folder: Path) -> None:
    held = held_equal(read_runs(folder))
    assert held["batch_size"] == "10" and held["seeds"] == "0, 1, 2" and held["epochs"] == "3"
    assert held["processors"] == "2" and held["commit"] == "abc"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 20),
        ("train_size", 99),
        ("test_size", 49),
        ("optimizer", "adam"),
        ("lr", 0.2),
        ("dtype", "float64"),
        ("device", "cuda"),
        ("steps", 9),
        ("dataset", "mnist"),
        ("commit", "other"),
        ("kind", "emulated"),
    ],
)
def test_unlike_runs_are_not_compared(tmp_path: Path, name: str, value: Any) -> None:
    folder = written(tmp_path / "a", made("ring_all_reduce", 0, [1.0]), made("ddp", 0, [1.0], **{name: value}))
    with pytest.raises(Unequal, match=f"differ in {name} .*{value}"):
        held_equal(read_runs(folder))
    held_equal(read_runs(folder), but=(name,))


def test_nor_are_other_seeds_numbers_of_epochs_and_processors(tmp_path: Path) -> None:
    runs = [
        made("ring_all_reduce", 0, [1.0]),
        made("ddp", 1, [1.0]),
        made("param_server", 0, [1.0, 1.0]),
        made("data_parallel", 0, [1.0], workers=1),
    ]
    ring, ddp, server, builtin = read_runs(written(tmp_path / "a", *runs))
    for other, difference in ((ddp, "seeds"), (server, "epochs"), (builtin, "processors")):
        with pytest.raises(Unequal, match=f"differ in {difference}"):
            held_equal([ring, other])
    held_equal([ring, builtin], same=())


def test_nor_mixtures_though_both_sides_have_the_same(tmp_path: Path) -> None:
    sides = ("ring_all_reduce", "ddp")
    runs = [made(side, seed, [1.0], lr=lr) for seed, lr in ((0, 0.5), (1, 0.02)) for side in sides]
    with pytest.raises(Unequal, match=r"differ in lr \(ring_all_reduce, 2 workers: 0.02, 0.5; ddp"):
        held_equal(read_runs(written(tmp_path / "a", *runs)))


def test_labels() -> None:
    rows = [("ring_all_reduce", 1), ("ring_all_reduce", 4), ("ddp", 2), ("data_parallel", 1)]
    assert _labels(rows) == [
        "one process",
        "ring_all_reduce, 4 workers",
        "ddp, 2 workers",
        "data_parallel, plain module, 1 threads",
    ]


def _labels(rows: list[tuple[str, int]]) -> list[str]:
    from torch_parallel.analysis.runs import Run

    return list(by_label([Run("", name, n, n, 1, 0, {"device": "cpu"}) for name, n in rows]))


def test_the_newest_complete_results(tmp_path: Path) -> None:
    for name, status in (("1", "completed"), ("2", "completed"), ("3", "running")):
        written(tmp_path / "made" / name, made("ddp", 0, [1.0]), status=status)
    assert newest("made", tmp_path) == tmp_path / "made" / "2"
    with pytest.raises(ExperimentMissing, match="make them with: python -m torch_parallel experiment other"):
        newest("other", tmp_path)


def test_findings_say_what_was_measured(folder: Path) -> None:
    told = findings.ring_beside_ddp(folder)
    assert "the ring's epoch takes 0.67 of DistributedDataParallel's time" in told  # medians 4 and 6
    assert "They differ by +2.00 s" in told
    # of the medians 4 and 6: compute is 0.75, update 0.05, the ring's exchange and waiting 0.2, DDP's exchange 1.5
    assert "compute +1.50 s, exchange and wait +0.70 s, update +0.10 s" in told
    assert "accuracies differ by at most 0.00 points" in told
    assert "6 runs" in findings.about(folder)
    assert "held equal: kind measured; dataset digits" in findings.summary(folder)


def scaled(results: Path) -> list[Path]:
    """On GPUs, and without: one process takes 4 s an epoch for 100 images, a ring of two 2.5 s, DataParallel 8 s."""
    folders = []
    for experiment, device in (("scaling_gpu", "cuda"), ("scaling", "cpu")):
        runs = [made("ring_all_reduce", 0, [9.0, of], n, device=device) for n, of in ((1, 4.0), (2, 2.5))]
        runs.append(made("data_parallel", 0, [9.0, 8.0], 1, n=2, threads=2, device=device))
        folders.append(written(results / experiment / "a", *runs))
    return folders


def test_data_parallel_counts_by_its_gpus_and_is_one_process_without_any(tmp_path: Path) -> None:
    told = [findings.scaling_found(folder) for folder in scaled(tmp_path)]
    ring = "cnn, ring_all_reduce, 2 workers: 1 times the images take 1.0 times as long; with 100 images 1.60 times"
    assert all(ring in of_device for of_device in told)
    builtin = [line for of_device in told for line in of_device.splitlines() if "data_parallel" in line]
    assert len(builtin) == 1 and "cnn, data_parallel, 2 GPUs" in builtin[0]
    assert "0.50 times the speed of one process (0.50 to 0.50), efficiency 25 %" in builtin[0]


def test_scaling_draws_each_device_and_no_panel_of_what_was_not_measured(tmp_path: Path) -> None:
    on_gpus, on_cpu = scaled(tmp_path)
    runs = [made("ring_all_reduce", 0, [1.0], n, model="mobilenet_v2") for n in (1, 2)]
    written(tmp_path / "scaling_mobilenet_v2" / "a", *runs)
    assert [axes.get_title() for axes in plots.scaling_with_data(on_cpu).axes] == ["cnn", "mobilenet_v2"]
    assert [axes.get_title() for axes in plots.scaling_with_data(on_gpus).axes] == ["cnn", ""]
    threads = "one process, 2 threads"
    told = [_first_points(plots.scaling_with_workers(folder)) for folder in (on_gpus, on_cpu)]
    assert told[0]["data_parallel"] == pytest.approx([2.03, 0.5]) and threads not in told[0]
    assert told[1][threads][1] == pytest.approx(0.5) and "data_parallel" not in told[1]


def _first_points(figure: Figure) -> dict[str, list[float]]:
    """Of what the first panel's legend tells."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    lines = [handle[0] if isinstance(handle, ErrorbarContainer) else handle for handle in handles]
    return {told: [line.get_xdata()[0], line.get_ydata()[0]] for told, line in zip(labels, lines, strict=True)}
