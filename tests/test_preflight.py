"""What a run needs, counted by hand, and what is said where it is not there."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from torch_parallel import preflight
from torch_parallel.preflight import Needs, PreflightError, check, needs
from torch_parallel.workloads import build_model

ROOT = Path(__file__).parent.parent


def two_layers() -> nn.Module:
    """(3 + 1) * 5 and (5 + 1) * 2 parameters in 4 tensors; 9 more that are frozen."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(2, 3))
    model[2].requires_grad_(False)
    return model


def test_a_worker_shares_gradients_and_marks_and_with_a_server_parameters_too() -> None:
    ring = needs(two_layers, itemsize=4, n=3, has_server=False, bucket_bytes=10**6, data_bytes=1000)
    assert ring is not None
    assert ring.bytes_per_rank == (32 + 4) * 4
    assert ring.shared_bytes == 3 * (32 + 4) * 4 + 1000
    server = needs(two_layers, itemsize=8, n=5, has_server=True, bucket_bytes=10**6, data_bytes=0)
    assert server is not None
    assert server.shared_bytes == 5 * (2 * 32 + 4) * 8
    sharded = needs(two_layers, 4, n=3, has_server=False, bucket_bytes=10**6, data_bytes=7, common_parameters=True)
    assert sharded is not None
    assert sharded.shared_bytes == 3 * (32 + 4) * 4 + 32 * 4 + 7
    in_place = needs(two_layers, 4, n=3, has_server=False, bucket_bytes=10**6, data_bytes=7, common_sums=True)
    assert in_place is not None
    assert in_place.shared_bytes == (3 + 1) * (32 + 4) * 4 + 7
    stale = needs(two_layers, itemsize=8, n=5, has_server=True, bucket_bytes=10**6, data_bytes=0, staleness=2)
    assert stale is not None
    assert stale.shared_bytes == 5 * (3 * (32 + 4) + 32) * 8 + 3 * 32 * 8


def test_a_model_that_cannot_be_built_without_memory_is_not_judged() -> None:
    def stubborn() -> nn.Module:
        return nn.Linear(int(torch.zeros(1).item()) + 1, 1)  # needs a number that is not there

    assert needs(stubborn, 4, 2, False, 10**6, 0) is None


def test_the_default_job_fits_64_mib() -> None:
    """CNN and MNIST, four processes with a server: 47 MB of images as bytes, and little else."""
    data_bytes = 70_000 * (28 * 28 + 8)
    required = needs(partial(build_model, "cnn", (1, 28, 28), 10), 4, 4, True, 25 << 20, data_bytes)
    assert required is not None and required.shared_bytes < 64 * 2**20


def needing(nbytes: int, descriptors: int = 50) -> Needs:
    return Needs(4, nbytes // 4, 0, descriptors, descriptors)


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
    check(needing(0, descriptors=64))
    with pytest.raises(PreflightError, match=r"may need 65 open files in one process, and the limit is 64.*ulimit -n"):
        check(needing(0, descriptors=65))


def train(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    command = f"{before}exec {sys.executable} {ROOT}/train.py --dataset digits --train_size 64 --epochs 1 " + " ".join(
        arguments
    )
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=100, env=dict(os.environ))


def test_a_run_with_few_descriptors_ends_before_it_starts_or_works(tmp_path: Path) -> None:
    done = train("--n_gpus", "2", "--results_dir", str(tmp_path / "few"), before="ulimit -n 48; ")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "open files" in done.stderr
    assert not (tmp_path / "few").exists()
    many = ("--n_gpus", "8", "--bucket_mb", "0.001", "--results_dir", str(tmp_path / "many"))
    done = train(*many, before="ulimit -n 256; ")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="needs root, to mount a /dev/shm")
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
