"""Who did what, and when, as a figure: a band for each rank, in it a row for each lane, and a bar for each event.

Below each other, ranks show at a glance what numbers hide: who waits for whom, and whether exchange and computation
happen at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from torch_parallel.trace import Event, lane_order

LANE_COLOURS = {
    "compute": "#0072B2",
    "send": "#56B4E9",
    "wait": "#B0B0B0",
    "reduce": "#D55E00",
    "copy": "#E69F00",
    "update": "#009E73",
    "evaluate": "#CC79A7",
}
"""Colours of Okabe and Ito, which the colour-blind can tell apart; waiting is pale, for nothing happens."""

OTHER_COLOURS = ("#F0E442", "#222222")  # lanes beyond the usual ones, in turn
GAP = 0.6  # between the bands of two ranks, in rows
BAR = 0.86  # of a row's height
INCHES_PER_ROW, WIDTH_INCHES = 0.17, 9.0


def draw(events: Iterable[Event], first_s: float | None = None, last_s: float | None = None) -> Figure:
    """The timeline of all ranks, in milliseconds from the first event; rows stand in the order of `trace.LANES`.

    `first_s` and `last_s` cut out a part: seconds from the first event, as on the axis. The figure is not pyplot's, so
    no window opens and nothing needs closing. Raises `ValueError` where there is nothing to see.
    """
    events = list(events)
    if not events:
        raise ValueError("a timeline needs events")
    zero_s = min(event.start_s for event in events)
    first_s = first_s or 0.0
    last_s = max(event.end_s for event in events) - zero_s if last_s is None else last_s
    if not first_s < last_s:
        raise ValueError(f"a timeline from {first_s} s to {last_s} s is empty")
    lanes, ranks = lane_order(events), sorted({event.rank for event in events})
    figure = Figure(
        figsize=(WIDTH_INCHES, 1.2 + INCHES_PER_ROW * (len(lanes) + GAP) * len(ranks)), layout="constrained"
    )
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xlim(1e3 * first_s, 1e3 * last_s)
    axes.set_xlabel("ms")
    axes.set_title(f"what each of {len(ranks)} ranks did, and when", fontsize=10)
    _name_ranks(axes, ranks, len(lanes))
    colours = lane_colours(lanes)
    for place, rank in enumerate(ranks):
        for row, lane in enumerate(lanes):
            chosen = [event for event in events if (event.rank, event.lane) == (rank, lane)]
            bars = _bars(chosen, zero_s, place * (len(lanes) + GAP) + row)
            # the edge keeps an event visible that is shorter than a pixel
            collection = PolyCollection(bars, facecolor=colours[lane], edgecolor=colours[lane], linewidth=0.4)
            collection.set_label(f"rank {rank} {lane}")
            axes.add_collection(collection, autolim=False)
    handles = [Patch(facecolor=colours[lane], label=lane) for lane in lanes]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(lanes), frameon=False)
    return figure


def _name_ranks(axes: Axes, ranks: list[int], rows: int) -> None:
    """A grey band a rank, the lowest rank on top."""
    tops = [place * (rows + GAP) for place in range(len(ranks))]
    for top in tops:
        axes.axhspan(top - GAP / 4, top + rows + GAP / 4, color="#F4F4F4", zorder=0, linewidth=0)
    axes.set_yticks([top + rows / 2 for top in tops], [f"rank {rank}" for rank in ranks])
    axes.set_ylim(tops[-1] + rows + GAP / 2, -GAP / 2)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def lane_colours(lanes: list[str]) -> dict[str, str]:
    """A colour for each lane."""
    others = [lane for lane in lanes if lane not in LANE_COLOURS]
    named = {lane: LANE_COLOURS[lane] for lane in lanes if lane in LANE_COLOURS}
    return named | {lane: OTHER_COLOURS[k % len(OTHER_COLOURS)] for k, lane in enumerate(others)}


def _bars(events: list[Event], zero_s: float, top: float) -> list[list[tuple[float, float]]]:
    """The corners of each event's bar, in ms and rows."""
    above, below = top + (1 - BAR) / 2, top + (1 + BAR) / 2
    spans = [(1e3 * (event.start_s - zero_s), 1e3 * (event.end_s - zero_s)) for event in events]
    return [[(start, above), (start, below), (end, below), (end, above)] for start, end in spans]
