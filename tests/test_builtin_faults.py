"""The controls end as train.py does, whatever ends them: exit code, a line that says who and why, nothing left."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from trapped_data import trapped

from ring_all_reduce_builtin import RankFailed, run_ranks
from torch_parallel import RunConfig, fork_server
from torch_parallel.results import RunFolder

ROOT = Path(__file__).parents[1]
RING, SERVER = "ring_all_reduce_builtin.py", "param_server_builtin.py"


@contextlib.contextmanager
def running(script: str, folder: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """The command in a session of its own; whatever happens, it is ended."""
    command = [sys.executable, str(ROOT / script), "--dataset", "digits", "--n_gpus", "2", "--device", "cpu"]
    with subprocess.Popen(
        [*command, "--results_dir", str(folder / "runs"), *more],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        limit = threading.Timer(90, os.killpg, (process.pid, signal.SIGKILL))
        limit.start()
        try:
            yield process
        finally:
            limit.cancel()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def after_first_epoch(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    while not (line := process.stdout.readline()).startswith("epoch 1/"):
        assert line, process.stderr and process.stderr.read()


def ended(process: subprocess.Popen[str], folder: Path) -> tuple[int, list[str], dict[str, Any]]:
    """Exit code, lines of stderr and manifest; its session has no process any more, and no weights are saved."""
    _, errors = process.communicate()
    deadline = time.monotonic() + 5
    while any(session_of(pid) == process.pid for pid in os.listdir("/proc") if pid.isdigit()):
        assert time.monotonic() < deadline, "a process is left"
        time.sleep(0.05)
    (run,) = (folder / "runs").iterdir()
    assert not (run / "weights.pt").exists()
    return process.returncode, errors.splitlines(), json.loads((run / "manifest.json").read_text(encoding="utf-8"))


def session_of(pid: str) -> int:
    try:
        state, _, _, session = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:4]
    except OSError:
        return -1
    return -1 if state == b"Z" else int(session)


@pytest.mark.parametrize(
    ("caught", "statement", "said"),
    [
        ((0, 1), "os.kill(os.getpid(), 2)", "rank 0 was killed by signal 2 (Interrupt)"),
        ((1,), "os.kill(os.getpid(), 2)", "rank 1 was killed by signal 2 (Interrupt)"),
        ((1,), "os.kill(os.getpid(), 9)", "rank 1 was killed by signal 9 (Killed)"),
        ((1,), "os._exit(0)", "rank 1 ended with exit code 0 before it had finished"),
        ((0,), "sys.exit(0)", "rank 0 ended with exit code 0 before it had finished"),
        ((1,), "raise ZeroDivisionError('of a model')", "rank 1 failed: ZeroDivisionError: of a model"),
        ((0,), "raise FileNotFoundError(2, 'mine')", "rank 0 failed: FileNotFoundError: [Errno 2] mine"),
    ],
)
def test_a_rank_that_ends_early(
    caught: tuple[int, ...], statement: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peers fail because of it, and are not blamed. A user's own error keeps its traceback."""
    fork_server.start()  # there is torch already
    forked = functools.partial(torch.multiprocessing.start_processes, start_method=fork_server.start_method())
    monkeypatch.setattr(torch.multiprocessing, "spawn", forked)
    config = RunConfig(n_gpus=2, device="cpu", batch_size=4, dataset="digits").resolved("digits", 16, 16)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    folder = RunFolder(str(tmp_path), "x")
    with pytest.raises(RankFailed) as raised, folder.running():
        run_ranks(2, store, 1, config, trapped(statement, caught), folder)
    lines = str(raised.value).splitlines()
    assert lines[0] == said
    assert (len(lines) > 1) == statement.startswith("raise")
    assert len(lines) == 1 or ("Traceback" in lines[2] and said.endswith(lines[-1]))
    assert json.loads((folder.path / "manifest.json").read_text(encoding="utf-8"))["status"] == "failed"
    assert [file.name for file in folder.path.iterdir()] == ["manifest.json"]
    assert not torch.multiprocessing.active_children()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("script", "number", "code"), [(RING, signal.SIGINT, 130), (SERVER, signal.SIGTERM, 143)])
def test_the_launcher_is_interrupted(script: str, number: signal.Signals, code: int, tmp_path: Path) -> None:
    """Ctrl-C reaches all processes of the terminal; SIGTERM the launcher alone."""
    with running(script, tmp_path, "--epochs", "100000") as process:
        after_first_epoch(process)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        returned, errors, manifest = ended(process, tmp_path)
    assert returned == code
    assert errors == ([f"{script}: interrupted"] if number == signal.SIGINT else [])
    assert manifest["status"] == "interrupted"


@pytest.mark.exhaustive
def test_no_rank_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with running(RING, tmp_path, "--epochs", "100000") as process:
        after_first_epoch(process)
        process.kill()
        code, errors, manifest = ended(process, tmp_path)
    assert (code, errors, manifest["status"]) == (-9, [], "running")


@pytest.mark.exhaustive
@pytest.mark.parametrize("script", [RING, "train.py"])
def test_closed_streams_end_nothing(script: str, tmp_path: Path) -> None:
    words = ["--dataset", "digits", "--device", "cpu", "--epochs", "1", "--train_size", "64", "--n_gpus", "2"]
    command = [sys.executable, str(ROOT / script), *words, "--results_dir", str(tmp_path)]
    done = subprocess.run(["bash", "-c", 'exec "$@" <&- >&- 2>&-', "-", *command], timeout=90)
    assert done.returncode == 0
    (run,) = tmp_path.iterdir()
    assert json.loads((run / "manifest.json").read_text(encoding="utf-8"))["status"] == "completed"
    assert len((run / "runs.csv").read_text(encoding="utf-8").splitlines()) > 1
