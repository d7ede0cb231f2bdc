"""What is told of a task of one's own before it trains: figures of other types, and means in place of sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from torch_parallel import Samples, Task
from torch_parallel.workloads import DataError
from torch_parallel.workloads.outputs import OutputMisfit
from torch_parallel.workloads.task import counts_of, metric_sums_of, metrics_of
from torch_parallel.workloads.tree import Tree, leaves
from torch_parallel.workloads.trial import is_mean, trial_of, try_out

ROWS, CLASSES = 10, 3


class Own(Task):
    """Its methods are given."""

    def __init__(self, loss: Callable[[Tensor, Tree], Any], counts: Any = None, **figures: Any) -> None:
        self.loss, self.counts, self.figures = loss, counts, figures

    def loss_sum(self, output: Any, batch: Tree) -> Any:
        return self.loss(output, batch)

    def target_counts(self, samples: Tree) -> Any:
        return None if self.counts is None else self.counts(samples)

    def metric_sums(self, output: Any, batch: Tree) -> Any:
        return self.figures.get("sums", {})

    def metrics(self, sums: Any, targets: int, loss: float) -> Any:
        return self.figures.get("metrics", {})


def samples() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(ROWS, 4, generator=generator)
    targets = torch.randint(CLASSES, (ROWS,), generator=generator)
    return {"inputs": inputs, "targets": targets, "count": torch.arange(ROWS) % 3}


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, CLASSES))


def per_token(reduction: str) -> Callable[[Tensor, Tree], Tensor]:
    """Samples count 0, 1 or 2 times; a mean over all these."""

    def loss(output: Tensor, batch: Tree) -> Tensor:
        losses = cross_entropy(output, batch["targets"], reduction="none") * batch["count"]
        return losses.sum() if reduction == "sum" else losses.sum() / batch["count"].sum()

    return loss


def contrastive(reduction: str) -> Callable[[Tensor, Tree], Tensor]:
    """Each sample against all of the batch."""

    def loss(output: Tensor, batch: Tree) -> Tensor:
        return cross_entropy(output @ output.T, torch.arange(len(output)), reduction=reduction)

    return loss


MEANS = {
    "cross entropy": Own(lambda output, batch: cross_entropy(output, batch["targets"])),
    "mean by hand": Own(lambda output, batch: (output - 1).abs().mean()),
    "of all numbers": Own(lambda output, batch: mse_loss(output, batch["inputs"][:, :CLASSES])),
    "of tokens": Own(per_token("mean"), lambda part: part["count"]),
    "negative": Own(lambda output, batch: -cross_entropy(output, batch["targets"])),
}
RIGHT = {
    "cross entropy": Own(lambda output, batch: cross_entropy(output, batch["targets"], reduction="sum")),
    "of tokens": Own(per_token("sum"), lambda part: part["count"]),
    "contrastive": Own(contrastive("sum")),
    "contrastive mean": Own(contrastive("mean")),
    "none": Own(lambda output, batch: output.sum() * 0),
    "not finite": Own(lambda output, batch: output.sum() * math.nan),
    "with a penalty": Own(lambda output, batch: output.abs().sum() + 3 * output.abs().mean()),
    "largest": Own(lambda output, batch: cross_entropy(output, batch["targets"], reduction="none").max()),
    "batch average": Own(lambda output, batch: (output - output.mean(0)).square().sum()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", MEANS)
def test_a_mean_is_refused(kind: str, dtype: torch.dtype) -> None:
    with pytest.raises(OutputMisfit, match=r"^loss_sum of Own gives a mean: .* for 8 samples.*reduction=") as error:
        try_out(model().to(dtype), MEANS[kind], samples(), dtype)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", RIGHT)
def test_a_sum_and_what_is_neither_pass(kind: str) -> None:
    assert trial_of(RIGHT[kind], samples(), torch.float32)(model) is None


@pytest.mark.parametrize("kind", MEANS)
def test_one_sample_says_nothing(kind: str) -> None:
    one = {name: each[1:2] for name, each in samples().items()}
    try_out(model(), MEANS[kind], one, torch.float32)
    two = {name: each[1:3] for name, each in samples().items()}
    with pytest.raises(OutputMisfit, match="gives a mean"):
        try_out(model(), MEANS[kind], two, torch.float32)


def test_is_mean_by_hand() -> None:
    assert is_mean(2.0, [1.0, 3.0], [4, 4]) and is_mean(2.5, [1.0, 3.0], [1, 3])
    assert not is_mean(4.0, [1.0, 3.0], [4, 4]) and not is_mean(2.5, [1.0, 3.0], [4, 4])
    assert not is_mean(0.0, [0.0, 0.0], [4, 4]) and not is_mean(math.inf, [1.0, 3.0], [1, 1])
    assert not is_mean(3.0, [0.0, 3.0], [0, 5])  # the first part has no target: the sum is the mean
    assert not is_mean(2.0, [1.0, 3.0], [0, 0])


def test_a_trial_leaves_no_trace() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4, CLASSES)
            self.frozen = nn.Dropout().eval()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, inputs: Tensor) -> Tensor:
            self.calls += 1
            return self.out(inputs) + torch.rand(())

    net = Writes()
    before, state = torch.get_rng_state(), {name: each.clone() for name, each in net.state_dict().items()}
    part = samples()
    try_out(net, RIGHT["cross entropy"], part, torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(each, state[name]) for name, each in net.state_dict().items())
    assert net.training and net.out.training and not net.frozen.training
    assert all(parameter.grad is None for parameter in net.parameters())
    assert all(torch.equal(each, part[name]) for name, each in samples().items())


def test_what_else_fails_is_left_to_the_run() -> None:
    def fails(output: Tensor, batch: Tree) -> Tensor:
        raise ZeroDivisionError

    try_out(model(), Own(fails), samples(), torch.float32)

    class NoFigures(Own):
        def metrics(self, sums: Any, targets: int, loss: float) -> Any:
            raise ZeroDivisionError

    with pytest.raises(OutputMisfit, match="gives a mean"):
        try_out(model(), NoFigures(MEANS["cross entropy"].loss), samples(), torch.float32)


@pytest.mark.parametrize(
    "loss",
    [
        lambda output, batch: output.detach().sum(),
        lambda output, batch: (output.argmax(1) != batch["targets"]).float().sum(),
        lambda output, batch: torch.tensor(output.sum().item()),
    ],
)
def test_a_loss_without_a_gradient(loss: Callable[[Tensor, Tree], Tensor]) -> None:
    with pytest.raises(OutputMisfit, match=r"^loss_sum of Own does not depend on the model's parameters"):
        try_out(model(), Own(loss), samples(), torch.float32)


def test_a_dict_without_inputs() -> None:
    part = {"picture": samples()["inputs"], "targets": samples()["targets"]}
    said = r"^a batch has the parts picture, targets, and Own gives the model its part \"inputs\"; name one so, or give"
    with pytest.raises(OutputMisfit, match=said):
        try_out(model(), RIGHT["cross entropy"], part, torch.float32)


@pytest.mark.parametrize(
    ("sums", "wanted"),
    [
        ({"a": 2.5, "b": 3}, {"a": 2.5, "b": 3.0}),
        ({"a": numpy.float32(2.5), "b": numpy.int64(3)}, {"a": 2.5, "b": 3.0}),
        ({"a": numpy.array([1.0, 2.0]), "b": True}, {"a": [1.0, 2.0], "b": 1.0}),
        ({"a": torch.tensor(4.0, requires_grad=True)}, {"a": 4.0}),
    ],
)
def test_numbers_become_sums(sums: dict[str, Any], wanted: dict[str, Any]) -> None:
    found = metric_sums_of(Own(RIGHT["none"].loss, sums=sums), None, None)
    assert {name: (each + each).tolist() for name, each in found.items()} == {
        name: (2 * numpy.array(each)).tolist() for name, each in wanted.items()
    }
    assert not any(each.requires_grad for each in found.values())


@pytest.mark.parametrize(
    ("sums", "said"),
    [
        ({"a": "many"}, "metric_sums of Own gives a, something of type str; a number or a tensor is wanted"),
        ({"a": None}, "metric_sums of Own gives a, None; a number"),
        ([1.0], "metric_sums of Own gives something of type list; a dict of sums by name is wanted"),
        (None, "metric_sums of Own gives None; a dict"),
    ],
)
def test_sums_that_are_none(sums: Any, said: str) -> None:
    with pytest.raises(OutputMisfit, match=f"^{said}"):
        try_out(model(), Own(RIGHT["cross entropy"].loss, sums=sums), samples(), torch.float32)


def test_figures() -> None:
    given = {"a": torch.tensor([2.5]), "b": numpy.float64(1.5), "c": 3, "d": torch.tensor(True)}
    found = metrics_of(Own(RIGHT["none"].loss, metrics=given), {}, 1, 0.0)
    assert found == {"a": 2.5, "b": 1.5, "c": 3.0, "d": 1.0} and all(type(each) is float for each in found.values())


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"a": torch.ones(2)}, r"metrics of Own gives a, a tensor \[2\] of torch.float32; one number is wanted"),
        ({"a": "good"}, "metrics of Own gives a, something of type str; a number"),
        (0.5, "metrics of Own gives something of type float; a dict of numbers by name is wanted"),
    ],
)
def test_figures_that_are_none(metrics: Any, said: str) -> None:
    with pytest.raises(OutputMisfit, match=f"^{said}"):
        try_out(model(), Own(RIGHT["cross entropy"].loss, metrics=metrics), samples(), torch.float32)


@pytest.mark.parametrize("given", [[1, 0, 2], numpy.array([1, 0, 2]), torch.tensor([1, 0, 2], dtype=torch.uint8)])
def test_counts_of_every_kind(given: Any) -> None:
    counts = counts_of(Own(RIGHT["none"].loss, lambda part: given), torch.zeros(3, 2))
    assert counts is not None and counts.dtype == torch.int64 and counts.tolist() == [1, 0, 2]


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        ({"a/b": 1, "a": {"b": 2}}, "a/b"),
        ({"a": {"b": [1, 2]}, "a/b/1": 3}, "a/b/1"),
        ({1: 1, "1": 2}, "1"),
        ({"x": {"1": 1, 1: 2}}, "x/1"),
    ],
)
def test_paths_that_collide(tree: Tree, path: str) -> None:
    with pytest.raises(DataError, match=f"^two tensors of the samples have the path {path}; rename one of the keys"):
        leaves(tree)
    ones = {"a/b": torch.ones(2), "a": {"b": torch.ones(2)}}
    with pytest.raises(DataError, match=r"^two tensors of the samples have the path train/a/b; rename"):
        Samples("mine", ones, ones)
