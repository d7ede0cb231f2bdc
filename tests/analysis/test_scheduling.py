"""Gains of a scheduler, from rows made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_parallel.analysis.runs import Record, bench_rows
from torch_parallel.analysis.scheduling import PLAIN, by_ratio, gain, gain_bars, gains_told, ideal_gain, newest_of_each


def rows(tmp_path: Path) -> list[Record]:
    return [
        Record(tmp_path / "bench.csv", {"ratio": ratio, "arm": arm, "step_s": step_s, "ideal_s": "0.2"})
        for ratio, arm, step_s in (("1.0", PLAIN, "0.6"), ("1.0", "priority", "0.3"), ("2.0", PLAIN, "0.9"))
    ]


def test_gains_by_hand(tmp_path: Path) -> None:
    table = by_ratio(rows(tmp_path))
    assert {ratio: list(arms) for ratio, arms in table.items()} == {1.0: [PLAIN, "priority"], 2.0: [PLAIN]}
    plain = table[1.0][PLAIN]
    assert gain(table[1.0]["priority"], plain) == pytest.approx(2) and ideal_gain(plain) == pytest.approx(3)


def test_the_committed_figures_are_told_and_drawn() -> None:
    folders = newest_of_each()
    assert set(folders) == {"ring_all_reduce", "param_server"}
    told = gains_told()
    for strategy, folder in folders.items():
        assert f"{strategy}, emulated link" in told
        for arms in by_ratio(bench_rows(folder)).values():
            both = arms["priority and partition"]
            step = f"{1e3 * float(both['step_s']):6.0f} ms"
            assert f"priority and partition  {step}" in told
    assert [axes.get_title() for axes in gain_bars("results").axes] == list(folders)
