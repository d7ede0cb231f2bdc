"""The fault driver itself: it passes on the program as it is, and fails when a safeguard is taken out."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from torch_parallel import faults
from torch_parallel.injection import CELLS, FAULTS, PHASES, make_plan


def drive(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch_parallel", "faults", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=400)


@pytest.mark.timeout(400)
def test_twenty_faults_end_as_they_should() -> None:
    done = drive("--trials", "20", "--seed", "1")
    assert done.returncode == 0, done.stdout
    assert "20 of 20 ended as they should" in done.stdout
    assert "MISS" not in done.stdout
    # 20 different cells, each counted once in the table
    table = done.stdout.split("hits", 1)[1]
    counts = [int(number) for number in re.findall(r" (\d+)\b", table.split("ended", 1)[0].rsplit("\n", 1)[0])]
    assert len(counts) == sum(map(len, FAULTS.values())) * len(PHASES)
    assert sorted(counts) == [0] * (len(counts) - 20) + [1] * 20


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("safeguard", "cell", "what_is_noticed"),
    [
        ("death watch", "launcher killed exchanging", "processes are left"),
        ("deadline", "worker stopped exchanging", "the run did not end within 45 s"),
    ],
)
def test_without_a_safeguard_the_driver_reports_misses(safeguard: str, cell: str, what_is_noticed: str) -> None:
    done = drive("--trials", "1", "--only", cell, "--without", safeguard)
    assert done.returncode == 1
    assert "MISS" in done.stdout and what_is_noticed in done.stdout
    assert "0 of 1 ended as they should" in done.stdout


@pytest.mark.parametrize(("before_s", "after_s", "misses"), [(1.5, 0.2, []), (0.2, 9.0, ["did not end within 1 s"])])
def test_a_run_has_its_time_from_the_fault_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before_s: float, after_s: float, misses: list[str]
) -> None:
    """How long a busy machine takes to start the run is not the run's fault."""
    monkeypatch.setattr(faults, "TRIAL_LIMIT_S", 1.0)
    plan = make_plan(("worker", "killed", "saving"), random.Random(1), str(tmp_path), "")
    script = f"sleep {before_s}; date +%s.%N > {tmp_path}/fired; sleep {after_s}"
    noticed: list[str] = []
    fired_s = faults._wait_for_end(plan, subprocess.Popen(["bash", "-c", script]), noticed)
    assert fired_s == float((tmp_path / "fired").read_text())
    assert noticed == [f"the run {miss}" for miss in misses]


def test_every_cell_is_drawn_before_any_comes_twice() -> None:
    """100 trials therefore leave no cell out."""
    assert len(CELLS) == 68 <= 100
    assert len(set(CELLS)) == len(CELLS)


def test_a_fault_of_the_server_is_one_of_a_parameter_server() -> None:
    for seed in range(20):
        plan = make_plan(("server", "killed", "saving"), random.Random(seed), "folder", "")
        assert (plan.strategy, plan.rank) == ("param_server", 0)
        plan = make_plan(("worker", "killed", "saving"), random.Random(seed), "folder", "")
        assert plan.rank >= (plan.strategy == "param_server")
