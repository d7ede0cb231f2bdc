"""The figures that compare runs. Each is one function of a folder of results, for `media/`, the README and notebooks.

    figure = accuracy(newest("param_server"))

Lines and bars are medians over the repeats; bands and whiskers reach from the least to the largest of them. Nothing is
drawn of runs that differ in what must be equal: `held_equal` raises first.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from torch_parallel.analysis.figure import Figure, style
from torch_parallel.analysis.runs import (
    PARTS,
    ExperimentMissing,
    Run,
    by_label,
    by_setting,
    held_equal,
    newest,
    read_runs,
    select,
    speed_ups,
    spread,
)

PART_COLOURS = {"compute": "#0072B2", "exchange": "#D55E00", "wait": "#B0B0B0", "update": "#009E73"}


def accuracy(folder: str | Path) -> Figure:
    """Test accuracy over epochs and over seconds of training, a row for each model."""
    models = by_setting(read_runs(folder), "model")
    figure = Figure(9.0, 3.3 * len(models))
    rows = figure.subplots(len(models), 2, squeeze=False)
    for (model, runs), (over_epochs, over_seconds) in zip(models.items(), rows, strict=True):
        held = held_equal(runs)
        for label, of_label in by_label(runs).items():
            values = [[100 * epoch.test_accuracy for epoch in run.epochs] for run in of_label]
            epochs = [epoch.epoch for epoch in of_label[0].epochs]
            seconds = [list(accumulate(epoch.train_s for epoch in run.epochs)) for run in of_label]
            band(over_epochs, epochs, values, label)
            band(over_seconds, [statistics.median(at) for at in zip(*seconds, strict=True)], values, label)
        images = f"{int(held['train_size']):,} images"
        over_epochs.set(xlabel="epochs", ylabel="test accuracy (%)", title=f"{model}, {images}: by epochs")
        over_epochs.set_xticks(epochs)
        over_seconds.set(xlabel="seconds of training", title=f"{model}, {images}: by time", xlim=(0, None))
        over_epochs.legend(loc="lower right", frameon=False, fontsize=8)
    return figure


def band(axes: Axes, places: Sequence[float], repeats: list[list[float]], label: str, **more: Any) -> None:
    """A line through the medians of the repeats, and a band from the least to the largest."""
    columns = [spread(list(column)) for column in zip(*repeats, strict=True)]
    look = style(label)
    middle, least, largest = (list(values) for values in zip(*columns, strict=True))
    axes.plot(places, middle, label=label, markersize=5, linewidth=1.5, **look, **more)
    axes.fill_between(places, least, largest, color=look["color"], alpha=0.15, linewidth=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)


def epoch_parts(folder: str | Path) -> Figure:
    """Seconds of an epoch and what they go into, a panel for each model. Whiskers: the whole epoch's spread.

    DistributedDataParallel times its exchange together with its waiting, in one of ten steps, from which its epoch's is
    worked out; what backward hides of it is compute. On GPUs our exchange holds the waiting too, and updates that are
    made while others are exchanged. Each part is the median of its own, so they add up to the whole
    only nearly.
    """
    models = by_setting(read_runs(folder), "model")
    figure = Figure(9.0, 0.9 + 1.5 * len(models))
    panels = figure.subplots(len(models), 1, squeeze=False)[:, 0]
    for (model, runs), axes in zip(models.items(), panels, strict=True):
        held = held_equal(runs)
        groups = by_label(runs)
        for row, of_label in enumerate(groups.values()):
            left = 0.0
            for part in PARTS:
                times = [seconds for run in of_label if (seconds := run.part_s(part)) is not None]
                if times:
                    hatch = "//" if part == "exchange" and _with_waiting(of_label[0]) else None
                    axes.barh(row, statistics.median(times), 0.55, left, color=PART_COLOURS[part], hatch=hatch)
                    left += statistics.median(times)
            middle, least, largest = spread([run.epoch_s for run in of_label])
            axes.errorbar(middle, row, xerr=[[middle - least], [largest - middle]], color="#222222", capsize=3)
            axes.annotate(f"{middle:.2f} s", (largest, row), (6, 0), textcoords="offset points", va="center")
        names = [f"{label}\n({_exchange_told(of_label)})" for label, of_label in groups.items()]
        frame_bars(axes, names)
        axes.set_title(f"{model}, {int(held['train_size']):,} images, batch {held['batch_size']}", fontsize=10)
    panels[-1].set_xlabel("seconds of an epoch, medians of its parts and of the whole")
    handles = [Patch(color=PART_COLOURS[part], label=part) for part in PARTS]
    handles.insert(2, Patch(facecolor=PART_COLOURS["exchange"], hatch="//", label="exchange and wait, timed together"))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    return figure


def frame_bars(axes: Axes, names: list[str]) -> None:
    """Around bars that lie below each other, the first on top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)


def _with_waiting(run: Run) -> bool:
    """Whether its exchange holds the waiting."""
    return run.strategy == "ddp" or run.part_s("wait") is None


def _exchange_told(runs: list[Run]) -> str:
    if any(run.part_s("exchange") is None for run in runs):
        return "exchange within compute"
    if runs[0].strategy == "ddp":
        return "exchange from 1 step of 10"
    return "updates within exchange" if runs[0].part_s("update") is None else "every step timed"


def scaling(folder: str | Path) -> Figure:
    """Both: `scaling_with_data` above, `scaling_with_workers` below."""
    figure = Figure(9.0, 7.0)
    above, below = figure.subplots(2, 2)
    _with_data(above, _by_model(folder))
    _with_workers(below[0], below[1], read_runs(folder), "cnn")
    return figure


def scaling_with_data(folder: str | Path) -> Figure:
    """Milliseconds of an epoch for each image, over the number of training images, a panel for each model."""
    figure = Figure(9.0, 3.6)
    _with_data(figure.subplots(1, 2), _by_model(folder))
    return figure


def _by_model(folder: str | Path) -> dict[str, Path]:
    """`cnn` of this folder and, where it was measured, `mobilenet_v2` of the experiment of its own that lies beside."""
    folder = Path(folder)
    beside = folder.parent.name.replace("scaling", "scaling_mobilenet_v2")  # those of GPUs end in _gpu
    try:
        return {"cnn": folder, "mobilenet_v2": newest(beside, folder.parents[1])}
    except ExperimentMissing:
        return {"cnn": folder}


def scaling_with_workers(folder: str | Path, model: str = "cnn") -> Figure:
    """Speed-up over one process and efficiency, by the number of workers, on the largest number of images."""
    figure = Figure(9.0, 3.6)
    speed_up, efficiency = figure.subplots(1, 2)
    _with_workers(speed_up, efficiency, read_runs(folder), model)
    return figure


def _with_data(panels: Sequence[Axes], folders: dict[str, Path]) -> None:
    for axes in panels[len(folders) :]:
        axes.set_axis_off()
    for axes, (model, folder) in zip(panels, folders.items(), strict=False):
        runs = [run for run in select(read_runs(folder), model=model) if run.workers <= 2]
        held_equal(runs, but=("train_size", "steps", "epochs"), same=())
        groups = by_label(runs)
        for place, (label, of_label) in enumerate(groups.items()):
            by_size = by_setting(of_label, "train_size")
            repeats = [[1e3 * run.epoch_s / int(size) for run in of_size] for size, of_size in by_size.items()]
            shift = 1.06 ** (place - (len(groups) - 1) / 2)  # beside each other, not on each other
            points(axes, [int(size) * shift for size in by_size], repeats, label)
        axes.set(xscale="log", xlabel="training images", ylabel="ms of an epoch for each image", title=model)
        sizes = sorted({int(run.setting("train_size")) for run in runs})
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.set_ylim(0, 1.6 * max(1e3 * run.epoch_s / int(run.setting("train_size")) for run in runs))
        axes.legend(loc="upper right", frameon=False, fontsize=8)  # above the points, whose highest is at 1 / 1.6


def _with_workers(speed_up: Axes, efficiency: Axes, runs: list[Run], model: str) -> None:
    """Each worker has one thread, and so has the one process. DataParallel is a line where it has threads, not GPUs."""
    images = max(int(run.setting("train_size")) for run in select(runs, model=model))
    runs = select(runs, model=model, train_size=images)
    held_equal(runs, same=("processors_each",))
    threads = [run for run in runs if run.plain_module]
    if threads:
        two = statistics.median(speed_ups(threads, runs))
        told = f"one process, {threads[0].threads} threads"
        speed_up.axhline(two, color="#CC79A7", linestyle="--", linewidth=1, label=told, zorder=0)
    runs = [run for run in runs if not run.plain_module]
    groups = by_setting([run for run in runs if run.asked_for > 1], "strategy")
    for place, (strategy, of_strategy) in enumerate(groups.items()):
        by_count = by_setting(of_strategy, "asked_for")
        counts = [int(count) for count in by_count]
        places = [count + 0.06 * (place - (len(groups) - 1) / 2) for count in counts]  # beside each other
        ratios = [speed_ups(of_count, runs) for of_count in by_count.values()]
        points(speed_up, places, ratios, strategy)
        shares = [[100 * ratio / count for ratio in of_count] for of_count, count in zip(ratios, counts, strict=True)]
        points(efficiency, places, shares, strategy)
    counts = sorted({run.asked_for for run in runs})
    speed_up.plot(counts, counts, color="#B0B0B0", linestyle=":", label="as many times as workers", zorder=0)
    speed_up.axhline(1, color="#222222", linewidth=0.8, zorder=0)
    efficiency.axhline(100, color="#B0B0B0", linestyle=":", zorder=0)
    heading = f"{model}, {images:,} images"
    speed_up.set(xlabel="workers", ylabel="times the speed of one process", title=heading, ylim=(0, None))
    efficiency.set(xlabel="workers", ylabel="speed-up / workers (%)", title=heading, ylim=(0, None))
    for axes in (speed_up, efficiency):
        axes.set_xticks(counts)
        axes.set_xlim(counts[0] - 0.2, counts[-1] + 0.2)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)


def points(axes: Axes, places: Sequence[float], repeats: list[list[float]], label: str) -> None:
    """A line through the medians with whiskers from the least to the largest."""
    columns = [spread(values) for values in repeats]
    errors = [[middle - least for middle, least, _ in columns], [largest - middle for middle, _, largest in columns]]
    axes.errorbar(
        places, [middle for middle, *_ in columns], errors, label=label, markersize=5, capsize=3, **style(label)
    )
    axes.spines[["top", "right"]].set_visible(False)
