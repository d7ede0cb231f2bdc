"""Under torch's DistributedDataParallel too the rank that failed is blamed, and its group waits no longer than ours."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_parallel import RunConfig, WorkerFailure, train
from torch_parallel.communicator import Communicator
from torch_parallel.training.config import ConfigError
from torch_parallel.training.evaluate import Evaluation
from torch_parallel.training.job import Job
from torch_parallel.training.loop import train_worker
from torch_parallel.training.network import check_network
from torch_parallel.transport.base import TransportError
from torch_parallel.transport.process_groups import deadline_of, in_plain_words, tells_of_a_peer

ROOT = Path(__file__).parents[2]
QUICK_S = 40.0


def is_rank(rank: int) -> bool:
    return multiprocessing.current_process().name.endswith(f"rank {rank}")


class Model(nn.Module):
    """A layer; on rank `broken_rank` something goes wrong in its third forward, or the backward of that."""

    def __init__(self, broken_rank: int, how: str) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.broken = is_rank(broken_rank)
        self.how = how
        self.forwards = 0

    def forward(self, images: Tensor) -> Tensor:
        self.forwards += 1
        logits: Tensor = self.layer(images.flatten(1))
        if self.broken and self.forwards == 3:
            if self.how == "forward":
                raise ValueError("mine alone")
            if self.how == "backward":
                logits.register_hook(_raise)
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "asleep":
                time.sleep(60)
        return logits


def _raise(gradient: Tensor) -> Tensor:
    raise ValueError("mine alone")


def broken_data(communicator: Communicator, job: Job) -> Any:
    """A target that is no class, among the samples of rank 1's share alone."""
    if communicator.rank == 1:
        communicator.shared["train/targets"] = torch.full_like(communicator.shared["train/targets"], 99)
    return train_worker(communicator, job)


def failure_of(tmp_path: Path, make_model: Callable[[], nn.Module], n: int = 2, **settings: Any) -> WorkerFailure:
    worker = settings.pop("worker_function", train_worker)
    config = RunConfig(
        strategy="ddp",
        dataset="digits",
        train_size=320,
        n_gpus=n,
        device="cpu",
        epochs=1,
        results_dir=str(tmp_path),
        **settings,
    )
    start_s = time.monotonic()
    with pytest.raises(WorkerFailure) as raised:
        train(config, make_model=make_model, verbose=False, worker_function=worker)
    assert time.monotonic() - start_s < QUICK_S
    return raised.value


@pytest.mark.parametrize("how, n, rank", [("forward", 2, 1), ("backward", 3, 2), ("forward", 3, 0)])
def test_the_rank_that_raises_is_blamed(tmp_path: Path, how: str, n: int, rank: int) -> None:
    failure = failure_of(tmp_path, partial(Model, rank, how), n)
    lines = str(failure).splitlines()
    assert failure.rank == rank
    assert lines[0] == f"rank {rank} failed: ValueError: mine alone"
    assert lines[-1] == "ValueError: mine alone"
    assert any("_raise" in line or "in forward" in line for line in lines)
    assert "gloo" not in str(failure) and "Connection" not in str(failure)


def test_the_rank_whose_data_are_broken_is_blamed(tmp_path: Path) -> None:
    failure = failure_of(tmp_path, partial(Model, 1, "not at all"), worker_function=broken_data)
    assert failure.rank == 1
    assert re.match(r"rank 1 failed: IndexError: Target 99 is out of bounds", str(failure))


def test_the_rank_that_is_killed_is_blamed(tmp_path: Path) -> None:
    failure = failure_of(tmp_path, partial(Model, 0, "killed"), 3)
    assert failure.rank == 0
    assert str(failure).startswith("rank 0 was killed by signal 9 (SIGKILL)")


def test_the_group_waits_no_longer_than_the_deadline(tmp_path: Path) -> None:
    failure = failure_of(tmp_path, partial(Model, 1, "asleep"), deadline_s=2.0)
    in_vain = "failed: RuntimeError: torch's process group has lost a peer, or waited for it in vain: "
    assert re.match(rf"rank \d ({in_vain}|gave no sign)", str(failure))


# ---- what counts as a complaint about a peer ----


def chained() -> BaseException:
    error = ValueError("a wrapper of the user's")
    error.__cause__ = RuntimeError("[/build/third_party/gloo/gloo/transport/tcp/pair.cc:1] Connection closed by peer")
    return error


@pytest.mark.parametrize(
    "error, expected",
    [
        (RuntimeError("[/build/third_party/gloo/gloo/transport/tcp/buffer.cc:72] Read error"), True),
        (RuntimeError("Connection reset by peer"), True),
        (dist.DistBackendError("NCCL communicator was aborted on rank 1"), True),
        (dist.DistStoreError("wait timeout after 2000ms, keys: /0"), True),
        (dist.DistNetworkError("The client socket has timed out"), True),
        (chained(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ConnectionResetError("Connection reset by peer"), False),  # of the user's own connections
        (TransportError("no signal from rank 1"), False),  # says itself whether it is secondhand
        (ValueError("NCCL"), False),
    ],
)
def test_complaints(error: BaseException, expected: bool) -> None:
    assert tells_of_a_peer(error) is expected


def test_a_complaint_in_plain_words() -> None:
    error = RuntimeError("[/build/third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by peer\nmore")
    assert in_plain_words(error) == (
        "RuntimeError: torch's process group has lost a peer, or waited for it in vain: Connection closed by peer"
    )
    assert deadline_of(0.05).total_seconds() == 1.0
    assert deadline_of(300).total_seconds() == 300.0


# ---- a machine without a network ----

NO_LOOPBACK = "no address of the loopback answers (Network is unreachable): bring it up (ip link set lo up), or"
TAKEN_OFF = ["unshare", "-n"]


def may_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*TAKEN_OFF, "true"], capture_output=True, timeout=20, check=False).returncode == 0


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, env={**os.environ, **environment}, check=False
    )


@pytest.mark.skipif(not may_unshare(), reason="this user may not make network namespaces (unshare -n)")
@pytest.mark.parametrize("command", [["train.py", "--strategy", "ddp"], ["ring_all_reduce_builtin.py"]])
@pytest.mark.exhaustive
def test_without_a_network_one_line_says_so(tmp_path: Path, command: list[str]) -> None:
    flags = ["--dataset", "digits", "--n_gpus", "2", "--device", "cpu", "--results_dir", str(tmp_path)]
    start_s = time.monotonic()
    ended = run(*TAKEN_OFF, sys.executable, *command, *flags)
    assert time.monotonic() - start_s < 60
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.startswith(f"{command[0]}: error: ") and NO_LOOPBACK in ended.stderr
    assert list(tmp_path.iterdir()) == []  # nothing was begun


@pytest.mark.skipif(not may_unshare(), reason="this user may not make network namespaces (unshare -n)")
@pytest.mark.exhaustive
def test_strategies_from_scratch_need_no_network(tmp_path: Path) -> None:
    flags = ["--dataset", "digits", "--n_gpus", "2", "--device", "cpu", "--epochs", "1", "--train_size", "64"]
    ended = run(*TAKEN_OFF, sys.executable, "train.py", *flags, "--results_dir", str(tmp_path))
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("names", ["eth99", "lo,eth99"])
def test_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch, names: str) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", names)
    with pytest.raises(
        ConfigError, match=r"^--strategy ddp: GLOO_SOCKET_IFNAME names eth99, and .* interfaces are .*lo"
    ):
        check_network("--strategy ddp", "take another", "cpu")
    check_network("--strategy ddp", "take another", "cuda")  # NCCL does not look at it
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    check_network("--strategy ddp", "take another", "cpu")


# ---- long work ----


class Slow(nn.Module):
    """Its first forward takes long on rank 1, as where it is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.is_slow = is_rank(1)

    def forward(self, images: Tensor) -> Tensor:
        if self.is_slow:
            self.is_slow = False
            time.sleep(WORK_S)
        logits: Tensor = self.layer(images.flatten(1))
        return logits


WORK_S = 3.2


def slow_worker(communicator: Communicator, job: Job) -> Any:
    """Rank 0 takes long to save the first time, rank 1 to evaluate."""
    from torch_parallel.training import checkpoint, loop

    save, evaluate = checkpoint.save, loop.evaluate

    def slow_save(*arguments: Any) -> Path:
        checkpoint.save = save  # type: ignore[attr-defined]
        time.sleep(WORK_S)
        return save(*arguments)

    def slow_evaluate(*arguments: Any, **options: Any) -> Evaluation:
        time.sleep(WORK_S * communicator.rank)
        return evaluate(*arguments, **options)

    loop.compile_layers = lambda model: None  # type: ignore[attr-defined]
    checkpoint.save, loop.evaluate = slow_save, slow_evaluate  # type: ignore[attr-defined]
    return train_worker(communicator, job)


@pytest.mark.parametrize("strategy", ["ddp", "ring_all_reduce"])
@pytest.mark.exhaustive
def test_saving_testing_and_compiling_may_take_longer_than_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    monkeypatch.setattr("torch_parallel.training.run.check_compiler", lambda device: None)
    config = RunConfig(
        strategy=strategy,
        dataset="digits",
        train_size=192,
        batch_size=64,
        n_gpus=2,
        device="cpu",
        epochs=1,
        deadline_s=2.0,
        checkpoint_every=2,
        compile=True,
        results_dir=str(tmp_path),
    )
    trained = train(config, make_model=Slow, verbose=False, worker_function=slow_worker)
    assert len(trained.history) == 1
    assert len(list(Path(trained.folder, "checkpoints").glob("*.pt"))) == 2  # after 2 of 3 steps, and at the end


class UsedIn(nn.Module):
    """A part of it is used in these forwards alone, counted from 1."""

    def __init__(self, forwards: tuple[int, ...]) -> None:
        super().__init__()
        self.layer, self.part = nn.Linear(64, 10), nn.Linear(10, 10)
        self.used_in, self.forwards = forwards, 0

    def forward(self, images: Tensor) -> Tensor:
        self.forwards += 1
        logits: Tensor = self.layer(images.flatten(1))
        return self.part(logits) if self.forwards in self.used_in else logits


@pytest.mark.parametrize("forwards", [(1,), (2,), (1, 3), tuple(range(2, 99))])
def test_a_graph_that_changes_is_told_in_one_line(tmp_path: Path, forwards: tuple[int, ...]) -> None:
    failure = failure_of(tmp_path, partial(UsedIn, forwards))
    assert re.match(r"rank \d failed: UnsupportedModel: DistributedDataParallel takes the graph of ", str(failure))
    assert str(failure).splitlines()[0].endswith("others: take another --strategy")
    assert "Traceback" not in str(failure)
