"""Where things are in an animation: the ranks in a circle, their chunks in columns, and the ways in between.

All coordinates are pixels from the lower left corner of the picture.
"""

from __future__ import annotations

import math

from torch_parallel.collectives.moves import Message

WIDTH, HEIGHT = 600, 640
LEFT, RIGHT, BOTTOM, TOP = 16.0, 584.0, 40.0, 540.0  # where the ranks stand; above and below are texts

Point = tuple[float, float]


class Circle:
    """Where the cells and the routes of a collective are."""

    def __init__(self, world_size: int, chunk_count: int) -> None:
        self.chunk_count = chunk_count
        # columns must fit beside each other, with a way for chunks in between
        self.cell_width = 130.0 if world_size <= 2 else 116.0 if world_size <= 4 else 74.0
        tallest = 240.0 if world_size <= 2 else 144.0 if world_size <= 6 else 112.0
        self.cell_height = min(tallest / 4, tallest / chunk_count)
        first = 90 if world_size % 2 else 90 + 180 / world_size  # degrees; even numbers stand on a side, not on a tip
        angles = [math.radians(first - 360 * rank / world_size) for rank in range(world_size)]
        half_width, half_height, label = self.cell_width / 2, self.cell_height * chunk_count / 2, 20
        xs = _spread([math.cos(angle) for angle in angles], LEFT + half_width, RIGHT - half_width)
        ys = _spread([math.sin(angle) for angle in angles], BOTTOM + half_height, TOP - half_height - label)
        self.columns: list[Point] = list(zip(xs, ys, strict=True))

    def cell(self, rank: int, chunk: float) -> Point:
        """The centre of a cell, or of several: then `chunk` is the mean of their numbers."""
        x, y = self.columns[rank]
        return x, y + ((self.chunk_count - 1) / 2 - chunk) * self.cell_height

    def route(self, message: Message) -> list[Point]:
        """The points of a Bezier curve from the edge of one column to that of the other, sideways at both ends."""
        leaves, arrives = middle(message.chunks), middle(message.target)
        if not message.chunks:
            leaves = arrives = (self.chunk_count - 1) / 2
        (x0, y0), (x1, y1) = self.cell(message.source, leaves), self.cell(message.to, arrives)
        if abs(x1 - x0) > self.cell_width + 10:
            leave = math.copysign(1.0, x1 - x0)
            enter, bend = -leave, (abs(x1 - x0) - self.cell_width) / 2
        else:  # one above the other: out and in on the same side, the one that has more room
            leave = enter = 1.0 if x0 + x1 < LEFT + RIGHT + 1 else -1.0
            bend = 20 + abs(y1 - y0) / 4
        start, end = x0 + leave * self.cell_width / 2, x1 + enter * self.cell_width / 2
        dx, dy = self._swerve(message)
        return [(start, y0), (start + leave * bend + dx, y0 + dy), (end + enter * bend + dx, y1 + dy), (end, y1)]

    def _swerve(self, message: Message) -> Point:
        """How far a route keeps to the right, so that those that cross in the middle do not meet there."""
        (x0, y0), (x1, y1) = self.columns[message.source], self.columns[message.to]
        off_centre = math.dist(((x0 + x1) / 2, (y0 + y1) / 2), ((LEFT + RIGHT) / 2, (BOTTOM + TOP) / 2))
        share = 0.28 * max(0.0, 1 - off_centre / 120) if len(self.columns) > 2 else 0.0
        return share * (y1 - y0), share * (x0 - x1)


def middle(chunks: range) -> float:
    """The mean of the numbers of some chunks."""
    return sum(chunks) / max(1, len(chunks))


def _spread(values: list[float], low: float, high: float) -> list[float]:
    """Scales values so that they reach from low to high; equal ones all go to the middle."""
    least, extent = min(values), max(values) - min(values)
    return [low + (value - least) / extent * (high - low) if extent > 1e-9 else (low + high) / 2 for value in values]


def on_curve(points: list[Point], fraction: float) -> Point:
    """The point of a Bezier curve at `fraction` (0..1) of its parameter."""
    weights = [math.comb(3, k) * fraction**k * (1 - fraction) ** (3 - k) for k in range(4)]
    pairs = list(zip(weights, points, strict=True))
    return sum(weight * x for weight, (x, _) in pairs), sum(weight * y for weight, (_, y) in pairs)
