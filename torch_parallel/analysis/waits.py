"""Who waits for whom, and what time goes on, as two figures of the steps that `--steps_csv` records.

    steps = read_steps("steps.csv")
    draw_matrix(steps).savefig("waits.png")        row i, column j: how long rank i waited for rank j
    draw_matrix(steps, followed=True).savefig(...) the same, put down to the rank that was waited for in the end
    draw_steps(steps).savefig("steps.png")         a panel a rank, a bar a step: compute, reduce, move, update, wait

Around a ring everybody waits for a neighbour, who waits for the next one, and under a parameter server for the server:
the slow rank is the one that waits for nobody, a pale row. Followed to the end, all waits stand in its column.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from torch_parallel.analysis.timeline import LANE_COLOURS, OTHER_COLOURS
from torch_parallel.steps import StepTimes

COLOUR_MAP = "Blues"
"""One hue that only grows darker: the colour-blind can read it, and so can a black-and-white printer."""

PARTS = (("compute", "compute"), ("reduce", "reduce"), ("move", "copy"), ("update", "update"), ("wait", "wait"))
"""Name of each part of a step and the lane whose colour it has, from the bottom up."""
REST = OTHER_COLOURS[0]
MOST_BARS = 60
"""The bars that are drawn at most; the last steps are taken."""


def draw_matrix(steps: Iterable[StepTimes], followed: bool = False, title: str = "") -> Figure:
    """Mean seconds a step that the rank of a row waited for the rank of a column; an empty cell is none at all.

    `followed`: for whom in the end, see `waits_in_the_end`. Raises ValueError without steps.
    """
    mean = mean_waits(list(steps))
    mean = waits_in_the_end(mean) if followed else mean
    ranks = range(len(mean))
    size = 2.0 + 0.62 * len(mean)
    figure = Figure(figsize=(size + 1.9, size + 0.3), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    unit, scale = _unit(max(map(max, mean)))
    values = [[scale * seconds for seconds in row] for row in mean]
    norm = Normalize(0, max(map(max, values)) or 1)
    mappable, colour_map = ScalarMappable(norm, COLOUR_MAP), colormaps[COLOUR_MAP]
    axes.imshow(values, COLOUR_MAP, norm)
    for rank in ranks:
        for peer in ranks:
            text = _short(values[rank][peer]) if mean[rank][peer] else ""
            axes.text(peer, rank, text, ha="center", va="center", color=_ink(*colour_map(norm(values[rank][peer]))))
    axes.set_xticks(ranks, [str(rank) for rank in ranks])
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("waits in the end for rank" if followed else "waits for rank")
    axes.xaxis.set_label_position("top")
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.colorbar(mappable, ax=axes, label=f"{unit} a step", shrink=0.8)
    return figure


def mean_waits(steps: Sequence[StepTimes]) -> list[list[float]]:
    """[rank][peer]: mean seconds a step that the rank waited for the peer; the first step, which warms up, is left out
    where there are more. Raises ValueError without steps."""
    if not steps:
        raise ValueError("a picture of waits needs steps")
    first = min((step.epoch, step.step) for step in steps)
    steps = [step for step in steps if (step.epoch, step.step) != first] or steps
    ranks = range(len(steps[0].waited_for_s))
    mean = []
    for rank in ranks:
        own = [step.waited_for_s for step in steps if step.rank == rank]
        mean.append([sum(waited[peer] for waited in own) / max(len(own), 1) for peer in ranks])
    return mean


def waits_in_the_end(mean: list[list[float]]) -> list[list[float]]:
    """The same seconds, [rank][peer], put down to the ranks that were waited for in the end.

    What rank i waited for rank j while j waited itself, i waited for those for whom j did: as many seconds as j waited
    in all are handed on to them, in proportion, and the rest is j's own. What still goes around after P hands stays.
    """
    ranks, waited = range(len(mean)), [sum(row) for row in mean]
    result = []
    for row in mean:
        own = [0.0 for _ in ranks]
        for _ in ranks:
            handed_on = [min(seconds, limit) for seconds, limit in zip(row, waited, strict=True)]
            own = [sum(parts) for parts in zip(own, row, [-seconds for seconds in handed_on], strict=True)]
            shares = [seconds / (limit or 1.0) for seconds, limit in zip(handed_on, waited, strict=True)]
            row = [sum(shares[via] * mean[via][peer] for via in ranks) for peer in ranks]
        result.append([seconds + rest for seconds, rest in zip(own, row, strict=True)])
    return result


def draw_steps(steps: Iterable[StepTimes], title: str = "") -> Figure:
    """The parts of each step's time, a panel a rank, all on one scale. Raises ValueError without steps."""
    steps = list(steps)
    if not steps:
        raise ValueError("a picture of steps needs steps")
    ranks = sorted({step.rank for step in steps})
    figure = Figure(figsize=(9.0, 1.0 + 1.1 * len(ranks)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(ranks), sharex=True, sharey=True, squeeze=False)[:, 0]
    numbers = sorted({(step.epoch, step.step) for step in steps})
    first = max(0, len(numbers) - MOST_BARS)
    place = {number: k for k, number in enumerate(numbers, start=1) if k > first}
    shown = [step for step in steps if (step.epoch, step.step) in place]
    unit, scale = _unit(max(step.step_s for step in shown))
    for axes, rank in zip(panels, ranks, strict=True):
        own = [step for step in shown if step.rank == rank]
        _stack(axes, [place[step.epoch, step.step] for step in own], own, scale)
        server = " (server)" if own and own[0].role == "server" else ""
        axes.set_ylabel(f"rank {rank}{server}\n{unit}")
    panels[-1].set_xlabel("step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[-1].set_xlim(first + 0.4, len(numbers) + 0.6)
    handles = [Patch(facecolor=LANE_COLOURS[lane], label=part) for part, lane in PARTS]
    handles.append(Patch(facecolor=REST, label="the rest"))
    # the title is the legend's: two things above the panels would lie upon each other
    figure.legend(
        handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, title=title, title_fontsize=10
    )
    return figure


def _stack(axes: Axes, places: list[int], steps: list[StepTimes], scale: float) -> None:
    """The parts on top of each other; the rest fills up to the whole step."""
    bottom = [0.0] * len(steps)
    for part, lane in PARTS:
        heights = [scale * float(getattr(step, f"{part}_s")) for step in steps]
        axes.bar(places, heights, 0.8, bottom, color=LANE_COLOURS[lane], label=part)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    rest = [max(0.0, scale * step.step_s - low) for step, low in zip(steps, bottom, strict=True)]
    axes.bar(places, rest, 0.8, bottom, color=REST, label="the rest")
    axes.spines[["top", "right"]].set_visible(False)


def _unit(largest_s: float) -> tuple[str, float]:
    """In which numbers up to this one are easily read, and how many there are in a second."""
    return ("s", 1.0) if largest_s >= 1 else ("ms", 1e3) if largest_s >= 1e-3 else ("µs", 1e6)


def _short(value: float) -> str:
    """At most three figures; what is next to nothing is 0."""
    return f"{value:.0f}" if value >= 10 or value < 0.05 else f"{value:.1f}"


def _ink(red: float, green: float, blue: float, _alpha: float) -> str:
    """Black on light cells, white on dark ones."""
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
