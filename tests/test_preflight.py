"""What a run needs, counted by hand, and what is said where it is not there."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from torch_parallel import RunConfig, WorkerFailure, preflight
from torch_parallel import train as run_training
from torch_parallel.preflight import (
    ModelSize,
    Needs,
    PreflightError,
    batch_norm_line,
    check,
    check_open_files,
    dry_build,
    needs,
)
from torch_parallel.workloads import Dataset, build_model

ROOT = Path(__file__).parent.parent


def two_layers() -> nn.Module:
    """(3 + 1) * 5 and (5 + 1) * 2 parameters in 4 tensors; 9 more that are frozen."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(2, 3))
    model[2].requires_grad_(False)
    return model


SIZE = ModelSize(elements=32, parameters=4, has_batch_norm=False)


def test_a_worker_shares_gradients_and_marks_and_with_a_server_parameters_too() -> None:
    ring = needs(SIZE, itemsize=4, n=3, has_server=False, data_bytes=1000)
    assert ring.bytes_per_rank == (32 + 4) * 4
    assert ring.shared_bytes == 3 * (32 + 4) * 4 + 1000
    server = needs(SIZE, itemsize=8, n=5, has_server=True, data_bytes=0)
    assert server.shared_bytes == 5 * (2 * 32 + 4) * 8
    sharded = needs(SIZE, 4, n=3, has_server=False, data_bytes=7, common_parameters=True)
    assert sharded.shared_bytes == 3 * (32 + 4) * 4 + 32 * 4 + 7
    in_place = needs(SIZE, 4, n=3, has_server=False, data_bytes=7, common_sums=True)
    assert in_place.shared_bytes == (3 + 1) * (32 + 4) * 4 + 7
    stale = needs(SIZE, itemsize=8, n=5, has_server=True, data_bytes=0, staleness=2)
    assert stale.shared_bytes == 5 * (3 * (32 + 4) + 32) * 8 + 3 * 32 * 8


@pytest.mark.parametrize("more", [{}, {"common_parameters": True}, {"common_sums": True}, {"staleness": 3}])
def test_of_gpus_the_host_holds_the_data_and_the_processes(more: dict[str, Any]) -> None:
    """20 GiB of gradients on each of 8 GPUs take nothing of the host's memory."""
    large = ModelSize(elements=5 << 30, parameters=100, has_batch_norm=False)
    on_gpus = needs(large, 4, n=8, has_server=True, data_bytes=1000, device="cuda", through_host=False, **more)
    assert on_gpus.shared_bytes == 1000
    assert on_gpus.memory_bytes == 1000 + 8 * (256 << 20)
    by_the_host = needs(large, 4, n=8, has_server=True, data_bytes=1000, device="cuda", **more)
    assert by_the_host.shared_bytes == needs(large, 4, n=8, has_server=True, data_bytes=1000, **more).shared_bytes


def stubborn() -> nn.Module:
    return nn.Linear(int(torch.zeros(1).item()) + 1, 1)  # needs a number that is not there


def dying() -> nn.Module:
    os._exit(0)


def not_a_model() -> Any:
    return {"weight": torch.zeros(3)}


@pytest.mark.parametrize("make_model", [stubborn, dying, not_a_model, lambda: sys.exit(1)])
@pytest.mark.exhaustive
def test_a_model_that_cannot_be_built_without_memory_is_not_judged(make_model: Any) -> None:
    assert dry_build(make_model) is None


def test_a_model_that_takes_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "DRY_BUILD_LIMIT_S", 0.2)
    start_s = time.monotonic()
    assert dry_build(lambda: time.sleep(60)) is None
    assert time.monotonic() - start_s < 20


LEFT: list[str] = []


def changes_everything(folder: str) -> nn.Module:
    """What a model's maker may do to the process in which it runs."""
    LEFT.append("here")
    os.environ["LEFT_BY_THE_MODEL"] = "here"
    os.chdir(folder)
    torch.rand(3), random.random(), numpy.random.rand(3)
    torch.set_default_dtype(torch.float64)
    torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    print("said by the model")
    os.write(2, b"said by the model")
    return two_layers()


def state_of_the_process() -> list[Any]:
    generators = [torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())]
    hooks = len(torch.nn.modules.module._global_forward_hooks)
    surroundings = [os.environ.get("LEFT_BY_THE_MODEL"), os.getcwd(), torch.get_default_dtype(), list(LEFT)]
    return [*generators, hooks, *surroundings, signal.getsignal(signal.SIGUSR1), list(warnings.filters)]


def test_the_dry_build_leaves_nothing_in_the_caller(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = state_of_the_process()
    size = dry_build(partial(changes_everything, str(tmp_path)))
    assert size == SIZE
    assert state_of_the_process() == before
    assert capfd.readouterr() == ("", "")


def test_the_default_job_fits_64_mib() -> None:
    """CNN and MNIST, four processes with a server: 47 MB of images as bytes, and little else."""
    size = dry_build(partial(build_model, "cnn", (1, 28, 28), 10))
    assert size is not None and not size.has_batch_norm
    assert needs(size, 4, 4, True, 70_000 * (28 * 28 + 8)).shared_bytes < 64 * 2**20


@pytest.mark.parametrize(
    ("train_size", "batch_size", "workers", "accumulate", "said"),
    [
        (257, 4, 4, 1, "in each step, of 4 samples, a worker has 1 sample;"),
        (257, 8, 4, 1, "in the last step, of 1 sample, a worker has 1 sample;"),
        (256, 8, 4, 1, None),
        (258, 16, 2, 1, "in the last step, of 2 samples, a worker has 1 sample;"),
        (20, 64, 2, 1, None),
        (1, 64, 2, 1, "in each step, of 1 sample, a worker has 1 sample;"),
        (256, 16, 4, 4, "in each step, of 16 samples, a worker has 1 sample at a time;"),
        (256, 16, 4, 2, None),
        (27, 9, 4, 1, None),  # 3, 2, 2, 2
        (33, 32, 1, 1, "in the last step, of 1 sample, a worker has 1 sample;"),
    ],
)
def test_one_sample_is_too_few_for_batch_norm(
    train_size: int, batch_size: int, workers: int, accumulate: int, said: str | None
) -> None:
    line = batch_norm_line(train_size, batch_size, workers, accumulate)
    assert (line is None) == (said is None)
    if line is not None and said is not None:
        assert said in line and "one value per channel" in line and "\n" not in line


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 2), nn.BatchNorm1d(2))


@pytest.mark.parametrize(("make_model", "is_said"), [(with_batch_norm, True), (lambda: nn.Linear(4, 2), False)])
def test_and_it_is_said_before_the_start(
    make_model: Any, is_said: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seventeen samples in batches of eight on four workers: two each, and then one."""
    inputs, targets = torch.randn(17, 4), torch.arange(17) % 2
    data = Dataset("own", inputs, targets, inputs, targets, 2, (), (), "this test")
    config = RunConfig(n_gpus=4, device="cpu", epochs=1, batch_size=8, results_dir=str(tmp_path))
    with pytest.raises(WorkerFailure, match="more than 1 value") if is_said else contextlib.nullcontext():
        run_training(config, make_model=make_model, dataset=data)
    lines = capsys.readouterr().out.splitlines()
    found = [line for line in lines if line.startswith("BatchNorm: in the last step, of 1 sample, ")]
    assert len(found) == is_said


def needing(nbytes: int) -> Needs:
    return Needs(4, nbytes // 4, 0)


def test_too_little_memory_is_said_with_both_numbers_and_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "free_memory_bytes", lambda: 500 * 2**20)
    check(needing(116 * 2**20))  # beside 4 * 96
    with pytest.raises(PreflightError) as error:
        check(needing(116 * 2**20 + 4))
    message = str(error.value)
    assert "needs 500.0 MiB" in message and "500.0 MiB are free" in message and "--n_gpus" in message
    assert "\n" not in message


def test_unknown_memory_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "free_memory_bytes", lambda: None)
    check(needing(2**50))


def test_too_few_descriptors_are_said_with_both_numbers_and_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 4096))
    check_open_files(4)  # 40 of the launcher, and 6 for each process
    with pytest.raises(PreflightError, match=r"may need 70 open files in one process, and the limit is 64.*ulimit -n"):
        check_open_files(5)


def train(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    command = f"{before}exec {sys.executable} {ROOT}/train.py --dataset digits --train_size 64 --epochs 1 " + " ".join(
        arguments
    )
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=100, env=dict(os.environ))


@pytest.mark.exhaustive
def test_a_run_with_few_descriptors_ends_before_it_starts_or_works(tmp_path: Path) -> None:
    done = train("--n_gpus", "2", "--results_dir", str(tmp_path / "few"), before="ulimit -n 48; ")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "open files" in done.stderr
    assert not (tmp_path / "few").exists()
    many = ("--n_gpus", "8", "--bucket_mb", "0.001", "--results_dir", str(tmp_path / "many"))
    done = train(*many, before="ulimit -n 256; ")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="needs root, to mount a /dev/shm")
@pytest.mark.exhaustive
def test_a_small_dev_shm_is_enough(tmp_path: Path) -> None:
    """A container's 64 MB, and even 1 MB: nothing of ours lies there, not even a model of 30 MB for four workers."""
    script = (
        "mount -t tmpfs -o size=1m tmpfs /dev/shm && "
        f"{sys.executable} {ROOT}/train.py --strategy param_server --n_gpus 5 --model mobilenet_v2 --dataset digits "
        f"--train_size 16 --batch_size 16 --epochs 1 --dtype float64 --results_dir {tmp_path}; "
        "code=$?; ls /dev/shm | wc -l; exit $code"
    )
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", script], capture_output=True, text=True, timeout=110, env=dict(os.environ)
    )
    if "unshare" in done.stderr:
        pytest.skip(f"no mount namespaces here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stdout
    assert done.stdout.splitlines()[-1] == "0"
