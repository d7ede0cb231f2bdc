"""Data and models of a user's own, through `train`: right as in one process, or one line that names what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from torch_parallel import RunConfig, WorkerFailure, train
from torch_parallel.strategies import STRATEGIES
from torch_parallel.training.evaluate import evaluate
from torch_parallel.training.run import TrainingRun
from torch_parallel.workloads import DataError, Dataset
from torch_parallel.workloads.outputs import OutputMisfit, fitting

three_strategies = pytest.mark.parametrize("strategy", ["ring_all_reduce", "param_server", "ddp"])

GENERATOR = torch.Generator().manual_seed(5)
INPUTS, TARGETS = torch.randn(24, 4, generator=GENERATOR), torch.randint(3, (24,), generator=GENERATOR)


def data(**changed: Any) -> Dataset:
    fields: dict[str, Any] = {"train_inputs": INPUTS, "train_targets": TARGETS, "class_count": 3}
    fields |= {"name": "own", "test_inputs": INPUTS[:10], "test_targets": TARGETS[:10]}
    return Dataset(**(fields | changed))


@pytest.fixture
def go(tmp_path: Path) -> Callable[..., TrainingRun]:
    def go(strategy: str, make_model: Callable[[], nn.Module] | None, dataset: Any, **options: Any) -> TrainingRun:
        options = {"epochs": 2, "batch_size": 8, "lr": 0.1, "deadline_s": 30, "dtype": "float32"} | options
        n = 2 + STRATEGIES[strategy].server_count
        config = RunConfig(strategy=strategy, n_gpus=n, device="cpu", results_dir=str(tmp_path / "runs"), **options)
        return train(config, make_model=make_model, dataset=dataset, verbose=False)

    return go


@three_strategies
def test_other_types_give_the_bits_of_tensors(strategy: str, go: Callable[..., TrainingRun]) -> None:
    plain = go(strategy, lambda: nn.Linear(4, 3), data())
    arrays = data(
        train_inputs=INPUTS.numpy().astype(">f4"),
        train_targets=TARGETS.to(torch.int16),
        test_inputs=INPUTS[:10].clone().requires_grad_(),
        test_targets=TARGETS[:10].numpy().astype(numpy.uint8),
    )
    other = go(strategy, lambda: nn.Linear(4, 3), arrays)
    assert all(torch.equal(value, other.weights[name]) for name, value in plain.weights.items())
    assert plain.history[-1]["test_loss"] == other.history[-1]["test_loss"]


class Bag(nn.Module):
    """The mean of the embeddings of a sample's tokens; an embedding raises for what is no whole number."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(50, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.table(tokens)
        return result


@three_strategies
def test_tokens_train_as_in_one_process(strategy: str, go: Callable[..., TrainingRun]) -> None:
    generator = torch.Generator().manual_seed(6)
    tokens = torch.randint(50, (24, 5), generator=generator)
    dataset = data(train_inputs=tokens, test_inputs=tokens[:10])
    trained = go(strategy, Bag, dataset, epochs=1, batch_size=24, momentum=0.0, dtype="float64")
    torch.manual_seed(0)
    model = Bag().double()
    loss = cross_entropy(model(tokens), TARGETS)
    loss.backward()
    assert model.table.weight.grad is not None
    expected = model.table.weight.detach() - 0.1 * model.table.weight.grad
    torch.testing.assert_close(trained.weights["table.weight"], expected, rtol=0, atol=1e-14)
    assert trained.history[0]["train_loss"] == pytest.approx(loss.item(), rel=1e-12)


@three_strategies
@pytest.mark.parametrize("empty", ["train", "test"])
def test_an_empty_part_is_named_before_anything_starts(
    strategy: str, empty: str, go: Callable[..., TrainingRun], tmp_path: Path
) -> None:
    nothing = data(**{f"{empty}_inputs": INPUTS[:0], f"{empty}_targets": TARGETS[:0]})
    with pytest.raises(DataError, match=f"^{empty}_inputs of own: it has no samples"):
        go(strategy, lambda: nn.Linear(4, 3), nothing)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("given", [(INPUTS, TARGETS), torch.utils.data.TensorDataset(INPUTS, TARGETS), INPUTS])
def test_what_is_no_dataset(given: Any, go: Callable[..., TrainingRun]) -> None:
    with pytest.raises(DataError, match=rf"^dataset is of type {type(given).__name__}; a torch_parallel.Dataset"):
        go("ring_all_reduce", lambda: nn.Linear(4, 3), given)


def test_a_model_by_name_wants_images(go: Callable[..., TrainingRun]) -> None:
    with pytest.raises(DataError, match=r"train_inputs of own: its samples have the shape \[4\]; images"):
        go("ring_all_reduce", None, data())


# Models that write into what they are given.


class Doubles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x.mul_(2))
        return result


class Counts(nn.Module):
    """Of whole numbers, which it limits in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x.add_(1).to(self.layer.weight.dtype))
        return result


def loss_of(model: nn.Module, weights: dict[str, Tensor], inputs: Tensor) -> float:
    model.load_state_dict(weights)
    with torch.no_grad():
        return cross_entropy(model(inputs.clone()), TARGETS[: len(inputs)]).item()


@three_strategies
@pytest.mark.parametrize(
    ("make_model", "inputs"),
    [
        (Doubles, INPUTS),
        (lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3)), INPUTS),
        (lambda: nn.Sequential(nn.Hardtanh(-0.1, 0.1, inplace=True), nn.Linear(4, 3)), INPUTS),
        (Counts, (INPUTS * 10).int()),
    ],
    ids=["doubles", "relu", "hardtanh", "counts"],
)
@pytest.mark.exhaustive
def test_a_model_that_writes_into_its_batch_changes_no_data(
    strategy: str, make_model: Callable[[], nn.Module], inputs: Tensor, go: Callable[..., TrainingRun]
) -> None:
    """With a learning rate of 0 every epoch has the test loss of the first weights; a second ReLU would not show."""
    mine = inputs.clone()
    dataset = data(train_inputs=mine, test_inputs=mine[:10])
    trained = go(strategy, make_model, dataset, epochs=3, lr=0.0, momentum=0.0)
    expected = loss_of(make_model(), trained.weights, inputs[:10])
    assert [epoch["test_loss"] for epoch in trained.history] == [pytest.approx(expected, rel=1e-5)] * 3
    whole = loss_of(make_model(), trained.weights, inputs)
    assert [epoch["train_loss"] for epoch in trained.history] == [pytest.approx(whole, rel=1e-5)] * 3
    assert torch.equal(mine, inputs) and torch.equal(dataset.train_inputs, inputs)


@pytest.mark.parametrize("inputs", [INPUTS, INPUTS.double(), (INPUTS * 10).long()])
def test_evaluation_in_this_process_leaves_the_data_alone(inputs: Tensor) -> None:
    """As in the control scripts, whose test set is the caller's own."""
    given = inputs.clone()
    task = data(train_inputs=given, test_inputs=given[:10]).task
    model = nn.Sequential(Doubles() if inputs.is_floating_point() else Counts()).to(torch.float32)
    once, again = (evaluate(model, task, {"inputs": given, "targets": TARGETS}, torch.float32) for _ in range(2))
    assert once.loss_sum == again.loss_sum and torch.equal(given, inputs)


# Models whose output is not one row of logits a sample.


class Gives(nn.Module):
    """Logits of a linear layer, made into something else."""

    def __init__(self, make: Callable[[Tensor], Any], classes: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(4, classes)
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.layer(x))


MISFITS: list[tuple[str, Callable[[Tensor], Any], str]] = [
    ("tuple", lambda logits: (None, logits), "a NoneType"),
    ("dict", lambda logits: {"scores": logits}, "a dict"),
    ("nothing", lambda logits: None, "a NoneType"),
    ("places", lambda logits: logits.unsqueeze(2).expand(-1, -1, 5), r"a tensor \[4, 3, 5\] of torch.float32"),
    ("one", lambda logits: logits.sum(1), r"a tensor \[4\] of torch.float32"),
    ("few", lambda logits: logits[:, :2], r"a tensor \[4, 2\] of torch.float32"),
    ("classes", lambda logits: logits.argmax(1, keepdim=True).expand(-1, 3), r"a tensor \[4, 3\] of torch.int64"),
    ("halves", lambda logits: logits[:2], r"a tensor \[2, 3\] of torch.float32"),
]


@pytest.mark.parametrize(("make", "found"), [each[1:] for each in MISFITS], ids=[each[0] for each in MISFITS])
def test_an_output_that_is_no_logits(make: Callable[[Tensor], Any], found: str) -> None:
    with pytest.raises(OutputMisfit, match=rf"^the model gives {found} for a batch of 4; one tensor \[4, k\] .* 3, "):
        fitting(Gives(make)(INPUTS[:4]), 4, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("samples", "classes"), [(4, 3), (4, 9), (1, 3), (0, 3)])
def test_logits_are_taken_as_they_are(dtype: torch.dtype, samples: int, classes: int) -> None:
    logits = torch.zeros(samples, classes, dtype=dtype)
    assert fitting(logits, samples, 3) is logits


@three_strategies
@pytest.mark.parametrize("which", ["tuple", "places", "few"])
def test_it_ends_training_with_one_line(strategy: str, which: str, go: Callable[..., TrainingRun]) -> None:
    make = next(make for name, make, _ in MISFITS if name == which)
    with pytest.raises(WorkerFailure) as failed:
        go(strategy, lambda: Gives(make), data())
    assert "Traceback" not in str(failed.value)
    headline = str(failed.value).splitlines()[0]
    assert "OutputMisfit: the model gives a" in headline and "class_count" in headline


def test_an_output_that_is_wrong_in_evaluation_alone(go: Callable[..., TrainingRun]) -> None:
    class Inception(nn.Module):
        """Two outputs in one of its modes, as torchvision's has."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Any:
            logits = self.layer(x)
            return logits if self.training else {"main": logits, "beside": logits}

    with pytest.raises(WorkerFailure, match="OutputMisfit: the model gives a dict for a batch of 5"):
        go("ring_all_reduce", Inception, data())


def test_the_weights_are_on_disk_for_the_bare_model(go: Callable[..., TrainingRun]) -> None:
    for strategy in ("ring_all_reduce", "param_server", "ddp"):
        run = go(strategy, lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), data())
        assert Path(run.weights_file) == Path(run.folder, "weights.pt")
        assert not list(Path(run.folder).glob("*.tmp"))
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        model.load_state_dict(torch.load(run.weights_file))
        for name, value in model.state_dict().items():
            assert torch.equal(value, run.weights[name]) and value.dtype == run.weights[name].dtype
        with torch.no_grad():
            loss = cross_entropy(model.eval()(INPUTS[:10]), TARGETS[:10]).item()
        assert run.history[-1]["test_loss"] == pytest.approx(loss, rel=1e-5)


def test_more_logits_than_classes_are_right(go: Callable[..., TrainingRun]) -> None:
    """As of a model that was made for more; the loss is that of all its logits."""
    trained = go("ring_all_reduce", lambda: nn.Linear(4, 7), data(), lr=0.0, momentum=0.0)
    expected = loss_of(nn.Linear(4, 7), trained.weights, INPUTS)
    assert trained.history[0]["train_loss"] == pytest.approx(expected, rel=1e-5)
    assert math.isfinite(expected)
