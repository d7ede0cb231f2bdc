"""Tensors that are not those of the task are told, and what is wrong with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_parallel.workloads.errors import DataError
from torch_parallel.workloads.text import TextData

TOKENS, MASK = torch.zeros(2, 3, dtype=torch.int32), torch.ones(2, 3, dtype=torch.bool)
LABELS = torch.zeros(2, dtype=torch.int64)
PART = {"tokens": TOKENS, "mask": MASK, "labels": LABELS}


def made(task: Any = "classification", train: Any = PART, test: Any = PART) -> TextData:
    return TextData("name", "memory", task, train, test, vocabulary_size=5, length=3)


def test_one_that_is_right() -> None:
    assert made().train["labels"] is LABELS
    window = {"tokens": torch.zeros(1, 4, dtype=torch.uint8), "count": torch.tensor([3])}
    assert made("next_token", window, window).unit == "token"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"task": "translation"}, "task of name: it is 'translation'; one of classification, next_token, masked is"),
        ({"train": {}}, "train of name: it has nothing; for classification, tokens, mask, labels are wanted"),
        ({"task": "masked"}, "train of name: it has labels, mask, tokens; for masked, tokens, mask, targets are"),
        ({"test": PART | {"labels": LABELS[:1]}}, "test of name: its rows are tokens 2, mask 2, labels 1; as many of"),
        ({"test": {name: each[:0] for name, each in PART.items()}}, "test of name: its rows are tokens 0, mask 0, lab"),
        (
            {"train": PART | {"tokens": TOKENS[:, :2]}},
            r"train of name: its tokens have the shape \[2, 2\]; \[n, 3\] is",
        ),
    ],
)
def test_one_that_is_not(given: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"^{message}"):
        made(**given)
