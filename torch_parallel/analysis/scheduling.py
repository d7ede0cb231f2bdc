"""What a scheduler gains: steps of equal layers over emulated links, by the bench of that name.

print(gains_told())     of results/bench_schedule
"""

from __future__ import annotations

from pathlib import Path

from torch_parallel.analysis.figure import Figure
from torch_parallel.analysis.runs import Record, bench_rows, complete, machine_told, manifest

NAME = "bench_schedule"
ARM_COLOURS = {
    "overlap": "#BBBBBB",
    "partition": "#888888",
    "priority": "#56B4E9",
    "priority and partition": "#0072B2",
}
"""What gains little is grey."""
PLAIN = "plain"


def newest_of_each(results_dir: str | Path = "results") -> dict[str, Path]:
    """By strategy, the folder of its last complete bench. Raises ExperimentMissing."""
    return {str(bench_rows(folder)[0]["strategy"]): folder for folder in complete(NAME, results_dir)}


def by_ratio(rows: list[Record]) -> dict[float, dict[str, Record]]:
    """By the seconds of the exchange in parts of those of forward and backward, the row of each arm."""
    table: dict[float, dict[str, Record]] = {}
    for row in rows:
        table.setdefault(float(row["ratio"]), {})[str(row["arm"])] = row
    return table


def gain(row: Record, plain: Record) -> float:
    """How many times as fast as without any overlap."""
    return float(plain["step_s"]) / float(row["step_s"])


def ideal_gain(plain: Record) -> float:
    return float(plain["step_s"]) / float(plain["ideal_s"])


def gains_told(results_dir: str | Path = "results") -> str:
    """A table for each strategy: milliseconds of a step, gains, and the part of what an ideal schedule would gain."""
    lines = []
    for strategy, folder in newest_of_each(results_dir).items():
        lines.append(f"{strategy}, emulated link; {machine_told(manifest(folder))}")
        for ratio, arms in by_ratio(bench_rows(folder)).items():
            plain = arms[PLAIN]
            lines.append(
                f"  exchange {ratio:g} times forward and backward; ideal {1e3 * float(plain['ideal_s']):.0f} ms"
            )
            for name, row in arms.items():
                of_ideal = f"{float(row['part_of_gain']):5.0%} of what the ideal gains" if name != PLAIN else ""
                step = f"{1e3 * float(row['step_s']):6.0f} ms"
                lines.append(f"    {name:24}{step}  {gain(row, plain):5.2f} x plain  {of_ideal}".rstrip())
    return "\n".join(lines)


def gain_bars(results_dir: str | Path) -> Figure:
    """For each strategy and ratio how many times as fast each arm is as plain, and what an ideal schedule would be."""
    folders = newest_of_each(results_dir)
    figure = Figure(5.0 * len(folders), 3.8)
    every = figure.subplots(1, len(folders), sharey=True, squeeze=False)[0]
    for axes, (strategy, folder) in zip(every, folders.items(), strict=True):
        table = by_ratio(bench_rows(folder))
        for place, arms in enumerate(table.values()):
            plain = arms[PLAIN]
            for index, (name, colour) in enumerate(ARM_COLOURS.items()):
                x = place + 0.2 * (index - 1.5)
                axes.bar(x, gain(arms[name], plain), 0.19, color=colour, label=name if place == 0 else None)
            label = "an ideal schedule" if place == 0 else None
            axes.hlines(ideal_gain(plain), place - 0.42, place + 0.42, color="#D55E00", label=label)
        axes.set_xticks(range(len(table)), [f"{ratio:g}" for ratio in table])
        axes.set_xlabel("exchange, in parts of forward + backward")
        axes.set_title(strategy, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    every[0].set(ylabel="times as fast as without overlap", ylim=(1, None))
    every[0].legend(frameon=False, fontsize=8, loc="upper left")
    figure.suptitle("Priority alone gains little; with partitions it gains what an ideal schedule would", fontsize=11)
    return figure
