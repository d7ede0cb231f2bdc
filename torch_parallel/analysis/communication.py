"""What the bench of collectives measured, and what their schedules say of messages and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from torch_parallel.analysis.figure import Figure
from torch_parallel.analysis.runs import bench_rows, read_table
from torch_parallel.collectives import ALL_REDUCE

NUMBERS = ("n", "size_bytes", "wrong", "repeats")
COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#B8A800", "#999999", "#7F5A2E")
MARKERS = "os^vDP*Xp"
PEERS = ("gloo", "mpi")


def read_bench(folder: str | Path, collective: str = "all_reduce") -> list[dict[str, Any]]:
    """The rows of bench.csv of one collective, its numbers as numbers."""
    rows: list[dict[str, Any]] = [{**row} for row in bench_rows(folder) if row["collective"] == collective]
    for row in rows:
        row |= {name: int(row[name]) for name in NUMBERS}
        row |= {name: float(row[name]) for name in row if name.endswith("_us") or name == "times_faster_than_gloo"}
    return rows


def size_told(nbytes: int) -> str:
    """4 KiB, 100 MiB: what the ranks divide evenly may be some bytes less."""
    kib = round(nbytes / 1024)
    return f"{round(kib / 1024)} MiB" if kib >= 1024 else f"{kib} KiB"


def all_reduce_times(folder: str | Path) -> Figure:
    """Time over size, both logarithmic, of every algorithm, gloo and MPI; a panel for each number of processes."""
    rows = read_bench(folder)
    counts = sorted({row["n"] for row in rows})
    figure = Figure(5.0 * max(len(counts), 1), 4.6)
    panels = figure.subplots(1, len(counts), sharey=True, squeeze=False)[0]
    for n, axes in zip(counts, panels, strict=True):
        _draw_times(axes, [row for row in rows if row["n"] == n])
        axes.set_title(f"all-reduce, {n} processes", fontsize=10)
    panels[0].set_ylabel("microseconds (median of the slowest rank)")
    panels[0].legend(frameon=False, fontsize=7, loc="upper left")
    return figure


def _draw_times(axes: Axes, rows: list[dict[str, Any]]) -> None:
    ways = [*ALL_REDUCE, *(peer for peer in PEERS if any(row["way"] == peer for row in rows))]
    for index, way in enumerate(ways):
        of_way = [row for row in rows if row["way"] == way]
        mark = {"marker": MARKERS[index % len(MARKERS)], "markersize": 4}
        look: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "linewidth": 1.2, **mark}
        if way in PEERS:
            look = {"color": "#222222", "linestyle": "--" if way == "gloo" else ":", "linewidth": 1.8}
        axes.plot([row["size_bytes"] for row in of_way], [row["time_us"] for row in of_way], label=way, **look)
    sizes = sorted({row["size_bytes"] for row in rows})
    axes.set(xscale="log", yscale="log", xlabel="size of the buffer")
    axes.set_xticks(sizes[::2], [size_told(size) for size in sizes[::2]], fontsize=7, rotation=30)
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)


def best_found(folder: str | Path) -> str:
    """For each number of processes and size the fastest algorithm, and how it compares."""
    rows = read_bench(folder)
    lines = []
    for n in sorted({row["n"] for row in rows}):
        lines.append(f"{n} processes")
        for size in sorted({row["size_bytes"] for row in rows if row["n"] == n}):
            ways = {row["way"]: row for row in rows if row["n"] == n and row["size_bytes"] == size}
            best = min((ways[name] for name in ALL_REDUCE), key=lambda row: float(row["time_us"]))
            told = f"{best['way']:20}{best['time_us']:12,.1f} us"
            told += f"   {best['times_faster_than_gloo']:6.1f} times gloo's speed"
            if "mpi" in ways:
                told += f"   {ways['mpi']['time_us'] / best['time_us']:5.2f} times MPI's"
            lines.append(f"  {size_told(size):>8}  {told}")
    return "\n".join(lines)


def others_found(folder: str | Path) -> str:
    """Every other collective at some sizes: our fastest way, and whether it is slower than gloo's and MPI's."""
    names = dict.fromkeys(row["collective"] for row in bench_rows(folder) if row["collective"] != "all_reduce")
    lines: list[str] = []
    slower: dict[str, list[str]] = {peer: [] for peer in PEERS}
    for name in names:
        rows = read_bench(folder, name)
        for n in sorted({row["n"] for row in rows}):
            of_count = [row for row in rows if row["n"] == n]
            sizes = sorted({row["size_bytes"] for row in of_count})
            for size in sorted({sizes[k * (len(sizes) - 1) // 3] for k in range(4)}):
                ways = {row["way"]: row["time_us"] for row in of_count if row["size_bytes"] == size}
                best = min((way for way in ways if way not in PEERS), key=lambda way: float(ways[way]))
                what = f"{name}, {n} processes" + (f", {size_told(size)}" if size else "")
                told = f"{what:40}{best:22}{ways[best]:12,.1f} us"
                for peer in (peer for peer in PEERS if peer in ways):
                    ratio = ways[peer] / ways[best]
                    told += f"   {ratio:7.2f} times {peer}'s speed"
                    slower[peer] += [what] if ratio < 1 else []
                lines.append(told)
    lines += [f"slower than {peer}: {'; '.join(names) or 'none'}" for peer, names in slower.items()]
    return "\n".join(lines)


def messages(n: int, numel: int) -> str:
    """What each all-reduce sends, from its formulas: the busiest rank's and everybody's, and the memory it takes."""
    lines = [f"{'all-reduce':20}{'rounds':>8}{'messages':>10}{'sent by one':>13}{'by all':>9}{'buffers':>9}"]
    for name, each in ALL_REDUCE.items():
        ranks = range(n)
        rounds = max(each.round_count(rank, n) for rank in ranks)
        sent = [each.sent_elements(rank, n, numel) / numel for rank in ranks]
        regions = max(each.region_count(rank, n) for rank in ranks)
        total = sum(each.message_count(rank, n) for rank in ranks)
        lines.append(f"{name:20}{rounds:8}{total:10}{max(sent):13.2f}{sum(sent):9.2f}{regions:9}")
    lines.append(f"{n} ranks; sent: times the buffer; buffers: the most that one rank needs, its own among them")
    return "\n".join(lines)


def fit_found(folder: str | Path) -> str:
    """How well alpha, beta and gamma predict the timings that they were not fitted to."""
    rows = read_table(Path(folder) / "fit.csv")
    lines = []
    for n in sorted({int(row["n"]) for row in rows}):
        errors = sorted(abs(float(row["predicted_over_measured"]) - 1) for row in rows if _foretold(row, n))
        if errors:
            within = sum(error <= 0.15 for error in errors)
            lines.append(
                f"predicted, {n} processes: {within} of {len(errors)} timings from 1 MiB on within 15 %, "
                f"median {100 * errors[len(errors) // 2]:.0f} %, largest {100 * errors[-1]:.0f} %"
            )
    return "\n".join(lines)


def _foretold(row: dict[str, str], n: int) -> bool:
    """Whether it is a timing of `n` processes from 1 MiB on that the fit had not seen."""
    return int(row["n"]) == n and row["fitted"] == "False" and int(row["size_bytes"]) >= 1 << 20
