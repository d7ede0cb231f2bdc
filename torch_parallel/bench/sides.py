"""The two sides of a comparison of training steps: a strategy of ours, and DistributedDataParallel at its best.

Both train the same model on the same samples with the same fused optimizer, in the plainest loop. So does a third, one
process alone on a worker's share of them, which is what scaling is measured against.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from torch_parallel.bench.setting import Setting
from torch_parallel.communicator import Communicator
from torch_parallel.strategies import FROM_SCRATCH
from torch_parallel.strategies.builtin import at_its_best
from torch_parallel.workloads.tree import count

DDP, ALONE = "ddp", "one process"
OVERLAPPING = ", overlapping"
"""Behind the name of a strategy that exchanges during backward."""


class OurSide:
    """One of our strategies; `name` may end in OVERLAPPING."""

    def __init__(self, communicator: Communicator, setting: Setting, name: str) -> None:
        self.device, self.setting = communicator.device, setting
        self.model = setting.make_model(self.device)
        self.task, self.batch, self.target_count = setting.batch(communicator)
        self.sample_count = count(self.batch)
        plain_name = name.removesuffix(OVERLAPPING)
        self.strategy = FROM_SCRATCH[plain_name](
            self.model,
            setting.make_optimizer,
            communicator,
            bucket_bytes=setting.bucket_bytes,
            overlap=name != plain_name,
        )

    def step(self) -> None:
        self.strategy.begin_step()
        if self.sample_count:
            with self.strategy.synchronising(last=True):
                with self.setting.autocast(self.device):
                    loss = self.task.loss_sum(self.task.forward(self.model, self.batch), self.batch)
                (loss / self.target_count).backward()
        self.strategy.step()


class PlainSide:
    """One process alone: the model as it is, on the first worker and its share of the batch. The others are idle."""

    def __init__(self, communicator: Communicator, setting: Setting) -> None:
        self.device, self.setting, self.idle = communicator.device, setting, self.idles(communicator)
        if self.idle:
            return
        self.task, self.batch, target_count = setting.batch(communicator)
        self.factor = communicator.worker_count / target_count  # of the mean over the workers
        self.model = setting.make_model(self.device)
        self.module = self.wrapped()
        self.optimizer = setting.make_optimizer(list(self.model.named_parameters()))

    def idles(self, communicator: Communicator) -> bool:
        return communicator.worker_index != 0

    def wrapped(self) -> nn.Module:
        """What forward is called of."""
        return self.model

    def step(self) -> None:
        if self.idle:
            return
        self.optimizer.zero_grad()
        with self.setting.autocast(self.device):
            loss = self.task.loss_sum(self.task.forward(self.module, self.batch), self.batch) * self.factor
        loss.backward()
        self.optimizer.step()


class DdpSide(PlainSide):
    """DistributedDataParallel, on all workers. The process group must be there."""

    def idles(self, communicator: Communicator) -> bool:
        return communicator.is_server

    def wrapped(self) -> nn.Module:
        device_ids = [self.device.index] if self.device.type == "cuda" else None
        return at_its_best(self.model, device_ids=device_ids, bucket_cap_mb=self.setting.ddp_bucket_mb)


def make_side(communicator: Communicator, setting: Setting, name: str) -> OurSide | PlainSide:
    """By its name; the process group must be there for DDP."""
    if name == ALONE:
        return PlainSide(communicator, setting)
    return DdpSide(communicator, setting) if name == DDP else OurSide(communicator, setting, name)


def difference_of(some: nn.Module, others: nn.Module) -> float:
    """How far apart the parameters of two models are, as a part of their norm."""
    return difference_between(list(some.parameters()), list(others.parameters()))


def difference_between(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """The same of tensors, on any devices.

    Of all together: a tensor of its own may be so small that rounding is a large part of it.
    """
    with torch.no_grad():
        pairs = [(one.double(), other.to(one).double()) for one, other in zip(some, others, strict=True)]
        apart = sum(float((one - other).square().sum()) for one, other in pairs)
        return math.sqrt(apart / (sum(float(other.square().sum()) for _, other in pairs) or 1.0))


def memory_bytes(device: torch.device) -> int:
    """What this process holds: of its GPU all that is not free, contexts included; else its Pss, 0 if it has none.

    The Pss is its memory with the pages of several processes divided among them.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    path = Path("/proc/self/smaps_rollup")
    if not path.exists():
        return 0
    return next(
        1024 * int(line.split()[1]) for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("Pss:")
    )
