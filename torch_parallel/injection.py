"""One thing that goes wrong in a training run: which, to whom, and when; and the run in which it happens.

`faults.py` draws such plans, runs each in a process session of its own, and judges how it ended.
"""

from __future__ import annotations

import math
import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from functools import partial
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

from torch_parallel import fork_server, launcher
from torch_parallel.communicator import Communicator
from torch_parallel.status import EVALUATING, EXCHANGING, SAVING, STARTING
from torch_parallel.strategies import FROM_SCRATCH
from torch_parallel.training.config import RunConfig
from torch_parallel.training.job import Job
from torch_parallel.training.loop import Trainer
from torch_parallel.training.run import train

FAULTS = {
    "worker": ("killed", "stopped", "raised", "exited", "returned"),
    "server": ("killed", "stopped", "raised", "exited", "returned"),
    "launcher": ("killed", "stopped", "raised", "exited", "interrupted", "terminated"),
    "fork server": ("killed", "stopped"),  # it runs no code of ours that could raise or exit
    "everyone": ("killed",),
}
PHASES = {"starting": STARTING, "exchanging": EXCHANGING, "evaluating": EVALUATING, "saving": SAVING}
CELLS = [(process, fault, phase) for process, faults in FAULTS.items() for fault in faults for phase in PHASES]

SIGNALS = {
    "killed": signal.SIGKILL,
    "stopped": signal.SIGSTOP,
    "interrupted": signal.SIGINT,
    "terminated": signal.SIGTERM,
    "raised": signal.SIGUSR1,  # in the launcher, whose handlers for these two do it
    "exited": signal.SIGUSR2,
}
DEADLINE_S = {"cpu": 4.0, "cuda": 20.0}
"""Of the trials' runs, by device: on a GPU workers compile the kernel before they exchange anything."""
BUCKET_MB = {"cpu": None, "cuda": 0.05}
"""On GPUs several, so that they are exchanged during backward."""
MORE_WORK_S = 2.0
"""A run that is over before its launcher gets to look has lost nothing by the fork server's death, and ends well."""


SCHEDULED: dict[str, Any] = {"schedule": "priority", "partition_mb": 0.01, "credit_mb": 0.03, "cross_barrier": True}
"""Of half of the runs that can: exchanges that last into the next step, several at a time."""


@dataclass(frozen=True)
class Plan:
    """One trial: what happens to which process, when `rank` enters the phase for the `occurrence`-th time."""

    process: str
    fault: str
    phase: str
    rank: int
    occurrence: int
    delay_s: float  # for signals: so long after the phase began
    strategy: str
    n: int
    optimizer: str
    folder: str
    without: str = ""  # "death watch" or "deadline": what is taken out, to see that the driver notices
    device: str = "cpu"
    is_scheduled: bool = False

    def __str__(self) -> str:
        how = ", scheduled" if self.is_scheduled else ""
        what = f"{self.strategy}{how}, {self.n} processes, rank {self.rank}"
        return f"{self.process} {self.fault} while {self.phase} ({what})"


def make_plan(
    cell: tuple[str, str, str], choose: random.Random, folder: str, without: str = "", gpu_count: int = 0
) -> Plan:
    """Draws what the cell leaves open. Without GPUs workers train on the CPU."""
    process, fault, phase = cell
    strategy = "param_server" if process == "server" else choose.choice(list(FROM_SCRATCH))
    servers = FROM_SCRATCH[strategy].server_count
    n = servers + choose.choice(range(2, (gpu_count or 3) + 1))
    rank = 0 if process == "server" else choose.randrange(servers, n)
    occurrence = {"starting": 1, "exchanging": choose.randint(1, 12)}.get(phase, choose.randint(1, 2))
    delay_s = choose.choice((0.0, choose.random() * 0.003))
    optimizer = choose.choice(("sgd", "adam"))
    device = "cuda" if gpu_count else "cpu"
    possible = "schedule" in FROM_SCRATCH[strategy].options and device == "cpu" and not without
    is_scheduled = choose.random() < 0.5 and possible
    drawn = process, fault, phase, rank, occurrence, delay_s, strategy, n, optimizer
    return Plan(*drawn, folder, without, device, is_scheduled)


def run_trial(plan: Plan) -> None:
    """The launcher of a trial: a training run like any other, but for the worker function."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background commands are born ignoring it
    signal.signal(signal.SIGUSR1, _raise)
    signal.signal(signal.SIGUSR2, lambda number, frame: os._exit(0))
    if plan.without == "deadline":
        launcher.GRACE_S = math.inf
    if plan.without == "death watch":
        fork_server.kill()  # the command has started one, which watches
        fork_server.PRELOAD.append("torch_parallel.unwatched")
    config = RunConfig(
        strategy=plan.strategy,
        n_gpus=plan.n,
        device=plan.device,
        dataset="digits",
        train_size=64,
        batch_size=16,
        epochs=3,
        optimizer=plan.optimizer,
        checkpoint_every=2,
        deadline_s=DEADLINE_S[plan.device],
        bucket_mb=BUCKET_MB[plan.device],
        results_dir=f"{plan.folder}/results",
        **(SCHEDULED if plan.is_scheduled else {}),
    )
    train(config, worker_function=partial(faulty_worker, plan=plan))


def _raise(number: int, frame: Any) -> None:
    raise RuntimeError("injected fault")


def faulty_worker(communicator: Communicator, job: Job, plan: Plan) -> dict[str, Any]:
    """`train_worker`, with a trap on the rank that the plan names."""
    if plan.without == "death watch":
        _take_out_the_death_watch()
    elif plan.without == "deadline":
        communicator.transport._signals._deadline_s = math.inf  # type: ignore[attr-defined]
    trap = _Trap(plan) if communicator.rank == plan.rank else None
    if trap is not None:
        enter_phase = communicator.status.phase

        def phase(number: int) -> int:
            before = enter_phase(number)
            trap.entered(number)
            return before

        communicator.status.phase = phase  # type: ignore[assignment,method-assign]
    try:
        if trap is not None:
            communicator.status.phase(STARTING)
        return Trainer(communicator, job).run()
    except _ReturnsEarly:
        return {"events": []}


class _ReturnsEarly(BaseException):
    """Takes a rank out of its training as if its function had ended, whatever catches errors on the way."""


class _Trap:
    """Springs when its phase is entered for the n-th time."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.left = plan.occurrence

    def entered(self, phase: int) -> None:
        self.left -= phase == PHASES[self.plan.phase]
        if self.left == 0:
            self.left = -1
            plan = self.plan
            if plan.process in ("worker", "server") and plan.fault in ("raised", "exited", "returned"):
                _note(plan)
                if plan.fault == "returned":
                    raise _ReturnsEarly
                if plan.fault == "exited":
                    os._exit(0)
                raise RuntimeError("injected fault")
            if plan.delay_s and plan.process != "fork server":
                threading.Thread(target=self._signal, daemon=True).start()
            else:
                self._signal()

    def _signal(self) -> None:
        plan, parent = self.plan, parent_process()
        assert parent is not None and parent.pid is not None
        time.sleep(plan.delay_s)
        target = {"launcher": parent.pid, "fork server": os.getppid(), "everyone": -os.getpgrp()}
        _note(plan)
        os.kill(target.get(plan.process, os.getpid()), SIGNALS[plan.fault])
        if (plan.process, plan.fault) == ("fork server", "killed"):
            time.sleep(MORE_WORK_S)


def _note(plan: Plan) -> None:
    (Path(plan.folder) / "fired").write_text(repr(time.time()), encoding="utf-8")


def _take_out_the_death_watch() -> None:
    import fcntl

    parent = parent_process()
    assert parent is not None
    flags = fcntl.fcntl(parent.sentinel, fcntl.F_GETFL)
    fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, flags & ~os.O_ASYNC)
