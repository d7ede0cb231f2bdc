"""Processes that others have started: they find each other, train as launched ones do, and see each other end."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import Program
from started import PLAIN, failing, free_port, running, said_by, started, weights_in
from torch.distributed import FileStore  # type: ignore[attr-defined]

from torch_parallel import RunConfig, join, launch, train
from torch_parallel.communicator import Communicator
from torch_parallel.meeting import Meeting
from torch_parallel.place import RendezvousError
from torch_parallel.strategies import STRATEGIES
from torch_parallel.transport.base import TransportError

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="other processes' files are opened by /proc"),
    pytest.mark.timeout(600),  # each of torchrun's processes imports torch
]

ROOT = Path(__file__).parents[1]
SMALL = ("--dataset", "digits", "--train_size", "200", "--test_size", "50", "--epochs", "1", "--device", "cpu")
LIMIT_S = 280.0


def torchrun(n: int, *program: str, restarts: int = 0) -> list[str]:
    own = ["--standalone", "--nproc_per_node", str(n), "--max_restarts", str(restarts), "--monitor_interval", "0.1"]
    return [sys.executable, "-m", "torch.distributed.run", *own, *program]


def run(command: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=PLAIN | environ, cwd=ROOT)


# ---- join ----


def joined(communicator: Communicator, path: str, times: int) -> list[Any]:
    """A worker that joins the others once more, by a store, as if somebody else had started it."""
    seen: list[Any] = []
    for _ in range(times):
        own = join(FileStore(path, communicator.world_size), communicator.rank, communicator.world_size, deadline_s=20)
        x = torch.arange(5.0) + own.rank
        seen.append((own.rank, own.world_size, own.all_reduce(x, algorithm="two_shot_in_place").tolist()))
        seen.append(own.gather(f"rank {own.rank}", root=1))
    return seen


def test_ranks_that_join_have_the_communicator_that_launch_gives(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    by_rank = launch(joined, 3, str(tmp_path / "store"), 2, deadline_s=60)
    sums = [3.0 * k + 3.0 for k in range(5)]
    for rank, seen in enumerate(by_rank):
        gathered = ["rank 0", "rank 1", "rank 2"] if rank == 1 else None
        assert seen == [(rank, 3, sums), gathered] * 2
    assert set(os.listdir("/dev/shm")) <= before


def held_now() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd")) + threading.active_count()


def joins_and_closes(communicator: Communicator, path: str, nodes: str, raising: bool, times: int) -> list[int]:
    """Open files and threads after each of the times."""
    counted = []
    for number in range(times):
        store, rank = FileStore(f"{path}{number}", communicator.world_size), communicator.rank
        with contextlib.suppress(ZeroDivisionError):
            own: Communicator | None = join(store, rank, communicator.world_size, deadline_s=20, node=nodes[rank])
            with own:
                assert own.all_reduce(torch.ones(3000)).tolist() == [3.0] * 3000
                communicator.barrier()  # who still waits for others would be told that one has raised
                if raising:
                    raise ZeroDivisionError
            own.close()  # again, which does nothing
        own = store = None
        communicator.barrier()
        until_s = time.monotonic() + 10
        while (held := held_now()) > min([held, *counted]) and time.monotonic() < until_s:
            time.sleep(0.05)  # gloo closes its connections in its own time
        counted.append(held)
    return counted


@pytest.mark.parametrize("nodes", ["aaa", "aab", "abc"])
@pytest.mark.parametrize("raising", [False, True])
@pytest.mark.exhaustive
def test_what_a_communicator_holds_is_given_back_when_it_is_closed(nodes: str, raising: bool, tmp_path: Path) -> None:
    hook, before = sys.excepthook, set(os.listdir("/dev/shm"))
    for counted in launch(joins_and_closes, 3, str(tmp_path / "store"), nodes, raising, 8, deadline_s=60):
        assert counted[-1] <= counted[0] + 2, counted  # gloo closes connections late, but all of them
    assert sys.excepthook is hook and set(os.listdir("/dev/shm")) <= before


def waits_for_one_that_has_closed(communicator: Communicator, path: str) -> str:
    own = join(FileStore(path, 2), communicator.rank, 2, deadline_s=20)
    if own.rank == 1:
        own.close()
        return ""
    with pytest.raises(TransportError) as error:
        own.barrier()
    own.close()
    return str(error.value)


def test_who_waits_for_one_that_has_closed_is_told(tmp_path: Path) -> None:
    said, _ = launch(waits_for_one_that_has_closed, 2, str(tmp_path / "store"), deadline_s=60)
    assert "rank 1 has returned" in said


def meets_alone(communicator: Communicator, path: str) -> str:
    if communicator.rank == 0:
        with pytest.raises(RendezvousError) as error:
            Meeting(FileStore(path, 2), 0, 2, deadline_s=0.5)
        return str(error.value)
    return ""


def test_who_does_not_come_is_named(tmp_path: Path) -> None:
    line, _ = launch(meets_alone, 2, str(tmp_path / "store"), deadline_s=60)
    assert re.fullmatch(r"rank 0 of 2 waited [01] s for rank 1 to come: were all ranks started, .*", line)


def test_arguments_that_are_none_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="store, rank and world_size are given together"):
        join(rank=1)
    with pytest.raises(ValueError, match="rank 2 of 2: ranks are 0 to world_size - 1"):
        join(FileStore(str(tmp_path / "store"), 2), 2, 2)
    with pytest.raises(RendezvousError, match=r"nobody has started this process .*torchrun --nproc_per_node 4"):
        join()


# ---- torchrun ----


EXACT = {"param_server_bounded": {"staleness": 0}, "param_server_backup": {"backup_workers": 0}}
"""With which these strategies wait for everybody, so that the weights do not depend on who comes first."""


def launched(strategy: str, folder: Path) -> dict[str, torch.Tensor]:
    small = {"dataset": "digits", "train_size": 200, "test_size": 50, "epochs": 1, "device": "cpu"}
    own = {**small, **EXACT.get(strategy, {})}
    config = RunConfig(strategy=strategy, n_gpus=3, results_dir=str(folder), **own)  # type: ignore[arg-type]
    return train(config, verbose=False).weights


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "data_parallel"])
def test_training_of_joined_processes_is_that_under_launch_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    own = [word for name, value in EXACT.get(strategy, {}).items() for word in (f"--{name}", str(value))]
    words = ["--strategy", strategy, *SMALL, *own, "--results_dir", str(tmp_path / "joined")]
    processes = started((3,), str(ROOT / "train.py"), *words)
    said = "".join(said_by(processes))
    assert [process.returncode for process in processes] == [0, 0, 0], said
    assert said.count("epoch 1/1") == said.count("results in ") == 1
    theirs = launched(strategy, tmp_path / "launched")
    if strategy != "param_server_async":  # who comes first differs from run to run
        ours = weights_in(tmp_path / "joined")
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("raise ValueError('mine')", r"FAILURE of 2 rank 2 failed: ValueError: mine"),
        ("os.kill(os.getpid(), signal.SIGKILL)", r"FAILURE of 2 rank 2 has died: its process ended before it returned"),
    ],
)
def test_who_fails_is_named_and_all_end(tmp_path: Path, what: str, said: str) -> None:
    begin_s = time.monotonic()
    processes = started((3,), failing(tmp_path, what), str(tmp_path / "results"), "ring_all_reduce", CULPRITS="2")
    texts = said_by(processes)
    assert all(process.returncode != 0 for process in processes)
    assert time.monotonic() - begin_s < LIMIT_S / 2
    assert all(re.search(said, text) for text in texts[:2]), texts


@pytest.mark.parametrize("culprit", [pytest.param(0, marks=pytest.mark.exhaustive), 2])
def test_of_processes_started_by_hand_the_survivors_name_the_lost_one(tmp_path: Path, culprit: int) -> None:
    """Nobody ends them, as torchrun does."""
    program = failing(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    same = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "CULPRITS": str(culprit)}
    command = [program, str(tmp_path / "results"), "ring_all_reduce"]
    processes = [Program(command, PLAIN | same | {"RANK": str(rank)}, ROOT) for rank in range(3)]
    said = said_by(processes)
    assert [process.returncode for process in processes] == [-9 if rank == culprit else 1 for rank in range(3)]
    lost = "the process of rank 0 has ended" if culprit == 0 else "rank 2 has died"
    assert all(f"FAILURE of {culprit} {lost}" in text for rank, text in enumerate(said) if rank != culprit), said


@pytest.mark.exhaustive
def test_a_killed_agent_leaves_nothing(tmp_path: Path) -> None:
    program = failing(tmp_path, "time.sleep(600)")
    command = torchrun(3, program, str(tmp_path / "results"), "ring_all_reduce")
    agent = subprocess.Popen(command, env=PLAIN | {"CULPRITS": "1"}, cwd=ROOT)
    try:
        give_up_s = time.monotonic() + LIMIT_S
        while not list((tmp_path / "results").glob("*/checkpoints/step_000000003.pt")):
            assert time.monotonic() < give_up_s and agent.poll() is None
            time.sleep(0.1)
        agent.kill()
        agent.wait()
        give_up_s = time.monotonic() + 10
        while running(program) and time.monotonic() < give_up_s:
            time.sleep(0.1)
        assert running(program) == []
    finally:
        agent.kill()
        for pid in running(program):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


SEVERAL = """
import os, random, sys
import torch
from torch import nn
from torch_parallel import RunConfig, WorkerFailure, join, train
from torch_parallel.workloads import load_dataset

class Model(nn.Module):
    def __init__(self, broken):
        super().__init__()
        self.layer, self.broken = nn.Linear(64, 10), broken

    def forward(self, x):
        if self.broken and os.environ["RANK"] == "1":
            raise ValueError("mine")
        return self.layer(x.flatten(1))

if __name__ == "__main__":
    data, _ = load_dataset("digits", None, 60, 0, 20)
    torch.manual_seed(5)
    expected = torch.Generator().manual_seed(5)
    for strategy, broken in (("ring_all_reduce", False), ("param_server_async", True), ("ddp", True), ("ddp", False),
                             ("sharded_param_server", False)):
        config = RunConfig(strategy=strategy, batch_size=20, epochs=1, device="cpu", results_dir=sys.argv[1],
                           deadline_s=60)
        try:
            run = train(config, make_model=lambda: Model(broken), dataset=data, verbose=False)
            print("DONE", strategy, run.rank, flush=True)
        except WorkerFailure as failure:
            print("FAILURE", strategy, failure.rank, "ValueError: mine" in str(failure), flush=True)
    communicator = join()
    print("SUM", communicator.all_reduce(torch.ones(2)).tolist(), flush=True)
    print("DRAWN", torch.equal(torch.rand(3), torch.rand(3, generator=expected)), flush=True)
"""


@pytest.mark.exhaustive
def test_one_program_has_several_runs_some_of_which_fail(tmp_path: Path) -> None:
    """And its own generators go on as if there had been none."""
    program = tmp_path / "several.py"
    program.write_text(SEVERAL)
    for rank, said in enumerate(said_by(started((3,), str(program), str(tmp_path / "results")))):
        assert [line for line in said.splitlines() if line.startswith(("DONE", "FAILURE", "SUM", "DRAWN"))] == [
            f"DONE ring_all_reduce {rank}",
            *("FAILURE param_server_async 1 True", "FAILURE ddp 1 True", f"DONE ddp {rank}"),
            *(f"DONE sharded_param_server {rank}", "SUM [3.0, 3.0]", "DRAWN True"),
        ], said


@pytest.mark.parametrize("strategy", ["ring_all_reduce", pytest.param("param_server", marks=pytest.mark.exhaustive)])
def test_a_run_that_torchrun_starts_anew_goes_on_to_the_bit(tmp_path: Path, strategy: str) -> None:
    kill = "os.kill(os.getpid(), signal.SIGKILL)"
    once = "self.training and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'"
    sums = {}
    for way in ("disturbed", "undisturbed"):
        (tmp_path / way).mkdir()
        program = failing(tmp_path / way, kill, once)
        if way == "disturbed":
            done = run(torchrun(3, program, str(tmp_path / way), strategy, restarts=2), CULPRITS="2")
            assert done.returncode == 0, done.stdout + done.stderr
            said = done.stdout
        else:
            said = "".join(said_by(started((3,), program, str(tmp_path / way), strategy, CULPRITS="none")))
        lines = re.findall(r"DONE (\d) (-?\d+\.\d+(?:e-?\d+)?)", said)
        assert sorted(rank for rank, _ in lines) == ["0", "1", "2"], said
        (sums[way],) = {total for _, total in lines}
    assert sums["disturbed"] == sums["undisturbed"]
    assert len(list((tmp_path / "disturbed").glob("*/checkpoints"))) == 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--n_gpus", "4"], "train.py: error: --n_gpus 4: 2 were started: start as many as that, or leave it out"),
        (["--lr", "-1"], "train.py: error: --lr"),
        (["--strategy", "data_parallel"], "it is 1 process, and 2 were started: run it with plain python"),
    ],
)
@pytest.mark.exhaustive
def test_what_is_wrong_is_told_once(tmp_path: Path, flags: list[str], said: str) -> None:
    processes = started((2,), str(ROOT / "train.py"), *SMALL, *flags, "--results_dir", str(tmp_path / "results"))
    text = "".join(said_by(processes))
    assert all(process.returncode != 0 for process in processes)
    assert 1 <= text.count(said) <= 2, text
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"RANK": "0"}, "RANK is set, and WORLD_SIZE and MASTER_ADDR and MASTER_PORT are not"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "no.such.host.invalid", "MASTER_PORT": "29511"},
            "MASTER_ADDR is no.such.host.invalid, which cannot be resolved",
        ),
    ],
)
def test_a_wrong_environment_is_told_in_a_line(tmp_path: Path, environ: dict[str, str], said: str) -> None:
    command = [str(ROOT / "train.py"), *SMALL, "--results_dir", str(tmp_path / "results")]
    process = Program(command, PLAIN | environ, ROOT)
    (text,) = said_by([process])
    assert process.returncode == 2
    assert text.startswith(f"train.py: error: {said}") and text.count("\n") == 1
