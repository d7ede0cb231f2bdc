"""Training in one process, which every synchronous strategy is held against, and the same under a strategy.

The reference is a plain loop in one process. It shares nothing with the package but the models.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from torch_parallel import launch
from torch_parallel.communicator import Communicator
from torch_parallel.strategies import ASYNCHRONOUS, FROM_SCRATCH, Strategy
from torch_parallel.workloads import build_model

IMAGE = (1, 8, 8)
CLASSES = 5
# more samples than workers, fewer, one, and sizes that no worker count but 1 divides
BATCH_SIZES = (8, 13, 7, 3, 2, 1, 11, 5, 4, 1)


class Awkward(nn.Module):
    """Frozen, tied, never used, rarely used, empty and 0-dim parameters, odd sizes, a buffer, and a gradient that
    arrives transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 7, bias=False)
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.never = nn.Linear(3, 3)
        self.rare = nn.Linear(7, 7)
        self.tied = nn.Linear(7, 7, bias=False)
        self.tied_again = nn.Linear(7, 7, bias=False)
        self.tied_again.weight = self.tied.weight
        self.scale = nn.Parameter(torch.tensor(5.0))  # stays away from 0, near which rounding is magnified
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.transposed = nn.Parameter(torch.randn(CLASSES, 7))
        self.register_buffer("offset", torch.randn(7))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.frozen(self.first(x.flatten(1)))) + self.offset
        rarely = x[:, 0, 0, 0] > 1.2  # one sample in nine
        if rarely.any():
            hidden = torch.where(rarely[:, None], self.rare(hidden), hidden)
        hidden = self.tied_again(torch.tanh(self.tied(hidden)))
        return self.scale / 5 * hidden @ self.transposed.t() + self.empty.sum()


class Strided(nn.Module):
    """Parameters whose elements do not lie in the order of their indices."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 6, 3))
        self.convolutions.to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(CLASSES, 96).t())

    def forward(self, x: Tensor) -> Tensor:
        return self.convolutions(x).flatten(1) @ self.transposed / 10


class BackToFront(nn.Module):
    """Layers that are used in the reverse of the order in which they are registered."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.second, self.first = nn.Linear(32, CLASSES), nn.Linear(48, 32), nn.Linear(64, 48)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(torch.tanh(self.second(torch.tanh(self.first(x.flatten(1))))))
        return output


PLAIN_MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": partial(build_model, "mlp", IMAGE, CLASSES),
    "cnn": partial(build_model, "cnn", IMAGE, CLASSES),
    "awkward": Awkward,
}
MODELS = {**PLAIN_MODELS, "strided": Strided}
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.002, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.002, weight_decay=0.01),
    "fused sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True),
    "fused adam": lambda parameters: torch.optim.Adam(parameters, lr=0.002, fused=True),
}
# (model, optimizer, dtype, tolerance as a part of the tensor's norm)
SETTINGS = [
    *((model, optimizer, torch.float64, 1e-12) for model in PLAIN_MODELS for optimizer in ("sgd", "adam", "adamw")),
    *((model, "sgd", torch.float32, 1e-6) for model in PLAIN_MODELS),
    *(("strided", optimizer, torch.float64, 1e-12) for optimizer in ("fused sgd", "fused adam")),
]
BY_STEPS = {**FROM_SCRATCH, **ASYNCHRONOUS}
"""All of ours. The asynchronous ones belong here where they wait for everybody, unless they are told otherwise."""
PROCESS_COUNTS = {
    "ring_all_reduce": (1, 2, 3, 4),
    "param_server": (2, 3, 5, 9),
    "sharded_param_server": (1, 2, 3, 4),
    "param_server_bounded": (4,),
    "param_server_backup": (4,),
}


def samples(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(size, *IMAGE, generator=generator, dtype=torch.float64).to(dtype),
            torch.randint(0, CLASSES, (size,), generator=generator),
        )
        for size in BATCH_SIZES
    ]


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone().cpu() for name, parameter in model.named_parameters()}


def one_process(
    make_model: Callable[[], nn.Module], make_optimizer: Callable, dtype: torch.dtype, device: str = "cpu"
) -> list[dict]:
    """The parameters after every step of a plain loop over whole batches."""
    torch.manual_seed(0)
    model = make_model().to(device, dtype)
    optimizer = make_optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    history = []
    with exact_convolutions():
        for inputs, targets in samples(dtype):
            optimizer.zero_grad(set_to_none=True)
            cross_entropy(model(inputs.to(device)), targets.to(device)).backward()
            optimizer.step()
            history.append(snapshot(model))
    return history


def exact_convolutions() -> AbstractContextManager[None]:
    """On GPUs: in the same order every time, and float32 as such."""
    return torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False)


def all_strategies(communicator: Communicator, names: list[str], settings: list) -> list[list[list]]:
    """`many_processes` for several strategies in one run."""
    return [many_processes(communicator, BY_STEPS[name], settings) for name in names]


def many_processes(
    communicator: Communicator,
    strategy_class: type[Strategy],
    settings: list,
    bucket_bytes: int = 20_000,  # several buckets
    micro_batches: int = 1,
    **options: bool,
) -> list[list]:
    """For each of the settings what this rank holds after every step: rank 0 the parameters, the others digests."""
    what_to_keep = snapshot if communicator.rank == 0 else digest
    histories = []
    for make_model, make_optimizer, dtype in settings:
        torch.manual_seed(communicator.rank)  # differently: the strategy must give all ranks rank 0's weights
        model = make_model().to(communicator.device, dtype)
        strategy = strategy_class(
            model,
            lambda named, make=make_optimizer: make([parameter for _, parameter in named]),
            communicator,
            bucket_bytes=bucket_bytes,
            **options,
        )
        history = []
        for inputs, targets in samples(dtype):
            inputs, targets = inputs.to(communicator.device), targets.to(communicator.device)
            strategy.begin_step()
            if communicator.worker_index is not None:
                count = communicator.worker_count
                mine = slice(
                    len(targets) * communicator.worker_index // count,
                    len(targets) * (communicator.worker_index + 1) // count,
                )
                parts = list(zip(inputs[mine].chunk(micro_batches), targets[mine].chunk(micro_batches), strict=True))
                for number, (some_inputs, some_targets) in enumerate(parts, 1):
                    if len(some_targets):
                        with exact_convolutions():
                            loss = cross_entropy(model(some_inputs), some_targets, reduction="sum") / len(targets)
                            with strategy.synchronising(last=number == len(parts)):
                                loss.backward()
            strategy.step()
            history.append(what_to_keep(model))
        histories.append(history)
    return histories


def train_everywhere(
    strategy_class: type[Strategy],
    n: int,
    settings: list,
    *,
    device: str = "cpu",
    performer: str = "auto",
    **options: int,
) -> list[list[list]]:
    """By rank, setting and step."""
    where = {"device": device, "performer": performer, "deadline_s": 30 if device == "cpu" else 60}
    servers = strategy_class.server_count
    return launch(partial(many_processes, **options), n, strategy_class, settings, server_count=servers, **where)


def digest(model_or_snapshot: nn.Module | dict[str, Tensor]) -> str:
    """Equal for equal bits of all parameters, and only then."""
    parameters = snapshot(model_or_snapshot) if isinstance(model_or_snapshot, nn.Module) else model_or_snapshot
    digested = hashlib.blake2b()
    for name, parameter in parameters.items():
        digested.update(name.encode() + parameter.numpy().tobytes())
    return digested.hexdigest()


def largest_deviation(history: list[dict], reference: list[dict]) -> float:
    """Over all steps and tensors, the norm of the difference as a part of the tensor's norm."""
    worst = 0.0
    for ours, theirs in zip(history, reference, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            if ours[name].numel():
                difference = torch.linalg.vector_norm((ours[name] - theirs[name]).double())
                worst = max(worst, (difference / torch.linalg.vector_norm(theirs[name].double())).item())
    return worst
