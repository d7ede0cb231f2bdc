"""A file of steps reads back as what was written."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from torch_parallel.steps import StepsFile, StepTimes, read_steps

FIRST = StepTimes(1, 1, 0, "worker", 1.0, 0.5, 0.25, 0.0625, 0.03125, 0.125, [0.0, 0.25])
SECOND = StepTimes(1, 1, 1, "worker", 1.0, 0.75, 0.0, 0.0625, 0.03125, 0.125, [0.0, 0.0])
THIRD = StepTimes(1, 2, 0, "worker", 2.0, 0.5, 1.25, 0.0625, 0.03125, 0.125, [0.0, 1.25])


def test_what_is_written_is_read_in_order(tmp_path: Path) -> None:
    file = StepsFile(tmp_path / "steps.csv", run_id="r", kind="emulated", strategy="ring")
    file.append([SECOND])
    file.append([FIRST, THIRD])
    assert read_steps(tmp_path / "steps.csv") == [FIRST, SECOND, THIRD]
    with open(tmp_path / "steps.csv", newline="") as opened:
        rows = list(csv.DictReader(opened))
    assert rows[0] == {
        "run_id": "r",
        "kind": "emulated",
        "strategy": "ring",
        "epoch": "1",
        "step": "1",
        "rank": "1",
        "role": "worker",
        "step_s": "1.0",
        "compute_s": "0.75",
        "wait_s": "0.0",
        "move_s": "0.0625",
        "reduce_s": "0.03125",
        "update_s": "0.125",
        "waited_for_s": "[0.0, 0.0]",
    }


def test_a_new_run_begins_the_file_anew(tmp_path: Path) -> None:
    for _ in range(2):
        file = StepsFile(tmp_path / "steps.csv", run_id="r", kind="measured", strategy="ring")
        file.append([FIRST])
    assert read_steps(tmp_path / "steps.csv") == [FIRST]


@pytest.mark.parametrize("text", ["epoch,step\n1,2\n", "a\nb\n", 'epoch\n"'])
def test_another_file_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.csv").write_text(text)
    with pytest.raises(ValueError, match=r"other\.csv is no file of steps"):
        read_steps(tmp_path / "other.csv")
