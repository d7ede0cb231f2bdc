"""Processes that are started as torchrun starts them, for tests of several files: their environment and programs."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
from programs import Program

ROOT = Path(__file__).parents[1]

PLAIN = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("TORCHELASTIC", "SLURM", "OMPI", "GLOO"))
    and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
} | {"OMP_NUM_THREADS": "1"}
"""An environment in which nobody has said which rank a process is."""

FAILING = """
import os, signal, sys, time
import torch
from torch import nn
from torch_parallel import RunConfig, WorkerFailure, train

class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.forwards = nn.Linear(64, 10), 0

    def forward(self, x):
        self.forwards += 1
        if self.forwards == 5 and os.environ["RANK"] in os.environ["CULPRITS"].split(",") and {when}:
            {what}
        return self.layer(x.flatten(1))

if __name__ == "__main__":
    config = RunConfig(strategy=sys.argv[2], dataset="digits", train_size=200, batch_size=20, epochs=1, device="cpu",
                       checkpoint_every=1, results_dir=sys.argv[1], deadline_s={deadline_s})
    from torch_parallel.workloads import load_dataset
    data, _ = load_dataset("digits", None, 200, 0, 50)
    try:
        trained = train(config, make_model=Broken, dataset=data, verbose=False)
    except WorkerFailure as failure:
        said = str(failure).replace("\\n", " | ")
        sys.stdout.write(f"FAILURE of {failure.rank} {said}\\n")  # at once, or lines of several processes mix
        sys.exit(1)
    sys.stdout.write(f"DONE {trained.rank} {trained.weights['layer.bias'].sum().item()}\\n")
"""


def failing(folder: Path, what: str, when: str = "self.training", deadline_s: int = 60) -> str:
    """A program that trains. In the fifth forward of the ranks that CULPRITS names it does `what`."""
    program = folder / "failing.py"
    text = FAILING.replace("{what}", what).replace("{when}", when).replace("{deadline_s}", str(deadline_s))
    program.write_text(text, encoding="utf-8")
    return str(program)


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """Of the one run whose results lie there."""
    (file,) = folder.glob("*/weights.pt")
    weights: dict[str, torch.Tensor] = torch.load(file)
    return weights


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def started(layout: Sequence[int], program: str, *words: str, **environ: str) -> list[Program]:
    """A process for each rank, in the environment of torchrun's, on nodes with so many ranks each."""
    port, ends = str(free_port()), list(accumulate(layout))
    processes = []
    for rank in range(ends[-1]):
        node = next(index for index, end in enumerate(ends) if rank < end)
        place = rank - ends[node] + layout[node]
        own = {"RANK": rank, "LOCAL_RANK": place, "LOCAL_WORLD_SIZE": layout[node], "GROUP_RANK": node}
        same = {"WORLD_SIZE": ends[-1], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        said = {name: str(value) for name, value in (own | same).items()}
        processes.append(Program([program, *words], PLAIN | said | environ, ROOT))
    return processes


def said_by(processes: Sequence[Program], limit_s: float = 200.0) -> list[str]:
    """What each has said, when all have ended."""
    until_s = time.monotonic() + limit_s
    try:
        return [process.communicate(timeout=max(1.0, until_s - time.monotonic()))[0] for process in processes]
    finally:
        end(processes)


def end(processes: Sequence[Program]) -> None:
    for process in processes:
        process.close()


def running(word: str) -> list[int]:
    """The processes with this word in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and word.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found
