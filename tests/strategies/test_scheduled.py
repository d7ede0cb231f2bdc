"""Exchanging by a scheduler, beside backward and the next forward, gives what one process gives, in whatever order."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import (
    MODELS,
    OPTIMIZERS,
    BackToFront,
    digest,
    largest_deviation,
    one_process,
    samples,
    snapshot,
)
from torch import nn
from torch.nn.functional import cross_entropy

from torch_parallel import RunConfig, TrainingRun, WorkerFailure, launch, train
from torch_parallel.communicator import Communicator
from torch_parallel.strategies import FROM_SCRATCH
from torch_parallel.training.config import ConfigError
from torch_parallel.transport.signals import stores_are_ordered
from torch_parallel.workloads import load_dataset

pytestmark = pytest.mark.skipif(not stores_are_ordered(), reason="several exchanges in flight need an x86-64 processor")

ALL = {**MODELS, "back to front": BackToFront}
SCHEDULED = [name for name, each in FROM_SCRATCH.items() if "schedule" in each.options]
CROSSING = {"schedule": "priority", "partition_mb": 0.004, "credit_mb": 0.016, "cross_barrier": True}
"""Everything at once: partitions of 4 KiB, of which four are under way."""


def trained(
    communicator: Communicator,
    name: str,
    settings: list[tuple[str, str, torch.dtype]],
    options: dict[str, Any],
    delay_s: float = 0.0,
    micro_batches: int = 1,
) -> list[list[Any]]:
    """For each setting what this rank holds after every step, or, with a cross barrier, after the last one."""
    drawn, keep = random.Random(communicator.rank), snapshot if communicator.rank == 0 else digest
    histories = []
    for model_name, optimizer, dtype in settings:
        torch.manual_seed(communicator.rank)
        model = ALL[model_name]().to(dtype)
        make = OPTIMIZERS[optimizer]
        strategy = FROM_SCRATCH[name](
            model, lambda named, make=make: make([each for _, each in named]), communicator, 20_000, **options
        )
        history = []
        for inputs, targets in samples(dtype):
            strategy.begin_step()
            time.sleep(drawn.random() * delay_s)
            if communicator.worker_index is not None:
                index, count = communicator.worker_index, communicator.worker_count
                mine = slice(len(targets) * index // count, len(targets) * (index + 1) // count)
                parts = list(zip(inputs[mine].chunk(micro_batches), targets[mine].chunk(micro_batches), strict=True))
                for number, (some_inputs, some_targets) in enumerate(parts, 1):
                    if len(some_targets):
                        with strategy.synchronising(last=number == len(parts)):
                            loss = cross_entropy(model(some_inputs), some_targets, reduction="sum")
                            time.sleep(drawn.random() * delay_s)
                            (loss / len(targets)).backward()
            strategy.step()
            if not options["cross_barrier"]:
                history.append(keep(model))
        strategy.confirm()
        strategy.close()
        histories.append([*history, keep(model)] if options["cross_barrier"] else history)
    return histories


Settings = list[tuple[str, str, torch.dtype]]


def check(name: str, n: int, settings: Settings, options: dict[str, Any], **more: Any) -> None:
    options = {"schedule": "fifo", "partition_mb": None, "credit_mb": None, "cross_barrier": False, **options}
    servers = FROM_SCRATCH[name].server_count
    first, *others = launch(trained, n, name, settings, options, *more.values(), server_count=servers, deadline_s=60)
    for index, (model, optimizer, dtype) in enumerate(settings):
        reference = one_process(ALL[model], OPTIMIZERS[optimizer], dtype)
        tolerance = 1e-12 if dtype == torch.float64 else 1e-6
        assert largest_deviation(first[index], reference[-len(first[index]) :]) <= tolerance, (model, optimizer, dtype)
        for other in others:
            assert other[index] == [digest(each) for each in first[index]], (model, optimizer, dtype)


EVERY = [(model, optimizer, torch.float64) for model in ALL for optimizer in ("sgd", "fused adam")]


@pytest.mark.parametrize("options", [{}, CROSSING], ids=["fifo", "everything"])
@pytest.mark.parametrize(("name", "n"), [("ring_all_reduce", 3), ("param_server", 3), ("two_shot_in_place", 2)])
def test_every_model_is_that_of_one_process(name: str, n: int, options: dict[str, Any]) -> None:
    check(name, n, EVERY, options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SCHEDULED)
def test_every_strategy_that_takes_it(name: str) -> None:
    settings = [("awkward", "adamw", torch.float64), ("mlp", "sgd", torch.float32)]
    check(name, 4 if "hierarchical" in name else 3, settings, CROSSING)


@pytest.mark.exhaustive
@pytest.mark.parametrize("cross_barrier", [False, True])
@pytest.mark.parametrize("partition_mb", [None, 0.002, 0.02])
@pytest.mark.parametrize("credit_mb", [None, 0.001, 0.03])
@pytest.mark.parametrize("schedule", ["fifo", "priority"])
@pytest.mark.parametrize("name", ["ring_all_reduce", "param_server"])
def test_every_combination(
    name: str, schedule: str, credit_mb: float, partition_mb: float, cross_barrier: bool
) -> None:
    options = {"schedule": schedule, "credit_mb": credit_mb, "partition_mb": partition_mb}
    options |= {"cross_barrier": cross_barrier}
    check(name, 3, [("awkward", "sgd", torch.float64), ("cnn", "adam", torch.float64)], options)


@pytest.mark.parametrize("name", ["ring_all_reduce", "param_server"])
def test_random_delays(name: str, request: pytest.FixtureRequest) -> None:
    """Of ranks, and of layers. More of them: --trials 200."""
    drawn = random.Random(request.config.getoption("first_trial"))
    for _ in range(max(1, request.config.getoption("trials") // 20)):
        options = {
            "schedule": drawn.choice(["fifo", "priority"]),
            "partition_mb": drawn.choice([None, 0.002, 0.01]),
            "credit_mb": drawn.choice([None, 0.002, 0.02]),
            "cross_barrier": drawn.random() < 0.7,
        }
        settings = [(drawn.choice(list(ALL)), drawn.choice(["sgd", "fused adam"]), torch.float64)]
        check(name, drawn.choice([2, 3, 4]), settings, options, delay_s=0.01)


@pytest.mark.parametrize("name", ["ring_all_reduce", "param_server"])
def test_micro_batches(name: str) -> None:
    check(name, 3, [("awkward", "sgd", torch.float64)], CROSSING, delay_s=0.0, micro_batches=2)


def plain_and_scheduled(communicator: Communicator, name: str, more: dict[str, Any]) -> list[list[Any]]:
    """Digests after the last step, of the plain exchange and of the scheduled one."""
    ends, make = [], OPTIMIZERS["fused sgd"]
    for options in ({}, {"schedule": "priority", "cross_barrier": True}):
        torch.manual_seed(0)
        model = MODELS["mlp"]()
        strategy = FROM_SCRATCH[name](
            model, lambda named: make([each for _, each in named]), communicator, 20_000, **options, **more
        )
        norms = []
        for inputs, targets in samples(torch.float32):
            strategy.begin_step()
            if communicator.worker_index is not None:
                mine = slice(communicator.worker_index, None, communicator.worker_count)
                if len(targets[mine]):
                    with strategy.synchronising(last=True):
                        loss = cross_entropy(model(inputs[mine]), targets[mine], reduction="sum") / len(targets)
                        loss.backward()
            strategy.step()
            norms.append(strategy.last_norm)
        strategy.close()  # which finishes what is under way
        ends.append([digest(model), norms])
    return ends


@pytest.mark.parametrize("name", ["reduce_broadcast", "two_shot_in_place", "param_server"])
@pytest.mark.parametrize("more", [{}, {"clip_norm": 0.5}, {"skip_not_finite": True}], ids=str)
def test_where_the_order_of_sums_is_the_same_so_are_the_bits(name: str, more: dict[str, Any]) -> None:
    for plain, scheduled in launch(
        plain_and_scheduled, 3, name, more, server_count=FROM_SCRATCH[name].server_count, deadline_s=60
    ):
        assert plain[0] == scheduled[0]
        assert plain[1] == pytest.approx(scheduled[1]) if None not in plain[1] else plain[1] == scheduled[1]


# ---- through train ----


def run_of(folder: Path, strategy: str, **options: Any) -> TrainingRun:
    small = {"dataset": "digits", "train_size": 300, "test_size": 50, "epochs": 2, "device": "cpu", "batch_size": 20}
    given: dict[str, Any] = {**small, "results_dir": str(folder), "strategy": strategy, "n_gpus": 3, **options}
    return train(RunConfig(**given), verbose=False)


@pytest.mark.parametrize("strategy", ["reduce_broadcast", "param_server"])
def test_a_run_with_checkpoints_goes_on_to_the_bit(strategy: str, tmp_path: Path) -> None:
    scheduled = {"schedule": "priority", "partition_mb": 0.01, "credit_mb": 0.05, "cross_barrier": True}
    plain = run_of(tmp_path, strategy, optimizer="adam")
    whole = run_of(tmp_path, strategy, optimizer="adam", check_replicas=7, checkpoint_every=11, **scheduled)
    assert [epoch["train_loss"] for epoch in whole.history] == [epoch["train_loss"] for epoch in plain.history]
    checkpoint = Path(whole.folder) / "checkpoints" / "step_000000011.pt"
    for options in (scheduled, {}):  # what was saved under a schedule goes on without, and so does the optimizer
        resumed = run_of(tmp_path, strategy, optimizer="adam", resume=str(checkpoint), **options)
        for name, weight in plain.weights.items():
            assert torch.equal(resumed.weights[name], weight) and torch.equal(whole.weights[name], weight), name


class Dies(nn.Module):
    def __init__(self, how: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 500), nn.ReLU(), nn.Linear(500, 10))
        self.how, self.calls = how, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 5 and multiprocessing.current_process().name.endswith(" 2"):
            os.kill(os.getpid(), self.how)
        result: torch.Tensor = self.layers(x)
        return result


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("strategy", ["ring_all_reduce", "param_server"])
def test_a_worker_that_dies_or_stops_ends_the_run(strategy: str, how: int, tmp_path: Path) -> None:
    data, _ = load_dataset("digits", None, 200, 0, 50)
    config = RunConfig(
        strategy=strategy,
        n_gpus=3,
        epochs=1,
        batch_size=20,
        device="cpu",
        results_dir=str(tmp_path),
        schedule="priority",
        cross_barrier=True,
        deadline_s=3 if how == signal.SIGSTOP else 60,
    )
    with pytest.raises(WorkerFailure, match="rank 2"):
        train(config, make_model=partial(Dies, how), dataset=data, verbose=False)


def test_what_cannot_be_scheduled_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for options, line in (
        ({"strategy": "sharded_param_server", "schedule": "fifo"}, "--schedule fifo: sharded_param_server does not"),
        ({"strategy": "ddp", "schedule": "fifo"}, "--schedule fifo: ddp does not take it"),
        ({"partition_mb": 1.0}, "--partition_mb 1.0: it says how gradients are scheduled"),
        ({"cross_barrier": True}, "--cross_barrier: it says how gradients are scheduled"),
        ({"schedule": "fifo", "credit_mb": 0.0}, "--credit_mb 0.0: it must be at least 0.001"),
        ({"schedule": "fifo", "cross_barrier": True, "compile": True}, "--cross_barrier: layers that are compiled"),
        ({"schedule": "priority", "compile": True}, "--schedule priority: layers that are compiled"),
        ({"schedule": "lifo"}, "--schedule lifo: choose from none, fifo, priority"),
        ({"schedule": "fifo", "device": "cuda"}, "--schedule fifo: it runs on the CPU"),
    ):
        with pytest.raises(ConfigError, match=line):
            RunConfig(**options)
    monkeypatch.setattr("torch_parallel.training.run.stores_are_ordered", lambda: False)
    with pytest.raises(ConfigError, match="--schedule fifo: several exchanges in flight need the CPU of one x86-64"):
        run_of(tmp_path, "ring_all_reduce", schedule="fifo")


def steps_with(communicator: Communicator, case: str) -> str:
    """What is said of a program that does not keep to what a cross barrier needs; nothing, where it does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4000), nn.Linear(4000, 2))
    strategy = FROM_SCRATCH["ring_all_reduce"](
        model,
        lambda named: torch.optim.SGD([each for _, each in named], lr=0.1),
        communicator,
        schedule="priority",
        cross_barrier=True,
    )
    try:
        for number in range(3):
            if case == "other memory" and number == 1:
                strategy.confirm()
                model[0].weight.data = model[0].weight.data.clone()
            strategy.begin_step()
            x = torch.ones(3, 4)
            if case == "forward outside":
                loss = model(x).sum()
                with strategy.synchronising(last=True):
                    loss.backward()
            else:
                with strategy.synchronising(last=True):
                    model(x).sum().backward()
            if communicator.rank == 1:
                time.sleep(0.1)  # so that the exchange is under way when the other begins the next step
            strategy.step()
        strategy.confirm()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("as it should be", ""),
        ("forward outside", "run forward and backward within strategy.synchronising"),
        ("other memory", "parameter 0.weight was given other memory"),
    ],
)
def test_what_a_cross_barrier_needs_is_held_or_told(case: str, said: str) -> None:
    told = [text for text in launch(steps_with, 2, case, deadline_s=20) if text]
    assert bool(told) == bool(said)
    assert any(said in text for text in told or [""]), told
