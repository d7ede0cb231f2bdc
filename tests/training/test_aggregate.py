"""What the gradient of a step is, in numbers worked out by hand, through the loop that trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from torch_parallel import RunConfig, train
from torch_parallel.strategies import STRATEGIES
from torch_parallel.training.aggregate import divisor
from torch_parallel.training.sampler import epoch_order
from torch_parallel.workloads import Dataset


class Slope(nn.Module):
    """Logits -2 w x and 0. For w = 0 both classes have probability 1/2, so of target 0 the loss's gradient is x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([-2 * self.w * x, 0 * x], dim=1)


def in_order(count: int) -> Dataset:
    """x = 0, 1, 2 ... in the order in which the first epoch takes the samples."""
    inputs = torch.zeros(count, 1, dtype=torch.float64)
    inputs[epoch_order(count, 0, 1), 0] = torch.arange(count, dtype=torch.float64)
    targets = torch.zeros(count, dtype=torch.int64)
    return Dataset("in_order", inputs, targets, inputs, targets, 2, (0.0,), (1.0,), "the test")


def slope_after_a_step(folder: Path, strategy: str, aggregate: str, count: int, accumulate: int = 1) -> float:
    """One step of SGD with lr = 1 from w = 0, of `count` samples on 4 workers: minus the gradient."""
    config = RunConfig(
        strategy=strategy,
        n_gpus=4 + STRATEGIES[strategy].server_count,
        batch_size=count,
        epochs=1,
        lr=1.0,
        momentum=0.0,
        dtype="float64",
        device="cpu",
        aggregate=aggregate,
        accumulate=accumulate,
        results_dir=str(folder),
        deadline_s=30,
    )
    return float(train(config, make_model=Slope, dataset=in_order(count), verbose=False).weights["w"])


# workers have [0, 1, 2], [3, 4, 5], [6, 7] and [8, 9]: means of 1, 4, 6.5 and 8.5
TEN_SAMPLES = {"weighted": 4.5, "mean": 5.0, "sum": 20.0}
# [0], [1], [2] and nothing
THREE_SAMPLES = {"weighted": 1.0, "mean": 1.0, "sum": 3.0}


# data_parallel has one process; param_server_async makes an update of each share
OF_ALL_WORKERS = [name for name in STRATEGIES if name not in ("data_parallel", "param_server_async")]


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", OF_ALL_WORKERS)
@pytest.mark.parametrize("aggregate", ["weighted", "mean", "sum"])
def test_the_gradient_of_uneven_shares(tmp_path: Path, strategy: str, aggregate: str) -> None:
    for count, expected in ((10, TEN_SAMPLES), (3, THREE_SAMPLES)):
        assert slope_after_a_step(tmp_path, strategy, aggregate, count) == pytest.approx(
            -expected[aggregate], abs=1e-12
        ), count


@pytest.mark.parametrize("aggregate", ["weighted", "mean", "sum"])
def test_micro_batches_change_nothing(tmp_path: Path, aggregate: str) -> None:
    slope = slope_after_a_step(tmp_path, "ring_all_reduce", aggregate, 10, accumulate=2)
    assert slope == pytest.approx(-TEN_SAMPLES[aggregate], abs=1e-12)


def test_divisors_by_hand() -> None:
    """A worker with 3 of 10 samples on 4 workers; one with 1 of 3, where a fourth has none; that one."""
    assert [divisor(name, 3, 10, 4) for name in ("weighted", "mean", "sum")] == [10, 12, 3]
    assert [divisor(name, 1, 3, 3) for name in ("weighted", "mean", "sum")] == [3, 3, 1]
    assert all(divisor(name, 0, 3, 3) > 0 for name in ("weighted", "mean", "sum"))
