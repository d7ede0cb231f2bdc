"""Forward may switch modes, make buffers and modules, and start from infinity: right as in one process, or named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from torch_parallel import Dataset, RunConfig, WorkerFailure, train
from torch_parallel.strategies import STRATEGIES

OURS = ("ring_all_reduce", "param_server", pytest.param("sharded_param_server", marks=pytest.mark.exhaustive))
ROOT = Path(__file__).parents[2]


def points() -> Dataset:
    generator = torch.Generator().manual_seed(5)
    inputs, targets = torch.randn(16, 6, generator=generator), torch.randint(3, (16,), generator=generator)
    return Dataset("points", inputs, targets, inputs[:6].clone(), targets[:6].clone(), 3)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
        self.prepare()

    def prepare(self) -> None:
        pass

    def between(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.b(self.between(torch.tanh(self.a(x))))
        return scores


class Twice(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return 2 * h if self.training else h


class SwitchesOff(Base):
    """Ends a part after four steps; the fourth has one sample, and so two of three workers have none."""

    def prepare(self) -> None:
        self.part = Twice()
        self.register_buffer("steps", torch.tensor(0))

    def between(self, h: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
            if self.steps == 4:
                self.part.eval()
        return self.part(h)  # type: ignore[no-any-return]


class SwitchesOnToTest(Base):
    """As for dropout by Monte Carlo: a part that trains in eval mode, and is tested in training mode."""

    def prepare(self) -> None:
        self.part = Twice().eval()

    def between(self, h: Tensor) -> Tensor:
        if not self.training:
            self.part.train()
        return self.part(h)  # type: ignore[no-any-return]


class MakesInInferenceMode(Base):
    def between(self, h: Tensor) -> Tensor:
        if self.training:
            with torch.inference_mode():
                self.scale = torch.full((8,), 2.0)
        return h * self.scale.clone()

    def prepare(self) -> None:
        self.register_buffer("scale", torch.ones(8))


def run(strategy: str, make_model: Any, tmp_path: Path, workers: int = 3, **options: Any) -> dict[str, Tensor]:
    given: dict[str, Any] = {"batch_size": 5, "epochs": 2, "lr": 0.05, "optimizer": "sgd", "momentum": 0.0} | options
    n = workers + STRATEGIES[strategy].server_count
    config = RunConfig(strategy=strategy, n_gpus=n, device="cpu", results_dir=str(tmp_path), deadline_s=30, **given)
    return train(config, make_model=make_model, dataset=points(), verbose=False).weights


def in_one_process(make_model: Any) -> dict[str, Tensor]:
    """Two epochs of a plain loop, with an evaluation that is done on a copy."""
    torch.manual_seed(0)
    model, data = make_model(), points()
    for epoch in (1, 2):
        order = torch.randperm(16, generator=torch.Generator().manual_seed(epoch))
        for some in order.split(5):
            model.zero_grad()
            cross_entropy(model(data.train_inputs[some]), data.train_targets[some]).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.05 * parameter.grad
    return dict(model.state_dict())


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(
            ours[name], value, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("strategy", [*OURS, pytest.param("ddp", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("make_model", [SwitchesOff, SwitchesOnToTest, MakesInInferenceMode])
def test_what_forward_switches_and_makes_is_that_of_one_process(strategy: str, make_model: Any, tmp_path: Path) -> None:
    assert_same(run(strategy, make_model, tmp_path), in_one_process(make_model))


@pytest.mark.parametrize("control", ["param_server_builtin.py", "ring_all_reduce_builtin.py"])
@pytest.mark.exhaustive
def test_controls_leave_the_modes_that_forward_switches_in_evaluation(control: str, tmp_path: Path) -> None:
    program = tmp_path / "own.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_what_forward_changes import SwitchesOnToTest, points\n"
        "from torch_parallel.workloads.task import Classification\n"
        "class Own(Classification):  # which is tried on the model before training\n    pass\n"
        "def make():\n    return SwitchesOnToTest, Own(3, (), ()), points().samples\n"
    )
    options = ["--batch_size", "5", "--epochs", "2", "--lr", "0.05", "--optimizer", "sgd", "--momentum", "0"]
    options += ["--n_gpus", "2"] if control.startswith("ring") else []
    command = [sys.executable, control, "--workload", f"{program}:make", "--device", "cpu", *options]
    done = subprocess.run(
        [*command, "--results_dir", str(tmp_path / "runs")], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    (weights,) = tmp_path.glob("runs/*/weights.pt")
    assert_same(torch.load(weights), in_one_process(SwitchesOnToTest))


class MakesAModule(Base):
    def between(self, h: Tensor) -> Tensor:
        if not hasattr(self, "counter"):
            self.counter = nn.Module()
            self.counter.register_buffer("steps", torch.zeros(()))
        self.counter.steps += self.training  # type: ignore[operator]
        return h * (1 + self.counter.steps / 100)  # type: ignore[operator]


@pytest.mark.parametrize("strategy", OURS)
def test_a_module_that_forward_makes_is_named_by_who_has_it_not(strategy: str, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailure, match=r"module counter was made by forward.*make it in make_model"):
        run(strategy, MakesAModule, tmp_path, workers=6)


class StartsAtInfinity(Base):
    """The least that a part has given so far; in the end it is no number."""

    def prepare(self) -> None:
        self.register_buffer("least", torch.full((8,), float("inf")))
        self.register_buffer("steps", torch.tensor(0))

    def between(self, h: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
            self.least = torch.minimum(self.least, h.detach().amin(0)) + (0.0 if self.steps < 7 else float("nan"))
        return h


@pytest.mark.parametrize("strategy", [*OURS, "ddp"])
def test_a_buffer_that_has_been_finite_may_not_be_nan(strategy: str, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailure, match="the buffer least is NaN or infinite"):
        run(strategy, StartsAtInfinity, tmp_path)


class ActNorm(Base):
    """A parameter that the first batch gives its value."""

    def prepare(self) -> None:
        self.gain = nn.Parameter(torch.ones(8))
        self.is_ready = False

    def between(self, h: Tensor) -> Tensor:
        if self.training and not self.is_ready:
            self.gain.data.copy_(1 / h.detach().std(0, unbiased=False))
            self.is_ready = True
        return h * self.gain


@pytest.mark.exhaustive
def test_the_control_says_that_its_replicas_differ(tmp_path: Path) -> None:
    program = tmp_path / "own.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_what_forward_changes import ActNorm, points\n"
        "def make():\n    return ActNorm, points().task, points().samples\n"
    )
    options = ["--batch_size", "8", "--epochs", "1", "--n_gpus", "2", "--device", "cpu"]
    command = [sys.executable, "ring_all_reduce_builtin.py", "--workload", f"{program}:make", *options]
    done = subprocess.run(
        [*command, "--results_dir", str(tmp_path / "runs")], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "parameter gain is not the same on all ranks after epoch 1: forward writes it" in done.stderr
    assert not list(tmp_path.glob("runs/*/weights.pt"))


class Steep(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1e25 if self.training else 1.0)


@pytest.mark.parametrize("strategy", ["ring_all_reduce", "ddp"])
def test_a_norm_that_overflows_in_float32_still_clips(strategy: str, tmp_path: Path) -> None:
    """Every step is as long as the rate then, and of a gradient whose norm's square float32 does not hold."""
    trained = run(strategy, Steep, tmp_path, clip_norm=1.0, epochs=1, batch_size=16)
    torch.manual_seed(0)
    before = Steep().state_dict()
    assert torch.stack([(trained[name] - value).norm() for name, value in before.items()]).norm() == pytest.approx(0.05)


class HidesParameters(Base):
    def parameters(self, recurse: bool = True) -> Any:
        return iter(self.b.parameters())


class HidesBuffers(Base):
    def prepare(self) -> None:
        self.register_buffer("steps", torch.tensor(0))

    def named_buffers(self, *arguments: Any, **more: Any) -> Any:
        return iter(())


class OwnStateDict(Base):
    def state_dict(self) -> Any:  # type: ignore[override]
        return {}


class Eighths(Base):
    def prepare(self) -> None:
        self.small = nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn))


class Sparse(Base):
    def prepare(self) -> None:
        self.table = nn.Embedding(3, 8, sparse=True)

    def between(self, h: Tensor) -> Tensor:
        return h + self.table(torch.zeros(len(h), dtype=torch.int64))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make_model", "strategy", "line"),
    [
        (HidesParameters, "ring_all_reduce", r"parameters\(\) or named_parameters\(\) of the model does not give all"),
        (HidesParameters, "param_server", r"parameters\(\) or named_parameters\(\) of the model does not give all"),
        (HidesBuffers, "sharded_param_server", r"buffers\(\) or named_buffers\(\) of the model does not give all"),
        (OwnStateDict, "ring_all_reduce", r"module at the top \(OwnStateDict\) has a state_dict that does not take"),
        (Eighths, "ddp", "parameter small is trainable and of torch.float8_e4m3fn"),
        (Sparse, "ddp", r"module table \(Embedding\) gives sparse gradients"),
        (Sparse, "data_parallel", r"module table \(Embedding\) gives sparse gradients"),
    ],
)
def test_what_cannot_be_held_is_named(make_model: Any, strategy: str, line: str, tmp_path: Path) -> None:
    with pytest.raises((WorkerFailure, ValueError), match=line):
        run(strategy, make_model, tmp_path, workers=1 if strategy == "data_parallel" else 2)
    assert not list(tmp_path.glob("*/weights.pt"))


def test_sparse_gradients_train_where_we_sum_them(tmp_path: Path) -> None:
    assert_same(run("ring_all_reduce", Sparse, tmp_path, workers=2), in_one_process_dense())


def in_one_process_dense() -> dict[str, Tensor]:
    def dense() -> nn.Module:
        model = Sparse()
        model.table.sparse = False
        return model

    return in_one_process(dense)
