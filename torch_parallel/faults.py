"""Breaks real training runs on purpose, and checks that each ends as it should: `python -m torch_parallel faults`.

A trial is a training run in a process session of its own. At a random moment of a random phase something happens to one
of its processes. The driver then checks how the run ended and how soon, that it named the culprit, that no process, no
temporary file and no shared memory is left, and that every checkpoint that was announced is on disk and whole. With
`--device cuda` workers have a GPU each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch

from torch_parallel import launcher
from torch_parallel.injection import CELLS, DEADLINE_S, PHASES, Plan, make_plan, run_trial
from torch_parallel.shm_files import SHARED_MEMORY, files_of
from torch_parallel.training import checkpoint
from torch_parallel.usage import OneLineParser

# How the launcher must end, where it is not with 1
EXIT_CODES = {
    ("launcher", "killed"): -signal.SIGKILL,
    ("everyone", "killed"): -signal.SIGKILL,
    ("launcher", "stopped"): 0,  # it goes on when it is continued
    ("fork server", "stopped"): 0,  # nobody needs it any more
    ("launcher", "exited"): 0,
    ("launcher", "interrupted"): 130,
    ("launcher", "terminated"): 143,
}
END_LIMIT_S = 10.0
GONE_LIMIT_S = 3.0  # shorter than the deadline, so that workers which only end by that are noticed
TRIAL_LIMIT_S = 45.0
"""From the fault on: how long a run takes to get that far is the machine's affair."""
FAULT_LIMIT_S = 300.0
STOPPED_LAUNCHER_S = 1.0

MAY_LEAVE_FILES = {("launcher", "killed"), ("launcher", "exited"), ("everyone", "killed")}
"""Where nobody is left to remove what a worker that used a GPU leaves in /dev/shm."""


def judge(plan: Plan) -> tuple[list[str], float]:
    """Runs one trial. What was wrong with it (nothing, if all is well), and the seconds from the fault to the end."""
    temporary = Path(plan.folder) / "tmp"
    temporary.mkdir()
    files = _SharedMemoryFiles(plan)
    with (
        open(f"{plan.folder}/out", "wb") as out,
        open(f"{plan.folder}/err", "wb") as err,
    ):
        process = subprocess.Popen(
            [sys.executable, "-m", "torch_parallel", "faults", "--child", json.dumps(asdict(plan))],
            stdout=out,
            stderr=err,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1"},
        )
    misses: list[str] = []
    try:
        fired_s = _wait_for_end(plan, process, misses, files)
        seconds = time.time() - fired_s if fired_s else math.nan
        out_text, err_text = (
            Path(plan.folder, name).read_text(encoding="utf-8", errors="replace") for name in ("out", "err")
        )
        if not fired_s:
            misses.append("the fault never happened")
        misses += _wrong_end(plan, process.returncode, seconds, err_text)
        misses += _leftovers(process.pid, temporary, files)
        misses += _lost_checkpoints(plan, out_text)
    finally:
        for pid in _session(process.pid):
            os.kill(pid, signal.SIGKILL)
    return misses, seconds


class _SharedMemoryFiles:
    """What a trial leaves in /dev/shm. On the CPU anything new, for nothing is ever put there.

    On GPUs torch and the driver put files there, in the trials that run beside it too: its are those of its processes.
    """

    def __init__(self, plan: Plan) -> None:
        self._on_gpus = plan.device == "cuda"
        self._allowed = self._on_gpus and (plan.process, plan.fault) in MAY_LEAVE_FILES
        self._before = _shared_memory()
        self._pids: set[int] = set()

    def look(self, session: int) -> None:
        """Now and then, while the processes live: afterwards nobody knows which session they were of."""
        if self._on_gpus:
            self._pids.update(_session(session))

    def left(self) -> set[str]:
        if self._on_gpus:
            return set() if self._allowed else {file.name for pid in self._pids for file in files_of(pid)}
        return _shared_memory() - self._before


def _wait_for_end(plan: Plan, process: subprocess.Popen[bytes], misses: list[str], files: _SharedMemoryFiles) -> float:
    """The time of the fault, 0 if there was none. Continues a launcher that was stopped."""
    fired = Path(plan.folder) / "fired"
    fired_s, limit_s = 0.0, FAULT_LIMIT_S
    since_s = time.time()
    while process.poll() is None and time.time() < since_s + limit_s:
        if not fired_s and (fired_s := _time_in(fired)):
            since_s, limit_s = fired_s, TRIAL_LIMIT_S
            if (plan.process, plan.fault) == ("launcher", "stopped"):
                time.sleep(STOPPED_LAUNCHER_S)
                os.kill(process.pid, signal.SIGCONT)
        files.look(process.pid)
        time.sleep(0.02)
    if process.poll() is None:
        misses.append(f"the run did not end within {limit_s:.0f} s")
        process.kill()
        process.wait()
    return fired_s or _time_in(fired)


def _time_in(file: Path) -> float:
    """0 as long as it is not there or not written."""
    return float(file.read_text(encoding="utf-8") or 0.0) if file.exists() else 0.0


def _wrong_end(plan: Plan, exit_code: int, seconds: float, err: str) -> list[str]:
    misses = []
    expected = EXIT_CODES.get((plan.process, plan.fault), 1)
    if exit_code != expected:
        misses.append(f"exit code {exit_code} instead of {expected}")
    limit_s = DEADLINE_S[plan.device] + launcher.GRACE_S + 3.0 if plan.fault == "stopped" else END_LIMIT_S
    if seconds > limit_s:
        misses.append(f"it took {seconds:.1f} s to end, more than {limit_s:.0f}")
    wanted = []
    if plan.process in ("worker", "server"):
        wanted = {
            "killed": [rf"rank {plan.rank} was killed by signal 9"],
            "stopped": [rf"rank {plan.rank} was .*\(its process is stopped\)"],
            "raised": [rf"rank {plan.rank} failed: RuntimeError: injected fault", "Traceback"],
            "exited": [rf"rank {plan.rank} ended with exit code 0"],
            "returned": [rf"rank {plan.rank} has returned(, and rank \d waits for it| after \d+ call)"],
        }[plan.fault]
        if (plan.device, plan.fault, plan.phase) == ("cpu", "stopped", "exchanging"):  # on GPUs a stream waits, no rank
            wanted.append(r"rank \d was .*waiting for rank \d \((.+, round \d+|which gradients are exchanged next)\)")
        if plan.phase != "starting" and plan.fault != "returned":
            wanted.append(rf"rank {plan.rank} was \w+.* step \d+ of epoch \d+")
    elif (plan.process, plan.fault) == ("fork server", "killed"):
        wanted = ["the fork server"]
    misses += [f"no line like {pattern!r} on stderr" for pattern in wanted if not re.search(pattern, err)]
    if err.count("Traceback") > 1:
        misses.append("more than one traceback")
    return misses


def _leftovers(session: int, temporary: Path, shared_memory: _SharedMemoryFiles) -> list[str]:
    """What the run left behind once its processes have had a moment to end."""
    end = time.monotonic() + GONE_LIMIT_S
    while (_session(session) or shared_memory.left()) and time.monotonic() < end:
        time.sleep(0.02)
    misses = []
    if left := _session(session):
        misses.append(f"{len(left)} processes are left")
    # torch makes its compiler's cache folder when it is imported: one a user, not one a run
    if files := [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]:
        misses.append(f"left in the temporary folder: {files}")
    if names := shared_memory.left():
        misses.append(f"left in /dev/shm: {sorted(names)}")
    return misses


def _lost_checkpoints(plan: Plan, out: str) -> list[str]:
    announced = [int(step) for step in re.findall(r"checkpoint of step (\d+):", out)]
    misses = []
    for folder in Path(plan.folder, "results").glob("*/checkpoints"):
        try:
            newest = checkpoint.load(checkpoint.find(str(folder)))["step"]
        except checkpoint.CheckpointError as error:
            newest = -1
            if announced or checkpoint.complete_checkpoints(folder):
                misses.append(str(error))
        if announced and newest < max(announced):
            misses.append(f"the checkpoint of step {max(announced)} was announced, the newest is of step {newest}")
    return misses


def _session(session: int) -> list[int]:
    """The living processes of a session (Linux)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, _, its_session = (
                    (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:4]
                )
            except (OSError, ValueError):
                continue
            if int(its_session) == session and state not in "ZX":
                found.append(int(entry.name))
    return found


def _shared_memory() -> set[str]:
    """What programs of this kind leave in /dev/shm when they leave something."""
    return {path.name for path in SHARED_MEMORY.iterdir() if re.match(r"torch|psm_", path.name)}


def drive(trials: int, seed: int, jobs: int, only: str, without: str, gpu_count: int) -> int:
    """Runs the trials, says what happened in each, counts the cells; returns the number of trials with a miss."""
    choose = random.Random(seed)
    cells = [cell for cell in CELLS if only in " ".join(cell)]
    # every cell once before any comes twice
    rounds = (choose.sample(cells, len(cells)) for _ in itertools.count())
    drawn = list(itertools.islice(itertools.chain.from_iterable(rounds), trials))
    counts: Counter[tuple[str, str, str]] = Counter()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="faults-") as root, ThreadPoolExecutor(jobs) as pool:
        plans = []
        for number, cell in enumerate(drawn):
            folder = Path(root, f"trial{number}")
            folder.mkdir()
            plans.append(make_plan(cell, choose, str(folder), without, gpu_count))
        for number, (plan, (misses, seconds)) in enumerate(zip(plans, pool.map(judge, plans), strict=True), start=1):
            counts[plan.process, plan.fault, plan.phase] += not math.isnan(seconds)
            failed += bool(misses)
            verdict = "MISS: " + "; ".join(misses) if misses else f"ok, {seconds:.1f} s"
            print(f"{number:4}/{trials}  {plan}: {verdict}", flush=True)
            if misses:
                print(_indented(Path(plan.folder, "err").read_text(encoding="utf-8", errors="replace")))
    _print_table(counts)
    print(f"{trials - failed} of {trials} ended as they should")
    return failed


def _indented(text: str) -> str:
    return "\n".join(f"        | {line}" for line in text.splitlines()[-30:])


def _print_table(counts: Counter[tuple[str, str, str]]) -> None:
    print(f"\n{'hits':24}" + "".join(f"{phase:>12}" for phase in PHASES))
    for process, fault in dict.fromkeys((process, fault) for process, fault, _ in CELLS):
        row = [counts[process, fault, phase] for phase in PHASES]
        print(f"{process + ' ' + fault:24}" + "".join(f"{count:12}" for count in row))


def main(arguments: list[str]) -> None:
    """`python -m torch_parallel faults --trials 100 --seed 1`"""
    parser = OneLineParser(prog="python -m torch_parallel faults", description=__doc__, allow_abbrev=False)
    parser.add_argument("--trials", type=int, default=len(CELLS), help="runs to break (default: each cell once)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="trials at a time (default: 2)")
    parser.add_argument("--only", default="", help='cells whose "process fault phase" contains this text')
    parser.add_argument(
        "--without", default="", choices=("", "death watch", "deadline"), help="take a safeguard out: misses must show"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where the broken runs train (default: cpu)"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        run_trial(Plan(**json.loads(options.child)))
        return
    if options.trials < 1 or options.jobs < 1:
        parser.error("--trials and --jobs must be at least 1")
    if not any(options.only in " ".join(cell) for cell in CELLS):
        parser.error(f"--only {options.only}: no such cell; one is {' '.join(CELLS[0])!r}")
    gpu_count = 0
    if options.device == "cuda":
        if options.without:
            parser.error("--without takes safeguards out of runs on the CPU only: leave --device cuda out")
        gpu_count = torch.cuda.device_count()
        if gpu_count < 2:
            parser.error(f"--device cuda: two workers have a GPU each, and this machine has {gpu_count}: leave it out")
    if drive(options.trials, options.seed, options.jobs, options.only, options.without, gpu_count):
        sys.exit(1)
