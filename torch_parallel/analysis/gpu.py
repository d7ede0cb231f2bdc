"""What was measured on GPUs: collectives beside NCCL, steps beside DistributedDataParallel, as figures and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from torch_parallel.analysis.communication import size_told
from torch_parallel.analysis.figure import Figure
from torch_parallel.analysis.runs import (
    ExperimentMissing,
    bench_rows,
    commit_told,
    complete,
    manifest,
    newest,
    read_table,
    same_told,
)

WAYS = {
    "ring, plain": ("#56B4E9", "o"),
    "ring, triton": ("#0072B2", "s"),
    "two_shot_in_place, plain": ("#009E73", "^"),
    "two_shot_in_place, triton": ("#D55E00", "v"),
    "ring, ordinary tensor": ("#999999", "x"),
}
"""What is drawn of all that was measured."""
COLUMNS = (
    ("ring", "all_reduce", "ring, auto"),
    ("plain ring", "all_reduce", "ring, plain"),
    ("two shots in place", "all_reduce", "two_shot_in_place, auto"),
    ("reduce-scatter", "reduce_scatter", "direct_reduce_scatter, auto"),
    ("all-gather", "all_gather", "direct_all_gather, auto"),
    ("broadcast", "broadcast", "broadcast, auto"),
)
"""Heading, operation and way of what is told beside NCCL's: as users get it."""
KINDS = {"forward, backward, copies": "#D9D9D9", "exchange": "#D55E00", "update": "#009E73"}
OVERLAPPING = "overlapping"
"""In the names of sides that exchange during backward."""
PROFILED_STEPS = 3
"""As many as gpu_work.csv holds of each side (`bench/turns.py`)."""


def read_gpu_bench(folder: str | Path) -> list[dict[str, Any]]:
    """The rows of bench.csv, its times and ratios as numbers."""
    rows: list[dict[str, Any]] = [*bench_rows(folder)]
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
    single.set_ylim(bottom=0)  # of both, and only now, since a limit keeps the upper one from growing
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
    axes.set(xscale="log", xlabel="size of the buffer", title=title)
    axes.set_xticks(sizes[::2], [size_told(size) for size in sizes[::2]], fontsize=8, rotation=45)
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)


def newest_overlap(results_dir: str | Path = "results") -> Path:
    """The folder of the last steps on GPUs that were exchanged during backward: a model may have one bucket only.

    Raises ExperimentMissing.
    """
    folders = complete("bench_step_gpu", results_dir)
    overlapping = [each for each in folders if any(OVERLAPPING in row["side"] for row in bench_rows(each))]
    if not overlapping:
        raise ExperimentMissing(f"{folders[-1].parent}: no steps there that were exchanged during backward")
    return overlapping[-1]


def overlap(folder: str | Path) -> Figure:
    """The last of the profiled steps of each side: what the stream that computes does, and what the other ones do."""
    rows = read_table(Path(folder) / "gpu_work.csv")
    medians_s = {(row["side"], row["beside"]): float(row["median_s"]) for row in bench_rows(folder)}
    pairs = dict.fromkeys((row["side"], row["beside"]) for row in rows)
    shown = [pair for pair in pairs if pair[0] == pair[1]]
    shown += [next(pair for pair in pairs if pair[0] == "ddp")]
    figure = Figure(9.0, 0.9 + 0.9 * len(shown))
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    steps_ms = []
    for axes, (side, beside) in zip(panels, shown, strict=True):
        step_ms = _draw_streams(axes, [row for row in rows if (row["side"], row["beside"]) == (side, beside)])
        timed = medians_s[side, beside if side == "ddp" else "ddp"]
        axes.set_title(f"{side}: {1e3 * timed:.1f} ms a step", fontsize=9, loc="left")
        steps_ms.append(step_ms)
    panels[-1].set_xlim(0, max(steps_ms))
    panels[-1].set_xlabel("milliseconds, while the profiler looks on")
    handles = [Patch(color=colour, label=kind) for kind, colour in KINDS.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    return figure


def exchange_share(folder: str | Path, side: str, beside: str) -> float:
    """The part of the last profiled step in which a kernel of the exchange ran, waiting for peers included."""
    rows = read_table(Path(folder) / "gpu_work.csv")
    work = [row for row in rows if (row["side"], row["beside"]) == (side, beside)]
    begin_us, step_us = _last_step(work)
    exchanges = [row for row in work if _kind(row["name"]) == "exchange" and float(row["start_us"]) >= begin_us]
    return sum(float(row["end_us"]) - float(row["start_us"]) for row in exchanges) / step_us


def _last_step(work: Sequence[Mapping[str, str]]) -> tuple[float, float]:
    """When the last of the profiled steps begins, and how long one takes."""
    step_us = max(float(row["end_us"]) for row in work) / PROFILED_STEPS
    return (PROFILED_STEPS - 1) * step_us, step_us


def _draw_streams(axes: Axes, work: list[dict[str, str]]) -> float:
    """Returns the milliseconds of the step."""
    busy: dict[str, float] = {}
    for row in work:
        busy[row["stream"]] = busy.get(row["stream"], 0.0) + float(row["end_us"]) - float(row["start_us"])
    compute = max(busy, key=lambda stream: busy[stream])
    begin_us, step_us = _last_step(work)
    for lane, wanted in ((1, True), (0, False)):
        for kind, colour in KINDS.items():
            bars = [
                ((float(row["start_us"]) - begin_us) / 1e3, (float(row["end_us"]) - float(row["start_us"])) / 1e3)
                for row in work
                if (row["stream"] == compute) == wanted and _kind(row["name"]) == kind
            ]
            axes.broken_barh(bars, (lane - 0.4, 0.8), facecolors=colour, linewidth=0)
    axes.set(ylim=(-0.6, 1.6))
    axes.set_yticks([0, 1], ["other streams", "computing stream"], fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return step_us / 1e3


def _kind(name: str) -> str:
    """Of KINDS, by the name of a kernel: ours and NCCL's, and those of fused optimizers; the plain performer's are not
    told apart from what computes."""
    if "perform_table" in name or "nccl" in name.lower():
        return "exchange"
    return "update" if "TensorListMetadata<3>" in name or "FusedOptimizer" in name else "forward, backward, copies"


def cards_told(about: dict[str, Any]) -> str:
    """2 NVIDIA H200, torch 2.11.0+cu130."""
    return f"{len(about['cards'])} {about['cards'][0]}, torch {about['versions']['torch']}"


def nccl_table(results_dir: str | Path = "results", of: str = "gpu") -> str:
    """Ours beside NCCL's by size, those of COLUMNS that were measured: of the benches that are named after `of`."""
    benches: dict[str, list[dict[str, Any]]] = {}
    sources = []
    told: dict[Path, str] = {}
    for operation in dict.fromkeys(operation for _, operation, _ in COLUMNS):
        try:
            folder = newest(f"bench_{operation}_{of}", results_dir)
        except ExperimentMissing:
            continue
        benches[operation] = read_gpu_bench(folder)
        about = manifest(folder)
        sources.append(f"`{folder.relative_to(results_dir)}` (commit {commit_told(about)})")
        told[folder] = f"{cards_told(about)}, NCCL {about['NCCL']}, NCCL_NVLS_ENABLE {about['NCCL_NVLS_ENABLE']}"
    if not benches:
        newest(f"bench_{COLUMNS[0][1]}_{of}", results_dir)  # says what is missing
    same_told(told)
    columns = [column for column in COLUMNS if column[1] in benches]
    lines = [f"| size | {' | '.join(name for name, *_ in columns)} |", "|---" * (len(columns) + 1) + "|"]
    for size in sorted({row["size_bytes"] for rows in benches.values() for row in rows}):
        cells = [_of(benches[operation], size, way) for _, operation, way in columns]
        lines.append(f"| {size_told(size)} | {' | '.join(cells)} |")
    multicast = "off" if about["NCCL_NVLS_ENABLE"] == "0" else "as NCCL decides"
    note = (
        f"Times NCCL's speed, single calls / back to back. {cards_told(about)}, NCCL {about['NCCL']}, its NVLink "
        f"multicast {multicast} (NCCL_NVLS_ENABLE {about['NCCL_NVLS_ENABLE']}), {about['started'][:10]}, "
        f"from {', '.join(sources)}."
    )
    return "\n".join([*lines, "", note])


def nccl_table_of_four(results_dir: str | Path = "results") -> str:
    """The same of four GPUs."""
    return nccl_table(results_dir, "gpu_n4")


def _of(rows: list[dict[str, Any]], size: int, way: str) -> str:
    found = [row for row in rows if row["size_bytes"] == size and row["way"] == way]
    if not found:
        return "-"
    return f"{found[0]['times_faster_than_nccl']:.2f} / {found[0]['back_to_back_times_faster']:.2f}"
