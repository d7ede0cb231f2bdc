"""Strategies whose ranks do not step alike: which call differs is said at once, whatever exchanges the gradients."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torch_parallel import WorkerFailure, launch
from torch_parallel.communicator import Communicator
from torch_parallel.strategies import STRATEGIES

LONG_S = 90.0
QUICK_S = 30.0


def first_line(work: Callable[..., Any], n: int, *arguments: Any) -> str:
    """Of the failure, which comes long before the deadline."""
    start_s = time.monotonic()
    with pytest.raises(WorkerFailure) as raised:
        launch(work, n, *arguments, threads=1, deadline_s=LONG_S)
    assert time.monotonic() - start_s < QUICK_S
    return str(raised.value).splitlines()[0]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def make_strategy(c: Communicator, name: str) -> Any:
    options = {"staleness": 1} if name == "param_server_bounded" else {}
    return STRATEGIES[name](make_model(), lambda named: torch.optim.SGD([p for _, p in named], lr=0.1), c, **options)


def step(strategy: Any) -> None:
    strategy.begin_step()
    if not strategy.communicator.is_server:
        strategy.model(torch.ones(1, 4)).sum().backward()
    strategy.step()


def steps_once_less(c: Communicator, name: str) -> None:
    strategy = make_strategy(c, name)
    for _ in range(3 - (c.rank == c.world_size - 1)):
        step(strategy)


@pytest.mark.parametrize(
    "name", ["ring_all_reduce", "two_shot_in_place", "param_server", "sharded_param_server", "param_server_bounded"]
)
def test_a_rank_that_steps_once_less(name: str) -> None:
    line = first_line(steps_once_less, 3, name)
    assert re.match(
        r"rank \d failed: TransportError: rank 2 has returned, and rank \d waits for it|rank 2 has ret", line
    )


def test_a_rank_that_steps_once_less_under_ddp() -> None:
    """Gloo only says that a connection was closed."""
    line = first_line(steps_once_less, 2, "ddp")
    step = "begin a step of DistributedDataParallel"
    assert re.match(
        rf"rank 1 has returned after \d+ calls, and rank 0 made \d+ calls: call \d+ of rank 0 was to {step}", line
    )


def test_a_step_of_ddp_against_an_all_reduce() -> None:
    def work(c: Communicator) -> None:
        strategy = make_strategy(c, "ddp")
        if c.rank == 0:
            c.all_reduce(torch.ones(3))
        else:
            step(strategy)

    line = first_line(work, 2)
    assert "wants to all_reduce 3 elements" in line and "wants to begin a step of DistributedDataParallel" in line


def steps_in_another_order(c: Communicator, name: str) -> None:
    strategies = [make_strategy(c, name) for _ in range(2)]
    for strategy in strategies if c.rank == 0 else reversed(strategies):
        step(strategy)


@pytest.mark.parametrize("name", ["ring_all_reduce", "two_shot_in_place", "param_server", "sharded_param_server"])
def test_two_strategies_stepped_in_another_order(name: str) -> None:
    line = first_line(steps_in_another_order, 2, name)
    assert re.match(
        r"rank \d failed: TransportError: call \d+: rank \d wants to perform (\w+) on \d+ elements", line
    ), line


def test_a_step_against_an_all_reduce() -> None:
    def work(c: Communicator) -> None:
        strategy = make_strategy(c, "ring_all_reduce")
        if c.rank == 0:
            c.all_reduce(torch.ones(3))
        else:
            step(strategy)

    line = first_line(work, 2)
    assert "wants to all_reduce 3 elements" in line and "wants to perform ring on" in line
