"""A workload with which a rank of a control comes to grief. Its processes import this by name."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from torch_parallel.workloads import build_model
from torch_parallel.workloads.samples import Samples
from torch_parallel.workloads.task import Classification
from torch_parallel.workloads.tree import Tree, count
from torch_parallel.workloads.workload import Workload


@dataclass(frozen=True)
class Trapped(Classification):
    """From the third batch on, those of a trial among them, the `caught` ranks run `statement`."""

    statement: str = "pass"
    caught: tuple[int, ...] = (1,)
    seen: tuple[list[int], ...] = ([],)

    def prepare(self, batch: Tree, dtype: torch.dtype) -> Tree:
        self.seen[0].append(count(batch))
        if len(self.seen[0]) >= 3 and dist.get_rank() in self.caught:
            exec(self.statement, {"os": os, "sys": sys})
        return super().prepare(batch, dtype)


def trapped(statement: str, caught: tuple[int, ...]) -> Workload:
    part = {"inputs": torch.zeros(24, 1, 8, 8), "targets": torch.zeros(24, dtype=torch.int64)}
    task = Trapped(10, statement=statement, caught=caught)
    return Workload(partial(build_model, "cnn", (1, 8, 8), 10), task, Samples("digits", part, part, "this test"))
