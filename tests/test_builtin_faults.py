"""The controls end as train.py does, whatever ends them: an exit code, a line that says who and why, and nothing left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RING, SERVER = "ring_all_reduce_builtin.py", "param_server_builtin.py"
both_controls = pytest.mark.parametrize("script", [RING, SERVER])


@contextlib.contextmanager
def running(script: str, folder: Path, *more: str, before: str = "") -> Iterator[subprocess.Popen[str]]:
    """The command in a session of its own; whatever happens, it is ended. `before` is Python that runs in all of its
    processes as they start."""
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(before, encoding="utf-8")
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    with subprocess.Popen(
        [sys.executable, str(ROOT / script), "--dataset", "digits", "--n_gpus", "2", "--device", "cpu",
         "--results_dir", str(folder / "runs"), *more],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
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


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """Their process numbers, by rank: they are started in that order."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="utf-8").split()
    return [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


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


def to_both(number: signal.Signals) -> Callable[[subprocess.Popen[str]], None]:
    return lambda process: [os.kill(rank, number) for rank in ranks_of(process)] and None


def to_second(number: signal.Signals) -> Callable[[subprocess.Popen[str]], None]:
    return lambda process: os.kill(ranks_of(process)[1], number)


@pytest.mark.parametrize(
    ("act", "who", "why"),
    [
        (to_both(signal.SIGINT), "rank 0", "was killed by signal 2 (Interrupt)"),
        (to_second(signal.SIGINT), "rank 1", "was killed by signal 2 (Interrupt)"),
        (to_second(signal.SIGKILL), "rank 1", "was killed by signal 9 (Killed)"),
    ],
)
def test_a_rank_that_gets_a_signal(
    act: Callable[[subprocess.Popen[str]], None], who: str, why: str, tmp_path: Path
) -> None:
    with running(RING, tmp_path, "--epochs", "100000") as process:
        after_first_epoch(process)
        act(process)
        code, errors, manifest = ended(process, tmp_path)
    assert (code, errors) == (1, [f"{RING}: {who} {why}"])
    assert (manifest["status"], manifest["error"]) == ("failed", f"{who} {why}")


# What a rank does in its second backward: torch's cross_entropy stands for any code that it runs.
IN_RANK_1 = """
import sys
if "--multiprocessing-fork" in sys.argv or any("spawn_main" in word for word in sys.orig_argv):
    import os, torch, torch.nn.functional as functional
    plain, calls = functional.cross_entropy, []
    def cross_entropy(*arguments, **options):
        calls.append(1)
        if len(calls) == 2 and torch.distributed.get_rank() == 1:
            {}
        return plain(*arguments, **options)
    functional.cross_entropy = cross_entropy
"""


@pytest.mark.parametrize(
    ("what", "said", "has_traceback"),
    [
        ("os._exit(0)", "rank 1 ended with exit code 0 before it had finished", False),
        ("sys.exit(0)", "rank 1 ended with exit code 0 before it had finished", False),
        ("raise ZeroDivisionError('of a model')", "rank 1 failed: ZeroDivisionError: of a model", True),
        ("raise FileNotFoundError(2, 'of a model')", "rank 1 failed: FileNotFoundError: [Errno 2] of a model", True),
    ],
)
def test_a_rank_that_ends_early(what: str, said: str, has_traceback: bool, tmp_path: Path) -> None:
    with running(RING, tmp_path, before=IN_RANK_1.format(what)) as process:
        code, errors, manifest = ended(process, tmp_path)
    assert (code, errors[0]) == (1, f"{RING}: {said}")
    assert (len(errors) > 1) == has_traceback
    assert not has_traceback or errors[-1] == said.removeprefix("rank 1 failed: ")
    assert (manifest["status"], manifest["error"].splitlines()[0]) == ("failed", said)


@both_controls
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
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


def test_no_rank_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with running(RING, tmp_path, "--epochs", "100000") as process:
        after_first_epoch(process)
        process.kill()
        code, errors, manifest = ended(process, tmp_path)
    assert (code, errors, manifest["status"]) == (-9, [], "running")


ONE_STEP = ("--epochs", "1", "--train_size", "40", "--test_size", "20", "--batch_size", "40")


@both_controls
@pytest.mark.parametrize("options", [("--lr", "1e6"), ("--lr", "1e38", *ONE_STEP)], ids=["diverges", "last_update"])
def test_what_is_not_finite_stops_a_control(script: str, options: tuple[str, ...], tmp_path: Path) -> None:
    """Also where the only update overflows, so that the loss that it was made of is finite."""
    with running(script, tmp_path, *options, "--momentum", "0.5") as process:
        code, (line,), manifest = ended(process, tmp_path)
    assert code == 1 and line.startswith(f"{script}: ")
    assert "the parameter " in line and "is NaN or infinite after epoch 1" in line
    assert manifest["status"] == "failed" and line.endswith(manifest["error"])


@both_controls
@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_a_closed_stream_ends_nothing(script: str, closed: str, tmp_path: Path) -> None:
    command = [str(ROOT / script), "--dataset", "digits", "--device", "cpu", *ONE_STEP, "--results_dir", str(tmp_path)]
    done = subprocess.run(["bash", "-c", f'exec "$@" {closed}', "-", sys.executable, *command], timeout=90,
                          capture_output=True)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    (run,) = tmp_path.iterdir()
    assert json.loads((run / "manifest.json").read_text(encoding="utf-8"))["status"] == "completed"
    assert (run / "weights.pt").exists()
