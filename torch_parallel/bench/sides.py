"""The two sides of a comparison of training steps: a strategy of ours, and DistributedDataParallel at its best.

Both train the same model on the same samples with the same fused optimizer, in the plainest loop. So does a third, one
process alone on a worker's share of them, which is what scaling is measured against.
"""

from __future__ import annotations

import itertools
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from torch_parallel.communicator import Communicator
from torch_parallel.gradients.layout import NamedParameters
from torch_parallel.strategies import FROM_SCRATCH
from torch_parallel.strategies.builtin import at_its_best
from torch_parallel.strategies.shares import shard
from torch_parallel.training.compiling import compile_layers
from torch_parallel.training.optimizers import DEFAULT_LR, make_optimizer
from torch_parallel.workloads import build_model

FEATURES, CLASSES = 784, 10
IMAGES = {"cnn": (1, 28, 28), "mobilenet_v2": (3, 224, 224), "torchvision_vit": (3, 224, 224)}
"""Channels, height and width of what models other than "mlp" are fed with."""
DDP, ALONE = "ddp", "one process"
OVERLAPPING = ", overlapping"
"""Behind the name of a strategy that exchanges during backward."""


@dataclass(frozen=True)
class Setting:
    """What both sides train."""

    parameters: int  # of "mlp"
    batch_size: int  # of all workers together
    optimizer: str
    model: str = "mlp"
    image_side: int | None = None  # pixels, instead of those of IMAGES
    precision: str = "full"
    compile: bool = False
    bucket_mb: float = 25.0
    ddp_bucket_mb: float = 25.0  # torch's own default

    def make_model(self, device: torch.device | None = None) -> nn.Module:
        torch.manual_seed(0)
        model = self._mlp() if self.model == "mlp" else build_model(self.model, self.image_shape, CLASSES)
        model.to(device)
        if self.compile:
            compile_layers(model)
        return model

    def _mlp(self) -> nn.Module:
        """A multi-layer perceptron of about that many parameters, three quarters of them in its two square layers."""
        # 2 h^2 + (FEATURES + CLASSES + 3) h parameters
        linear = FEATURES + CLASSES + 3
        width = max(1, round((math.sqrt(linear**2 + 8 * self.parameters) - linear) / 4))
        sizes = (FEATURES, width, width, width, CLASSES)
        layers = [nn.Linear(inputs, outputs) for inputs, outputs in itertools.pairwise(sizes)]
        return nn.Sequential(*(part for layer in layers[:-1] for part in (layer, nn.ReLU())), layers[-1])

    @property
    def bucket_bytes(self) -> int:
        return int(self.bucket_mb * 2**20)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        channels, height, width = IMAGES[self.model]
        return channels, self.image_side or height, self.image_side or width

    def make_optimizer(self, parameters: NamedParameters) -> torch.optim.Optimizer:
        return make_optimizer(parameters, self.optimizer, DEFAULT_LR[self.optimizer], momentum=0.9, weight_decay=0.0)

    def samples(self, communicator: Communicator) -> tuple[Tensor, Tensor]:
        """This worker's of the batch that every step takes, where it trains; none on a server."""
        generator = torch.Generator().manual_seed(1)
        shape = (FEATURES,) if self.model == "mlp" else self.image_shape
        inputs = torch.randn(self.batch_size, *shape, generator=generator)
        targets = torch.randint(0, CLASSES, (self.batch_size,), generator=generator)
        mine = shard(self.batch_size, communicator.worker_index, communicator.worker_count)
        return inputs[mine].to(communicator.device), targets[mine].to(communicator.device)

    def autocast(self, device: torch.device) -> AbstractContextManager[None]:
        return torch.autocast(device.type, torch.bfloat16) if self.precision == "bf16" else nullcontext()


class OurSide:
    """One of our strategies; `name` may end in OVERLAPPING."""

    def __init__(self, communicator: Communicator, setting: Setting, name: str) -> None:
        self.device, self.setting = communicator.device, setting
        self.model = setting.make_model(self.device)
        self.inputs, self.targets = setting.samples(communicator)
        plain_name = name.removesuffix(OVERLAPPING)
        self.strategy = FROM_SCRATCH[plain_name](
            self.model,
            setting.make_optimizer,
            communicator,
            bucket_bytes=setting.bucket_bytes,
            **({} if name == plain_name else {"overlap": True}),
        )

    def step(self) -> None:
        self.strategy.begin_step()
        if len(self.targets):
            with self.strategy.synchronising(last=True):
                with self.setting.autocast(self.device):
                    loss = cross_entropy(self.model(self.inputs), self.targets, reduction="sum")
                (loss / self.setting.batch_size).backward()
        self.strategy.step()


class PlainSide:
    """One process alone: the model as it is, on the first worker and its share of the batch. The others are idle."""

    def __init__(self, communicator: Communicator, setting: Setting) -> None:
        self.device, self.setting, self.idle = communicator.device, setting, self.idles(communicator)
        if self.idle:
            return
        self.inputs, self.targets = setting.samples(communicator)
        self.factor = communicator.worker_count / setting.batch_size  # of the mean over the workers
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
            loss = cross_entropy(self.module(self.inputs), self.targets, reduction="sum") * self.factor
        loss.backward()
        self.optimizer.step()


class DdpSide(PlainSide):
    """DistributedDataParallel, on all workers. The process group must be there."""

    def idles(self, communicator: Communicator) -> bool:
        return communicator.is_server

    def wrapped(self) -> nn.Module:
        device_ids = [self.device.index] if self.device.type == "cuda" else None
        return at_its_best(self.model, device_ids=device_ids, bucket_cap_mb=self.setting.ddp_bucket_mb)


def make_side(communicator: Communicator, setting: Setting, name: str) -> OurSide | DdpSide:
    return DdpSide(communicator, setting) if name == DDP else OurSide(communicator, setting, name)


def difference_of(some: nn.Module, others: nn.Module) -> float:
    """How far apart the parameters of two models are, as a part of their norm.

    Of all together: a tensor of its own may be so small that rounding is a large part of it.
    """
    with torch.no_grad():
        pairs = [
            (one.double(), other.double()) for one, other in zip(some.parameters(), others.parameters(), strict=True)
        ]
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
