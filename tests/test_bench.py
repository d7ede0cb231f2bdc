"""The timings are right about what they time, and they notice a result that is wrong."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from figures import figures

from torch_parallel import bench, launch
from torch_parallel.bench import collectives, compare, gpu, mpi, operations
from torch_parallel.bench.collectives import Timing
from torch_parallel.collectives import ALL_REDUCE
from torch_parallel.communicator import Communicator
from torch_parallel.devices import DeviceError
from torch_parallel.training.config import ConfigError


def test_a_row_by_hand() -> None:
    """8 MB in a median of 4 ms; a ring of four moves 2 * 3/4 of them over each link, an all-gather 3/4."""
    timing = Timing("all_reduce", "ring", 8_000_000, [0.001, 0.003, 0.004, 0.005, 0.010])
    gloo = Timing("all_reduce", "gloo", 8_000_000, [0.006])
    row = timing.row(n=4, peer=gloo)
    assert (row["time_us"], row["algbw"], row["busbw"], row["count"]) == (4000, 2, 3, 2_000_000)
    assert row["times_faster_than_gloo"] == 1.5
    assert (row["way"], row["n"], row["size_bytes"], row["wrong"], row["repeats"]) == ("ring", 4, 8_000_000, 0, 5)
    assert 1000 <= row["lower_quartile_us"] < 4000 < row["upper_quartile_us"] <= 10_000
    assert Timing("all_gather", "ring", 8_000_000, [0.004] * 3).row(4, gloo)["busbw"] == 1.5
    assert Timing("broadcast", "tree", 8_000_000, [0.004] * 3).row(4, gloo)["busbw"] == 2


def test_sizes_are_cut_to_what_the_ranks_divide_and_a_barrier_has_none() -> None:
    jobs = collectives.jobs_of(["all_gather", "barrier"], 3, 20_000)
    assert [(operation, size) for operation, size, _ in jobs] == [
        ("all_gather", 4092),
        ("all_gather", 16380),
        ("barrier", 0),
    ]
    repeats = [repeats for _, _, repeats in collectives.jobs_of(["reduce"], 2, 400 << 20)]
    assert repeats == sorted(repeats, reverse=True) and repeats[0] == 100 and repeats[-1] == 3


def test_what_is_expected_of_three_ranks_by_hand() -> None:
    """Tables of three rows of two; rank r adds r to each element."""
    table = torch.tensor([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]])

    def rows(operation: str, rank: int) -> list[list[float]]:
        promised = operations.expected(operation, table, rank)
        return [] if promised is None else promised[1].tolist()

    assert rows("all_reduce", 1) == rows("reduce", 0) == [[6, 9], [33, 63], [303, 603]]
    assert rows("reduce", 1) == rows("gather", 2) == rows("barrier", 0) == []
    assert rows("broadcast", 2) == table.tolist()
    assert rows("all_gather", 2) == rows("gather", 0) == [[1, 2], [11, 21], [102, 202]]
    assert rows("scatter", 1) == [[10, 20]]
    assert rows("reduce_scatter", 1) == [[33, 63]]
    assert rows("all_to_all", 1) == [[10, 20], [11, 21], [12, 22]]


@pytest.mark.exhaustive
def test_all_reduce(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives.mpi, "why_not", lambda: "this test has none")
    monkeypatch.setattr(collectives, "MOST_REPEATS", 10)
    bench.main(["all_reduce", "--n_gpus", "2", "3", "--largest_mb", "0.02", "--results_dir", str(tmp_path)])
    rows, manifest = figures(tmp_path)
    ways = ["gloo", *ALL_REDUCE, "ring, ordinary tensor"]
    sizes = {2: (4096, 16384), 3: (4092, 16380)}
    assert [(row["way"], int(row["n"]), int(row["size_bytes"])) for row in rows] == [
        (way, n, size) for n in (2, 3) for size in sizes[n] for way in ways
    ]
    output = capsys.readouterr().out.splitlines()
    assert output[0] == "beside gloo's; MPI's are left out: this test has none"
    lines = [line for line in output if "float" in line]
    for row, line in zip(rows, lines, strict=True):
        assert row["wrong"] == "0" and int(row["repeats"]) == 20
        seconds, n = float(row["time_us"]) / 1e6, int(row["n"])
        assert seconds > 0
        algorithm_bandwidth = int(row["size_bytes"]) / seconds / 1e9
        assert float(row["algbw"]) == pytest.approx(algorithm_bandwidth, rel=0.01, abs=1e-4)
        assert float(row["busbw"]) == pytest.approx(2 * (n - 1) / n * algorithm_bandwidth, rel=0.01, abs=1e-4)
        assert row["way"] in line and f"{int(row['size_bytes']):,}" in line
    of_size = {row["way"]: row for row in rows if row["size_bytes"] == "4096"}
    assert float(of_size["gloo"]["times_faster_than_gloo"]) == 1
    ratio = float(of_size["gloo"]["time_us"]) / float(of_size["ring"]["time_us"])
    assert float(of_size["ring"]["times_faster_than_gloo"]) == pytest.approx(ratio, rel=0.01)
    assert (manifest["status"], manifest["counts"]) == ("completed", [2, 3])
    assert {"command", "commit", "machine", "versions", "threads", "mpi"} <= manifest.keys()


def test_without_a_name_all_collectives_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []
    monkeypatch.setitem(bench.BENCHES, "collectives", given.append)
    bench.main([])
    assert given == [[]]


def test_every_collective_gives_the_right_result_by_all_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo's are checked by the same rule, so the rule is right about what each operation means."""
    monkeypatch.setattr(collectives, "MOST_REPEATS", 2)
    monkeypatch.setattr(collectives, "FEWEST_REPEATS", 2)
    bench.main(["collectives", "--n_gpus", "3", "--largest_mb", "0.004", "--results_dir", str(tmp_path)])
    rows, _ = figures(tmp_path)
    assert {row["collective"] for row in rows} == set(operations.ALGORITHMS)
    assert {row["wrong"] for row in rows} == {"0"}
    assert {row["way"] for row in rows} >= {name for each in operations.ALGORITHMS.values() for name in each}


def order_of_calls(communicator: Communicator) -> list[str]:
    start, called = operations.base(1, 4), []
    target = torch.empty(1, 4)
    ways = {name: (target, lambda name=name: called.append(name) or target) for name in "abc"}
    collectives.alternate(communicator, ways, start, torch.empty(1, 4), "all_reduce", repeats=2)
    return called


def test_every_way_is_warmed_up_by_itself_and_each_begins_in_turn() -> None:
    """Twice each, of which the second counts: a repeat that warms up, and two that count."""
    (called,) = launch(order_of_calls, 1, deadline_s=30)
    assert "".join(called) == "ccaabbaabbccbbccaa"


def wrong_of_ways(communicator: Communicator) -> list[int]:
    """Of one way that sums, one that does nothing, and one that returns for ever what was right the first time."""
    start = operations.base(2, 4)
    target, first = torch.empty(2, 4), 2 * start + 1
    ways = {
        "right": (target, partial(communicator.all_reduce, target)),
        "wrong": (target, lambda: target),
        "stale": (target, lambda: first),
    }
    _, wrong = collectives.alternate(communicator, ways, start, torch.empty(2, 4), "all_reduce", repeats=3)
    return wrong.tolist()


def test_a_wrong_result_is_noticed_on_every_rank() -> None:
    """Of 8 elements, in the first repeat 0 .. 7 and the rank more, in the last 1 .. 8 and the rank more.

    On rank 1, 0 + 1 happens to be the sum 2 * 0 + 1.
    """
    assert launch(wrong_of_ways, 2, deadline_s=30) == [[0, 8 + 8, 8], [0, 7 + 8, 8]]


@pytest.mark.skipif(mpi.why_not() is not None, reason=f"MPI's collectives: {mpi.why_not()}")
def test_mpi_performs_the_same_operations() -> None:
    jobs = [(operation, 0 if operation == "barrier" else 48, 2) for operation in operations.ALGORITHMS]
    found = mpi.measure(2, jobs, threads=1)
    assert [each["operation"] for each in found] == list(operations.ALGORITHMS)
    assert all(each["wrong"] == 0 and len(each["seconds"]) == 2 for each in found)


def test_an_epoch_beside_ddp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three workers: their sums are rounded in another order than DDP's, so the difference is small and not zero."""
    bench.main(
        ["epoch", "--n_gpus", "3", "--device", "cpu", "--dataset", "digits", "--train_size", "300", "--repeats", "2"]
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
    assert 0 < manifest["difference_of_parameters"] < 1e-6
    assert manifest["data"] == "digits from scikit-learn's 8x8 digits; 300 of 1437 training samples"
    assert manifest["status"] == "completed"
    output = capsys.readouterr().out
    ratio = re.search(r"takes (\S+) of ddp's time; parameters differ by (\S+) of their norm", output)
    assert ratio is not None
    assert float(ratio[1]) == pytest.approx(medians[0] / medians[1], abs=1e-3)
    assert float(ratio[2]) == pytest.approx(manifest["difference_of_parameters"], rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["all_reduce", "--n_gpus", "1"], "--n_gpus 1"),
        (["all_reduce", "--largest_mb", "0.001"], "--largest_mb 0.001"),
        (["all_reduce", "--largest_mb", "nan"], "--largest_mb nan"),
        (["all_reduce", "--device", "cuda", "--n_gpus", "999"], "--n_gpus 999"),
        (["all_reduce", "--settings", "all"], "--settings all: the grids are those of the GPU's kernel; give --device"),
        (["epoch", "--n_gpus", "0"], "--n_gpus 0"),
        (["epoch", "--batch_size", "0"], "--batch_size 0"),
        (["epoch", "--repeats", "0"], "--repeats 0"),
        (["step", "--n_gpus", "0"], "--n_gpus 0"),
        (["step", "--repeats", "0"], "--repeats 0"),
        (["step", "--steps", "0"], "--steps 0"),
        (["step", "--batch_size", "1"], "--batch_size 1: each of the 2 workers"),
        (["step", "--parameters_m", "nan"], "--parameters_m nan"),
        (["step", "--ddp_bucket_mb", "25", "0"], "--ddp_bucket_mb 0"),
        (["step", "--bucket_mb", "1e305"], r"--bucket_mb 1e\+305: it must be > 0 and at most 1048576, a TiB"),
        (["step", "--image_side", "28"], "--image_side 28: mlp is fed with no images"),
        (
            ["step", "--model", "torchvision_vit", "--image_side", "30"],
            "--image_side 30: torchvision_vit cannot take such images",
        ),
        (["step", "--model", "cnn", "--image_side", "-5"], "--image_side -5: cnn cannot take such images"),
        (["step", "--model", "cnn", "--image_side", "1000000"], "--image_side 1000000: at most 4096 pixels"),
    ],
)
def test_what_cannot_be_timed(arguments: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, DeviceError), match=said):
        bench.main([*arguments, "--results_dir", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_a_row_of_gpus_by_hand() -> None:
    """8 MB in 4 ms back to back on four ranks: 2 GB/s, of which a reduce_scatter moves 3/4 over each link."""
    ours = gpu.GpuTiming("reduce_scatter", "ring, plain", 8_000_000, [0.005] * 3, 0, [0.003, 0.004, 0.009])
    nccl = gpu.GpuTiming("reduce_scatter", "nccl", 8_000_000, [0.010] * 3, 0, [0.002] * 3)
    row = ours.row(4, nccl)
    assert (row["time_us"], row["algbw"], row["busbw"]) == (5000, 1.6, 1.2)
    assert (row["back_to_back_us"], row["back_to_back_busbw"]) == (4000, 1.5)
    assert row["back_to_back_lower_quartile_us"] < 4000 < row["back_to_back_upper_quartile_us"]
    assert (row["times_faster_than_nccl"], row["back_to_back_times_faster"]) == (2, 0.5)
    on_the_cpu = Timing("reduce_scatter", "ring", 8_000_000, [0.005] * 3).row(4, Timing("", "gloo", 1, [1.0]))
    shared = [name for name in on_the_cpu if name != "times_faster_than_gloo"]
    assert [name for name in row if "back_to_back" not in name and "nccl" not in name] == shared


def wrong_back_to_back(communicator: Communicator) -> list[int]:
    """Of one way that sums, one that does nothing, and one that returns what the first call gave."""
    start = operations.base(2, 4)
    target, first = torch.empty(2, 4), []

    def stale() -> torch.Tensor:
        first.append(communicator.all_reduce(target).clone())
        return first[0]

    ways = {
        "right": (target, partial(communicator.all_reduce, target)),
        "wrong": (target, lambda: target),
        "stale": (target, stale),
    }
    return gpu._wrong_back_to_back(communicator, ways, start, torch.empty(2, 4), "all_reduce").tolist()


def test_a_wrong_result_of_calls_back_to_back_is_noticed() -> None:
    """On rank 1, 0 + 1 happens to be the sum 2 * 0 + 1."""
    assert launch(wrong_back_to_back, 2, deadline_s=30) == [[0, 8, 8], [0, 7, 8]]


def test_the_best_grid_of_each_size_is_named() -> None:
    def row(way: str, size_bytes: int, us: float) -> dict[str, Any]:
        return {"collective": "all_reduce", "n": 2, "size_bytes": size_bytes, "way": way, "back_to_back_us": us}

    rows = [row("nccl", 4096, 3.0), row("ring, triton", 4096, 12.0), row("ring, 16x8k/16", 4096, 11.0)]
    rows += [row("one_shot, triton", 4096, 15.0), row("one_shot, 64x32k/16", 4096, 10.0)]
    assert list(gpu.best_grids(rows)) == [
        "all_reduce, 2 processes, 4,096 bytes: one_shot, 64x32k/16 is the best grid with 10.0 us in a row; "
        "the chosen one takes 1.50 of that"
    ]
    more = [row("ring, triton", 16384, 12.0), row("ring, 16x8k/16", 16384, 12.0)]
    assert [line[:39] for line in gpu.best_grids(rows + more)] == [
        "all_reduce, 2 processes, 4,096 bytes: o",
        "all_reduce, 2 processes, 16,384 bytes: ",
    ]
    assert list(gpu.best_grids(rows[:2])) == []


def test_without_peer_access_there_is_nothing_to_time_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on processes whose transport is the host's."""
    monkeypatch.setattr(gpu, "launch", lambda *arguments, device, **more: launch(*arguments, **more))
    with pytest.raises(DeviceError, match="these GPUs do not reach each other's memory"):
        gpu.measure(2, [("all_reduce", 4096, 5)], all_settings=False)


def test_gpus_are_timed_up_to_a_gibibyte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "choose_processes", lambda n, device: None)
    assert compare._parse("all_reduce", []).largest_mb == 400
    assert compare._parse("all_reduce", ["--device", "cuda"]).largest_mb == 1024
    assert compare._parse("all_reduce", ["--device", "cuda", "--largest_mb", "2"]).largest_mb == 2


def test_versions_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert gpu.driver_version() == "unknown"
    assert gpu.triton_version() == "not installed" or gpu.triton_version()[0].isdigit()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="there is no GPU")
def test_an_epoch_beside_ddp_on_gpus(tmp_path: Path) -> None:
    """Of one worker or two; sums are rounded in other orders than DDP's, and its own kernels' order changes too."""
    n = min(2, torch.cuda.device_count())
    options = ["--device", "cuda", "--n_gpus", str(n), "--dataset", "digits", "--train_size", "300", "--repeats", "1"]
    bench.main(["epoch", *options, "--results_dir", str(tmp_path)])
    rows, manifest = figures(tmp_path)
    assert [row["side"] for row in rows] == ["ring_all_reduce", "ddp"]
    assert manifest["device"] == "cuda" and 0 <= manifest["difference_of_parameters"] < 1e-3


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each process")
def test_every_collective_on_gpus_gives_the_right_result_by_all_ways(tmp_path: Path) -> None:
    arguments = ["--device", "cuda", "--largest_mb", "0.02", "--results_dir", str(tmp_path)]
    bench.main(["collectives", *arguments])
    rows, manifest = figures(tmp_path)
    assert {row["collective"] for row in rows} == set(operations.ALGORITHMS)
    assert {row["wrong"] for row in rows} == {"0"}
    assert {row["way"].split(",")[0] for row in rows} >= {
        name for each in operations.ALGORITHMS.values() for name in each
    }
    assert all(float(row["time_us"]) > 0 and float(row["back_to_back_us"]) > 0 for row in rows)
    assert manifest["status"] == "completed" and manifest["NCCL"].startswith("2.")
    assert re.fullmatch(r"[\d.]+", manifest["driver"])
    assert "ring, auto" in {row["way"] for row in rows} or manifest["Triton"] == "not installed"
