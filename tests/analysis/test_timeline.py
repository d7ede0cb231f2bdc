"""Bars lie where the events were, in the colour of their lane."""

from __future__ import annotations

import sys
from io import BytesIO
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from torch_parallel.analysis.timeline import LANE_COLOURS, draw, lane_colours
from torch_parallel.trace import LANES, Event

EVENTS = [
    Event(0, "compute", "step 0", 10.0, 10.004),
    Event(0, "compute", "step 1", 10.006, 10.009),
    Event(1, "compute", "step 0", 10.001, 10.003),
    Event(1, "wait", "bucket 0", 10.003, 10.005),
]


def many(world_size: int) -> list[Event]:
    """Every lane of every rank."""
    return [
        Event(rank, lane, lane, 0.001 * (k + rank / 10), 0.001 * (k + 1))
        for rank in range(world_size)
        for k, lane in enumerate(LANES)
    ]


def corners(figure: Figure) -> dict[str, list[np.ndarray]]:
    """The corners [corner, (ms, row)] of each bar, by "rank r lane"."""
    collections = [artist for artist in figure.axes[0].collections if isinstance(artist, PolyCollection)]
    return {str(each.get_label()): [np.asarray(path.vertices) for path in each.get_paths()] for each in collections}


def bars(figure: Figure) -> dict[str, list[tuple[float, float]]]:
    """(start, end) in ms of each bar, by "rank r lane"."""
    return {
        row: [(each[:, 0].min(), each[:, 0].max()) for each in drawn if len(each)]
        for row, drawn in corners(figure).items()
    }


def test_bars_are_the_events_in_ms_from_the_first() -> None:
    drawn = bars(draw(EVENTS))
    assert drawn["rank 0 compute"] == [pytest.approx((0, 4)), pytest.approx((6, 9))]
    assert drawn["rank 0 wait"] == []
    assert drawn["rank 1 compute"] == [pytest.approx((1, 3))]
    assert drawn["rank 1 wait"] == [pytest.approx((3, 5))]


def test_the_axis_shows_all_or_the_part_asked_for() -> None:
    assert draw(EVENTS).axes[0].get_xlim() == pytest.approx((0, 9))
    assert draw(EVENTS, first_s=0.002).axes[0].get_xlim() == pytest.approx((2, 9))
    assert draw(EVENTS, first_s=0.002, last_s=0.005).axes[0].get_xlim() == pytest.approx((2, 5))
    assert draw(EVENTS).axes[0].get_xlabel() == "ms"


def test_colours_and_legend_are_those_of_the_lanes() -> None:
    figure = draw(EVENTS)
    for collection in figure.axes[0].collections:
        lane = str(collection.get_label()).split()[-1]
        if lane in LANE_COLOURS:
            assert to_hex(np.asarray(collection.get_facecolor())[0]).upper() == LANE_COLOURS[lane]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["compute", "wait"]
    assert len({*lane_colours([*LANES, "disk", "net"]).values()}) == len(LANES) + 2


@pytest.mark.parametrize("world_size", [2, 8])
def test_rows_stand_below_each_other_and_the_legend_above(world_size: int) -> None:
    figure = draw(many(world_size))
    down = {row: drawn[0][:, 1].mean() for row, drawn in corners(figure).items()}
    assert list(down) == [f"rank {rank} {lane}" for rank in range(world_size) for lane in LANES]
    assert list(down.values()) == sorted(down.values())
    axes = figure.axes[0]
    low, high = sorted(axes.get_ylim())
    assert all(low < row < high for row in down.values())
    assert axes.yaxis_inverted()
    figure.draw_without_rendering()
    labels = [label.get_window_extent() for label in axes.get_yticklabels()]
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"rank {rank}" for rank in range(world_size)]
    assert not any(a.overlaps(b) for a, b in pairwise(labels))
    assert figure.legends[0].get_window_extent().y0 >= axes.get_window_extent().y1


def test_the_figure_can_be_saved_and_leaves_pyplot_alone() -> None:
    loaded = "matplotlib.pyplot" in sys.modules
    file = BytesIO()
    draw(many(2)).savefig(file, format="png")
    assert file.getvalue().startswith(b"\x89PNG")
    assert ("matplotlib.pyplot" in sys.modules) == loaded


def test_nothing_to_see_is_refused() -> None:
    with pytest.raises(ValueError, match="needs events"):
        draw([])
    with pytest.raises(ValueError, match=r"from 0\.005 s to 0\.002 s is empty"):
        draw(EVENTS, first_s=0.005, last_s=0.002)
    with pytest.raises(ValueError, match="is empty"):
        draw([Event(0, "wait", "", 1.0, 1.0)])
