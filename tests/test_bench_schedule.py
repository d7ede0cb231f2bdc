"""The bounds of the bench of schedules, by hand; and the bench itself, in short."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from torch_parallel.bench.schedule import bench_schedule, ideal_step_s, overlapped_step_s
from torch_parallel.usage import ConfigError


def test_bounds_by_hand() -> None:
    """Two layers, F = 2, B = 4, C = 6 seconds: of a layer 1, 2 and 3."""
    # backward 2 ends at 2, of 1 at 4; the link has layer 2's from 2 to 5, layer 1's to 8; then forward
    assert overlapped_step_s(2, 4, 6, 2) == pytest.approx(8 + 2)
    # from the end of backward: layer 2's is interrupted after 2 s, layer 1's takes 3, forward 1 lasts 1 beside the
    # last second of layer 2's, forward 2 1 more: 4 + 3 + 1 + 1
    assert ideal_step_s(2, 4, 6, 2) == pytest.approx(9)
    # nothing to exchange; and one layer, where nothing overlaps
    assert ideal_step_s(2, 4, 0, 2) == overlapped_step_s(2, 4, 0, 2) == pytest.approx(6)
    assert ideal_step_s(2, 4, 6, 1) == overlapped_step_s(2, 4, 6, 1) == pytest.approx(12)


def test_bounds_of_many_layers() -> None:
    """In the limit, F + max(B, C) and max(F + B, C): at most 4/3 where B = 2 F and C = F + B."""
    assert overlapped_step_s(1, 2, 3, 1000) == pytest.approx(4, rel=0.01)
    assert ideal_step_s(1, 2, 3, 1000) == pytest.approx(3, rel=0.01)
    assert ideal_step_s(1, 2, 9, 1000) == pytest.approx(9, rel=0.01)
    assert ideal_step_s(1, 2, 0.3, 1000) == pytest.approx(3, rel=0.01)


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["ring_all_reduce", "param_server"])
def test_the_bench_in_short(strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--layers", "2", "--layer_mb", "0.1", "--forward_ms", "2", "--backward_ms", "4", "--partition_mb", "0.03"]
    bench_schedule(["--strategy", strategy, *small, "--steps", "2", "--repeats", "1", "--results_dir", str(tmp_path)])
    assert "priority and partition" in capsys.readouterr().out
    (file,) = tmp_path.glob("*/bench.csv")
    with file.open() as opened:
        rows = list(csv.DictReader(opened))
    assert [row["arm"] for row in rows] == ["plain", "overlap", "partition", "priority", "priority and partition"]
    assert all(float(row["step_s"]) > 0.006 for row in rows)  # forward and backward last at least so long


def test_what_cannot_be_timed_is_one_line() -> None:
    for flags, line in (
        (["--n_gpus", "1"], "--n_gpus 1: at least 2 are needed"),
        (["--ratio", "0"], "--ratio 0.0: each must be > 0"),
        (["--layers", "0"], "--layers 0: at least 1 is needed"),
        (["--credit_mb", "-1"], "--credit_mb -1: it must be > 0"),
    ):
        with pytest.raises(ConfigError, match=line):
            bench_schedule(flags)
