"""The commands as a user runs them: what they print, how they end, and what they leave behind."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from torch_parallel.command_line import run_command
from torch_parallel.devices import DeviceError
from torch_parallel.launcher import WorkerFailure
from torch_parallel.preflight import PreflightError
from torch_parallel.results import ResultsError
from torch_parallel.strategies import STRATEGIES
from torch_parallel.training.checkpoint import CheckpointError
from torch_parallel.training.config import ConfigError
from torch_parallel.workloads import DataError, build_model, load_dataset

ROOT = Path(__file__).parents[1]
TRAIN = [sys.executable, str(ROOT / "train.py")]
EPOCH = re.compile(
    r"epoch (\d+)/(\d+)  train loss (\d+\.\d{4})  test accuracy (\d+\.\d\d) %  [\d,]+ samples/s  "
    r"(compute \d+\.\d\d s  exchange \d+\.\d\d s  wait \d+\.\d\d s"
    r"|compute, exchange and wait \d+\.\d\d s)  update \d+\.\d\d s"  # ddp times its exchange in few steps only
)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """An empty working directory; home and temporary folder lie beside it."""
    for name in ("cwd", "home", "tmp"):
        (tmp_path / name).mkdir()
    return tmp_path


def environment(place: Path) -> dict[str, str]:
    """No network, no GPU, no data, and no folder but those in `place`."""
    inherited = {key: value for key, value in os.environ.items() if key in ("PATH", "LANG", "LD_LIBRARY_PATH")}
    nowhere = "http://127.0.0.1:1"
    return inherited | {
        "CUDA_VISIBLE_DEVICES": "",
        "HOME": str(place / "home"),
        "TMPDIR": str(place / "tmp"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "http_proxy": nowhere,
        "https_proxy": nowhere,
    }


def run(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python train.py` with these arguments, ended after 100 s. Line ends are left as they are."""
    ended = subprocess.run(
        [*TRAIN, *arguments], cwd=place / "cwd", env=environment(place), capture_output=True, timeout=100
    )
    return subprocess.CompletedProcess(ended.args, ended.returncode, ended.stdout.decode(), ended.stderr.decode())


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


@pytest.mark.parametrize(
    ("strategy", "n", "who"), [("ring_all_reduce", 4, "4 workers on"), ("param_server", 3, "2 workers and 1 server on")]
)
def test_a_run(strategy: str, n: int, who: str, place: Path) -> None:
    ended = run(place, "--strategy", strategy, "--n_gpus", str(n), "--dataset", "digits", "--epochs", "2")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "\r" not in ended.stdout and "\x1b" not in ended.stdout  # a pipe is no terminal
    lines = ended.stdout.splitlines()
    epochs = [match for line in lines if (match := EPOCH.fullmatch(line))]
    assert [(match[1], match[2]) for match in epochs] == [("1", "2"), ("2", "2")]
    last = re.fullmatch(r"test accuracy (\d+\.\d\d) %; weights in (\S+); results in (\S+)", lines[-1])
    assert last is not None and last[1] == epochs[-1][4]
    # That there is no GPU, which data, who trains and in which steps is said once, and before.
    head = lines[: lines.index(epochs[0][0])]
    assert len(lines) == len(head) + 3
    assert [line for line in lines if "no GPU was found" in line] == [head[0]]
    assert f"{n} processes" in head[0] and "digits" in head[1]
    assert who in head[2] and "batch of 16 over all workers" in head[2] and "90 steps an epoch" in head[2]
    # The folder that it names, and nothing anywhere else.
    folder = Path(last[3])
    assert files_below(place) == {f"cwd/{folder}/{name}" for name in ("manifest.json", "runs.csv", "weights.pt")}
    # The weights are the bare model's, and they have the accuracy that was told.
    digits, _ = load_dataset("digits", None, None, seed=0)
    model = build_model("cnn", digits.image_shape, digits.class_count)
    model.load_state_dict(torch.load(place / "cwd" / last[2]))
    predicted = model(digits.normalize(digits.test_inputs, torch.float32)).argmax(1)
    assert f"{100 * (predicted == digits.test_targets).double().mean().item():.2f}" == last[1]
    assert folder.parent == Path("results/runs")
    manifest = json.loads((place / "cwd" / folder / "manifest.json").read_text())
    assert manifest["status"] == "completed" and manifest["config"]["n_gpus"] == n
    assert manifest["command"].endswith(f"train.py --strategy {strategy} --n_gpus {n} --dataset digits --epochs 2")
    with open(place / "cwd" / folder / "runs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * n
    assert [f"{float(row['train_loss']):.4f}" for row in rows[::n]] == [match[3] for match in epochs]


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_the_command_of_every_strategy(
    strategy: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    handlers: None,
) -> None:
    """The script itself, run in this process, where torch and the fork server are there already. With no other choice
    than less to train on: as many processes as it takes by default."""
    words = ["--strategy", strategy, "--dataset", "digits", "--train_size", "130", "--epochs", "1", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", [TRAIN[1], *words])
    monkeypatch.chdir(place / "cwd")
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(TRAIN[1], run_name="__main__")
    assert ended.value.code == 0
    out, err = capsys.readouterr()
    assert err == "" and EPOCH.search(out) is not None


def test_no_argument_at_all_and_no_data(place: Path) -> None:
    """Without MNIST it trains on digits, and says so and why."""
    ended = run(place)
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = ended.stdout.splitlines()
    assert lines[1].startswith("digits") and "MNIST was neither found in data nor downloadable" in lines[1]
    assert "2 workers on cpu" in lines[2]
    accuracy = re.match(r"test accuracy (\S+) %", lines[-1])
    assert accuracy is not None and float(accuracy[1]) >= 95  # the first thing that a reader runs learns something


@pytest.mark.exhaustive
def test_a_run_that_diverges(place: Path) -> None:
    ended = run(place, "--dataset", "digits", "--lr", "1e30", "--epochs", "2")
    assert ended.returncode == 1
    headline = ended.stderr.splitlines()[0]
    assert re.match(r"train\.py: rank [01] failed: NotFinite: the gradient of \w+\.(weight|bias) is NaN", headline)
    assert "in step 2 of epoch 1" in headline
    assert "test accuracy" not in ended.stdout
    (manifest,) = (place / "cwd" / "results" / "runs").glob("*/manifest.json")
    assert json.loads(manifest.read_text())["status"] == "failed"


@contextlib.contextmanager
def long_run(place: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A run that has to be ended; whatever happens in between, it is."""
    with subprocess.Popen(
        [*TRAIN, "--dataset", "digits", "--epochs", "100000", *arguments],
        cwd=place / "cwd",
        env=environment(place),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # in the background a shell ignores it
    ) as process:
        limit = threading.Timer(60, process.kill)
        limit.start()
        try:
            yield process
        finally:
            limit.cancel()
            process.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.exhaustive
def test_an_interrupted_run_keeps_its_epochs(number: signal.Signals, code: int, place: Path) -> None:
    with long_run(place, "--results_dir", str(place / "kept")) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("epoch 2/"):
                break
        process.send_signal(number)
        _, errors = process.communicate()
    assert process.returncode == code
    assert errors in ("", "train.py: interrupted\n")  # no traceback
    (folder,) = (place / "kept").iterdir()
    assert json.loads((folder / "manifest.json").read_text())["status"] == "interrupted"
    with open(folder / "runs.csv", newline="") as file:
        assert {"1", "2"} <= {row["epoch"] for row in csv.DictReader(file)}  # what was shown is on disk
    assert files_below(place / "cwd") == set()


@pytest.mark.exhaustive
def test_output_that_nobody_reads_to_the_end(place: Path) -> None:
    """`python train.py | head -1`: one line says why it ends, and the exit code that it did."""
    with long_run(place) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
        process.wait()
    assert process.returncode == 1
    assert len(errors.splitlines()) == 1 and "Broken pipe" in errors


# Exit codes, without a process for each.


def raiser(error: BaseException) -> Callable[[], NoReturn]:
    def command() -> NoReturn:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("--n_gpus 0: too few"), 2, "name: error: --n_gpus 0: too few\n"),
        (DataError("damaged"), 2, "name: error: damaged\n"),
        (DeviceError("too many"), 2, "name: error: too many\n"),
        (ResultsError("a file"), 2, "name: error: a file\n"),
        (CheckpointError("not there"), 2, "name: error: not there\n"),
        (PreflightError("too little"), 2, "name: error: too little\n"),
        (WorkerFailure("rank 1 died\nwhile computing", 1), 1, "name: rank 1 died\nwhile computing\n"),
        (KeyboardInterrupt(), 130, "name: interrupted\n"),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str], handlers: None
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command("name", raiser(error))
    assert ended.value.code == code
    assert capsys.readouterr() == ("", said)


def test_exit_codes_of_success_and_of_sigterm(capsys: pytest.CaptureFixture[str], handlers: None) -> None:
    cleaned = []

    def terminated() -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(cleaned.append, True)
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()

    for command, code in ((lambda: None, 0), (terminated, 143)):
        with pytest.raises(SystemExit) as ended:
            run_command("name", command)
        assert ended.value.code == code
    assert cleaned == [True]  # what is open is closed
    assert capsys.readouterr() == ("", "")


def test_an_error_of_the_program_itself_keeps_its_traceback(handlers: None) -> None:
    with pytest.raises(ZeroDivisionError):
        run_command("name", raiser(ZeroDivisionError()))


# The other commands.


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "bench"),
        (["bogus"], "bogus"),
        (["bench", "bogus"], "all_reduce"),
    ],
)
def test_commands_are_named_where_none_is_given(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch_parallel import __main__ as commands

    monkeypatch.setattr(sys, "argv", ["torch_parallel", *arguments])
    with pytest.raises(SystemExit) as ended:
        commands.main()
    assert ended.value.code == 2
    output, errors = capsys.readouterr()
    (line,) = errors.splitlines()
    assert output == "" and said in line


def test_help_of_the_other_commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_parallel import __main__ as commands

    expected: dict[tuple[str, ...], list[str]] = {
        ("--help",): list(commands.COMMANDS),
        ("bench", "--help"): ["all_reduce", "epoch", "step", "--n_gpus"],
        ("bench", "all_reduce", "--help"): ["--n_gpus", "--largest_mb", "--results_dir"],
        ("bench", "step", "--help"): ["--strategy", "--parameters_m", "--optimizer", "--steps"],
        ("bench", "epoch", "--help"): ["--model", "--batch_size", "--repeats", "--dataset"],
    }
    for arguments, words in expected.items():
        monkeypatch.setattr(sys, "argv", ["torch_parallel", *arguments])
        with pytest.raises(SystemExit) as ended:
            commands.main()
        output, errors = capsys.readouterr()
        assert (ended.value.code, errors) == (0, "")
        assert all(word in output for word in words), arguments


@pytest.mark.exhaustive
def test_python_dash_m(place: Path) -> None:
    ended: Any = subprocess.run(
        [sys.executable, "-m", "torch_parallel", "bench", "all_reduce", "--n_gpus", "1"],
        cwd=ROOT,
        env=environment(place),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "torch_parallel: error: --n_gpus 1: it takes at least 2 processes to exchange anything\n"
