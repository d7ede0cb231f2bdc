"""Tasks other than one class a sample: under every strategy as in one process, however targets are spread."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from torch_parallel import RunConfig, Samples, Task, WorkerFailure, Workload, train
from torch_parallel.strategies import STRATEGIES, SYNCHRONOUS
from torch_parallel.training.config import ConfigError
from torch_parallel.training.sampler import epoch_order
from torch_parallel.workloads import DataError
from torch_parallel.workloads.own import load_own
from torch_parallel.workloads.task import IGNORED, MaskedTokens, NextToken, class_metrics, counts_by_class
from torch_parallel.workloads.tree import Tree

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY, LENGTH = 11, 6
BATCH, EPOCHS, LR = 5, 2, 0.5
"""23 samples: 5 steps an epoch, of which the last has 3 samples, so that one of four workers has none."""


class Words(nn.Module):
    """A small model of tokens, which gives what transformers give: an object, a dict or a tuple with the logits."""

    def __init__(self, gives: str) -> None:
        super().__init__()
        self.gives = gives
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.mixing = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Any:
        h = self.embedding(tokens)
        if attention_mask is not None:
            h = h * attention_mask.unsqueeze(-1)
        logits = self.head(self.mixing(h)[0])
        return {"tensor": logits, "dict": {"logits": logits}, "tuple": (logits, h)}[self.gives]


def next_token() -> Workload:
    """Samples have 0 to 6 targets; those of one whole step's worker may have none."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCABULARY, (23, LENGTH + 1), generator=generator, dtype=torch.uint8)
    count = torch.randint(LENGTH + 1, (23,), generator=generator)
    count[epoch_order(23, 0, 1)[:2]] = 0  # the share of the first of three workers in the first step
    samples = {"tokens": tokens, "count": count}
    part = {name: each[:9] for name, each in samples.items()}
    return Workload(lambda: Words("dict"), NextToken(VOCABULARY), Samples("bytes", samples, part))


def masked_tokens() -> Workload:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (23, LENGTH), generator=generator, dtype=torch.int32)
    hidden = torch.rand(23, LENGTH, generator=generator) < 0.2
    targets = torch.where(hidden, tokens.long(), IGNORED)
    samples = {"tokens": tokens.masked_fill(hidden, 1), "mask": tokens != 0, "targets": targets}
    part = {name: each[:9] for name, each in samples.items()}
    return Workload(lambda: Words("tuple"), MaskedTokens(VOCABULARY), Samples("hidden", samples, part))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(2, 3)

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.tanh(self.left(left)) * self.right(right)
        return both[:, 0], both[:, 1:]


class Weighted(Task):
    """A regression and a classification, whose samples count 0 to 3 times."""

    def forward(self, model: Callable[..., Any], batch: Tree) -> Any:
        (left, right), _ = batch
        return model(left, right)

    def loss_sum(self, output: Any, batch: Tree) -> Tensor:
        (value, logits), (_, (number, kind, weight)) = output, batch
        losses = mse_loss(value, number, reduction="none") + cross_entropy(logits, kind, reduction="none")
        return (losses * weight).sum()

    def target_counts(self, samples: Tree) -> Tensor:
        _, (_, _, weight) = samples
        return weight

    def metric_sums(self, output: Any, batch: Tree) -> dict[str, Tensor]:
        return {"errors": (output[0] - batch[1][0]).abs().sum(), "samples": torch.tensor(len(output[0]))}

    def metrics(self, sums: dict[str, Tensor], targets: int, loss: float) -> dict[str, float]:
        return {"mean_error": float(sums["errors"] / sums["samples"])}


def two_inputs() -> Workload:
    generator = torch.Generator().manual_seed(4)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weight = torch.randint(4, (23,), generator=generator)
    samples = (drawn(23, 4), drawn(23, 2)), (drawn(23), torch.randint(2, (23,), generator=generator), weight)
    part = (samples[0][0][:9], samples[0][1][:9]), tuple(each[:9] for each in samples[1])
    return Workload(TwoInputs, Weighted(), Samples("pairs", samples, part))


WORKLOADS = {"next token": next_token, "masked tokens": masked_tokens, "two inputs": two_inputs}


def losses_of(kind: str, model: nn.Module, part: Tree, rows: Tensor) -> tuple[Tensor, int]:
    """Sum and number, sample by sample: no mask, no divisor and no ignored target as the package has them."""
    total, targets = torch.zeros((), dtype=torch.float64), 0
    for row in rows.tolist():
        if kind == "two inputs":
            (left, right), (number, sort, weight) = part
            value, logits = model(left[row : row + 1], right[row : row + 1])
            loss = (value[0] - number[row]) ** 2 - torch.log_softmax(logits[0], 0)[sort[row]]
            total, targets = total + loss * int(weight[row]), targets + int(weight[row])
            continue
        tokens = part["tokens"][row].long()
        if kind == "next token":
            logits, wanted = model(tokens[None, :-1])["logits"][0], tokens[1:]
            places = list(range(int(part["count"][row])))
        else:
            logits, wanted = model(tokens[None], part["mask"][row][None])[0][0], part["targets"][row]
            places = [place for place in range(LENGTH) if wanted[place] >= 0]
        for place in places:
            total = total - torch.log_softmax(logits[place], 0)[wanted[place]]
        targets += len(places)
    return total, targets


def in_one_process(kind: str, workload: Workload) -> tuple[dict[str, Tensor], float, float]:
    """Weights, mean training loss of the last epoch, and mean test loss at the end."""
    torch.manual_seed(0)
    model = workload.make_model().to(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    train_loss = 0.0
    for epoch in range(1, EPOCHS + 1):
        loss_sum, seen = 0.0, 0
        for step in epoch_order(23, 0, epoch).split(BATCH):
            loss, targets = losses_of(kind, model, workload.samples.train, step)
            optimizer.zero_grad()
            (loss / targets).backward()
            optimizer.step()
            loss_sum, seen = loss_sum + loss.item(), seen + targets
        train_loss = loss_sum / seen
    test, count = losses_of(kind, model, workload.samples.test, torch.arange(9))
    return model.state_dict(), train_loss, test.item() / count


def go(folder: Path, workload: Workload, strategy: str, workers: int, **options: Any) -> Any:
    config = RunConfig(
        strategy=strategy, n_gpus=workers + STRATEGIES[strategy].server_count, device="cpu", dtype="float64", lr=LR,
        batch_size=BATCH, epochs=EPOCHS, deadline_s=60, results_dir=str(folder), **options,
    )  # fmt: skip
    return train(config, workload=workload, verbose=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", WORKLOADS)
@pytest.mark.parametrize("strategy", [*SYNCHRONOUS, "param_server_bounded", "param_server_backup"])
def test_every_strategy_trains_as_one_process(kind: str, strategy: str, tmp_path: Path) -> None:
    workload = WORKLOADS[kind]()
    weights, train_loss, test_loss = in_one_process(kind, workload)
    accumulates = {} if strategy == "data_parallel" else {"accumulate": 2}
    trained = go(tmp_path, workload, strategy, workers=3, **accumulates)
    for name, value in weights.items():
        bar = 1e-12 * max(float(value.norm()), 1e-3)
        assert float((trained.weights[name] - value).norm()) <= bar, name
    assert trained.history[-1]["train_loss"] == pytest.approx(train_loss, rel=1e-9)
    assert trained.history[-1]["test_loss"] == pytest.approx(test_loss, rel=1e-9)


@pytest.mark.parametrize("aggregate", ["mean", "sum"])
def test_other_aggregates_divide_by_targets(aggregate: str, tmp_path: Path) -> None:
    """One step with learning rate 1 from known weights: the means of the workers' means, worked out apart."""
    workload = two_inputs()
    samples = Samples("pairs", *(first_of(part, 5) for part in (workload.samples.train, workload.samples.test)))
    config = RunConfig(
        n_gpus=3, device="cpu", dtype="float64", lr=1.0, momentum=0.0, batch_size=5, epochs=1, aggregate=aggregate,
        results_dir=str(tmp_path),
    )  # fmt: skip
    trained = train(config, workload=Workload(TwoInputs, Weighted(), samples), verbose=False)
    torch.manual_seed(0)
    model = TwoInputs().to(torch.float64)
    means = []
    for share in epoch_order(5, 0, 1).tensor_split(3):
        loss, targets = losses_of("two inputs", model, samples.train, share)
        means += [loss / targets] if targets else []
    (sum(means) / (len(means) if aggregate == "mean" else 1)).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(trained.weights[name], parameter - parameter.grad, rtol=1e-12, atol=1e-14), name


def first_of(part: Tree, count: int) -> Tree:
    (left, right), (number, kind, weight) = part
    return (left[:count], right[:count]), (number[:count], kind[:count], weight[:count])


def test_a_task_of_ones_own_is_recorded(tmp_path: Path) -> None:
    trained = go(tmp_path, two_inputs(), "ring_all_reduce", workers=2)
    model = TwoInputs().to(torch.float64)
    model.load_state_dict(trained.weights)
    (left, right), (number, _, _) = two_inputs().samples.test
    error = float((model(left, right)[0] - number).detach().abs().mean())
    assert trained.history[-1]["metrics"] == {"mean_error": pytest.approx(error, rel=1e-9)}
    with open(Path(trained.folder) / "runs.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert json.loads(rows[-1]["metrics"]) == {"mean_error": pytest.approx(error, rel=1e-9)}


def test_classes_are_counted_as_scikit_learn_does() -> None:
    from sklearn.metrics import accuracy_score, precision_recall_fscore_support

    generator = torch.Generator().manual_seed(1)
    wanted = torch.randint(4, (200,), generator=generator)  # class 4 never comes, class 5 is only predicted
    predicted = torch.where(torch.rand(200, generator=generator) < 0.6, wanted, torch.full_like(wanted, 5))
    sums = counts_by_class(predicted, wanted, class_count=6)
    found = class_metrics(sums, 200)
    precision, recall, f1, _ = precision_recall_fscore_support(wanted, predicted, average="macro", zero_division=0)
    assert found["accuracy"] == pytest.approx(accuracy_score(wanted, predicted), rel=1e-12)
    assert [found["precision"], found["recall"], found["f1"]] == pytest.approx([precision, recall, f1], rel=1e-12)


class Broken(Weighted):
    def __init__(self, counts: Any) -> None:
        self.counts = counts

    def target_counts(self, samples: Tree) -> Any:
        return self.counts


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        (torch.ones(22, dtype=torch.int64), r"it gives \[22\] for the training part of pairs; \[23\] whole numbers"),
        (torch.ones(23), r"it gives torch.float32 for .*give \.long\(\) if they are"),
        (torch.full((23,), -1), "it gives -1 for a sample for the training part of pairs; .* none below 0"),
        (torch.zeros(23, dtype=torch.int64), "the training part of pairs has no target"),
        (7, "it gives one number, 7 for the training part of pairs"),
        ("ones", "it gives something of type str for"),
        ([1] * 22 + ["one"], "it gives something of type list for the training part of pairs"),
        ([1] * 22, r"it gives \[22\] for the training part of pairs"),
        (numpy.ones(23), "it gives torch.float64 for the training part of pairs"),
    ],
)
def test_counts_that_are_none(counts: Any, said: str, tmp_path: Path) -> None:
    own = two_inputs()
    with pytest.raises(DataError, match=said):
        go(tmp_path, Workload(own.make_model, Broken(counts), own.samples), "ring_all_reduce", 2)


class Losses(Weighted):
    """One loss a sample, where their sum is wanted."""

    def loss_sum(self, output: Any, batch: Tree) -> Tensor:
        return (output[0] - batch[1][0]).abs()


def test_a_loss_that_is_no_sum_is_told_in_one_line(tmp_path: Path) -> None:
    own = two_inputs()
    # before the start, or, where the trial takes too long, in the first step
    with pytest.raises(
        (DataError, WorkerFailure), match=r"loss_sum of Losses gives a tensor \[[38]\] of torch.float64"
    ):
        go(tmp_path, Workload(own.make_model, Losses(), own.samples), "ring_all_reduce", 2)


@pytest.mark.parametrize(
    ("train_part", "test_part", "said"),
    [
        ({}, {}, "train of mine: it holds no tensor"),
        ({"a": torch.ones(3), "b": torch.ones(2)}, {}, "train/b of mine: it has 2 rows; as many as the 3 of train/a"),
        ({"a": torch.ones(3)}, {"b": torch.ones(3)}, r"test of mine: it has the parts \['b'\]"),
        ({"a": torch.ones(3, 2)}, {"a": torch.ones(3, 4)}, r"test/a of mine: its samples are \[4\]"),
        ([torch.ones(3), "text"], [torch.ones(3), "text"], "train/1 of mine: it is of type str"),
        ((torch.ones(3), torch.tensor(1.0)), (), "train/1 of mine: it is a single number"),
    ],
)
def test_samples_that_are_wrong(train_part: Tree, test_part: Tree, said: str) -> None:
    with pytest.raises(DataError, match=f"^{said}"):
        Samples("mine", train_part, test_part)


MINE = """
import torch
from torch import nn
from torch_parallel import Samples, Task, Workload

class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.number = nn.Linear(6, 2), nn.Linear(1, 2)

    def forward(self, image, number):
        return self.image(image) + self.number(number)

class Own(Task):
    def forward(self, model, batch):
        return model(batch["image"], batch["number"])

    def loss_sum(self, output, batch):
        return (output - batch["wanted"]).abs().sum()

def make():
    torch.manual_seed(1)
    part = {"image": torch.randn(40, 6), "number": torch.randn(40, 1), "wanted": torch.randn(40, 2)}
    return Workload(Both, Own(), Samples("mine", part, part))

def wrong():
    return Both()

number = 3
"""


@pytest.mark.parametrize("command", [["train.py", "--n_gpus", "2"], ["ring_all_reduce_builtin.py", "--n_gpus", "2"]])
@pytest.mark.exhaustive
def test_a_workload_of_a_file(command: list[str], tmp_path: Path) -> None:
    """The same losses by ours and by the control."""
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    words = [
        sys.executable,
        str(ROOT / command[0]),
        *command[1:],
        "--device",
        "cpu",
        "--workload",
        f"{tmp_path}/mine.py:make",
    ]
    words += ["--epochs", "2", "--batch_size", "7", "--lr", "0.01", "--results_dir", str(tmp_path / "results")]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=200, cwd=tmp_path, env={**os.environ})
    assert ended.returncode == 0, ended.stderr
    (table,) = tmp_path.glob("results/*/runs.csv")
    with open(table, newline="", encoding="utf-8") as file:
        losses = [float(row["train_loss"]) for row in csv.DictReader(file) if row["rank"] == "0"]
    assert losses == pytest.approx(losses_of_mine(), rel=1e-4)


def losses_of_mine() -> list[float]:
    space: dict[str, Any] = {"__name__": "mine"}
    exec(MINE, space)
    workload = space["make"]()
    torch.manual_seed(0)
    model, part, means = workload.make_model(), workload.samples.train, []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for epoch in (1, 2):
        loss_sum = 0.0
        for step in epoch_order(40, 0, epoch).split(7):
            loss = (model(part["image"][step], part["number"][step]) - part["wanted"][step]).abs().sum()
            optimizer.zero_grad()
            (loss / len(step)).backward()
            optimizer.step()
            loss_sum += loss.item()
        means.append(loss_sum / 40)
    return means


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("mine.py", "give a file and a function in it"),
        ("none.py:make", "there is no file"),
        ("mine.py:none", "there is no function none in"),
        ("mine.py:number", "there is no function number in"),
        ("mine.py:wrong", "it returned something of type Both; make_model, task and samples are wanted"),
        ("no_such_module:make", "there is no module no_such_module"),
    ],
)
def test_places_where_there_is_no_workload(
    place: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(DataError, match=f"^--workload {place}: {said}"):
        load_own(place)
    sys.modules.pop("mine", None)


class Half(Task):
    def loss_sum(self, output: Any, batch: Tree) -> Tensor:
        return output.square().sum()


def test_samples_may_be_one_tensor(tmp_path: Path) -> None:
    """Of float32, in a run of float64: floats are fed in the run's type."""
    samples = Samples("bare", torch.ones(8, 5), torch.ones(4, 5))
    config = RunConfig(n_gpus=2, device="cpu", dtype="float64", lr=0.0, epochs=1, results_dir=str(tmp_path))
    trained = train(config, workload=Workload(lambda: nn.Linear(5, 3), Half(), samples), verbose=False)
    torch.manual_seed(0)
    output = nn.Linear(5, 3).to(torch.float64)(torch.ones(5, dtype=torch.float64))
    assert trained.history[0]["test_loss"] == pytest.approx(float(output.square().sum().detach()), rel=1e-12)


def test_a_task_without_a_loss_is_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^workload is a Task without a loss: give it a method loss_sum"):
        go(tmp_path, Workload(TwoInputs, Task(), two_inputs().samples), "ring_all_reduce", 2)


@pytest.mark.parametrize("option", [{"dataset": "digits"}, {"length": 5}, {"model_size": "tiny"}, {"pretrained": "x"}])
def test_a_workload_brings_its_own_model_and_data(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^--{next(iter(option))} \w+: a workload brings its own"):
        RunConfig(workload="mine.py:make", **option)
