"""The figures of the experiments with transformers. Each is a function of one folder of results, or of several.

    drawn(seconds_by_batch, "transformers_batch")       of the results on the CPU, on GPUs, or both: what there is

Lines and bars are medians over the seeds; whiskers and bands reach from the least to the largest.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from torch_parallel.analysis import transformers
from torch_parallel.analysis.figure import Figure, style
from torch_parallel.analysis.plots import PART_COLOURS, band, frame_bars, points
from torch_parallel.analysis.runs import Run, by_setting, machine_told, manifest, read_runs, spread
from torch_parallel.analysis.transformers import EQUAL_BATCH, by_setup


def drawn(draw: Callable[..., Figure], experiment: str, results_dir: str | Path = "results") -> Figure:
    """The figure of all folders of the experiment that are there; where there is none it says how to make one."""
    found = transformers.folders(experiment, results_dir)
    if found:
        return draw(*found)
    figure = Figure(9.0, 0.8)
    figure.text(0.5, 0.5, transformers.none_yet(experiment), ha="center", va="center")
    return figure


def _rows(folders: Sequence[Path]) -> list[tuple[str, list[Run]]]:
    """A heading and the runs, of each model of each folder."""
    rows = []
    for folder in folders:
        about = manifest(folder)
        where = f"{len(about['cards'])} x {about['cards'][0]}" if about["cards"] else _processors(about)
        rows += [(f"{model}, {where}", runs) for model, runs in by_setting(read_runs(folder), "model").items()]
    return rows


def _processors(about: dict[str, object]) -> str:
    return machine_told(about).partition(",")[0]


# ---- batches ----


def seconds_by_batch(*folders: Path) -> Figure:
    """Left: seconds for 1,000 samples by the batch of a worker. Right: at an equal batch of all. A row for a model."""
    rows = _rows(folders)
    figure = Figure(10.0, 3.4 * len(rows))
    panels = figure.subplots(len(rows), 2, squeeze=False, width_ratios=(3, 2))
    for (heading, runs), (left, right) in zip(rows, panels, strict=True):
        _draw_batches(left, runs)
        _draw_whole_batch(right, transformers.at_whole_batch(runs))
        left.set_title(heading, fontsize=10)
    return figure


def _draw_batches(axes: Axes, runs: list[Run]) -> None:
    sizes = transformers.batch_sizes(runs)
    chosen = [run for size in sizes for run in transformers.at_batch(runs, size)]
    groups = by_setup(chosen)
    for place, (setup, of_setup) in enumerate(groups.items()):
        own = [size for size in sizes if any(run.setting("batch_each") == size for run in of_setup)]
        repeats = [[run.per_1000_s for run in of_setup if run.setting("batch_each") == size] for size in own]
        shift = 1.05 ** (place - (len(groups) - 1) / 2)  # beside each other, not on each other
        points(axes, [size * shift for size in own], repeats, setup)
    axes.set(xscale="log", xlabel="samples of one worker in a step", ylabel="seconds for 1,000 samples", ylim=(0, None))
    axes.set_xlim(sizes[0] / 1.5, sizes[-1] * 1.5)  # also where there is one only
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8, title="nodes_workers", title_fontsize=8)


def _draw_whole_batch(axes: Axes, runs: list[Run]) -> None:
    groups = by_setup(runs)
    for place, (setup, of_setup) in enumerate(groups.items()):
        middle, least, largest = spread([run.per_1000_s for run in of_setup])
        axes.bar(place, middle, 0.6, color=style(setup)["color"])
        axes.errorbar(place, middle, [[middle - least], [largest - middle]], color="#7A7A7A", capsize=3)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set(xlabel="nodes_workers", ylim=(0, None))
    axes.set_title(f"{EQUAL_BATCH} samples over all workers", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


# ---- learning rates ----

LINES = ("-", "--", ":")
"""One a learning rate."""


def accuracy_by_epoch(*folders: Path) -> Figure:
    """Test accuracy by epoch. Left: rates as they are. Right: times the workers, with those of one worker."""
    figure = Figure(10.0, 3.8 * len(folders))
    panels = figure.subplots(len(folders), 2, squeeze=False, sharey="row")
    for folder, (left, right) in zip(folders, panels, strict=True):
        groups = transformers.rate_groups(folder)
        plain = [rate for rate in dict.fromkeys(rate for rate, _ in groups) if "x" not in rate]
        for (rate, setup), runs in groups.items():
            number = plain.index(rate.partition(" ")[0])
            _draw_epochs(left if "x" not in rate else right, runs, f"{setup}, {rate}", number)
            if setup == "1_1":
                _draw_epochs(right, runs, f"{setup}, {rate}", number)
        heading = _rows([folder])[0][0]
        left.set_ylabel("test accuracy (%)")
        left.set_title(f"{heading}: rate as it is", fontsize=10)
        right.set_title("rate times the workers", fontsize=10)
        for axes in (left, right):
            axes.set_xlabel("epochs")
            axes.legend(frameon=False, fontsize=8, title="nodes_workers, learning rate", title_fontsize=8)
    return figure


def _draw_epochs(axes: Axes, runs: list[Run], label: str, number: int) -> None:
    epochs = [epoch.epoch for epoch in runs[0].epochs]
    values = [[100 * epoch.test_accuracy for epoch in run.epochs] for run in runs]
    band(axes, epochs, values, label, linestyle=LINES[number % len(LINES)])
    axes.set_xticks(epochs)


# ---- near and far ----


def step_parts(*folders: Path) -> Figure:
    """Seconds of a step and what they go into, on average over the workers, by what lies between two workers.

    Compute is what is neither exchange nor waiting: the update is in it. Where waiting is not told apart it is within
    the exchange, which is hatched.
    """
    rows = _rows(folders)
    figure = Figure(9.5, 0.9 + 1.9 * len(rows))
    panels = figure.subplots(len(rows), 1, squeeze=False)[:, 0]
    for (heading, runs), axes in zip(rows, panels, strict=True):
        groups = transformers.link_groups(runs)
        for row, of_link in enumerate(groups.values()):
            _draw_step(axes, row, of_link)
        frame_bars(axes, list(groups))
        axes.set_title(f"{heading}, batch of {runs[0].setting('batch_size')} over two workers", fontsize=10)
    panels[-1].set_xlabel("ms of a step, medians")
    names = {"compute": "compute and update", "exchange": "exchange", "wait": "wait"}
    handles = [Patch(color=PART_COLOURS[part], label=label) for part, label in names.items()]
    handles.append(Patch(facecolor=PART_COLOURS["exchange"], hatch="//", label="exchange and wait, timed together"))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    return figure


def _draw_step(axes: Axes, row: int, runs: list[Run]) -> None:
    """One bar of three parts, with a whisker of the whole."""
    milliseconds = [1e3 * transformers.step_s(run) for run in runs]
    whole = statistics.median(milliseconds)
    exchanged, waited = (transformers.part(runs, name) for name in ("exchanged_part", "waited_part"))
    widths = {"compute": 1 - (exchanged or 0.0) - (waited or 0.0), "exchange": exchanged or 0.0, "wait": waited or 0.0}
    left = 0.0
    for part, width in widths.items():
        hatch = "//" if part == "exchange" and waited is None else None
        axes.barh(row, width * whole, 0.6, left, color=PART_COLOURS[part], hatch=hatch)
        left += width * whole
    middle, least, largest = spread(milliseconds)
    axes.errorbar(middle, row, xerr=[[middle - least], [largest - middle]], color="#222222", capsize=3)
    axes.annotate(f"{middle:.0f} ms", (largest, row), (6, 0), textcoords="offset points", va="center")
