"""Tasks other than one class a sample: under every strategy as in one process, however targets are spread."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from torch_parallel import RunConfig, Samples, Task, Workload, train
from torch_parallel.strategies import STRATEGIES, SYNCHRONOUS
from torch_parallel.training.sampler import epoch_order
from torch_parallel.workloads.task import IGNORED, MaskedTokens, NextToken
from torch_parallel.workloads.tree import Tree

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
