"""Processes that are started as torchrun starts them, for tests of several files: their environment and programs."""

from __future__ import annotations

import os
from pathlib import Path

import torch

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
