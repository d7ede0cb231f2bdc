"""Ports, other launchers, other systems: what a run takes from its surroundings, and what it leaves alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torch_parallel import launch
from torch_parallel.communicator import Communicator
from torch_parallel.strategies import FROM_SCRATCH

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


@pytest.mark.exhaustive
def test_two_runs_at_once_and_three_in_a_row(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "train.py"), "--dataset", "digits", "--train_size", "64", "--epochs", "1"]
    command += ["--n_gpus", "2", "--results_dir", str(tmp_path)]
    together = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for _ in range(2)]
    assert [process.communicate(timeout=100)[1] for process in together] == [b"", b""]
    assert [process.returncode for process in together] == [0, 0]
    assert [subprocess.run(command, capture_output=True, timeout=100).returncode for _ in range(3)] == [0, 0, 0]
    assert len(list(tmp_path.iterdir())) == 5  # nobody wrote into another's folder


def test_windows_is_refused_with_the_remedy() -> None:
    script = "import sys; sys.platform = 'win32'; import torch_parallel"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 1
    assert "runs on Linux and macOS; on Windows, run it in WSL" in done.stderr
