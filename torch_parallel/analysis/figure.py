"""A figure without pyplot: no window opens, nothing needs closing, and a notebook shows it as it is returned."""

from __future__ import annotations

import io
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Plain

DPI = 100

COLOURS = {
    "ring_all_reduce": "#0072B2",
    "ddp": "#E69F00",
    "param_server": "#009E73",
    "data_parallel": "#CC79A7",
    "one process": "#222222",
    "sharded_param_server": "#56B4E9",
    "param_server_async": "#D55E00",
    "param_server_bounded": "#B8A800",
    "param_server_backup": "#7F5A2E",
    "1_1": "#222222",
    "1_2": "#56B4E9",
    "1_4": "#0072B2",
    "2_1": "#E69F00",
    "2_2": "#D55E00",
}
"""One a strategy, in every figure: those of Okabe and Ito, which the colour-blind can tell apart, their yellow darker,
and a brown. Markers differ too. Set-ups, nodes and workers of each, have figures of their own: one node is blue."""
MARKERS = {
    "ring_all_reduce": "o",
    "ddp": "s",
    "param_server": "^",
    "data_parallel": "D",
    "one process": "x",
    "sharded_param_server": "v",
    "param_server_async": "s",
    "param_server_bounded": "D",
    "param_server_backup": "P",
    "1_1": "x",
    "1_2": "o",
    "1_4": "s",
    "2_1": "^",
    "2_2": "D",
}
OTHER = "#999999"


class Figure(Plain):
    """A figure of the given size in inches."""

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")
        FigureCanvasAgg(self)

    def _repr_png_(self) -> bytes:
        """What a notebook shows."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", metadata={"Software": None})
        return buffer.getvalue()


def style(label: str) -> dict[str, Any]:
    """Colour and marker of a strategy, by a label that begins with its name."""
    name = label.split(",")[0]
    return {"color": COLOURS.get(name, OTHER), "marker": MARKERS.get(name, "v")}
