"""Every registered algorithm can be drawn; what is drawn is what ranks hold; files open."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from itertools import combinations, pairwise
from math import dist
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import numpy as np
import pytest
from matplotlib.collections import PatchCollection
from matplotlib.colors import to_hex
from matplotlib.text import Text
from PIL import Image, ImageSequence

from torch_parallel.analysis.animate import (
    COLOURS,
    INK,
    Frame,
    Picture,
    animate,
    for_notebook,
    frames,
    regions_named,
    save_gif,
    sentence,
)
from torch_parallel.analysis.circle import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Circle, on_curve
from torch_parallel.collectives import COLLECTIVES
from torch_parallel.collectives.moves import Message, moves, states
from torch_parallel.collectives.proof import ProofError

RING = COLLECTIVES["ring"]
A, B = COLOURS[:2]


def cells(picture: Picture, index: int) -> list[tuple[tuple[str, ...], bool]]:
    """(colours of the stripes, whether complete) of each cell of a collection, complete ones last.

    Each is drawn as a white rectangle, its stripes, and an outline without a filling.
    """
    collection = [artist for artist in picture.axes.collections if isinstance(artist, PatchCollection)][index]
    found: list[tuple[tuple[str, ...], bool]] = []
    stripes: list[str] = []
    faces, edges = np.asarray(collection.get_facecolor()), np.asarray(collection.get_edgecolor())
    for face, edge in zip(faces, edges, strict=True):
        if face[3] == 0:
            found.append((tuple(stripes), to_hex(edge) == INK))
            stripes = []
        elif to_hex(face) != "#ffffff":
            stripes.append(to_hex(face).upper())
    return found


def texts(picture: Picture) -> list[Text]:
    return [text for text in picture.axes.texts if text.get_text()]


# ---- the frames ----


def test_frames_by_hand() -> None:
    eased = [(k / 6) ** 2 * (3 - 2 * (k / 6)) for k in range(1, 7)]
    assert frames(1, 10) == [
        *[Frame(0, 1.0)] * 10,
        *[Frame(1, 0.0)] * 2,
        *[Frame(1, fraction) for fraction in eased],
        *[Frame(1, 1.0)] * 2,
        *[Frame(2, 1.0)] * 15,
    ]


def test_frames_of_a_ring_speed_up_and_slow_down() -> None:
    shown = frames(6, 20)
    assert len(shown) == 20 + 6 * 20 + 30
    one = [frame.fraction for frame in shown if frame.number == 3]
    steps = [after - before for before, after in pairwise(one) if after > before]
    assert len(one) == 20
    assert steps[0] < steps[len(steps) // 2] > steps[-1]


# ---- the drawing, by hand ----


def test_a_ring_of_two_step_by_step() -> None:
    picture = Picture(RING, 2)
    picture.draw(Frame(0, 1.0))
    assert cells(picture, 0) == [((A,), False), ((A,), False), ((B,), False), ((B,), False)]
    picture.draw(Frame(1, 0.5))
    assert cells(picture, 0) == [((A,), False), ((A,), False), ((B,), False), ((B,), False)]
    assert [cells(picture, k) for k in (1, 2)] == [[((B,), False)], [((A,), False)]]  # on their way to ranks 0 and 1
    picture.draw(Frame(1, 1.0))
    assert cells(picture, 0) == [((A,), False), ((B,), False), ((A, B), True), ((A, B), True)]
    picture.draw(Frame(3, 1.0))
    assert cells(picture, 0) == [((A, B), True)] * 4
    assert len(picture.axes.collections) == 1  # of earlier frames nothing is left


def test_stripes_are_as_wide_as_their_share() -> None:
    picture = Picture(RING, 2)
    held = [[Counter({0: 1, 1: 2}), Counter({1: 1})], [Counter({0: 1}), Counter({1: 1})]]
    tab, *stripes, outline = picture._cell(held, rank=0, chunk=0, centre=(300, 100), halo=0)
    assert (tab.get_x(), tab.get_width()) == (outline.get_x(), outline.get_width()) == (235, 130)
    # after 16 for the number, 114 are shared by three; each stripe goes on below those after it
    assert [(stripe.get_x(), stripe.get_x() + stripe.get_width()) for stripe in stripes] == [(251, 365), (289, 365)]
    assert [to_hex(stripe.get_facecolor()).upper() for stripe in stripes] == [A, B]


def test_words_of_each_frame() -> None:
    picture, words = Picture(RING, 4), []
    for frame in frames(6, 4):
        picture.draw(frame)
        words.append([text.get_text() for text in picture._texts])
    assert words[0] == ["before", "every rank holds its own values", ""]
    assert [
        "round 1 of 6",
        "rank 0 sends chunk 3 to rank 1, which adds it to its own",
        "and 3 more messages at the same time",
    ] in words
    assert [
        "round 6 of 6",
        "rank 0 sends chunk 2 to rank 1, which puts it in place of its own",
        "and 3 more messages at the same time",
    ] in words
    assert words[-1] == ["done", "every chunk that was promised is complete", ""]


def test_sentences() -> None:
    assert sentence(Message(2, 0, range(1, 4), reduce=True)) == (
        "rank 2 sends chunks 1 to 3 to rank 0, which adds them to its own"
    )
    assert sentence(Message(2, 0, range(0), reduce=False)) == "rank 2 signals rank 0, without a chunk"


def test_sentences_of_regions() -> None:
    one, second = range(1), range(1, 2)
    assert sentence(Message(2, 0, one, reduce=False, into=second)) == (
        "rank 2 sends chunk 0 to rank 0, which puts it into its chunk 1"
    )
    assert sentence(Message(2, 0, one, reduce=True, into=second, plus=one)) == (
        "rank 2 sends chunk 0 to rank 0, which adds its chunk 0, into chunk 1"
    )
    assert sentence(Message(2, 0, one, reduce=True, into=second)) == (
        "rank 2 sends chunk 0 to rank 0, which adds it to its chunk 1"
    )


def test_nothing_is_sent_of_a_common_chunk() -> None:
    told = sentence(Message(2, 0, range(6, 7), reduce=False), common=range(4, 8))
    assert told == "rank 2 tells rank 0 that chunk 6 is complete"


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.exhaustive
def test_sentences_fit_into_the_picture(name: str) -> None:
    picture = Picture(COLLECTIVES[name], 8)
    for number in range(len(picture.rounds) + 2):
        picture.draw(Frame(number, 1.0))
        assert all(text.get_window_extent().x1 < WIDTH for text in picture._texts)


def test_regions_are_named() -> None:
    named = {name: regions_named(each, states(each, 4)[0]) for name, each in COLLECTIVES.items()}
    assert {name: text for name, text in named.items() if text} == {
        "two_shot_in_place": "chunks 4 to 7: the result, one memory for all ranks",
        "one_shot": "chunk 1: the result",
        "gather_scatter": "chunks 1 to 3: scratch",
        "all_gather_average": "chunk 1: the result        chunks 2 to 3: scratch",
        "all_to_all": "chunks 4 to 7: the result",
    }


def test_a_chunk_travels_from_cell_to_cell() -> None:
    picture = Picture(RING, 4)
    message = Message(0, 1, range(3, 4), reduce=True)
    ((_, _, start),), ((_, _, end),) = (picture._under_way(message, fraction) for fraction in (0.0, 1.0))
    assert start == pytest.approx(picture.circle.cell(0, 3))
    assert end == pytest.approx(picture.circle.cell(1, 3))


def test_chunks_of_one_message_keep_their_distance() -> None:
    picture = Picture(RING, 4)
    places = picture._under_way(Message(0, 2, range(1, 4), reduce=True), 0.3)
    assert [(rank, chunk) for rank, chunk, _ in places] == [(0, 1), (0, 2), (0, 3)]
    assert {round(above[1] - below[1], 6) for (*_, above), (*_, below) in pairwise(places)} == {
        round(picture.circle.cell_height, 6)
    }


# ---- what holds for all ----


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_collective_is_drawn(name: str) -> None:
    for world_size in range(1, 9):
        picture = Picture(COLLECTIVES[name], world_size)
        rounds = moves(COLLECTIVES[name], world_size)
        for number in {1, len(rounds) // 2 + 1, len(rounds)} if rounds else ():
            picture.draw(Frame(number, 0.5))
            assert len(picture.axes.collections) == 1 + sum(m.source != m.to for m in rounds[number - 1])
        picture.draw(Frame(len(picture.rounds) + 1, 1.0))
        promised = [
            COLLECTIVES[name].promised(rank, world_size, chunk) is not None
            for rank in range(world_size)
            for chunk in range(COLLECTIVES[name].total_chunks(rank, world_size))
        ]
        assert [complete for _, complete in cells(picture, 0)] == sorted(promised)


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("chunk_count", [1, 4, 8])
def test_columns_neither_overlap_nor_leave_the_picture(world_size: int, chunk_count: int) -> None:
    circle = Circle(world_size, chunk_count)
    width, height = circle.cell_width, circle.cell_height * chunk_count + 20  # with the label
    for x, y in circle.columns:
        assert x - width / 2 + 1e-6 >= LEFT and x + width / 2 <= RIGHT + 1e-6
        assert y - (height - 20) / 2 + 1e-6 >= BOTTOM and y + (height + 20) / 2 <= TOP + 1e-6
    for (x0, y0), (x1, y1) in combinations(circle.columns, 2):
        assert abs(x1 - x0) > width + 10 or abs(y1 - y0) > height


@pytest.mark.parametrize("world_size", range(2, 9))
def test_routes_stay_in_the_picture_and_crossing_ones_do_not_meet(world_size: int) -> None:
    circle = Circle(world_size, 1)
    pairs = [(a, b) for a in range(world_size) for b in range(world_size) if a != b]
    for a, b in pairs:
        route = circle.route(Message(a, b, range(1), reduce=True))
        points = [on_curve(route, k / 20) for k in range(21)]
        assert all(0 < x < WIDTH and 20 < y < TOP for x, y in points)
    if world_size in (4, 6, 8):
        opposite = [Message(a, (a + world_size // 2) % world_size, range(1), True) for a in range(world_size)]
        middles = [on_curve(circle.route(message), 0.5) for message in opposite]
        assert min(dist(p, q) for p, q in combinations(middles, 2)) > 2 * circle.cell_height / 3


@pytest.mark.parametrize(("name", "world_size"), [("ring", 8), ("ring", 7), ("ring", 4), ("broadcast", 3)])
def test_texts_do_not_overlap(name: str, world_size: int) -> None:
    picture = Picture(COLLECTIVES[name], world_size)
    picture.draw(Frame(1, 1.0))
    boxes = [text.get_window_extent() for text in texts(picture)]
    assert all(box.x0 > 0 and box.x1 < WIDTH and box.y0 > 0 and box.y1 < HEIGHT for box in boxes)
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


@pytest.mark.parametrize("world_size", [0, 9])
def test_more_ranks_than_colours_are_refused(world_size: int) -> None:
    with pytest.raises(ValueError, match=f"{world_size} ranks: an animation shows 1 to 8"):
        animate(RING, world_size)


def test_a_wrong_schedule_is_not_drawn() -> None:
    with pytest.raises(ProofError, match="ring is wrong for 4 ranks"):
        Picture(replace(RING, rounds=COLLECTIVES["ring_reduce_scatter"].rounds), 4)


# ---- files ----


def test_the_gif_of_a_ring_of_four(tmp_path: Path) -> None:
    backend = matplotlib.rcParams._get("backend")  # a plain read would choose one
    save_gif(RING, 4, tmp_path / "ring.gif")
    assert (tmp_path / "ring.gif").stat().st_size < 1_000_000
    with Image.open(tmp_path / "ring.gif") as gif:
        assert gif.size == (600, 640)
        assert gif.info["loop"] == 0  # for ever
        durations = [frame.info["duration"] for frame in ImageSequence.Iterator(gif)]
        last = gif.convert("RGB")
    assert sum(durations) == (20 + 6 * 20 + 30) * 50
    assert durations[0] == 1000 and durations[-1] == 1500
    # of a round's 20 pictures: one stands still for 4, 11 move, and the last one stands for 1 + 4
    assert len(durations) == 1 + 6 * 13 + 1
    x, y = Circle(4, 4).cell(0, 0)
    colour = last.getpixel((int(x - Circle(4, 4).cell_width / 2 + 25), int(HEIGHT - y)))
    assert colour == tuple(bytes.fromhex(A[1:]))
    assert last.getpixel((2, 2)) == (255, 255, 255)
    assert matplotlib.rcParams._get("backend") is backend


def test_a_notebook_gets_html_with_buttons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(HTML=lambda text: ("HTML", text)))
    kind, text = for_notebook(COLLECTIVES["broadcast"], 2)
    assert kind == "HTML"
    assert text.count("data:image/png;base64") == 6 + 6 + 9
    assert "anim" in text and "<script" in text
