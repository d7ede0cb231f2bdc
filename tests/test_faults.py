"""The fault driver itself: it passes on the program as it is, and fails when a safeguard is taken out."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_parallel import faults, shm_files
from torch_parallel.faults import _SharedMemoryFiles
from torch_parallel.injection import CELLS, FAULTS, PHASES, make_plan
from torch_parallel.strategies import FROM_SCRATCH
from torch_parallel.training.config import ConfigError


def drive(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch_parallel", "faults", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=400)


TRIALS = 3


@pytest.mark.timeout(400)
def test_some_faults_end_as_they_should() -> None:
    """Others each time; a thousand in a row: python -m torch_parallel faults --trials 1000."""
    seed = random.SystemRandom().randrange(10**6)
    done = drive("--trials", str(TRIALS), "--seed", str(seed))
    assert done.returncode == 0, f"--seed {seed}\n{done.stdout}"
    assert f"{TRIALS} of {TRIALS} ended as they should" in done.stdout
    assert "MISS" not in done.stdout
    # different cells, each counted once in the table
    table = done.stdout.split("hits", 1)[1]
    counts = [int(number) for number in re.findall(r" (\d+)\b", table.split("ended", 1)[0].rsplit("\n", 1)[0])]
    assert len(counts) == sum(map(len, FAULTS.values())) * len(PHASES)
    assert sorted(counts) == [0] * (len(counts) - TRIALS) + [1] * TRIALS


@pytest.mark.exhaustive
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
    process = subprocess.Popen(["bash", "-c", script])
    fired_s = faults._wait_for_end(plan, process, noticed, _SharedMemoryFiles(plan))
    assert fired_s == float((tmp_path / "fired").read_text())
    assert noticed == [f"the run {miss}" for miss in misses]


def test_every_cell_is_drawn_before_any_comes_twice() -> None:
    """100 trials therefore leave no cell out."""
    assert len(CELLS) == 76 <= 100
    assert len(set(CELLS)) == len(CELLS)


def test_a_fault_of_the_server_is_one_of_a_parameter_server() -> None:
    for seed in range(20):
        plan = make_plan(("server", "killed", "saving"), random.Random(seed), "folder")
        assert (plan.strategy, plan.rank) == ("param_server", 0)
        plan = make_plan(("worker", "killed", "saving"), random.Random(seed), "folder")
        assert plan.rank >= (plan.strategy == "param_server")


def test_on_gpus_each_worker_has_one() -> None:
    cells = [("worker", "killed", "saving"), ("server", "raised", "starting")]
    plans = [make_plan(cell, random.Random(seed), "folder", gpu_count=4) for cell in cells for seed in range(60)]
    workers = {plan.n - FROM_SCRATCH[plan.strategy].server_count for plan in plans}
    assert workers == {2, 3, 4} and {plan.device for plan in plans} == {"cuda"}


MAKES_FILES = """
import os, sys, time
for name in f"torch_{os.getpid()}_1", f"cuda.shm.0.{os.getpid():x}.1":
    open(f"{sys.argv[1]}/{name}", "w").close()
print(flush=True)
time.sleep(60)
"""


def test_files_in_shared_memory_are_known_by_the_session_that_made_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs, where trials that run beside each other make some. The process's number is in their names."""
    monkeypatch.setattr(faults, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(shm_files, "SHARED_MEMORY", tmp_path)
    worker_killed, launcher_killed = (
        _SharedMemoryFiles(make_plan((process, "killed", "saving"), random.Random(1), "folder", gpu_count=2))
        for process in ("worker", "launcher")
    )
    on_cpu = _SharedMemoryFiles(make_plan(CELLS[0], random.Random(1), "folder"))
    command = [sys.executable, "-c", MAKES_FILES, str(tmp_path)]
    makers = [subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) for _ in range(2)]
    names = [{f"torch_{maker.pid}_1", f"cuda.shm.0.{maker.pid:x}.1"} for maker in makers]
    try:
        for maker in makers:
            assert maker.stdout is not None
            maker.stdout.readline()
        for files in (worker_killed, launcher_killed):
            files.look(makers[0].pid)
    finally:
        for maker in makers:
            maker.kill()
            maker.communicate()
    assert worker_killed.left() == names[0] and not launcher_killed.left()
    assert on_cpu.left() == {f"torch_{maker.pid}_1" for maker in makers}  # and not those of anybody's CUDA programs
    for name in names[0]:
        (tmp_path / name).unlink()
    assert not worker_killed.left()


def test_gpus_that_are_not_there_are_an_error_in_a_line(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for arguments, message in (
        (["--device", "cuda"], "--device cuda: two workers have a GPU each, and this machine has 1: leave it out"),
        (["--device", "cuda", "--without", "deadline"], "--without takes safeguards out of runs on the CPU only"),
    ):
        with pytest.raises((ConfigError, SystemExit)) as raised:
            faults.main(arguments)
        assert message in str(raised.value) + capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.timeout(300)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="workers with a GPU each need 2 GPUs")
def test_faults_on_gpus_end_as_they_should() -> None:
    done = drive("--device", "cuda", "--trials", "4", "--only", "exchanging")
    assert "4 of 4 ended as they should" in done.stdout, done.stdout
