"""The cells of the experiments with transformers: nodes and workers, batches, learning rates, and links between nodes.

On the CPU models are tiny and runs have a few steps, so that a grid is done in a quarter of an hour on two processors.
On GPUs they are small, and there are more cells and steps.
"""

from __future__ import annotations

from typing import Any

from torch_parallel.analysis.transformers import EQUAL_BATCH, SETUPS
from torch_parallel.cells import Cell

STUDIED = {"bert": "bbc_text", "vit": "mnist", "gpt2": "tinyshakespeare"}
"""The transformers, and what each of them is trained on."""
BARE = {"bbc_text": "python_docs", "mnist": "digits", "tinyshakespeare": "python_docs"}
"""What every machine has, in the place of data that must be fetched: see `fetched.py`."""
STEPS: dict[str, dict[int, int]] = {"bert": {1: 24, 4: 12, 8: 8, 16: 6}, "vit": {8: 6, 16: 4}}
"""Steps of a run on the CPU by the batch of a worker: more of the short ones."""
STEPS_ON_GPUS = 60


def of_setup(model: str, setup: str, **flags: Any) -> Cell:
    """A transformer trained by the ring on so many nodes and workers, each process with one thread."""
    same = {"model": model, "dataset": STUDIED[model], "optimizer": "adamw"} | flags
    return Cell("train.py", (("strategy", "ring_all_reduce"), ("setup", setup), *same.items()), threads=1)


def _of_model(model: str, setups: tuple[str, ...], sizes: tuple[int, ...], on_gpus: bool) -> list[Cell]:
    """At equal batches of a worker, then at an equal batch of all workers where that is none of those."""
    cells, same = [], _short(on_gpus)
    for setup in setups:
        for size in sizes:
            steps = STEPS_ON_GPUS if on_gpus else STEPS[model][size]
            cells.append(of_setup(model, setup, **same, per_gpu_batch=size, max_steps=steps))
    for setup in ("1_2", "2_1"):  # one worker and four have it with batches of 16 and of 4 already
        steps = STEPS_ON_GPUS if on_gpus else STEPS[model][EQUAL_BATCH // 2]
        cells.append(of_setup(model, setup, **same, batch_size=EQUAL_BATCH, max_steps=steps))
    return cells


def _short(on_gpus: bool) -> dict[str, Any]:
    size = {"model_size": "small" if on_gpus else "tiny", "test_size": 200 if on_gpus else 32}
    return size | {"lr": 2e-4}


def batches(on_gpus: bool) -> list[Cell]:
    """Of vit, whose steps are long, less on the CPU: what more of it took would be the time of all the others."""
    all_sizes = (1, 4, EQUAL_BATCH)
    setups, sizes = (SETUPS, all_sizes) if on_gpus else (("1_1", "1_2", "2_1"), (EQUAL_BATCH,))
    return _of_model("bert", SETUPS, all_sizes, on_gpus) + _of_model("vit", setups, sizes, on_gpus)


def learning_rates(on_gpus: bool) -> list[Cell]:
    """Each rate as it is, and times the workers where there are several."""
    data = {} if on_gpus else {"length": 48, "train_size": 512}
    flags = {"model_size": "small" if on_gpus else "tiny", **data, "test_size": 200, "epochs": 5, "per_gpu_batch": 8}
    flags |= {"warmup_steps": 10}
    cells = []
    for setup in ("1_1", "1_2", "1_4"):
        for rate in (2e-4, 2e-5):
            cells.append(of_setup("bert", setup, **flags, lr=rate))
            if setup != "1_1":
                cells.append(of_setup("bert", setup, **flags, lr=rate, scale_lr=True))
    return cells


DISTANCES = (("10gbit", "50us"), ("1gbit", "5ms"), ("200mbit", "30ms"))
"""Bandwidth and latency between two nodes: in one rack, in one region, in two regions."""


def propagation(on_gpus: bool) -> list[Cell]:
    cells = []
    for model in ("bert", "vit"):
        flags = _short(on_gpus) | {"per_gpu_batch": 8, "max_steps": STEPS_ON_GPUS // 2 if on_gpus else STEPS[model][8]}
        cells.append(of_setup(model, "1_2", **flags))
        cells += [of_setup(model, "2_1", **flags, link=link, latency=latency) for link, latency in DISTANCES]
    return cells


def learning(model: str, on_gpus: bool) -> list[Cell]:
    """From fresh weights to what the model can learn of its data; on the CPU, in the minutes that a laptop takes."""
    of_model: dict[str, dict[str, Any]] = {
        "bert": {"batch_size": 32, "lr": 3e-4, "weight_decay": 0.05, "warmup_steps": 100, "epochs": 12}
        | {"model_size": "small"},
        "vit": {"batch_size": 256, "lr": 1e-3, "weight_decay": 0.05, "warmup_steps": 200, "epochs": 5},
        "gpt2": {"batch_size": 32, "lr": 1e-3, "weight_decay": 0.1, "warmup_steps": 100, "epochs": 12},
    }
    of_laptop: dict[str, dict[str, Any]] = {
        "bert": {"model_size": "tiny", "lr": 1e-3},
        "vit": {"batch_size": 64, "warmup_steps": 60, "epochs": 4, "train_size": 5000, "test_size": 1000},
        "gpt2": {"length": 64, "epochs": 2, "test_size": 500},
    }
    flags = {"model_size": "tiny", "lr_schedule": "cosine", **of_model[model], **({} if on_gpus else of_laptop[model])}
    return [of_setup(model, "1_1" if on_gpus else "1_2", **flags)]
