"""What was measured on GPUs: collectives beside NCCL, steps beside DistributedDataParallel, as figures and tables."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from torch_parallel.analysis.communication import size_told
from torch_parallel.analysis.figure import Figure
from torch_parallel.analysis.runs import manifest, newest

WAYS = {
    "ring, plain": ("#56B4E9", "o"),
    "ring, triton": ("#0072B2", "s"),
    "two_shot_in_place, plain": ("#009E73", "^"),
    "two_shot_in_place, triton": ("#D55E00", "v"),
    "ring, ordinary tensor": ("#999999", "x"),
}
"""What is drawn of all that was measured."""
COMPUTE, BESIDE = "#D9D9D9", "#0072B2"


def read_gpu_bench(folder: str | Path) -> list[dict[str, Any]]:
    """The rows of bench.csv, its times and ratios as numbers."""
    with open(Path(folder) / "bench.csv", newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    for row in rows:
        row["size_bytes"] = int(row["size_bytes"])
        row |= {name: float(row[name]) for name in row if name.endswith("_us") or "times_faster" in name}
    return rows


def all_reduce_beside_nccl(folder: str | Path) -> Figure:
    """Times NCCL's speed over size, of single calls and of calls back to back."""
    rows = read_gpu_bench(folder)
    figure = Figure(10.0, 4.2)
    single, back_to_back = figure.subplots(1, 2, sharey=True)
    _draw_ratios(single, rows, "times_faster_than_nccl", "single calls")
    _draw_ratios(back_to_back, rows, "back_to_back_times_faster", "calls back to back")
    single.set_ylabel("times NCCL's speed")
    single.legend(frameon=False, fontsize=8)
    about = manifest(folder)
    figure.suptitle(f"all-reduce on {cards_told(about)}", fontsize=11)
    return figure


def _draw_ratios(axes: Axes, rows: list[dict[str, Any]], column: str, title: str) -> None:
    for way, (colour, marker) in WAYS.items():
        of_way = [row for row in rows if row["way"] == way]
        sizes, ratios = [row["size_bytes"] for row in of_way], [row[column] for row in of_way]
        axes.plot(sizes, ratios, color=colour, marker=marker, markersize=4, linewidth=1.3, label=way)
    sizes = sorted({row["size_bytes"] for row in rows})
    axes.axhline(1, color="#222222", linewidth=0.8)
    axes.set(xscale="log", xlabel="size of the buffer", title=title, ylim=(0, None))
    axes.set_xticks(sizes[::2], [size_told(size) for size in sizes[::2]], fontsize=8, rotation=45)
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)


def overlap(folder: str | Path) -> Figure:
    """One step of each side: when the stream that computes is at work, and when the other ones are."""
    with open(Path(folder) / "gpu_work.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["side"] == row["beside"] or row["side"] == "ddp"]
    sides = {row["side"]: [each for each in rows if each["side"] == row["side"]] for row in rows}
    figure = Figure(9.0, 0.9 + 0.9 * len(sides))
    panels = figure.subplots(len(sides), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (side, work) in zip(panels, sides.items(), strict=True):
        first = [row for row in work if row["beside"] == work[0]["beside"]]
        _draw_streams(axes, side, first)
    panels[-1].set_xlabel("milliseconds")
    handles = [Patch(color=COMPUTE, label="forward, backward"), Patch(color=BESIDE, label="exchange and update")]
    figure.legend(handles=handles, loc="outside upper center", ncols=2, frameon=False)
    return figure


def _draw_streams(axes: Axes, side: str, work: list[dict[str, str]]) -> None:
    busy: dict[str, float] = {}
    for row in work:
        busy[row["stream"]] = busy.get(row["stream"], 0.0) + float(row["end_us"]) - float(row["start_us"])
    compute = max(busy, key=lambda stream: busy[stream])
    for lane, wanted, colour in ((1, True, COMPUTE), (0, False, BESIDE)):
        bars = [
            (float(row["start_us"]) / 1e3, (float(row["end_us"]) - float(row["start_us"])) / 1e3)
            for row in work
            if (row["stream"] == compute) == wanted
        ]
        axes.broken_barh(bars, (lane - 0.4, 0.8), facecolors=colour, linewidth=0)
    axes.set(ylim=(-0.6, 1.6))
    axes.set_yticks([0, 1], ["other streams", "computing stream"], fontsize=8)
    axes.set_title(side, fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def cards_told(about: dict[str, Any]) -> str:
    """2 NVIDIA H200, torch 2.11.0+cu130."""
    return f"{len(about['cards'])} {about['cards'][0]}, torch {about['versions']['torch']}"


def _commit(about: dict[str, Any]) -> str:
    return f"commit {about['commit'][:7]}" if about["commit"] else "code outside a repository"


def nccl_table(results_dir: str | Path = "results") -> str:
    """All-reduce, reduce-scatter, all-gather and broadcast beside NCCL's, by size: the best of ours back to back."""
    lines = [
        "| size | all-reduce | plain ring | reduce-scatter | all-gather | broadcast |",
        "|---|---|---|---|---|---|",
    ]
    names = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
    folders = {name: newest(f"bench_{name}_gpu", results_dir) for name in names}
    rows = {name: read_gpu_bench(folder) for name, folder in folders.items()}
    for size in sorted({row["size_bytes"] for row in rows["all_reduce"]}):
        cells = [_best(rows["all_reduce"], size), _of(rows["all_reduce"], size, "ring, plain")]
        cells += [_best(rows[name], size) for name in names[1:]]
        lines.append(f"| {size_told(size)} | {' | '.join(cells)} |")
    about = manifest(folders["all_reduce"])
    note = (
        "Times NCCL's speed, single calls / back to back, of what is fastest (in brackets, back to back). "
        f"{cards_told(about)}, NCCL {about['NCCL']}, NCCL_NVLS_ENABLE {about['NCCL_NVLS_ENABLE']} (multicast), "
        f"{about['started'][:10]}, from `{folders['all_reduce'].relative_to(results_dir)}` and those of the others "
        f"({', '.join(f'{name}: {_commit(manifest(folder))}' for name, folder in folders.items())})."
    )
    return "\n".join([*lines, "", note])


def _best(rows: list[dict[str, Any]], size: int) -> str:
    ours = [row for row in rows if row["size_bytes"] == size and row["way"] not in ("nccl", "ring, ordinary tensor")]
    if not ours:
        return "-"
    single = max(row["times_faster_than_nccl"] for row in ours)
    best = max(ours, key=lambda row: row["back_to_back_times_faster"])
    return f"{single:.2f} / {best['back_to_back_times_faster']:.2f} ({best['way']})"


def _of(rows: list[dict[str, Any]], size: int, way: str) -> str:
    (row,) = [row for row in rows if row["size_bytes"] == size and row["way"] == way]
    return f"{row['times_faster_than_nccl']:.2f} / {row['back_to_back_times_faster']:.2f}"
