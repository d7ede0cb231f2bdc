"""Mistakes of those who bring a workload of their own, through train() and the three programs."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from torch_parallel import Dataset, RunConfig, Samples, Task, WorkerFailure, Workload, preflight, train
from torch_parallel.training import checkpoint
from torch_parallel.training.run import _checkpoint_to_resume
from torch_parallel.workloads import DataError, load_dataset
from torch_parallel.workloads.tree import Tree

ROOT = Path(__file__).resolve().parents[2]


class Distance(Task):
    """The sum, and figures that are plain numbers."""

    def loss_sum(self, output: Any, batch: Tree) -> Tensor:
        return (output - batch["wanted"]).abs().sum()

    def target_counts(self, samples: Tree) -> Any:
        return numpy.full(len(samples["wanted"]), 2)

    def metric_sums(self, output: Any, batch: Tree) -> Any:
        return {"rows": len(output), "distance": numpy.float32((output - batch["wanted"]).abs().sum().item())}

    def metrics(self, sums: dict[str, Tensor], targets: int, loss: float) -> Any:
        return {"distance": sums["distance"] / sums["rows"], "rows": sums["rows"].reshape(1)}


class Mean(Distance):
    def loss_sum(self, output: Any, batch: Tree) -> Tensor:
        return (output - batch["wanted"]).abs().mean()


class Detached(Distance):
    def loss_sum(self, output: Any, batch: Tree) -> Tensor:
        return (output.detach() - batch["wanted"]).abs().sum()


def workload(task: Task, name: str = "inputs") -> Workload:
    generator = torch.Generator().manual_seed(1)
    part = {name: torch.randn(12, 3, generator=generator), "wanted": torch.randn(12, 2, generator=generator)}
    return Workload(lambda: nn.Linear(3, 2), task, Samples("mine", part, part))


def config(tmp_path: Path, **options: Any) -> RunConfig:
    given: dict[str, Any] = {"n_gpus": 2, "device": "cpu", "epochs": 1, "batch_size": 4, "lr": 0.01}
    return RunConfig(results_dir=str(tmp_path / "runs"), deadline_s=60, **(given | options))


def test_numbers_do_as_well_as_tensors(tmp_path: Path) -> None:
    trained = train(config(tmp_path), workload=workload(Distance()), verbose=False)
    model = nn.Linear(3, 2)
    model.load_state_dict(trained.weights)
    part = workload(Distance()).samples.test
    distance = float((model(part["inputs"]) - part["wanted"]).abs().sum().detach())
    assert trained.history[0]["metrics"] == {"distance": pytest.approx(distance / 12, rel=1e-5), "rows": 12.0}
    assert trained.history[0]["test_loss"] == pytest.approx(distance / 24, rel=1e-5)  # two targets a sample


@pytest.mark.parametrize(
    ("task", "name", "said"),
    [
        (Mean(), "inputs", "^loss_sum of Mean gives a mean"),
        (Detached(), "inputs", "^loss_sum of Detached does not depend on the model's parameters"),
        (Distance(), "picture", "^a batch has the parts picture, wanted, and Distance gives the model its part"),
    ],
)
def test_it_is_told_before_anything_is_started(
    task: Task, name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "TRIAL_LIMIT_S", 100.0)  # where the processors are busy
    with pytest.raises(DataError, match=said) as error:
        train(config(tmp_path), workload=workload(task, name), verbose=False)
    assert "\n" not in str(error.value) and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("task", "name"), [(Detached(), "inputs"), (Distance(), "picture")])
def test_without_a_trial_the_first_step_tells_it(
    task: Task, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "LARGEST_TRIED", 0)
    with pytest.raises(WorkerFailure) as failure:
        train(config(tmp_path), workload=workload(task, name), verbose=False)
    assert "OutputMisfit" in str(failure.value) and "Traceback" not in str(failure.value)


def test_data_that_a_user_calls_digits_have_the_usual_defaults(tmp_path: Path) -> None:
    images = torch.randint(256, (70, 1, 8, 8), dtype=torch.uint8)
    own = Dataset("digits", images, torch.arange(70) % 3, images[:5], torch.arange(5) % 3, 3)
    trained = train(config(tmp_path, epochs=None, batch_size=None, lr=None, n_gpus=1), dataset=own, verbose=False)
    assert len(trained.history) == 3 and trained.history[0]["steps"] == 2  # not 10, and not batches of 16
    assert own.samples.known_as == "" and own.subset(3, 0).samples.known_as == ""
    built_in, _ = load_dataset("digits", None, 20, 0)
    assert built_in.samples.known_as == "digits" and built_in.samples.subset(3, 0).known_as == "digits"


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({"workload": "a.py:make"}, {"workload": "b.py:make"}, "with --workload a.py:make, and this run has b.py:make"),
        ({"workload": "a.py:make"}, {}, "with --workload a.py:make, and this run has none; give --workload a.py:make"),
        ({}, {"workload": "a.py:make"}, "without --workload, and this run has a.py:make; leave --workload out"),
        ({"model": "vit", "model_size": "tiny"}, {"model": "vit"}, "with --model_size tiny, and this run has none"),
        (
            {"model": "bert"},
            {"model": "bert", "length": 64},
            "with --length 128, and this run has 64; give --length 128",
        ),
        ({"model": "bert", "pretrained": "x"}, {"model": "bert"}, "with --pretrained x, and this run has none"),
    ],
)
def test_what_must_be_equal_on_resuming(before: dict[str, Any], now: dict[str, Any], said: str, tmp_path: Path) -> None:
    file = saved_by(config(tmp_path, **before), tmp_path)
    with pytest.raises(checkpoint.CheckpointError, match=f"it was made {said}") as error:
        _checkpoint_to_resume(config(tmp_path, **now, resume=str(file)), "mine", False)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("before", "now", "in_python"),
    [
        ({"model": "bert"}, {"model": "bert", "length": 128}, False),
        ({"workload": "./a.py:make"}, {"workload": "a.py:make"}, False),
        ({"model": "vit", "pretrained": "x/../y"}, {"model": "vit", "pretrained": "y"}, False),
        ({"workload": "a.py:make"}, {}, True),
    ],
)
def test_what_means_the_same_on_resuming(
    before: dict[str, Any], now: dict[str, Any], in_python: bool, tmp_path: Path
) -> None:
    file = saved_by(config(tmp_path, **before), tmp_path)
    assert _checkpoint_to_resume(config(tmp_path, **now, resume=str(file)), "mine", in_python)[0] == str(file)


def saved_by(configuration: RunConfig, folder: Path) -> Path:
    """A checkpoint that has all that is compared."""
    content = {"format": checkpoint.FORMAT, "dataset": "mine", "config": dataclasses.asdict(configuration)}
    return checkpoint.save(content, folder / "checkpoints", 1)


MINE = """
import torch
from torch import nn
from torch_parallel import Samples, Task, Workload

class Own(Task):
    def loss_sum(self, output, batch):
        return {loss}

def make():
    part = {{"inputs": torch.randn(12, 3), {key!r}: torch.randn(12, 2)}}
    return Workload(Model, Own(), Samples("mine", part, {{**part}}))

class Model(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
"""
SUM = '(output - batch["wanted"]).abs().sum()'
PROGRAMS = {"train.py": 2, "param_server_builtin.py": 1, "ring_all_reduce_builtin.py": 1}


@pytest.mark.exhaustive
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (SUM.replace("sum", "mean"), "loss_sum of Own gives a mean"),
        (SUM.replace("output", "output.detach()"), "loss_sum of Own does not depend on the model's parameters"),
    ],
)
def test_the_programs_tell_it_in_one_line(program: str, loss: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE.format(loss=loss, key="wanted"), encoding="utf-8")
    words = [sys.executable, str(ROOT / program), "--workload", "mine.py:make", "--device", "cpu", "--n_gpus", "2"]
    words += ["--results_dir", str(tmp_path / "results"), "--epochs", "1"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert ended.returncode == PROGRAMS[program], ended.stderr
    assert said in ended.stderr and len(ended.stderr.splitlines()) == 1
