"""Torch's own as strategies of the same loop: they train what one process trains, whatever the options."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_parallel import Dataset, RunConfig, WorkerFailure, train
from torch_parallel.strategies import BUILTIN
from torch_parallel.workloads import load_dataset

builtin = pytest.mark.parametrize("strategy", list(BUILTIN))


def trained(
    folder: Path, strategy: str, n: int, make_model: Any = None, epochs: int = 1, **options: Any
) -> dict[str, Tensor]:
    config = RunConfig(
        strategy=strategy,
        n_gpus=n,
        dataset="digits",
        epochs=epochs,
        dtype="float64",
        device="cpu",
        results_dir=str(folder),
        **options,
    )
    return train(config, make_model=make_model, verbose=False).weights


@pytest.mark.exhaustive
@builtin
@pytest.mark.parametrize(
    "options",
    [
        {"train_size": 7, "batch_size": 1},  # fewer samples than workers in every step
        {"train_size": 50, "batch_size": 16, "clip_norm": 0.05},
        {"train_size": 50, "batch_size": 16, "accumulate": 3},
    ],
    ids=lambda options: list(options)[-1],
)
def test_they_train_what_one_process_trains(tmp_path: Path, strategy: str, options: dict[str, Any]) -> None:
    weights, reference = (trained(tmp_path, name, n, **options) for name, n in ((strategy, 3), ("ring_all_reduce", 1)))
    for name, value in reference.items():
        assert torch.linalg.vector_norm(weights[name] - value) <= 1e-12 * torch.linalg.vector_norm(value)


@builtin
def test_a_gradient_that_is_not_finite_stops_them_too(tmp_path: Path, strategy: str) -> None:
    with pytest.raises(WorkerFailure, match=r"the gradient of .* is NaN or infinite in step \d+ of epoch 1"):
        trained(tmp_path, strategy, 2, train_size=200, batch_size=10, lr=1e200)


class Fussy(nn.Module):
    """In training, logits that are NaN for the two images with the most ink."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        ink = images.flatten(1).sum(1, keepdim=True)
        logits: Tensor = self.layer(images.flatten(1))
        return logits + torch.where(ink > MOST_INK, torch.nan, 0.0) if self.training else logits


def ink_of(dataset: Dataset) -> Tensor:
    return dataset.normalize(dataset.train_inputs, torch.float64).flatten(1).sum(1)


FEW, _ = load_dataset("digits", None, 200, 0)
MOST_INK = float(ink_of(FEW).sort().values[-3:-1].mean())


@builtin
def test_or_all_ranks_skip_the_step(tmp_path: Path, strategy: str) -> None:
    """Of 20 steps that with one of the two, or those."""
    weights = trained(tmp_path, strategy, 2, make_model=Fussy, train_size=200, batch_size=10, not_finite="skip")
    assert all(torch.isfinite(value).all() for value in weights.values())
    (table,) = tmp_path.glob("*/runs.csv")
    with open(table, newline="", encoding="utf-8") as file:
        skipped = {int(row["skipped_steps"]) for row in csv.DictReader(file)}
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1)).split(10)
    bad = set((ink_of(FEW) > MOST_INK).nonzero().flatten().tolist())
    assert len(bad) == 2 and skipped == {sum(bool(bad & set(batch.tolist())) for batch in order)}


class PartlyUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(64, 10), nn.Linear(3, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.used(images.flatten(1))


def test_ddp_takes_unused_parameters_but_with_accumulation_says_what_would_help(tmp_path: Path) -> None:
    options: dict[str, Any] = {"train_size": 64, "batch_size": 16, "make_model": PartlyUsed}
    before = trained(tmp_path, "ring_all_reduce", 1, **options, lr=0.0)["unused.weight"]
    assert torch.equal(trained(tmp_path, "ddp", 2, **options)["unused.weight"], before)
    with pytest.raises(WorkerFailure, match="leave --accumulate out, freeze what is not used, or take another"):
        trained(tmp_path, "ddp", 2, **options, accumulate=2)


class NeedsSamples(nn.Module):
    """Takes no empty batch, as many transformers do not, and draws, and keeps count of samples in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(64, 10), nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        if not len(images):
            raise RuntimeError("cannot reshape a tensor of 0 elements")
        if self.training:
            self.seen += len(images)
        return self.layer(self.dropout(images.flatten(1)))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_ddp_gives_no_rank_an_empty_batch_and_trains_as_the_ring(accumulate: int, tmp_path: Path) -> None:
    """Steps of 5, 5 and 1 samples on three workers: in the last one two have none, and draw nothing."""
    options: dict[str, Any] = {"train_size": 11, "batch_size": 5, "make_model": NeedsSamples, "accumulate": accumulate}
    ring, ddp = (trained(tmp_path, name, 3, epochs=3, **options) for name in ("ring_all_reduce", "ddp"))
    for name, value in ring.items():
        assert torch.linalg.vector_norm(ddp[name] - value) <= 1e-12 * torch.linalg.vector_norm(value), name
    assert float(ddp["seen"]) == 3 * (2 + 2 + 1)  # of the first worker
