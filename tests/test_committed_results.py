"""The results that are committed are whole, and what experiments compare may be compared."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from torch_parallel.analysis.findings import summary
from torch_parallel.analysis.runs import manifest, newest
from torch_parallel.grids import EXPERIMENTS

RESULTS = Path(__file__).parents[1] / "results"
EVERY = EXPERIMENTS | {f"{name}_gpu": each.on(2) for name, each in EXPERIMENTS.items()}
"""The folder's name -> the experiment; those of GPUs were made on one or two, with the same cells where it was one."""
COMMITTED = [name for name in EVERY if (RESULTS / name).is_dir()]
ON_GPUS = [name for name in COMMITTED if name not in EXPERIMENTS]


LEARNING = {name for name in EXPERIMENTS if name.startswith("learning_")}
"""They take minutes each, on a GPU or a laptop; README has what they gave."""


def test_all_but_what_takes_longest_are_there() -> None:
    assert set(EXPERIMENTS) - set(COMMITTED) <= {"scaling_mobilenet_v2"} | LEARNING
    on_two = {"ring_all_reduce_gpu", "param_server_gpu", "scaling_gpu"}
    on_one = {"learning_bert_gpu", "learning_vit_gpu", "learning_gpt2_gpu", "transformers_learning_rate_gpu"}
    assert on_two | on_one == set(ON_GPUS)


@pytest.mark.parametrize("name", COMMITTED)
def test_every_command_of_a_grid_was_run_and_no_other(name: str) -> None:
    folder = newest(name, RESULTS)
    with open(folder / "runs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["command"] for row in rows} == set(manifest(folder)["grid"])
    assert {row["experiment"] for row in rows} == {name}
    assert all(row["started"] and row["commit"].isalnum() for row in rows)
    assert len(set(manifest(folder)["seeds"])) >= 3


@pytest.mark.parametrize("name", COMMITTED)
def test_the_command_would_run_nothing_that_is_not_there(name: str) -> None:
    """A grid may have lost cells since; it has no new ones."""
    each = EVERY[name]
    commands = {cell.command(seed) for cell in each.cells for seed in each.seeds}
    assert commands <= set(manifest(newest(name, RESULTS))["grid"])


@pytest.mark.parametrize("name", COMMITTED)
def test_what_is_compared_is_alike(name: str) -> None:
    """`summary` raises where it is not; a line says what was held equal in each comparison."""
    each = EVERY[name]
    told = summary(newest(name, RESULTS), each.apart, each.same, each.but)
    assert told.count("held equal: ") >= 1
