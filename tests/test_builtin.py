"""The controls train what train.py trains: the comparison compares the same training."""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import json
import multiprocessing
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_parallel import RunConfig, train
from torch_parallel.strategies import BUILTIN, STRATEGIES

ROOT = Path(__file__).parent.parent
FLAGS = ("--dataset", "digits", "--train_size", "203", "--batch_size", "20", "--epochs", "2", "--dtype", "float64")

Ended = subprocess.CompletedProcess[str]
Control = Callable[..., Ended]


def control(script: str, folder: Path, *more: str) -> Ended:
    """The command as a user types it, in processes of its own that all import torch first.

    One that torch aborts says where it was.
    """
    command, telling = [sys.executable, *words(script, folder, *more)], {**os.environ, "PYTHONFAULTHANDLER": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=110, env=telling)


def control_here(script: str, folder: Path, *more: str) -> Ended:
    """The script itself, run in this process, and its workers forked where torch is there already.

    What the workers print is not caught.
    """
    out, err, threads = io.StringIO(), io.StringIO(), torch.get_num_threads()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    code: Any = 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        multiprocessing.get_context("forkserver").set_forkserver_preload(["torch._dynamo"])
        forked = functools.partial(torch.multiprocessing.start_processes, start_method="forkserver")
        patch.setattr(torch.multiprocessing, "spawn", forked)
        patch.setattr(sys, "argv", words(script, folder, *more))
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as ended:
            code = ended.code
        finally:
            torch.set_num_threads(threads)
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return Ended(sys.argv, code, out.getvalue(), err.getvalue())


def words(script: str, folder: Path, *more: str) -> list[str]:
    return [str(ROOT / script), *FLAGS, "--device", "cpu", "--results_dir", str(folder), *more]


def trained(how: Control, script: str, folder: Path, **options: Any) -> dict[str, Tensor]:
    done = how(script, folder, "--n_gpus", "2", *(f"--{name}={value}" for name, value in options.items()))
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = folder.iterdir()
    weights: dict[str, Tensor] = torch.load(run / "weights.pt")
    return weights


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return ours("ring_all_reduce", 1, tmp_path_factory.mktemp("one"))


def ours(strategy: str, n: int, folder: Path, **more: Any) -> dict[str, Tensor]:
    same: dict[str, Any] = {"dataset": "digits", "batch_size": 20, "epochs": 2, "dtype": "float64", "device": "cpu"}
    same["train_size"] = 203  # the last batch has 3 samples
    configuration = RunConfig(strategy=strategy, n_gpus=n, results_dir=str(folder), **{**same, **more})
    return train(configuration, verbose=False).weights


def deviation(weights: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    assert weights.keys() == reference.keys()
    return max(
        (torch.linalg.vector_norm((weights[name] - value).double()) / torch.linalg.vector_norm(value.double())).item()
        for name, value in reference.items()
    )


both_controls = pytest.mark.parametrize("script", ["ring_all_reduce_builtin.py", "param_server_builtin.py"])


@both_controls
def test_a_control_ends_with_the_weights_of_one_process(
    script: str, tmp_path: Path, one_process: dict[str, Tensor]
) -> None:
    assert deviation(trained(control, script, tmp_path), one_process) <= 1e-12


@pytest.mark.exhaustive
@both_controls
@pytest.mark.parametrize(
    ("optimizer", "dtype", "tolerance"),
    [("adam", "float64", 1e-12), ("adamw", "float64", 1e-12), ("sgd", "float32", 1e-6)],
)
def test_with_another_optimizer_and_in_float32_too(
    script: str, optimizer: str, dtype: str, tolerance: float, tmp_path: Path
) -> None:
    """After 11 steps."""
    options = {"optimizer": optimizer, "dtype": dtype, "epochs": 1}
    theirs = trained(control_here, script, tmp_path / "theirs", **options)
    assert deviation(theirs, ours("ring_all_reduce", 1, tmp_path / "ours", **options)) <= tolerance


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")
@both_controls
def test_a_control_on_gpus_ends_with_the_weights_of_the_ring_on_gpus(script: str, tmp_path: Path) -> None:
    theirs = trained(control, script, tmp_path / "theirs", device="cuda")
    assert deviation(theirs, ours("ring_all_reduce", 2, tmp_path / "ours", device="cuda")) <= 1e-10


@pytest.mark.exhaustive
def test_ddp_says_its_settings_and_times_its_exchange(tmp_path: Path) -> None:
    done = control("ring_all_reduce_builtin.py", tmp_path, "--n_gpus", "2", "--batch_size", "4")
    assert "'gradient_as_bucket_view': True, 'static_graph': True" in done.stdout
    assert "_buffers': False" in done.stdout
    (run,) = tmp_path.iterdir()
    rows = list(csv.DictReader((run / "runs.csv").read_text().splitlines()))
    for row in rows:  # 51 steps, of which five are timed; as a share of the epoch they may be far off
        assert float(row["exchange_s"]) >= 0
        assert json.loads(row["options"])["timed_every"] == 10


@pytest.mark.parametrize("strategy", ["two_shot_in_place", "param_server", "sharded_param_server", *BUILTIN])
@pytest.mark.exhaustive
def test_and_so_does_every_strategy(strategy: str, tmp_path: Path, one_process: dict[str, Tensor]) -> None:
    assert deviation(ours(strategy, 2 + STRATEGIES[strategy].server_count, tmp_path), one_process) <= 1e-12


def test_ddp_in_our_loop_says_no_exchange_that_it_did_not_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One step in ten is timed: of 12 steps one, which is too few to tell an epoch's exchange from its compute."""
    config = RunConfig(
        strategy="ddp", n_gpus=2, device="cpu", dataset="digits", train_size=48, batch_size=4, epochs=1,
        results_dir=str(tmp_path),
    )  # fmt: skip
    run = train(config)
    assert re.search(r"compute, exchange and wait \d+\.\d\d s  update", capsys.readouterr().out)
    rows = list(csv.DictReader((Path(run.folder) / "runs.csv").read_text().splitlines()))
    assert [row["exchange_s"] for row in rows] == ["", ""]
    assert all(float(row["compute_s"]) > 0 for row in rows)


@pytest.mark.parametrize("side", ["ring_all_reduce_builtin.py", "ddp"])
@pytest.mark.exhaustive
def test_dropout_and_batch_norm_are_the_same_under_ring_and_ddp(side: str, tmp_path: Path) -> None:
    """Each rank draws the same masks under both, and BatchNorm's statistics are its own while it trains."""
    model = {"model": "mobilenet_v2", "optimizer": "adamw", "train_size": 60, "test_size": 20, "epochs": 1}
    ring = ours("ring_all_reduce", 2, tmp_path / "ring", **model)
    if side == "ddp":
        theirs = ours("ddp", 2, tmp_path / "ddp", **model)
    else:
        theirs = trained(control_here, side, tmp_path / "control", **model)
    assert deviation(theirs, ring) <= 1e-12


def test_a_control_writes_the_same_columns_and_says_what_it_runs(tmp_path: Path) -> None:
    done = control_here("param_server_builtin.py", tmp_path, "--n_gpus", "3")
    assert "no GPU: the plain module in one process" in done.stdout
    (run,) = tmp_path.iterdir()
    rows = list(csv.DictReader((run / "runs.csv").read_text().splitlines()))
    assert [(row["strategy"], row["epoch"], row["batch_size"], row["steps"]) for row in rows] == [
        ("data_parallel", "1", "20", "11"),
        ("data_parallel", "2", "20", "11"),
    ]


def test_a_port_that_is_taken_is_named_and_any_free_one_is_found(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = control_here("ring_all_reduce_builtin.py", tmp_path, "--port", str(port))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and f"--port {port}: it is in use" in done.stderr


@pytest.mark.parametrize("port", ["-1", "65536"])
def test_a_port_that_cannot_be(tmp_path: Path, port: str) -> None:
    done = control_here("ring_all_reduce_builtin.py", tmp_path, "--port", port)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and f"--port {port}: ports go from 0" in done.stderr


@pytest.mark.parametrize(
    ("script", "flag", "value"),
    [
        ("ring_all_reduce_builtin.py", "--accumulate", "2"),
        ("ring_all_reduce_builtin.py", "--straggler", "1:4x"),
        ("param_server_builtin.py", "--accumulate", "2"),
        ("param_server_builtin.py", "--link", "1gbit"),
    ],
)
def test_what_a_control_does_not_do_is_refused(script: str, flag: str, value: str, tmp_path: Path) -> None:
    done = control_here(script, tmp_path / "results", flag, value)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and flag in done.stderr
    assert not (tmp_path / "results").exists()


ONE_STEP = ("--epochs", "1", "--train_size", "20")


@both_controls
@pytest.mark.parametrize("options", [("--lr", "1e6"), ("--lr", "1e45", *ONE_STEP)], ids=["diverges", "last_update"])
@pytest.mark.exhaustive
def test_what_is_not_finite_stops_a_control(script: str, options: tuple[str, ...], tmp_path: Path) -> None:
    """Also where the only update overflows, so that the loss that it was made of is finite."""
    done = control_here(script, tmp_path, *options, "--n_gpus", "2", "--dtype", "float32")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{script}: ")
    assert "the parameter " in line and "is NaN or infinite after epoch 1" in line
    (run,) = tmp_path.iterdir()
    manifest = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["status"] == "failed" and line.endswith(manifest["error"])
    assert [file.name for file in run.iterdir()] == ["manifest.json"]
