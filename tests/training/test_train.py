"""`train` from end to end, as a user calls it: on digits, and on data sets and models made for what they show."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from torch_parallel import RunConfig, WorkerFailure, train
from torch_parallel.strategies import FROM_SCRATCH, STRATEGIES, SYNCHRONOUS
from torch_parallel.training.run import TrainingRun
from torch_parallel.training.sampler import epoch_order
from torch_parallel.workloads import DataError, Dataset, build_model, load_dataset

every_strategy = pytest.mark.parametrize("strategy", list(SYNCHRONOUS))
from_scratch = pytest.mark.parametrize("strategy", list(FROM_SCRATCH))


def made(
    inputs: Tensor, targets: Tensor, test_inputs: Tensor | None = None, test_targets: Tensor | None = None
) -> Dataset:
    """A data set of floats, which are fed to the model as they are; tested with what it is trained on by default."""
    return Dataset(
        name="made",
        train_inputs=inputs,
        train_targets=targets,
        test_inputs=inputs if test_inputs is None else test_inputs,
        test_targets=targets if test_targets is None else test_targets,
        class_count=2,
        mean=(),
        std=(),
        source="this test",
    )


def points(count: int) -> Dataset:
    """[count, 4] points in two classes, the same in every call."""
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return made(inputs, (inputs.sum(1) > 0).long())


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., TrainingRun]:
    """Trains so many workers, with a server where the strategy has one, on the CPU."""

    def run(
        workers: int,
        strategy: str = "ring_all_reduce",
        make_model: Callable[[], nn.Module] | None = None,
        dataset: Dataset | None = None,
        **options: Any,
    ) -> TrainingRun:
        config = RunConfig(
            strategy=strategy,
            n_gpus=workers + STRATEGIES[strategy].server_count,
            device="cpu",
            results_dir=str(tmp_path / "runs"),
            deadline_s=30,
            **{"dataset": "digits" if dataset is None else None, **options},
        )
        return train(config, make_model=make_model, dataset=dataset, verbose=False)

    return run


def linear() -> nn.Module:
    return nn.Linear(4, 2)


def same_bits(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        value.numpy().tobytes() == theirs[name].numpy().tobytes() for name, value in ours.items()
    )


def plain_loop(
    model: nn.Module, dataset: Dataset, batch_size: int, epochs: int, lr: float, momentum: float
) -> list[float]:
    """Trains in this process, and returns for each epoch the mean over the samples of their losses when they came."""
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=lr, momentum=momentum)
    means = []
    for epoch in range(1, epochs + 1):
        total = 0.0
        for batch in epoch_order(len(dataset.train_targets), 0, epoch).split(batch_size):
            inputs = dataset.normalize(dataset.train_inputs[batch], torch.float64)
            loss = cross_entropy(model(inputs), dataset.train_targets[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        means.append(total / len(dataset.train_targets))
    return means


# Learning.


@pytest.mark.exhaustive
@every_strategy
def test_training_on_digits(strategy: str, run: Callable[..., TrainingRun]) -> None:
    # everything by default, the cnn and ten epochs, for one of each kind; the others train the same, and less of it
    whole = strategy in ("ring_all_reduce", "param_server", "ddp")
    trained = run(2, strategy, **({} if whole else {"epochs": 2}))
    assert [each["epoch"] for each in trained.history] == list(range(1, 11 if whole else 3))
    assert {each["steps"] for each in trained.history} == {90}  # 1437 = 89 * 16 + 13
    assert trained.test_accuracy == trained.history[-1]["test_accuracy"] > (0.95 if whole else 0.8)
    assert trained.history[0]["test_accuracy"] > 0.8
    losses = [each["train_loss"] for each in trained.history]
    assert losses[-1] < losses[0] / (5 if whole else 1.5)
    # The weights are those of the bare model, on the CPU, and they are the trained ones.
    dataset, _ = load_dataset("digits", None, None, seed=0)
    model = build_model("cnn", dataset.image_shape, 10)
    assert model.load_state_dict(trained.weights, strict=True)
    assert all(value.device.type == "cpu" and not value.requires_grad for value in trained.weights.values())
    with torch.no_grad():
        predicted = model(dataset.normalize(dataset.test_inputs, torch.float32)).argmax(1)
    assert (predicted == dataset.test_targets).double().mean().item() == trained.test_accuracy


@pytest.mark.exhaustive
@pytest.mark.parametrize(("model", "seed"), [("cnn", 1), ("cnn", 2), ("mlp", 0)])
def test_digits_are_learnt_by_default_whatever_the_seed(model: str, seed: int, run: Callable[..., TrainingRun]) -> None:
    trained = run(2, model=model, seed=seed)
    assert trained.history[0]["test_accuracy"] > 0.8 and trained.test_accuracy >= 0.95


@pytest.mark.exhaustive
@every_strategy
def test_the_same_run_gives_the_same_bits_again(strategy: str, run: Callable[..., TrainingRun]) -> None:
    """Twice in one process, with several buckets and another seed in between."""
    options = {"model": "cnn", "epochs": 1, "train_size": 400, "batch_size": 64, "bucket_mb": 0.02}
    first = run(3, strategy, **options)
    other = run(3, strategy, **options, seed=1)
    again = run(3, strategy, **options)
    assert same_bits(first.weights, again.weights)
    assert first.history[0]["train_loss"] == again.history[0]["train_loss"]
    assert not same_bits(first.weights, other.weights)
    assert len({first.folder, other.folder, again.folder}) == 3


def test_weights_and_losses_do_not_depend_on_workers_or_strategy(run: Callable[..., TrainingRun]) -> None:
    """Nor do they differ from those of a plain loop in this process, on real data, with short last batches."""
    settings: dict[str, Any] = {"batch_size": 64, "epochs": 2, "lr": 0.02, "momentum": 0.9}
    dataset, _ = load_dataset("digits", None, 300, seed=0)
    torch.manual_seed(0)
    model = build_model("cnn", dataset.image_shape, 10).double()
    losses = plain_loop(model, dataset, **settings)
    for workers, strategy in (
        (1, "ring_all_reduce"),
        (2, "ring_all_reduce"),
        (4, "ring_all_reduce"),
        (2, "param_server"),
    ):
        trained = run(workers, strategy, model="cnn", train_size=300, dtype="float64", **settings)
        for name, expected in model.state_dict().items():
            difference = (trained.weights[name] - expected).norm() / expected.norm()
            assert difference <= 1e-12, (workers, strategy, name)
        assert [each["train_loss"] for each in trained.history] == pytest.approx(losses, rel=1e-12)


def test_batch_size_is_that_of_all_workers_together(run: Callable[..., TrainingRun]) -> None:
    for workers in (1, 2, 4):
        assert run(workers, make_model=linear, dataset=points(1024), epochs=1).history[0]["steps"] == 16


# Losses and accuracies, by hand.


class LossIs(nn.Module):
    """Logits (0, w x) for w = 1: a sample of class 0 has the loss log(1 + exp(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.w * x[:, 0]
        return torch.stack([torch.zeros_like(logits), logits], 1)


@pytest.mark.parametrize(
    ("workers", "strategy"), [*((n, "ring_all_reduce") for n in (1, 2, 3, 4)), (1, "param_server"), (3, "param_server")]
)
def test_losses_are_means_over_samples(workers: int, strategy: str, run: Callable[..., TrainingRun]) -> None:
    """Losses 0, 1, ... 9 in batches of four. The mean of the batches' means would be 5.1667 in some order."""
    wanted = torch.arange(10, dtype=torch.float64)
    inputs = torch.log(torch.expm1(wanted).clamp_min(1e-30)).unsqueeze(1)  # log(1 + exp(x)) = wanted
    dataset = made(inputs, torch.zeros(10, dtype=torch.int64))
    trained = run(workers, strategy, LossIs, dataset, epochs=2, batch_size=4, lr=0.0, dtype="float64")
    for epoch in trained.history:
        assert epoch["train_loss"] == pytest.approx(4.5, rel=1e-12)
        assert epoch["test_loss"] == pytest.approx(4.5, rel=1e-12)
    last = trained.history[-1]  # in which no step is left out as a warm-up
    assert last["samples_per_s"] == pytest.approx(10 / last["train_s"])
    assert trained.weights["w"].item() == 1.0  # a learning rate of 0 is one


@pytest.mark.parametrize(("workers", "strategy"), [(1, "ring_all_reduce"), (4, "ring_all_reduce"), (3, "param_server")])
def test_accuracy_counts_every_test_sample_once(workers: int, strategy: str, run: Callable[..., TrainingRun]) -> None:
    """The model says class 1 where x > 0. All ten test samples are of class 1, and x > 0 in two."""
    test_inputs = torch.tensor([1.0, 1.0] + [-1.0] * 8).unsqueeze(1)
    dataset = made(torch.ones(4, 1), torch.ones(4).long(), test_inputs, torch.ones(10).long())
    trained = run(workers, strategy, LossIs, dataset, epochs=1, lr=0.0)
    assert trained.test_accuracy == 0.2
    wrong, right = math.log(1 + math.e), math.log(1 + 1 / math.e)
    assert trained.history[0]["test_loss"] == pytest.approx((8 * wrong + 2 * right) / 10, rel=1e-6)


class Slow(nn.Module):
    """Takes half a second for its first step of training, and a tenth of a second for each other one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.pause_s = 0.5

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            time.sleep(self.pause_s)
            self.pause_s = 0.1
        result: Tensor = self.layer(x)
        return result


def test_the_first_step_is_no_part_of_the_rate(run: Callable[..., TrainingRun]) -> None:
    """Three steps of ten samples: 20 samples in 0.2 s and what the steps take besides."""
    (epoch,) = run(2, make_model=Slow, dataset=points(30), epochs=1, batch_size=10).history
    assert epoch["train_s"] > 0.7
    assert 20 / (epoch["train_s"] - 0.5) <= epoch["samples_per_s"] <= 20 / 0.2


# Sizes.


@pytest.mark.exhaustive
@every_strategy
@pytest.mark.parametrize("count", [257, 3, 1])
def test_sizes_that_leave_workers_without_samples(count: int, strategy: str, run: Callable[..., TrainingRun]) -> None:
    """With a batch of 64 for four workers: one sample in the last batch, one worker without any, three without."""
    dataset = points(count)
    torch.manual_seed(0)
    model = linear().double()
    losses = plain_loop(model, dataset, batch_size=64, epochs=2, lr=0.02, momentum=0.9)
    trained = run(4, strategy, linear, dataset, epochs=2, dtype="float64")
    assert [each["train_loss"] for each in trained.history] == pytest.approx(losses, rel=1e-12)
    for name, expected in model.state_dict().items():
        assert torch.allclose(trained.weights[name], expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("part", ["train", "test"])
def test_no_samples(part: str, run: Callable[..., TrainingRun], tmp_path: Path) -> None:
    some, none = points(3), points(0)
    given = (some, none) if part == "test" else (none, some)
    dataset = made(given[0].train_inputs, given[0].train_targets, given[1].train_inputs, given[1].train_targets)
    with pytest.raises(DataError, match=f"^{part}_inputs of made: it has no samples"):
        run(2, make_model=linear, dataset=dataset)
    assert not (tmp_path / "runs").exists()  # nothing was started


# Models from anywhere.


@pytest.mark.exhaustive
@every_strategy
def test_a_lambda_and_a_function_of_a_notebook_cell(strategy: str, run: Callable[..., TrainingRun]) -> None:
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(
        "from torch import nn\n"
        "hidden = 3\n"
        "def make():\n"
        "    return nn.Sequential(nn.Linear(4, hidden), nn.Linear(hidden, 2))\n",
        cell,
    )
    assert run(2, strategy, cell["make"], points(20), epochs=1).weights["0.weight"].shape == (3, 4)
    hidden = 5
    trained = run(2, strategy, lambda: nn.Sequential(nn.Linear(4, hidden), nn.Linear(hidden, 2)), points(20), epochs=1)
    assert trained.weights["0.weight"].shape == (5, 4)
    # What lies in the folder's name needs no quotes in a shell.
    assert not set(Path(trained.folder).name) & set("<>() *?'\"")


class Tied(nn.Module):
    """Two layers with one weight, and a frozen one before them."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.encode = nn.Linear(4, 4, bias=False)
        self.decode = nn.Linear(4, 4, bias=False)
        self.decode.weight = self.encode.weight
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.decode(torch.tanh(self.encode(self.frozen(x)))))
        return result


@pytest.mark.exhaustive
@every_strategy
def test_tied_weights_stay_tied_and_frozen_ones_as_they_were(strategy: str, run: Callable[..., TrainingRun]) -> None:
    torch.manual_seed(0)
    model = Tied().double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plain_loop(model, points(40), batch_size=8, epochs=2, lr=0.1, momentum=0.9)
    weights = run(2, strategy, Tied, points(40), epochs=2, batch_size=8, lr=0.1, dtype="float64").weights
    assert weights.keys() == before.keys()
    assert torch.equal(weights["encode.weight"], weights["decode.weight"])
    assert torch.equal(weights["frozen.weight"], before["frozen.weight"])
    for name, expected in model.state_dict().items():
        assert torch.allclose(weights[name], expected, rtol=1e-11, atol=1e-14), name
    assert not torch.equal(weights["encode.weight"], before["encode.weight"])
    again = Tied().double()
    again.load_state_dict(weights)
    assert again.decode.weight is again.encode.weight


def test_nothing_to_train(run: Callable[..., TrainingRun]) -> None:
    def frozen() -> nn.Module:
        return nn.Linear(4, 2).requires_grad_(False)

    with pytest.raises(WorkerFailure, match="no trainable parameter"):
        run(2, make_model=frozen, dataset=points(8))


@pytest.mark.parametrize(
    ("workers", "strategy"), [(2, "ring_all_reduce"), (2, "param_server")], ids=["ring_all_reduce", "param_server"]
)
@pytest.mark.parametrize(("first", "second", "mean"), [(0.0, 2.0, 0.0), (2.0, 0.0, 0.2)])
def test_batchnorm_statistics_are_those_of_the_first_worker(
    workers: int, strategy: str, first: float, second: float, mean: float, run: Callable[..., TrainingRun]
) -> None:
    """One step over four samples: the first worker sees `first` twice and the second one `second` twice.

    The average of both workers' means would be 0.1, and one process on the whole batch has variance 1.0333.
    """
    order = epoch_order(4, 0, 1)
    inputs, targets = torch.empty(4, 1), torch.tensor([0, 1, 0, 1])
    inputs[order[:2]], inputs[order[2:]] = first, second
    model = nn.Sequential(nn.BatchNorm1d(1, momentum=0.1), nn.Linear(1, 2))
    trained = run(workers, strategy, lambda: model, made(inputs, targets), epochs=1, batch_size=4)
    weights = trained.weights
    assert weights["0.running_mean"].item() == pytest.approx(mean, abs=1e-7)
    assert weights["0.running_var"].item() == pytest.approx(0.9, abs=1e-7)
    assert weights["0.num_batches_tracked"].dtype == torch.int64
    assert weights["0.num_batches_tracked"].item() == 1
    # and all workers evaluate with them: the model that is returned has the loss that was reported
    model.load_state_dict(weights)
    with torch.no_grad():
        loss = cross_entropy(model.eval()(inputs), targets).item()
    assert trained.history[0]["test_loss"] == pytest.approx(loss, rel=1e-6)


# Random numbers.


class Probe(nn.Module):
    """Writes down, in its first step of training, its weights' bits and what this process draws."""

    def __init__(self, folder: str, seed: Callable[[], int] | None = None) -> None:
        super().__init__()
        if seed is not None:
            torch.manual_seed(seed())
        self.linear = nn.Linear(4, 2)
        self.drop = nn.Dropout(0.5)
        with torch.no_grad():  # also from the generators that are not torch's
            self.linear.bias.copy_(torch.tensor([numpy.random.rand(), random.random()]))
        self.register_buffer("noise", torch.rand(3))
        self.folder = folder

    def forward(self, x: Tensor) -> Tensor:
        path = Path(self.folder, str(os.getpid()))
        if self.training and not path.exists():
            bits = b"".join(value.numpy().tobytes() for value in self.state_dict().values())
            seen = {
                "weights": hashlib.blake2b(bits).hexdigest(),
                "mask": self.drop(torch.ones(64)).tolist(),
                "torch": torch.rand(1).item(),
                "numpy": numpy.random.rand(),
                "python": random.random(),
            }
            path.write_text(json.dumps(seen))
        result: Tensor = self.drop(self.linear(x))
        return result


@pytest.fixture
def probe(run: Callable[..., TrainingRun], tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """What each worker wrote down, in some order."""

    def probe(strategy: str, name: str, **options: Any) -> list[dict[str, Any]]:
        folder = tmp_path / name
        folder.mkdir()
        run(3, strategy, partial(Probe, str(folder), **options), points(30), epochs=1)
        return sorted((json.loads(path.read_text()) for path in folder.iterdir()), key=lambda seen: seen["torch"])

    return probe


@pytest.mark.exhaustive
@from_scratch
def test_draws_differ_between_workers_and_repeat_in_the_next_run(
    strategy: str, probe: Callable[..., list[dict[str, Any]]]
) -> None:
    first, again = probe(strategy, "first"), probe(strategy, "again")
    assert len(first) == 3  # the server, if there is one, never trains
    assert len({seen["weights"] for seen in first}) == 1
    for draw in ("mask", "torch", "numpy", "python"):
        assert len({json.dumps(seen[draw]) for seen in first}) == 3, draw
    assert first == again


@pytest.mark.exhaustive
@from_scratch
def test_all_start_from_the_same_weights_even_if_each_seeds_itself(
    strategy: str, probe: Callable[..., list[dict[str, Any]]]
) -> None:
    seen = probe(strategy, "seeded", seed=os.getpid)
    assert len({each["weights"] for each in seen}) == 1
    assert len({each["torch"] for each in seen}) == 3


def test_the_generators_of_the_calling_process_are_left_alone(run: Callable[..., TrainingRun]) -> None:
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    run(2, model="cnn", train_size=20, epochs=1)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before[1:]


# Failing.


@pytest.mark.exhaustive
@from_scratch
def test_a_nan_stops_all_and_is_located(strategy: str, run: Callable[..., TrainingRun], tmp_path: Path) -> None:
    """Sample 7 of the third batch of the second epoch lies in the second of two shards of eight, four each."""
    dataset = points(24)
    place = epoch_order(24, 0, 2)[2 * 8 + 7]
    # ... and the sample comes in the first epoch too, where a gate of the model lets it through
    inputs = dataset.train_inputs.clone()
    inputs[place, 0] = 1e4

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.steps = 0

        def forward(self, x: Tensor) -> Tensor:
            self.steps += self.training
            Path(tmp_path, f"pid{os.getpid()}").touch()
            bad = (x[:, :1] > 1e3) & torch.tensor(self.steps > 3)
            result: Tensor = self.layer(torch.where(bad, torch.nan, torch.where(x > 1e3, 0.0, x)))
            return result

    with pytest.raises(WorkerFailure) as raised:
        run(2, strategy, Gate, made(inputs, dataset.train_targets), epochs=3, batch_size=8)
    rank = 1 + STRATEGIES[strategy].server_count
    message = str(raised.value)
    assert raised.value.rank == rank
    headline = message.splitlines()[0]
    assert "the gradient of layer." in headline and "NaN" in headline
    assert f"in step 3 of epoch 2 on rank {rank}" in headline
    # Nobody trains on.
    for path in tmp_path.glob("pid*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.name[3:]), 0)
    # What was finished before is kept, and how it ended is written down.
    (folder,) = (tmp_path / "runs").iterdir()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["status"] == "failed" and manifest["error"] == message
    rows = (folder / "runs.csv").read_text().splitlines()
    assert len(rows) == 1 + rank + 1  # one finished epoch


def test_targets_that_are_no_classes() -> None:
    dataset = points(8)
    with pytest.raises(DataError, match=r"train_targets of made: it has a target [23]; classes 0\.\.1"):
        made(dataset.train_inputs, dataset.train_targets + 2)


class KilledWhileItComputes(nn.Module):
    """In its third forward, or in its third backward at the first layer, when the last one's bucket has left."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 4), nn.Linear(4, 2)
        self.where, self.steps = where, 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.steps += self.training
        hidden = self.first(inputs)
        if self.steps == 3 and self.where == "forward":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.steps == 3:
            hidden.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
        return self.last(hidden)


@pytest.mark.parametrize(
    ("strategy", "where", "options"),
    [
        ("ring_all_reduce", "forward", {}),
        ("param_server", "forward", {}),  # whose workers' memory may still be read when a step begins
        ("ring_all_reduce", "backward", {"overlap": True, "bucket_mb": 5e-5}),
    ],
)
def test_who_computes_is_not_said_to_exchange(
    strategy: str, where: str, options: dict[str, Any], run: Callable[..., TrainingRun]
) -> None:
    data = made(torch.randn(40, 2), torch.arange(40) % 2)
    with pytest.raises(WorkerFailure, match=r"SIGKILL") as failed:
        run(2, strategy, partial(KilledWhileItComputes, where), data, batch_size=4, **options)
    said = [line for line in str(failed.value).splitlines() if re.match(r"  rank \d was ", line)]
    killed = failed.value.rank
    assert f"  rank {killed} was computing step 3 of epoch 1" in said
