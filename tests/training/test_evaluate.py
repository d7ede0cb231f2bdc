"""Evaluation is exact: every sample once, counts summed, whatever the number of workers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from torch_parallel.strategies.shares import shard
from torch_parallel.training.evaluate import Evaluation, FromTheStart, evaluate, first_not_finite, not_finite
from torch_parallel.workloads.task import Classification
from torch_parallel.workloads.tree import Tree


class RightOnTwo(nn.Module):
    """Knows the class of samples 0 and 1, whose target is 1, and says 0 to all others."""

    def forward(self, x: Tensor) -> Tensor:
        known = (x[:, 0] < 2).double()
        return torch.stack([1 - known, known], 1)


TASK = Classification(class_count=2)


def count_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Evaluation:
    return evaluate(model, TASK, {"inputs": inputs, "targets": targets}, inputs.dtype)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 11])
def test_accuracy_does_not_depend_on_the_number_of_workers(workers: int) -> None:
    """Padding the shards with repeats would give 0.333 for four workers, dropping the rest 0.25."""
    inputs, targets = torch.arange(10.0).unsqueeze(1), torch.ones(10, dtype=torch.int64)
    parts = [shard(10, worker, workers) for worker in range(workers)]
    tested = sum((count_of(RightOnTwo(), inputs[part], targets[part]) for part in parts), Evaluation())
    assert tested.targets == 10 and tested.metrics(TASK)["accuracy"] == 0.2
    # logits (0, 1) where it is right and (1, 0) where it is wrong
    right, wrong = math.log(1 + math.exp(-1)), math.log(1 + math.exp(1))
    assert tested.loss == pytest.approx((2 * right + 8 * wrong) / 10, rel=1e-6)


def test_more_samples_than_fit_into_one_batch() -> None:
    """1,203 samples of which every third is right: the last batch is short."""
    inputs = (torch.arange(1203.0) % 3).unsqueeze(1) + 1.5  # 1.5, 2.5, 3.5
    tested = count_of(RightOnTwo(), inputs.double(), torch.ones(1203, dtype=torch.int64))
    assert tested.sums["right"].tolist() == [0, 401, 0] and tested.targets == 1203
    assert tested.sums["predicted"].tolist() == [802, 401, 0] and tested.sums["actual"].tolist() == [0, 1203, 0]
    right, wrong = math.log(1 + math.exp(-1)), math.log(1 + math.exp(1))
    assert tested.loss_sum == pytest.approx(401 * right + 802 * wrong, rel=1e-12)


def test_the_model_is_fed_what_is_prepared() -> None:
    class Hundredths(Classification):
        def prepare(self, batch: Tree, dtype: torch.dtype) -> Tree:
            return {**batch, "inputs": batch["inputs"] / 100}

    samples = {"inputs": torch.tensor([[100.0], [300.0]]), "targets": torch.tensor([1, 1])}
    tested = evaluate(RightOnTwo(), Hundredths(2), samples, torch.float32)
    assert tested.sums["right"].tolist() == [0, 1, 0]


def test_no_samples() -> None:
    tested = count_of(RightOnTwo(), torch.empty(0, 1), torch.empty(0, dtype=torch.int64))
    assert tested == Evaluation(0.0, 0, {}) and math.isnan(tested.loss)


class Spy(nn.Module):
    """Records the mode it is run in, and whether gradients are."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Linear(1, 2)
        self.frozen = nn.BatchNorm1d(1)
        self.seen: list[tuple[bool, bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((self.training, self.frozen.training, torch.is_grad_enabled()))
        result: Tensor = self.trained(self.frozen(x))
        return result


@pytest.mark.parametrize("training", [True, False])
def test_every_module_is_left_in_the_mode_it_was_in(training: bool) -> None:
    model = Spy().train(training)
    model.frozen.eval()  # as one does with a part that is not to be trained
    statistics = {name: value.clone() for name, value in model.frozen.state_dict().items()}
    count_of(model, torch.arange(4.0).unsqueeze(1), torch.zeros(4, dtype=torch.int64))
    assert model.seen == [(False, False, False)]
    assert (model.training, model.trained.training, model.frozen.training) == (training, training, False)
    assert all(torch.equal(value, statistics[name]) for name, value in model.frozen.state_dict().items())


NAN, INF = float("nan"), float("inf")


class OfManyKinds(nn.Module):
    """Parameters and buffers of every kind; all finite, but for a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.real = nn.Parameter(torch.ones(2, 3))
        self.complex = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.frozen = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
        self.short = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.empty = nn.Parameter(torch.ones(0))
        self.later = nn.LazyLinear(3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("table", torch.eye(3).to_sparse())
        self.register_buffer("count", torch.tensor(2**40))
        self.register_buffer("seen", torch.tensor([True]))
        self.register_buffer("eight", torch.ones(2).to(torch.float8_e4m3fn), persistent=False)
        self.register_buffer("mask", torch.tensor([0.0, -INF]))


def test_a_model_of_many_kinds_is_finite_but_for_what_it_was_made_with() -> None:
    model = OfManyKinds()
    assert list(not_finite(model)) == ["the buffer mask"]
    assert first_not_finite(model) == "the buffer mask"
    assert first_not_finite(model, except_for=FromTheStart(model)) is None


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("real", NAN, "the parameter real"),
        ("complex", complex(1, INF), "the parameter complex"),
        ("frozen", -INF, "the parameter frozen"),
        ("short", INF, "the parameter short"),
        ("mean", NAN, "the buffer mean"),
        ("eight", NAN, "the buffer eight"),
    ],
)
def test_the_first_that_is_not_finite_is_named(name: str, value: complex, said: str) -> None:
    model = OfManyKinds()
    made_so = FromTheStart(model)
    tensor = getattr(model, name)
    changed = tensor.detach().to(torch.complex64 if name == "complex" else torch.float64)
    changed.view(-1)[-1] = value
    tensor.data = changed.to(tensor.dtype)
    assert first_not_finite(model, except_for=made_so) == said


def test_what_is_not_finite_from_the_start_may_stay_so_in_its_places_alone() -> None:
    model = nn.Linear(3, 1)
    model.register_buffer("least", torch.tensor([INF, -INF, NAN, 1.0]))
    model.register_buffer("later", torch.full((2,), INF))
    with torch.no_grad():
        model.weight[0, 1] = -INF
    made_so = FromTheStart(model)
    assert first_not_finite(model, except_for=made_so) is None
    for changed, index, value, said in (
        (model.least, 3, INF, "the buffer least"),
        (model.least, 0, -INF, "the buffer least"),  # another infinity
        (model.least, 1, NAN, "the buffer least"),
        (model.weight.data[0], 0, INF, "the parameter weight"),
    ):
        before = changed[index].clone()
        changed[index] = value
        assert first_not_finite(model, except_for=made_so) == said
        changed[index] = before
        made_so = FromTheStart(model)
    model.later.fill_(2.0)
    assert first_not_finite(model, except_for=made_so) is None
    model.later[0] = INF  # it has been finite
    assert first_not_finite(model, except_for=made_so) == "the buffer later"


def test_a_parameter_that_is_nan_from_the_start_is_named() -> None:
    model = nn.Linear(1, 1)
    model.unused = nn.Parameter(torch.full((3,), NAN))
    assert first_not_finite(model, except_for=FromTheStart(model)) == "the parameter unused"


def test_a_sparse_buffer() -> None:
    model = OfManyKinds()
    model.table = (torch.eye(3) * INF).nan_to_num(0.0, posinf=INF).to_sparse()
    assert list(not_finite(model)) == ["the buffer table", "the buffer mask"]


def test_the_optimizers_state_comes_before_the_losses() -> None:
    """The square of a gradient of 1e30 is too large for float32. Adam divides by its root, and changes nothing."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters())
    optimized = [(list(model.named_parameters()), optimizer)]
    model.weight.grad, model.bias.grad = torch.full((1, 1), 1e30), torch.zeros(1)
    optimizer.step()
    losses = {"training loss": torch.tensor(1.0), "test loss": 2.0}
    assert first_not_finite(model, optimized, losses) == "the optimizer's exp_avg_sq of weight"
    assert first_not_finite(model, (), losses) is None
    losses["test loss"] = NAN
    assert first_not_finite(model, (), losses) == "the test loss"
    assert list(not_finite(model, optimized, losses)) == ["the optimizer's exp_avg_sq of weight", "the test loss"]


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_both_moments_of_adam(key: str) -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model.weight.grad = torch.ones(1, 2)
    optimizer.step()
    optimized = [(list(model.named_parameters()), optimizer)]
    assert first_not_finite(model, optimized) is None
    optimizer.state[model.weight][key][0, 1] = INF
    assert first_not_finite(model, optimized) == f"the optimizer's {key} of weight"
