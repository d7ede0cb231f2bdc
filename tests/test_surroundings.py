"""Ports, other launchers, other systems: what a run takes from its surroundings, and what it leaves alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torch_parallel import RunConfig, launch, train
from torch_parallel.communicator import Communicator
from torch_parallel.strategies import FROM_SCRATCH
from torch_parallel.training.config import ConfigError

ROOT = Path(__file__).parent.parent


def internet_sockets(communicator: Communicator, name: str) -> tuple[list[str], bool]:
    """This process's TCP and UDP sockets after a step of training, and whether torch.distributed was initialised."""
    model = torch.nn.Linear(3, 2)
    strategy = FROM_SCRATCH[name](
        model, lambda named: torch.optim.SGD([each for _, each in named], lr=1.0), communicator
    )
    strategy.begin_step()
    model(torch.ones(1, 3)).sum().backward()
    strategy.step()
    mine = {
        os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink() and os.path.lexists(link)
    }
    known = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        path = Path("/proc/net") / table
        known += [f"socket:[{line.split()[9]}]" for line in path.read_text().splitlines()[1:]] if path.exists() else []
    return sorted(mine & set(known)), torch.distributed.is_initialized()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", ("ring_all_reduce", "two_shot_in_place", "param_server", "sharded_param_server"))
def test_a_run_opens_no_port_and_no_process_group(name: str) -> None:
    servers = FROM_SCRATCH[name].server_count
    assert launch(internet_sockets, 2 + servers, name, server_count=servers, deadline_s=20) == [([], False)] * (
        2 + servers
    )


def test_two_runs_at_once_and_three_in_a_row(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "train.py"), "--dataset", "digits", "--train_size", "64", "--epochs", "1"]
    command += ["--n_gpus", "2", "--results_dir", str(tmp_path)]
    together = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for _ in range(2)]
    assert [process.communicate(timeout=100)[1] for process in together] == [b"", b""]
    assert [process.returncode for process in together] == [0, 0]
    assert [subprocess.run(command, capture_output=True, timeout=100).returncode for _ in range(3)] == [0, 0, 0]
    assert len(list(tmp_path.iterdir())) == 5  # nobody wrote into another's folder


@pytest.mark.parametrize("variable", ["RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"])
def test_under_another_launcher_nothing_is_started(
    variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each of torchrun's processes would start workers of its own."""
    monkeypatch.setenv(variable, "0")
    with pytest.raises(ConfigError, match=f"{variable} is set, as torchrun does.*plain python"):
        train(RunConfig(dataset="digits", results_dir=str(tmp_path / "results")), verbose=False)
    assert not (tmp_path / "results").exists()


def test_torchrun_is_refused_in_one_line_a_process(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*torchrun, str(ROOT / "train.py"), "--n_gpus", "2", "--results_dir", str(tmp_path / "results")],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode != 0
    assert done.stderr.count("train.py: error: TORCHELASTIC_RUN_ID is set") >= 1
    assert not (tmp_path / "results").exists()


def test_windows_is_refused_with_the_remedy() -> None:
    script = "import sys; sys.platform = 'win32'; import torch_parallel"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 1
    assert "runs on Linux and macOS; on Windows, run it in WSL" in done.stderr
