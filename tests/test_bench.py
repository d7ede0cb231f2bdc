"""The timings are right about what they time, and they notice a result that is wrong."""

from __future__ import annotations

import csv
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_parallel import bench, bench_gpu, launch
from torch_parallel.bench import Timing
from torch_parallel.collectives import ALL_REDUCE
from torch_parallel.communicator import Communicator
from torch_parallel.devices import DeviceError
from torch_parallel.training.config import ConfigError


def figures(results_dir: Path) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """bench.csv and manifest.json of the only folder."""
    (folder,) = results_dir.iterdir()
    with open(folder / "bench.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return rows, json.loads((folder / "manifest.json").read_text())


def test_a_row_by_hand() -> None:
    """8 MB in a median of 4 ms; a ring of four moves 2 * 3/4 of them over each link."""
    timing = Timing("ring", 8_000_000, [0.001, 0.003, 0.004, 0.005, 0.010], error=1e-7)
    row = timing.row(n=4, peer_s=0.006)
    assert (row["time_us"], row["algbw"], row["busbw"]) == (4000, 2, 3)
    assert row["times_faster_than_gloo"] == 1.5
    assert (row["way"], row["n"], row["size_bytes"], row["error"], row["repeats"]) == ("ring", 4, 8_000_000, 1e-7, 5)
    assert 1000 <= row["lower_quartile_us"] < 4000 < row["upper_quartile_us"] <= 10_000


@pytest.mark.parametrize("n", [2, 3])
def test_all_reduce(n: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(["all_reduce", "--n_gpus", str(n), "--largest_mb", "0.02", "--results_dir", str(tmp_path)])
    rows, manifest = figures(tmp_path)
    ways = ["gloo", *(way for name in ALL_REDUCE for way in (name, f"{name}, ordinary tensor"))]
    assert [(row["way"], int(row["size_bytes"])) for row in rows] == [
        (way, size) for size in (4096, 16384) for way in ways
    ]
    output = capsys.readouterr().out.splitlines()
    assert len(output) == 1 + len(rows) + 2 and str(next(tmp_path.iterdir())) in output[-1]
    for row, line in zip(rows, output[1:], strict=False):
        assert float(row["error"]) < 1e-6
        assert int(row["n"]) == n and int(row["repeats"]) >= 15
        seconds = float(row["time_us"]) / 1e6
        assert seconds > 0
        algorithm_bandwidth = int(row["size_bytes"]) / seconds / 1e9
        assert float(row["algbw"]) == pytest.approx(algorithm_bandwidth, rel=0.01, abs=1e-4)
        assert float(row["busbw"]) == pytest.approx(2 * (n - 1) / n * algorithm_bandwidth, rel=0.01, abs=1e-4)
        assert row["way"] in line and f"{int(row['size_bytes']):,}" in line
    for size in ("4096", "16384"):
        of_size = {row["way"]: row for row in rows if row["size_bytes"] == size}
        assert float(of_size["gloo"]["times_faster_than_gloo"]) == 1
        ratio = float(of_size["gloo"]["time_us"]) / float(of_size["ring"]["time_us"])
        assert float(of_size["ring"]["times_faster_than_gloo"]) == pytest.approx(ratio, rel=0.01)
    assert (manifest["status"], manifest["n"]) == ("completed", n)
    assert {"command", "commit", "machine", "versions", "threads"} <= manifest.keys()


def errors_of_ways(communicator: Communicator) -> list[float]:
    """Of one way that sums and one that does nothing."""
    mine = torch.arange(8.0) + communicator.rank
    expected = 2 * torch.arange(8.0).double() + 1
    target = torch.empty(8)
    ways = {"right": (target, partial(communicator.all_reduce, target)), "wrong": (target, lambda: None)}
    _, errors = bench._alternate(communicator, ways, mine, expected, repeats=3)
    return errors.tolist()


def test_a_wrong_result_is_noticed_on_every_rank() -> None:
    """Rank r holds r .. r + 7; the sums are 1, 3, ... 15."""
    by_rank = launch(errors_of_ways, 2, deadline_s=30)
    # the largest error of doing nothing: on rank 0, 15 - 7; on rank 1, 15 - 8
    assert by_rank == [[0.0, pytest.approx(8 / 15)], [0.0, pytest.approx(7 / 15)]]


def test_an_epoch_beside_ddp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three workers: their sums are rounded in another order than DDP's, so the difference is small and not zero."""
    bench.main(
        ["epoch", "--n_gpus", "3", "--dataset", "digits", "--train_size", "300", "--repeats", "2"]
        + ["--results_dir", str(tmp_path)]
    )
    rows, manifest = figures(tmp_path)
    assert [row["side"] for row in rows] == ["ring_all_reduce", "ddp"]
    medians = []
    for row in rows:
        times = json.loads(row["all_s"])
        assert len(times) == 2 and min(times) > 0
        assert float(row["median_s"]) == pytest.approx(sum(times) / 2)
        medians.append(float(row["median_s"]))
    assert 0 < manifest["largest_difference_of_parameters"] < 1e-6
    assert manifest["data"] == "digits from scikit-learn's 8x8 digits; 300 of 1437 training samples"
    assert manifest["status"] == "completed"
    output = capsys.readouterr().out
    ratio = re.search(r"takes (\S+) of ddp's time; parameters differ by (\S+) of their norm", output)
    assert ratio is not None
    assert float(ratio[1]) == pytest.approx(medians[0] / medians[1], abs=1e-3)
    assert float(ratio[2]) == pytest.approx(manifest["largest_difference_of_parameters"], rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["all_reduce", "--n_gpus", "1"], "--n_gpus 1"),
        (["all_reduce", "--largest_mb", "0.001"], "--largest_mb 0.001"),
        (["all_reduce", "--largest_mb", "nan"], "--largest_mb nan"),
        (["all_reduce", "--device", "cuda", "--n_gpus", "999"], "--n_gpus 999"),
        (["epoch", "--n_gpus", "0"], "--n_gpus 0"),
        (["epoch", "--batch_size", "0"], "--batch_size 0"),
        (["epoch", "--repeats", "0"], "--repeats 0"),
    ],
)
def test_what_cannot_be_timed(arguments: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, DeviceError), match=said):
        bench.main([*arguments, "--results_dir", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_a_row_of_gpus_by_hand() -> None:
    """8 MB in 4 ms back to back on four ranks: 2 GB/s, of which a reduce_scatter moves 3/4 over each link."""
    ours = bench_gpu.GpuTiming("ring, plain", 8_000_000, [0.005] * 3, [0.003, 0.004, 0.009], error=0.0)
    nccl = bench_gpu.GpuTiming("nccl", 8_000_000, [0.010] * 3, [0.002] * 3, error=0.0)
    row = ours.row("reduce_scatter", 4, nccl)
    assert (row["time_us"], row["back_to_back_us"]) == (5000, 4000)
    assert (row["algbw"], row["busbw"]) == (2, 1.5)
    assert (row["times_faster_than_nccl"], row["back_to_back_times_faster"]) == (2, 0.5)
    assert ours.row("all_reduce", 4, nccl)["busbw"] == 3
    assert ours.row("broadcast", 4, nccl)["busbw"] == 2


def test_what_gpus_have_to_end_with() -> None:
    cpu = torch.device("cpu")
    a, total = bench_gpu._inputs("all_reduce", 6, 0, 2, cpu)
    b, same = bench_gpu._inputs("all_reduce", 6, 1, 2, cpu)
    assert torch.equal(total, a + b) and torch.equal(total, same)
    assert torch.equal(bench_gpu._inputs("reduce_scatter", 6, 1, 2, cpu)[1], total[3:])
    assert torch.equal(bench_gpu._inputs("all_gather", 6, 0, 2, cpu)[1], torch.cat([a[:3], b[3:]]))
    assert torch.equal(bench_gpu._inputs("broadcast", 6, 1, 2, cpu)[1], a)
