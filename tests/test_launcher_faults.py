"""Whatever goes wrong, and whoever is killed: the run ends soon, says why, and leaves nothing behind."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_servers import workers_alive

from torch_parallel import launcher
from torch_parallel.communicator import Communicator
from torch_parallel.launcher import WorkerFailure, launch

pytestmark = pytest.mark.usefixtures("started")

ROOT = Path(__file__).parent.parent
DEADLINE_S = 1.0
SHORT_GRACE_S = 1.0
END_LIMIT_S = 10.0


def failure_of(function: Callable[..., Any], n: int, deadline_s: float = 20.0) -> tuple[list[str], WorkerFailure]:
    """The lines of the failure, which must come in time and leave no process."""
    start_s = time.monotonic()
    with pytest.raises(WorkerFailure) as raised:
        launch(function, n, threads=1, deadline_s=deadline_s)
    assert time.monotonic() - start_s < END_LIMIT_S
    assert multiprocessing.active_children() == []
    assert workers_alive() == []
    return str(raised.value).splitlines(), raised.value


# ---- a worker ----


def raise_before_the_first_round(communicator: Communicator) -> None:
    if communicator.rank == 1:
        raise ValueError("bad sample 17")
    communicator.all_reduce(torch.ones(3))


def raise_in_the_third_step(communicator: Communicator) -> None:
    for step in range(1, 4):
        communicator.status.step(1, step, 0)
        if (communicator.rank, step) == (1, 3):
            raise ValueError("bad sample 17")
        communicator.all_reduce(torch.ones(3))


@pytest.mark.parametrize(
    "function, step",
    [(raise_before_the_first_round, ""), (raise_in_the_third_step, " step 3 of epoch 1")],
)
def test_a_worker_that_raises(function: Callable[..., Any], step: str) -> None:
    lines, failure = failure_of(function, 3)
    assert failure.rank == 1
    doing = r"\(all_reduce 3 elements of torch.float32 by ring, round 0\)"
    patterns = [
        "rank 1 failed: ValueError: bad sample 17",
        rf"  rank 0 was computing{step}, waiting for rank 1 {doing}",
        f"  rank 1 was computing{step}",
        rf"  rank 2 was computing{step}, waiting for rank 1 {doing}",
        "",
        r"Traceback \(most recent call last\):",
    ]
    for line, pattern in zip(lines, patterns, strict=False):
        assert re.fullmatch(pattern, line)
    assert any(function.__name__ in line for line in lines[6:])
    assert lines[-1] == "ValueError: bad sample 17"


class NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text either")


class NoPickle(Exception):
    def __reduce__(self) -> Any:
        raise RuntimeError("not to be pickled")


class LoadedOnlyByAWorker:
    def __reduce__(self) -> Any:
        return int, ("not a number",)


def fail_in(way: str) -> Callable[[Communicator], Any]:
    def work(communicator: Communicator) -> Any:
        if communicator.rank == 0:
            communicator.barrier()
            return None
        if way == "no text":
            raise NoText
        if way == "no pickle":
            raise NoPickle("but a text")
        if way == "sys.exit":
            sys.exit("that was all")
        if way == "result cannot be sent":
            return threading.Lock()
        if way == "message cannot be sent":
            communicator.report(threading.Lock())
        if way == "message cannot be read":
            communicator.report(LoadedOnlyByAWorker())
            time.sleep(60)
        return LoadedOnlyByAWorker()

    return work


@pytest.mark.parametrize(
    "way, headline",
    [
        ("no text", "rank 1 failed: NoText, of which str() fails"),
        ("no pickle", "rank 1 failed: NoPickle: but a text"),
        ("sys.exit", "rank 1 failed: SystemExit: that was all"),
        (
            "result cannot be sent",
            "rank 1 failed: CannotBeSent: the result of the worker function, of type lock, cannot be sent to the "
            "launcher (TypeError: cannot pickle '_thread.lock' object): return tensors, numbers and texts, and "
            "containers of them",
        ),
        (
            "message cannot be sent",
            "rank 1 failed: CannotBeSent: the message, of type lock, cannot be sent to the launcher (TypeError: cannot "
            "pickle '_thread.lock' object): report tensors, numbers and texts, and containers of them",
        ),
        (
            "message cannot be read",
            "what rank 1 sent cannot be read: ValueError: invalid literal for int() with base 10: 'not a number'",
        ),
        (
            "result cannot be read",
            "what rank 1 sent cannot be read: ValueError: invalid literal for int() with base 10: 'not a number'",
        ),
    ],
)
def test_errors_that_do_not_travel_well(monkeypatch: pytest.MonkeyPatch, way: str, headline: str) -> None:
    monkeypatch.setattr(launcher, "LAST_WORDS_S", 0.1)
    lines, failure = failure_of(fail_in(way), 2)
    assert lines[0] == headline
    assert failure.rank == 1


class SawIt(ArithmeticError):
    secondhand = True


@pytest.mark.parametrize(
    "errors, culprit", [((SawIt, ValueError, SawIt), 1), ((SawIt, SawIt, SawIt), 0), ((ValueError, SawIt, KeyError), 0)]
)
def test_whoever_only_saw_the_failure_of_another_is_not_blamed_for_it(
    monkeypatch: pytest.MonkeyPatch, errors: tuple[type[Exception], ...], culprit: int
) -> None:
    """Though it speaks first, as long as the other speaks at all: rank 0 does so 0.2 s before the others."""
    for limit in ("LAST_WORDS_S", "FIRST_HAND_S"):  # all are to speak, on a busy machine too
        monkeypatch.setattr(launcher, limit, 30.0)

    def work(communicator: Communicator) -> None:
        time.sleep(0.2 if communicator.rank else 0.0)
        raise errors[communicator.rank]("this")

    lines, failure = failure_of(work, 3)
    assert lines[0] == f"rank {culprit} failed: {errors[culprit].__name__}: {errors[culprit]('this')}"
    assert failure.rank == culprit
    for rank in {0, 1, 2} - {culprit}:
        assert f"    it said: {errors[rank].__name__}: {errors[rank]('this')}" in lines


def test_whose_failure_it_was_may_come_late() -> None:
    """Later than others' words are waited for once it is known."""

    def work(communicator: Communicator) -> None:
        if communicator.rank:
            time.sleep(2 * launcher.LAST_WORDS_S)
            raise ValueError("mine")
        raise SawIt("theirs")

    lines, failure = failure_of(work, 2)
    assert (lines[0], failure.rank) == ("rank 1 failed: ValueError: mine", 1)


def end_by(action: Callable[[], Any], *ranks: int) -> Callable[[Communicator], None]:
    def work(communicator: Communicator) -> None:
        communicator.barrier()
        if communicator.rank in ranks:
            time.sleep(0.4)  # until the others wait at the next barrier
            action()
        communicator.barrier()

    return work


def kill_myself(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    "action, headline",
    [
        (lambda: os._exit(0), "rank 1 ended with exit code 0 before it returned a result"),
        (lambda: os._exit(3), "rank 1 ended with exit code 3 before it returned a result"),
        (
            kill_myself(signal.SIGKILL),
            "rank 1 was killed by signal 9 (SIGKILL): probably too little memory, if nobody sent it",
        ),
        (kill_myself(signal.SIGBUS), "rank 1 was killed by signal 7 (SIGBUS): probably too little shared memory"),
        (kill_myself(signal.SIGTERM), "rank 1 was killed by signal 15 (SIGTERM)"),
        (kill_myself(40), "rank 1 was killed by signal 40 (Real-time signal 6)"),
    ],
    ids=["exit 0", "exit 3", "SIGKILL", "SIGBUS", "SIGTERM", "real-time"],
)
def test_a_worker_that_ends_without_a_word(action: Callable[[], Any], headline: str) -> None:
    lines, failure = failure_of(end_by(action, 1), 3)
    waiting = "waiting for rank 1 (meet at a barrier, round 0)"
    assert lines == [
        headline,
        f"  rank 0 was computing, {waiting}",
        "  rank 1 was computing",
        f"  rank 2 was computing, {waiting}",
    ]
    assert failure.rank == 1


def test_a_stopped_worker_is_named_by_those_who_waited_for_it() -> None:
    lines, _ = failure_of(end_by(kill_myself(signal.SIGSTOP), 1), 3, DEADLINE_S)
    who = re.fullmatch(
        r"rank 1 is stopped; rank ([02]) failed: TransportError: "
        r"rank \1, meet at a barrier: no signal from rank 1 for [\d.]+ s",
        lines[0],
    )
    assert who
    table = [line for line in lines if line.startswith("  rank")]
    assert table == [
        "  rank 0 was computing, waiting for rank 1 (meet at a barrier, round 0)",
        "  rank 1 was computing (its process is stopped)",
        "  rank 2 was computing, waiting for rank 1 (meet at a barrier, round 0)",
    ]


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher itself speaks at 2 s, not at 6."""
    monkeypatch.setattr(launcher, "GRACE_S", SHORT_GRACE_S)


@pytest.mark.parametrize("n", [1, 3])
def test_all_workers_stopped(short_grace: None, n: int) -> None:
    lines, _ = failure_of(end_by(kill_myself(signal.SIGSTOP), *range(n)), n, DEADLINE_S)
    assert re.fullmatch(r"rank 0 gave no sign of life for [2-4] s", lines[0])
    assert lines[1:] == [f"  rank {rank} was computing (its process is stopped)" for rank in range(n)]


def test_a_worker_that_computes_for_too_long_without_a_sign_of_life(short_grace: None) -> None:
    lines, _ = failure_of(lambda communicator: time.sleep(60), 1, DEADLINE_S)
    assert re.fullmatch(r"rank 0 gave no sign of life for [2-4] s", lines[0])
    assert lines[1:] == ["  rank 0 was computing"]


def report_all_the_time(communicator: Communicator) -> str:
    for _ in range(10):
        time.sleep(0.25)
        communicator.report("still here")
    return "done"


def test_a_report_is_a_sign_of_life(short_grace: None) -> None:
    assert launch(report_all_the_time, 1, deadline_s=DEADLINE_S) == ["done"]  # 2.5 s, longer than deadline and grace


def test_a_rank_that_returns_while_others_need_it() -> None:
    def work(communicator: Communicator) -> None:
        if communicator.rank != 2:
            communicator.barrier()

    lines, _ = failure_of(work, 3, deadline_s=60.0)
    what = "rank 2 has returned, and rank [01] waits for it in call 1, meet at a barrier"
    assert re.fullmatch(rf"rank [01] failed: TransportError: {what}", lines[0])
    assert "  rank 2 was returning its result" in lines


# ---- the launcher ----

SCRIPT = """
import os, re, sys, time
sys.path.insert(0, {root!r})
from torch_parallel import fork_server
fork_server.PRELOAD[:] = ["torch_parallel.worker"]
fork_server.start()
from torch_parallel import launch

def work(communicator):
    import torch
    communicator.barrier()
    communicator.report("running")
    if communicator.rank == 0:  # for hours in C code, which no Python signal handler or thread can interrupt
        re.match("(a+)+$", "a" * 60 + "b")
    if communicator.rank == 1:
        while True:
            torch.ones(2000, 2000) @ torch.ones(2000, 2000)
    communicator.barrier()

def running(rank, message):
    print("running", flush=True)

launch(work, 3, on_message=running)
"""


def session_of(pid: int) -> list[str]:
    """The processes of a session that still run, with their commands."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == pid and fields[0] not in "ZX":
                    found.append(f"{entry} {Path(f'/proc/{entry}/cmdline').read_text()}")
            except OSError:
                continue
    return found


class Launched:
    """A command in a session of its own, with a temporary folder of its own."""

    def __init__(self, command: list[str], folder: Path, stdin: int = subprocess.DEVNULL) -> None:
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.shared_before = set(os.listdir("/dev/shm"))
        self.errors = folder / "errors"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                cwd=folder,
                env={**os.environ, "TMPDIR": str(self.temporary), "PYTHONUNBUFFERED": "1"},
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def wait_for_line(self, beginning: str, times: int = 1) -> None:
        assert self.process.stdout is not None
        lines = (line for line in self.process.stdout if line.startswith(beginning))
        for _ in range(times):
            assert next(lines, None) is not None, self.errors.read_text()

    def assert_all_gone(self, exit_code: int, limit_s: float = 5.0) -> str:
        """Checks how it ended and that nothing is left; returns what it wrote to stderr."""
        end = time.monotonic() + limit_s
        assert self.process.wait(10) == exit_code
        while session_of(self.process.pid) and time.monotonic() < end:
            time.sleep(0.02)
        assert session_of(self.process.pid) == []
        assert [name for name in os.listdir(self.temporary) if not name.startswith("torchinductor_")] == []
        new = set(os.listdir("/dev/shm")) - self.shared_before
        assert [name for name in new if name.startswith(("torch", "pym", "psm", "sem"))] == []
        return self.errors.read_text()

    def close(self) -> None:
        for entry in session_of(self.process.pid):
            os.kill(int(entry.split()[0]), signal.SIGKILL)
        self.process.wait(10)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Launched]:
    (tmp_path / "script.py").write_text(SCRIPT.format(root=str(ROOT)))
    launched = Launched(["script.py"], tmp_path)
    launched.wait_for_line("running", times=3)
    time.sleep(0.1)  # ranks 0 and 1 are in C code now
    yield launched
    launched.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "number, to_all, tracebacks",
    [
        (signal.SIGKILL, False, 0),
        (signal.SIGHUP, True, 0),
        (signal.SIGINT, True, 1),  # of the script itself, which does not catch it; no worker's
    ],
    ids=["killed", "closed terminal", "Ctrl-C"],
)
def test_the_launcher_is_ended_and_takes_workers_in_c_code_with_it(
    script: Launched, number: int, to_all: bool, tracebacks: int
) -> None:
    # The script, the resource tracker, the fork server and 3 workers. They have not run the script once more, which
    # does not ask for its `__name__`.
    assert len(session_of(script.process.pid)) == 6
    if to_all:
        os.killpg(script.process.pid, number)
    else:
        os.kill(script.process.pid, number)
    errors = script.assert_all_gone(exit_code=-number)
    assert errors.count("Traceback") == tracebacks, errors


@pytest.mark.exhaustive
def test_two_interrupts_during_training(tmp_path: Path) -> None:
    """`kill -INT` of the launcher, of which the workers know nothing, and Ctrl-C while it cleans up."""
    arguments = "--dataset digits --device cpu --n_gpus 3 --epochs 1000000 --strategy param_server"
    launched = Launched([str(ROOT / "train.py"), *arguments.split(), "--results_dir", str(tmp_path)], tmp_path)
    try:
        launched.wait_for_line("epoch 2/")
        os.kill(launched.process.pid, signal.SIGINT)
        time.sleep(0.2)
        os.killpg(launched.process.pid, signal.SIGINT)
        assert launched.assert_all_gone(exit_code=130) == "train.py: interrupted\n"
    finally:
        launched.close()


def test_ctrl_c_while_torch_is_imported(tmp_path: Path) -> None:
    """Neither import is finished when the launcher is gone; the fork server's would take some seconds more."""
    launched = Launched([str(ROOT / "train.py"), "--dataset", "digits", "--results_dir", str(tmp_path)], tmp_path)
    try:
        time.sleep(0.5)
        os.killpg(launched.process.pid, signal.SIGINT)
        assert launched.assert_all_gone(exit_code=130, limit_s=1.0) == ""
    finally:
        launched.close()


START_ONLY = """
import os, sys
sys.path.insert(0, {root!r})
from torch_parallel import fork_server
fork_server.start()
blocked = [line for line in open(f"/proc/{{fork_server.pid()}}/status") if line.startswith("SigBlk")]
print(int(blocked[0].split()[1], 16), os.listdir(os.environ["TMPDIR"]), "torch" in sys.modules, flush=True)
sys.stdin.read()
"""


def test_the_fork_server_from_its_first_moment_on(tmp_path: Path) -> None:
    """It is deaf to Ctrl-C, has no name in the file system, and does not outlive a launcher that is killed."""
    (tmp_path / "script.py").write_text(START_ONLY.format(root=str(ROOT)))
    launched = Launched(["script.py"], tmp_path, stdin=subprocess.PIPE)
    try:
        assert launched.process.stdout is not None
        mask, temporary, torch_is_here = launched.process.stdout.readline().split()
        assert int(mask) & 1 << signal.SIGINT - 1
        assert (temporary, torch_is_here) == ("[]", "False")
        assert len(session_of(launched.process.pid)) == 2
        launched.process.kill()
        launched.assert_all_gone(exit_code=-signal.SIGKILL, limit_s=1.0)
    finally:
        launched.close()
