"""The matrix of waits and the stacked seconds show the numbers that they are given."""

from __future__ import annotations

from io import BytesIO

import pytest
from matplotlib.colors import to_rgb
from matplotlib.container import BarContainer

from torch_parallel.analysis.waits import draw_matrix, draw_steps, mean_waits, waits_in_the_end
from torch_parallel.steps import StepTimes


def step(number: int, rank: int, waited_for_s: list[float], role: str = "worker") -> StepTimes:
    """10 ms compute, 2 move, 3 reduce, 1 update, the waits, and 4 ms more than that."""
    wait_s = sum(waited_for_s)
    return StepTimes(1, number, rank, role, 0.020 + wait_s, 0.010, wait_s, 0.002, 0.003, 0.001, waited_for_s)


STEPS = [
    *(step(0, rank, [7.0, 7.0, 7.0]) for rank in range(3)),  # warms up
    step(1, 0, [0.0, 0.010, 0.040], "server"),
    step(1, 1, [0.005, 0.0, 0.0]),
    step(1, 2, [0.0, 0.0, 0.0]),
    step(2, 0, [0.0, 0.030, 0.020], "server"),
    step(2, 1, [0.015, 0.0, 0.0]),
    step(2, 2, [0.0, 0.0, 0.0]),
]


def test_means_by_hand() -> None:
    mean = mean_waits(STEPS)
    assert mean == [pytest.approx([0, 0.020, 0.030]), pytest.approx([0.010, 0, 0]), [0, 0, 0]]


def test_waits_along_a_ring_are_put_down_to_the_slow_rank() -> None:
    """Rank 3 is slow: 0 waits for 3, 1 for 0, 2 for 1, each 8 s, and 3 waits 1 s for 2. Of the 8 s, rank 3 has 7 on its
    own account; the eighth goes around: 3 was kept waiting by 2, that by 1, that by 0, and that by 3."""
    ring = [[0.0, 0.0, 0.0, 8.0], [8.0, 0.0, 0.0, 0.0], [0.0, 8.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]]
    end = waits_in_the_end(ring)
    for rank in (0, 1, 2):
        assert sum(end[rank]) == pytest.approx(8) and end[rank][3] >= 7
    assert sum(end[3]) == pytest.approx(1)


def test_waits_for_a_server_are_put_down_to_its_slow_worker() -> None:
    """Rank 0 serves. It waits 9 s for rank 2 and 1 s for rank 1; rank 1 waits 10 s for it and rank 2 not at all.

    Of rank 1's 10 s, 9 are rank 2's; 1 s comes back to rank 1, so to the server, and from there 0.9 s to rank 2.
    """
    served = [[0.0, 1.0, 9.0], [10.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    expected = [[0.1, 0, 9.9], [0, 0.1, 9.9], [0, 0, 0]]
    assert waits_in_the_end(served) == [pytest.approx(row) for row in expected]


def test_a_short_chain_by_hand() -> None:
    """Rank 2 waits 3 s for rank 1, which waits 5 s for rank 0: so rank 2 has waited for rank 0 alone."""
    star = [[0.0, 0.0, 0.0], [5.0, 0.0, 0.0], [2.0, 3.0, 0.0]]
    assert waits_in_the_end(star) == [[0, 0, 0], [5, 0, 0], [pytest.approx(5), pytest.approx(0), 0]]


def test_the_matrix_says_its_numbers_in_ms() -> None:
    figure = draw_matrix(STEPS)
    axes = figure.axes[0]
    said = {(text.get_position()[1], text.get_position()[0]): text.get_text() for text in axes.texts}
    rows = [[said[rank, peer] for peer in range(3)] for rank in range(3)]
    assert rows == [["", "20", "30"], ["10", "", ""], ["", "", ""]]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1", "rank 2"]
    assert axes.get_xlabel() == "waits for rank" and figure.axes[1].get_ylabel() == "ms a step"
    # each number can be told from its ground: it is dark where the text is white
    image = axes.images[0]
    for (rank, peer), text in zip(said, axes.texts, strict=True):
        ground = image.to_rgba(image.get_array())[int(rank), int(peer)][:3]
        contrast = abs(sum(to_rgb(text.get_color())) / 3 - sum(ground) / 3)
        assert contrast > 0.4, (rank, peer)


def test_a_small_wait_is_told_in_its_unit() -> None:
    figure = draw_matrix([step(1, 0, [0.0, 0.000_020]), step(1, 1, [0.000_001_5, 0.0])])
    assert [text.get_text() for text in figure.axes[0].texts] == ["", "20", "1.5", ""]
    assert figure.axes[1].get_ylabel() == "µs a step"
    quiet = draw_matrix([step(1, 0, [0.0, 0.0]), step(1, 1, [0.0, 0.0])])
    assert [text.get_text() for text in quiet.axes[0].texts] == ["", "", "", ""]


def test_the_parts_of_a_step_are_stacked() -> None:
    """Rank 0, in ms: compute 0 to 10, reduce to 13, move to 15, update to 16, wait 50 more, then the 4 of the rest."""
    figure = draw_steps(STEPS[3:])
    assert [axes.get_ylabel() for axes in figure.axes] == ["rank 0 (server)\nms", "rank 1\nms", "rank 2\nms"]
    bars = {str(each.get_label()): each for each in figure.axes[0].containers if isinstance(each, BarContainer)}
    spans = {
        part: [(bar.get_x() + bar.get_width() / 2, bar.get_y(), bar.get_height()) for bar in drawn.patches]
        for part, drawn in bars.items()
    }
    expected = [("compute", 0, 10), ("reduce", 10, 3), ("move", 13, 2), ("update", 15, 1), ("wait", 16, 50)]
    for part, low, height in [*expected, ("the rest", 66, 4)]:
        assert spans[part] == [pytest.approx((1, low, height)), pytest.approx((2, low, height))], part
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [*(part for part, _, _ in expected), "the rest"]


def test_of_many_steps_the_last_are_drawn() -> None:
    figure = draw_steps([step(number, 0, [0.0]) for number in range(1, 101)])
    assert figure.axes[0].get_xlim() == pytest.approx((40.4, 100.6))
    assert len(figure.axes[0].containers[0]) == 60


def test_both_can_be_saved_and_nothing_is_refused() -> None:
    for draw in (draw_matrix, draw_steps):
        file = BytesIO()
        draw(STEPS).savefig(file, format="png")
        assert file.getvalue().startswith(b"\x89PNG")
        with pytest.raises(ValueError, match="needs steps"):
            draw([])
