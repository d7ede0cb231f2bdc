"""A schedule that moves: the chunks of every rank, and the messages of every round on their way.

The picture is made from the schedule, as all else is, so every registered algorithm has one:

    animate(COLLECTIVES["ring"], 4)                an animation of matplotlib
    save_gif(COLLECTIVES["ring"], 4, "ring.gif")   a file
    for_notebook(COLLECTIVES["ring"], 4)           with buttons to stop and to step; needs no ffmpeg

Ranks stand in a circle, clockwise. Each is a column of cells, one a chunk; a cell's stripes are the ranks whose values
it is the sum of, and a dark outline says that it is complete. Rounds are those of `collectives/moves.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib.animation import FuncAnimation
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.path import Path as Curve
from matplotlib.text import Text
from PIL import Image

from torch_parallel.analysis.circle import HEIGHT, WIDTH, Circle, Point, middle, on_curve
from torch_parallel.collectives import Collective
from torch_parallel.collectives.moves import Message, Table, is_complete, moves, region_name, states
from torch_parallel.collectives.schedule import NOTHING

COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#999999")
"""One a rank: those of Okabe and Ito, which the colour-blind can tell apart, with grey in place of black."""

INK, GREY, PALE = "#222222", "#7A7A7A", "#B0B0B0"
ARROW: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 11, "linewidth": 1.2}
DPI = 100
FRAMES_PER_ROUND, FRAMES_PER_S = 20, 20
TAB = 16.0  # width of the number before a cell's stripes

Place = tuple[int, int, Point]  # rank and chunk of a cell, and its centre


@dataclass(frozen=True, slots=True)
class Frame:
    """One picture: the messages of round `number` after `fraction` (0..1) of their way. Round 0 is the state before."""

    number: int
    fraction: float


def frames(round_count: int, frames_per_round: int) -> list[Frame]:
    """A still start, rounds of equal length, each slow at both ends with a halt before and after, and a longer halt."""
    halt = frames_per_round // 5
    moving = frames_per_round - 2 * halt
    way = [0.0] * halt + [_eased((k + 1) / moving) for k in range(moving)] + [1.0] * halt
    rounds = [Frame(number, fraction) for number in range(1, round_count + 1) for fraction in way]
    return [Frame(0, 1.0)] * frames_per_round + rounds + [Frame(round_count + 1, 1.0)] * (3 * frames_per_round // 2)


def _eased(fraction: float) -> float:
    return fraction * fraction * (3 - 2 * fraction)


class Picture:
    """A figure, and one frame after the other on it."""

    def __init__(self, collective: Collective, world_size: int) -> None:
        if not 1 <= world_size <= len(COLOURS):
            raise ValueError(f"{world_size} ranks: an animation shows 1 to {len(COLOURS)}")
        self.collective = collective
        self.rounds, self.tables = moves(collective, world_size), states(collective, world_size)
        self.circle = Circle(world_size, max(map(len, self.tables[0])))
        self.figure = Figure(figsize=(WIDTH / DPI, HEIGHT / DPI), dpi=DPI, facecolor="white")
        self.canvas = FigureCanvasAgg(self.figure)  # not by pyplot: no window, no backend for all, nothing to close
        self.axes = self.figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(0, HEIGHT))
        self.axes.set_axis_off()
        ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
        self._write(18, 606, f"{collective.name}, {ranks}", fontsize=14, weight="bold")
        key = "stripes: the ranks whose values are summed        dark outline: complete"
        self._write(WIDTH / 2, 13, key, fontsize=8.5, ha="center", color=GREY)
        for rank in range(world_size):
            self._label(rank)
            held = range(len(self.tables[0][rank]))
            self._number([(chunk, self.circle.cell(rank, chunk)) for chunk in held], height=3)
        self._write(WIDTH / 2, 27, regions_named(collective, self.tables[0]), fontsize=8.5, ha="center", color=GREY)
        self._texts = [
            self._write(WIDTH - 18, 607, "", fontsize=11, ha="right"),
            self._write(18, 580, "", fontsize=10.5),
            self._write(18, 560, "", fontsize=9, color=GREY),
        ]
        self._passing: list[Artist] = []  # what only the present frame shows

    def _write(self, x: float, y: float, text: str, **style: Any) -> Text:
        return self.axes.text(x, y, text, **{"color": INK, **style})

    def _label(self, rank: int) -> None:
        x, y = self.circle.cell(rank, -0.5)  # the upper edge of the column
        self._write(x + 7, y + 7, f"rank {rank}", fontsize=9, ha="center")
        self.axes.add_patch(Rectangle((x - 27, y + 7), 9, 9, facecolor=COLOURS[rank], edgecolor=INK, linewidth=0.5))

    def _number(self, places: list[tuple[int, Point]], height: float) -> list[Text]:
        """Writes the chunks' numbers into the tabs of cells, if they can be read there."""
        if self.circle.cell_height < 9:
            return []
        left, size = TAB / 2 - self.circle.cell_width / 2, min(9.0, 0.55 * self.circle.cell_height)
        style = {"fontsize": size, "ha": "center", "va": "center_baseline", "zorder": height}
        return [self._write(x + left, y, str(chunk), **style) for chunk, (x, y) in places]

    def draw(self, frame: Frame) -> list[Artist]:
        """Puts a frame in the place of the one before."""
        for artist in self._passing:
            artist.remove()
        this = self.rounds[frame.number - 1] if 1 <= frame.number <= len(self.rounds) else []
        messages = [message for message in this if not message.is_local]
        moving = [] if frame.fraction == 1.0 else messages
        table = self.tables[min(frame.number, len(self.rounds)) - bool(moving)]
        standing = [(rank, k, self.circle.cell(rank, k)) for rank, row in enumerate(table) for k in range(len(row))]
        self._passing = [*self._arrows(messages), self._cells(table, standing, height=2)]
        for height, message in enumerate(moving, start=5):  # each above the one before, its numbers too
            cells = self._under_way(message, frame.fraction)
            self._passing.append(self._cells(table, cells, height, halo=3))
            self._passing += self._number([(chunk, centre) for _, chunk, centre in cells], height + 0.5)
        for text, words in zip(self._texts, self._words(frame.number, messages), strict=True):
            text.set_text(words)
        return self._passing

    def _under_way(self, message: Message, fraction: float) -> list[Place]:
        """Where the cells of a message are: its curve goes from centre to centre, and all keep their distances."""
        first, (_, leaving, entering, _) = message.chunks.start, self.circle.route(message)
        centre = middle(message.chunks)
        ends = self.circle.cell(message.source, centre), self.circle.cell(message.to, middle(message.target))
        x, y = on_curve([ends[0], leaving, entering, ends[1]], fraction)
        return [
            (message.source, first + k, (x, y + (centre - first - k) * self.circle.cell_height))
            for k in range(len(message.chunks))
        ]

    def _cells(self, table: Table, places: list[Place], height: float, halo: float = 0) -> Artist:
        """Draws cells, complete ones last: their outlines go over their neighbours'."""
        places = sorted(places, key=lambda place: is_complete(self.collective, table, *place[:2]))
        patches = [patch for place in places for patch in self._cell(table, *place, halo)]
        return self.axes.add_collection(PatchCollection(patches, match_original=True, zorder=height), autolim=False)

    def _cell(self, table: Table, rank: int, chunk: int, centre: Point, halo: float) -> list[Rectangle]:
        """A white tab, a stripe a contribution, and the outline."""
        width, height = self.circle.cell_width, self.circle.cell_height - 2
        left, bottom = centre[0] - width / 2, centre[1] - height / 2
        contributions = sorted(table[rank][chunk].items())
        total, before = sum(times for _, times in contributions), 0
        patches = [Rectangle((left, bottom), width, height, facecolor="white", edgecolor="white", linewidth=halo)]
        for source, times in contributions:
            # each reaches to the right end, below those that follow: no seam of white between two
            start = TAB + (width - TAB) * before / total
            stripe = Rectangle((left + start, bottom), width - start, height, facecolor=COLOURS[source], linewidth=0)
            patches.append(stripe)
            before += times
        edge = (INK, 1.6) if is_complete(self.collective, table, rank, chunk) else (PALE, 0.8)
        return [*patches, Rectangle((left, bottom), width, height, fill=False, edgecolor=edge[0], linewidth=edge[1])]

    def _arrows(self, messages: list[Message]) -> Iterator[Artist]:
        colour = GREY if len(messages) <= 16 else PALE
        for message in messages:
            curve = Curve(self.circle.route(message), [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4])
            line = "-" if message.chunks else ":"  # dotted: a signal without chunks
            yield self.axes.add_patch(FancyArrowPatch(path=curve, color=colour, ls=line, **ARROW))

    def _words(self, number: int, messages: list[Message]) -> tuple[str, str, str]:
        """The round, the first of its messages, and how many there are besides."""
        if not self.rounds:
            return "", "one rank has nothing to send", ""
        if number == 0:
            return "before", "every rank holds its own values", ""
        if number > len(self.rounds):
            return "done", "every chunk that was promised is complete", ""
        heading = f"round {number} of {len(self.rounds)}"
        if not messages:
            return heading, "nothing arrives", ""
        first, *others = sorted(messages, key=lambda message: (message.source, message.to))
        besides = f"and {len(others)} more message{'s' if len(others) > 1 else ''} at the same time" if others else ""
        return heading, sentence(first, self.collective.common_chunks(len(self.tables[0]))), besides


def sentence(message: Message, common: range = NOTHING) -> str:
    """What a message does, in words; `common` are the chunks that are one memory for all ranks."""
    if not message.chunks:
        return f"rank {message.source} signals rank {message.to}, without a chunk"
    if message.chunks[0] in common:
        return f"rank {message.source} tells rank {message.to} that {_numbered(message.chunks)} is complete"
    what, it = _numbered(message.chunks), "it" if len(message.chunks) == 1 else "them"
    deed = f"adds {it} to its own" if message.reduce else f"puts {it} in place of its own"
    if message.target != message.chunks:
        place, addend = _numbered(message.target), _numbered(message.addend)
        summed = f"adds {it} to its {place}" if addend == place else f"adds its {addend}, into {place}"
        deed = summed if message.reduce else f"puts {it} into its {place}"
    return f"rank {message.source} sends {what} to rank {message.to}, which {deed}"


def _numbered(chunks: Sequence[int]) -> str:
    return f"chunk {chunks[0]}" if len(chunks) == 1 else f"chunks {chunks[0]} to {chunks[-1]}"


def regions_named(collective: Collective, table: Table) -> str:
    """Which chunks are the result and which are scratch, where they do not all lie in the input."""
    names: dict[str, list[int]] = {}
    for chunk in range(max(map(len, table))):
        names.setdefault(region_name(collective, len(table), chunk), []).append(chunk)
    common = ", one memory for all ranks" if collective.common_chunks(len(table)) else ""
    meanings = {"result": f"the result{common}", "scratch": "scratch"}
    return "        ".join(f"{_numbered(names[name])}: {meanings[name]}" for name in names if name in meanings)


def animate(collective: Collective, world_size: int, frames_per_round: int = FRAMES_PER_ROUND) -> FuncAnimation:
    """The animation of a collective on 1 to 8 ranks, one second a round.

    Raises `ValueError` for other numbers of ranks, and `ProofError` for a schedule that is wrong.
    """
    picture = Picture(collective, world_size)
    shown = frames(len(picture.rounds), frames_per_round)
    interval = 1000 / frames_per_round
    return FuncAnimation(picture.figure, picture.draw, frames=shown, interval=interval, cache_frame_data=False)


def save_gif(collective: Collective, world_size: int, path: str | Path) -> None:
    """Writes the animation as a GIF of 600 x 640 pixels that repeats. Raises as `animate` does."""
    picture = Picture(collective, world_size)
    images, durations_ms, palette = [], [], _palette()
    for frame, halt in groupby(frames(len(picture.rounds), FRAMES_PER_ROUND)):  # a halt is drawn once, and shown longer
        picture.draw(frame)
        picture.canvas.draw()
        image = Image.frombuffer("RGBA", (WIDTH, HEIGHT), bytes(picture.canvas.buffer_rgba())).convert("RGB")
        # with one palette for all, what stands still is stored once
        images.append(image.quantize(palette=palette, dither=Image.Dither.NONE))
        durations_ms.append(1000 * len(list(halt)) // FRAMES_PER_S)
    images[0].save(path, save_all=True, append_images=images[1:], duration=durations_ms, loop=0)


def _palette() -> Image.Image:
    """All colours of the picture, and what lies between them and white: the edges of letters and lines."""
    colours = [bytes.fromhex(colour[1:]) for colour in (*COLOURS, INK, GREY, PALE)]
    shades = [[round(255 + (value - 255) * part / 5) for value in colour] for colour in colours for part in range(1, 6)]
    image = Image.new("P", (1, 1))
    image.putpalette(sum(shades, start=[255, 255, 255]))
    return image


def for_notebook(collective: Collective, world_size: int) -> Any:
    """The animation as an `IPython.display.HTML` with buttons. Coarser than the GIF: the notebook stores its frames."""
    html: type[Any] = import_module("IPython.display").HTML  # IPython is there where there is a notebook
    return html(animate(collective, world_size, frames_per_round=6).to_jshtml(fps=6, default_mode="loop"))
