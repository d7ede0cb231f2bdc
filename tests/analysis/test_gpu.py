"""What is drawn and told of GPUs, from small tables whose numbers can be worked out by hand."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgba

from torch_parallel.analysis import gpu
from torch_parallel.analysis.runs import ExperimentMissing

ABOUT = {
    "status": "completed",
    "cards": ["NVIDIA H200", "NVIDIA H200"],
    "versions": {"torch": "2.11.0"},
    "commit": "0123456789",
    "started": "2026-11-28T14:00:00+00:00",
    "NCCL": "2.28.9",
    "NCCL_NVLS_ENABLE": "0",
}


def written(folder: Path, table: str, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(ABOUT))
    with open(folder / table, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return folder


def timing(way: str, size: int, single: float, in_a_row: float) -> dict[str, Any]:
    ratios = {"times_faster_than_nccl": single, "back_to_back_times_faster": in_a_row}
    return {"way": way, "size_bytes": size, "time_us": 1.0, **ratios}


ROWS = [
    timing("nccl", 4096, 1.0, 1.0),
    timing("ring, plain", 4096, 1.25, 0.75),
    timing("ring, auto", 4096, 2.5, 1.5),
    timing("ring, ordinary tensor", 4096, 9.0, 9.0),
]


def test_the_table_has_what_users_get_and_what_was_measured(tmp_path: Path) -> None:
    written(tmp_path / "bench_all_reduce_gpu" / "one", "bench.csv", ROWS)
    rows = [timing("nccl", 4096, 1.0, 1.0), timing("tree_broadcast, auto", 4096, 9.0, 9.0)]
    rows += [timing("broadcast, auto", size, 3.0, 2.0) for size in (4096, 1 << 20)]
    written(tmp_path / "bench_broadcast_gpu" / "one", "bench.csv", rows)
    lines = gpu.nccl_table(tmp_path).splitlines()
    assert lines[:4] == [
        "| size | ring | plain ring | two shots in place | broadcast |",
        "|---|---|---|---|---|",
        "| 4 KiB | 2.50 / 1.50 | 1.25 / 0.75 | - | 3.00 / 2.00 |",
        "| 1 MiB | - | - | - | 3.00 / 2.00 |",
    ]
    assert "2 NVIDIA H200, torch 2.11.0, NCCL 2.28.9, its NVLink multicast off (NCCL_NVLS_ENABLE 0)" in lines[-1]
    assert "`bench_broadcast_gpu/one` (commit 0123456)" in lines[-1]
    written(tmp_path / "bench_all_reduce_gpu_n4" / "one", "bench.csv", ROWS)
    assert gpu.nccl_table_of_four(tmp_path).splitlines()[2] == "| 4 KiB | 2.50 / 1.50 | 1.25 / 0.75 | - |"


def test_lines_are_the_ratios_of_their_way(tmp_path: Path) -> None:
    single, in_a_row = gpu.all_reduce_beside_nccl(written(tmp_path / "one", "bench.csv", ROWS)).axes
    for axes, expected in ((single, 1.25), (in_a_row, 0.75)):
        (line,) = [each for each in axes.lines if each.get_label() == "ring, plain"]
        assert list(line.get_ydata()) == [expected]


@pytest.mark.parametrize("highest", ["single", "in_a_row"])
def test_the_highest_ratio_of_either_panel_is_in_the_picture(highest: str, tmp_path: Path) -> None:
    rows = [*ROWS, timing("ring, plain", 1 << 20, **{"single": 1.0, "in_a_row": 1.0, highest: 20.0})]
    for axes in gpu.all_reduce_beside_nccl(written(tmp_path / "one", "bench.csv", rows)).axes:
        least, most = axes.get_ylim()
        assert least == 0 and most > 20.0


def test_overlap_is_drawn_of_the_last_steps_that_had_any(tmp_path: Path) -> None:
    """A model of one bucket, measured later, has nothing to show."""
    place = tmp_path / "bench_step_gpu"
    for name, started, side in (("a", "1", "ring, overlapping"), ("b", "2", "ring, overlapping"), ("c", "3", "ring")):
        folder = written(place / name, "bench.csv", [{"side": side}, {"side": "ddp"}])
        (folder / "manifest.json").write_text(json.dumps({"status": "completed", "started": started}))
    assert gpu.newest_overlap(tmp_path) == place / "b"
    shutil.rmtree(place / "a")
    shutil.rmtree(place / "b")
    with pytest.raises(ExperimentMissing, match="bench_step_gpu: no steps there that were exchanged during backward"):
        gpu.newest_overlap(tmp_path)


def test_the_longest_step_is_in_sight_to_its_end(tmp_path: Path) -> None:
    """Three profiled steps of 7 ms each beside three of 5 ms."""
    ring = "ring_all_reduce"
    rows = [
        {"side": side, "beside": ring, "stream": 7, "name": "gemm", "start_us": 0, "end_us": 3 * step_us}
        for side, step_us in ((ring, 7e3), ("ddp", 5e3))
    ]
    folder = written(tmp_path / "one", "gpu_work.csv", rows)
    with open(folder / "bench.csv", "w", newline="") as file:
        csv.writer(file).writerows([("side", "beside", "median_s"), (ring, "ddp", 0.007), ("ddp", ring, 0.005)])
    assert [axes.get_xlim() for axes in gpu.overlap(folder).axes] == [(0, 7)] * 2


def test_work_lies_in_the_lane_of_its_stream_and_has_the_colour_of_its_kind(tmp_path: Path) -> None:
    """Three profiled steps of 5 ms, of which the last is drawn: a ring that computes, exchanges and updates on one
    stream, the same on two streams, and DistributedDataParallel."""
    ring, overlapping = "ring_all_reduce", "ring_all_reduce, overlapping"
    update = "multi_tensor_apply_kernel<TensorListMetadata<3>,"
    last_step = [
        (ring, ring, 7, "gemm", 0, 3),
        (ring, ring, 7, "perform_table", 3, 4),
        (ring, ring, 7, update, 4, 5),
        ("ddp", ring, 7, "gemm", 0, 5),
        ("ddp", ring, 17, "ncclDevKernel", 2, 4),
        (overlapping, overlapping, 7, "gemm", 0, 5),
        (overlapping, overlapping, 20, "perform_table", 1, 2),
        (overlapping, overlapping, 20, update, 2, 3),
        ("ddp", overlapping, 7, "gemm", 0, 5),
    ]
    rows = [
        {"side": side, "beside": beside, "stream": stream, "name": name, "start_us": 1e3 * (before + start),
         "end_us": 1e3 * (before + end)}
        for before in (0, 5, 10)
        for side, beside, stream, name, start, end in last_step
    ]  # fmt: skip
    rows.append({**rows[6], "start_us": 3e3, "end_us": 5e3})  # waits for a peer in the first step
    folder = written(tmp_path / "one", "gpu_work.csv", rows)
    medians = [(ring, "ddp", 0.005), ("ddp", ring, 0.006), (overlapping, "ddp", 0.004), ("ddp", overlapping, 0.007)]
    with open(folder / "bench.csv", "w", newline="") as file:
        csv.writer(file).writerows([("side", "beside", "median_s"), *medians])
    panels = gpu.overlap(folder).axes
    for side, beside, share in ((ring, ring, 1 / 5), ("ddp", ring, 2 / 5), (overlapping, overlapping, 1 / 5)):
        assert gpu.exchange_share(folder, side, beside) == pytest.approx(share)
    assert gpu.exchange_share(folder, "ddp", overlapping) == 0

    def spans_ms(axes: Any) -> list[tuple[Any, ...]]:
        """Lane, begin, end and kind of what is in sight."""
        kinds = {to_rgba(colour): kind for kind, colour in gpu.KINDS.items()}
        found = []
        for each in axes.collections:
            assert isinstance(each, PolyCollection)
            for box in (path.get_extents() for path in each.get_paths()):
                if box.x0 > -0.001:
                    kind = kinds[tuple(each.get_facecolor()[0])]
                    found.append((round((box.y0 + box.y1) / 2), round(box.x0, 3), round(box.x1, 3), kind))
        return sorted(found)

    compute = "forward, backward, copies"
    assert [axes.get_title(loc="left") for axes in panels] == [
        f"{ring}: 5.0 ms a step",
        f"{overlapping}: 4.0 ms a step",
        "ddp: 6.0 ms a step",
    ]
    assert [spans_ms(axes) for axes in panels] == [
        [(1, 0, 3, compute), (1, 3, 4, "exchange"), (1, 4, 5, "update")],
        [(0, 1, 2, "exchange"), (0, 2, 3, "update"), (1, 0, 5, compute)],
        [(0, 2, 4, "exchange"), (1, 0, 5, compute)],
    ]
