"""A data set with which a rank of a control comes to grief. Its processes import this by name."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from torch_parallel.workloads import Dataset


@dataclass(frozen=True, eq=False)
class Trapped(Dataset):
    """Digits' shape; at the third batch the `caught` ranks run `statement`."""

    statement: str = "pass"
    caught: tuple[int, ...] = (1,)
    seen: tuple[list[int], ...] = ([],)

    def normalize(self, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        self.seen[0].append(len(inputs))
        if len(self.seen[0]) == 3 and dist.get_rank() in self.caught:
            exec(self.statement, {"os": os, "sys": sys})
        return super().normalize(inputs, dtype)


def trapped(statement: str, caught: tuple[int, ...]) -> Trapped:
    inputs, targets = torch.zeros(24, 1, 8, 8), torch.zeros(24, dtype=torch.int64)
    digits = {"name": "digits", "class_count": 10, "mean": (0.0,), "std": (1.0,), "source": "this test"}
    return Trapped(
        train_inputs=inputs, train_targets=targets, test_inputs=inputs, test_targets=targets, statement=statement,
        caught=caught, **digits,
    )  # fmt: skip
