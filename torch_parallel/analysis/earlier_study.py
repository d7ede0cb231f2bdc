"""What an earlier study of the same questions claimed, beside what is found here.

It trained DistilBERT on 8,000 texts of AG News, tested on 2,000, and gave the seconds of an epoch. Its figures are not
comparable with ours as they are. Every rank drew its own data, so two ranks might train on one text. With the batch
of a GPU fixed, the batch of a step grew with the GPUs. Only ratios stand beside each other.
"""

from __future__ import annotations

from pathlib import Path

from torch_parallel.analysis.runs import Run, by_setting, read_runs
from torch_parallel.analysis.transformers import at_batch, batch_sizes, by_setup, link_groups, with_spread

EPOCH_S = {
    "1_1": {1: 470.0, 4: 382.0, 16: 359.0},
    "1_4": {1: 146.0, 4: 101.0, 16: 89.0},
    "2_2": {1: 357.0, 4: 157.0, 16: 102.0},
}
"""Seconds of an epoch, by nodes_GPUs and batch of a GPU."""
NEAR_S, FAR_S = 118.0, 303.0
"""The same of two nodes with one GPU each and a batch of 16, in one zone and far apart."""


def ratios(over: list[Run], under: list[Run]) -> list[float]:
    """How many times as long the first take, seed by seed."""
    below = {run.seed: run.per_1000_s for run in under}
    return [run.per_1000_s / below[run.seed] for run in over]


def batches_beside_study(folder: Path) -> str:
    """How many times as fast as one worker, at the same batch of a worker."""
    lines = []
    for model, runs in by_setting(read_runs(folder), "model").items():
        for size in batch_sizes(runs):
            groups = by_setup(at_batch(runs, size))
            for setup in [each for each in groups if each in EPOCH_S and each != "1_1"]:
                theirs = EPOCH_S["1_1"][size] / EPOCH_S[setup][size]
                ours = with_spread([1 / ratio for ratio in ratios(groups[setup], groups["1_1"])])
                lines.append(f"{model}, {size} a worker, {setup}: the study {theirs:.2f}, here {ours}")
            if {"1_4", "2_2"} <= groups.keys():
                theirs = EPOCH_S["2_2"][size] / EPOCH_S["1_4"][size]
                ours = with_spread(ratios(groups["2_2"], groups["1_4"]))
                told = f"{model}, {size} a worker, 2_2 over 1_4 in time"
                lines.append(f"{told}: the study {theirs:.2f}, here {ours}")
    heading = "times the speed of one worker, here seed by seed"
    return "\n".join([heading, *lines]) if lines else "no set-up of the study was measured here: it had four GPUs"


def links_beside_study(folder: Path) -> str:
    """How many times as long a step takes far apart as near."""
    lines = [f"far apart over near, in time: the study {FAR_S / NEAR_S:.2f}; here seed by seed, with emulated links"]
    for model, runs in by_setting(read_runs(folder), "model").items():
        groups = link_groups(runs)
        near, *far = [name for name in groups if name != "one node"]
        lines += [f"{model}, {name} over {near}: {with_spread(ratios(groups[name], groups[near]))}" for name in far]
    return "\n".join(lines)
