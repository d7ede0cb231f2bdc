"""What is drawn and told of GPUs, from small tables whose numbers can be worked out by hand."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.collections import PolyCollection

from torch_parallel.analysis import gpu

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
    timing("one_shot, auto", 4096, 2.5, 1.5),
    timing("ring, ordinary tensor", 4096, 9.0, 9.0),  # is not compared: it does something else
]


def test_the_table_names_what_is_fastest_back_to_back(tmp_path: Path) -> None:
    for name in ("all_reduce", "reduce_scatter", "all_gather", "broadcast"):
        rows = ROWS if name == "all_reduce" else [ROWS[0], timing("pull, auto", 4096, 3.0, 2.0)]
        written(tmp_path / f"bench_{name}_gpu" / "one", "bench.csv", rows)
    lines = gpu.nccl_table(tmp_path).splitlines()
    other = "3.00 / 2.00 (pull, auto)"
    assert lines[2] == f"| 4 KiB | 2.50 / 1.50 (one_shot, auto) | 1.25 / 0.75 | {other} | {other} | {other} |"
    assert (
        "2 NVIDIA H200, torch 2.11.0, NCCL 2.28.9, NCCL_NVLS_ENABLE 0" in lines[-1]
        and "broadcast: commit 0123456" in lines[-1]
    )


def test_lines_are_the_ratios_of_their_way(tmp_path: Path) -> None:
    single, in_a_row = gpu.all_reduce_beside_nccl(written(tmp_path / "one", "bench.csv", ROWS)).axes
    for axes, expected in ((single, 1.25), (in_a_row, 0.75)):
        (line,) = [each for each in axes.lines if each.get_label() == "ring, plain"]
        assert list(line.get_ydata()) == [expected]


def test_work_lies_in_the_lane_of_its_stream(tmp_path: Path) -> None:
    """A ring with two kernels that compute and one beside them, and DistributedDataParallel with one of each."""
    rows = [
        {"side": side, "beside": "ring_all_reduce", "stream": stream, "name": "k", "start_us": start, "end_us": end}
        for side, stream, start, end in (
            ("ring_all_reduce", 7, 0, 2000),
            ("ring_all_reduce", 7, 2000, 5000),
            ("ring_all_reduce", 20, 1000, 3000),
            ("ddp", 7, 0, 4000),
            ("ddp", 17, 4000, 5000),
        )
    ]
    ring, ddp = gpu.overlap(written(tmp_path / "one", "gpu_work.csv", rows)).axes

    def spans_ms(axes: Any) -> list[tuple[float, float, float]]:
        boxes = [path.get_extents() for each in axes.collections for path in each.get_paths()]
        assert all(isinstance(each, PolyCollection) for each in axes.collections)
        return [(round((box.y0 + box.y1) / 2), box.x0, box.x1) for box in boxes]

    assert spans_ms(ring) == [pytest.approx(each) for each in [(1, 0, 2), (1, 2, 5), (0, 1, 3)]]
    assert spans_ms(ddp) == [pytest.approx(each) for each in [(1, 0, 4), (0, 4, 5)]]
