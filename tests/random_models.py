"""Random small models with what people's models have, and random runs to train them in, each drawn from one number.

A part of a model either trains as in one process, or is refused by its name. What each should be is said here, beside
the part, and never taken from the package.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

FEATURES, WIDTH, CLASSES = 6, 5, 3
DOUBLE = torch.float64
"""The run's type. Memory that a part shares or expands has it from the start: a cast would give each its own."""


@dataclass(frozen=True)
class Part:
    """Something that a model may have: what it puts into the model, and what forward does with it."""

    make: Callable[[Mixed], None]
    use: Callable[[Mixed, Tensor], Tensor] = lambda model, h: h
    refused: str | None = None
    """The name by which it is refused, where it is."""
    refused_alone: bool = True
    """Whether it is refused in a run of one process too."""
    counts_forwards: bool = False
    """Whether it depends on how often forward is called, which micro-batches change."""
    not_under: tuple[str, ...] = ()
    """Strategies whose own rules it breaks: torch's DistributedDataParallel wants the same graph in every step."""


class Mixed(nn.Module):
    """Two layers, and the parts of these names between them."""

    def __init__(self, parts: tuple[str, ...], checkpointed: bool, frozen_first: bool) -> None:
        super().__init__()
        self.parts, self.checkpointed = parts, checkpointed
        self.first, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.first.requires_grad_(not frozen_first)
        for part in parts:
            PARTS[part].make(self)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        twice = self.checkpointed and self.training
        return self.last(checkpoint(self.middle, h, use_reentrant=False) if twice else self.middle(h))

    def middle(self, h: Tensor) -> Tensor:
        for part in self.parts:
            h = PARTS[part].use(self, h)
        return h


def _put(**things: Any) -> Callable[[Mixed], None]:
    """Puts what each function makes under its name."""

    def make(model: Mixed) -> None:
        for name, thing in things.items():
            setattr(model, name, thing())

    return make


def _buffer(name: str, value: Callable[[], Tensor], **options: Any) -> Callable[[Mixed], None]:
    return lambda model: model.register_buffer(name, value(), **options)


def _tied(model: Mixed) -> None:
    model.tied, model.tied_again = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
    model.tied_again.weight = model.tied.weight


def _two_names(model: Mixed) -> None:
    model.one_name = nn.Linear(WIDTH, WIDTH)
    model.other_name = model.one_name


def _still_norm(model: Mixed) -> None:
    """BatchNorm whose statistics are to stay, in a model that trains."""
    model.still = nn.BatchNorm1d(WIDTH)
    model.still.running_mean.fill_(0.25)
    model.still.running_var.fill_(2.0)
    model.still.eval()


def _rotary(model: Mixed, h: Tensor) -> Tensor:
    pairs = torch.view_as_complex(h[:, :4].reshape(len(h), 2, 2).contiguous())
    return torch.cat([torch.view_as_real(pairs * model.turns).flatten(1), h[:, 4:]], 1)


def _counting(model: Mixed, h: Tensor) -> Tensor:
    if model.training and torch.is_grad_enabled():
        model.forwards += 1
    return h * (1 + model.forwards.to(h.dtype) / 1000)


def _replaced_buffer(model: Mixed, h: Tensor) -> Tensor:
    if model.training:
        model.level = model.level * 0.5 + 1  # another tensor in the buffer's place
    return h + model.level.to(h.dtype) / 100


def _kept_table(model: Mixed, h: Tensor) -> Tensor:
    if model.table is None or len(model.table) < len(h):
        model.table = h.new_ones(len(h), 1)
    return h * model.table[: len(h)]


def _clamp_data(model: Mixed, h: Tensor) -> Tensor:
    if model.training:
        model.clipped.weight.data.clamp_(-0.05, 0.05)
    return model.clipped(h)


def _clamp(model: Mixed, h: Tensor) -> Tensor:
    if model.training:
        with torch.no_grad():
            model.limited.weight.clamp_(-0.05, 0.05)
    return model.limited(h)


def _follow(model: Mixed, h: Tensor) -> Tensor:
    """A copy that follows the last layer slowly, as a momentum encoder does."""
    if model.training:
        with torch.no_grad():
            model.follower.mul_(0.9).add_(model.last.bias, alpha=0.1)
    return h + model.follower.mean()


def _same_data(model: Mixed) -> None:
    model.owner = nn.Linear(WIDTH, WIDTH, bias=False, dtype=DOUBLE)
    model.sharer = nn.Parameter(model.owner.weight.data)


def _alias(model: Mixed) -> None:
    model.seen = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)
    model.register_buffer("glance", model.seen.bias.data)


def _array(model: Mixed) -> None:
    """Seen by NumPy, which a function holds."""
    model.shown = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)
    array = model.shown.bias.detach().numpy()
    model.reading = lambda: array


def _late(model: Mixed, h: Tensor) -> Tensor:
    if model.late is None:
        model.late = nn.Linear(WIDTH, WIDTH).to(h)
    return model.late(h)


def _synchronised(model: Mixed) -> None:
    model.synchronised = nn.SyncBatchNorm(WIDTH)


def _spectral(model: Mixed) -> None:
    model.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


class Scaled(nn.Module):
    """Keeps a number that is no tensor."""

    scale = 1.5

    def get_extra_state(self) -> dict[str, float]:
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]

    def forward(self, h: Tensor) -> Tensor:
        return h * self.scale


PARTS: dict[str, Part] = {
    "tied": Part(_tied, lambda model, h: model.tied_again(torch.tanh(model.tied(h)))),
    "two names": Part(_two_names, lambda model, h: model.other_name(torch.tanh(model.one_name(h)))),
    "unused": Part(_put(unused=lambda: nn.Linear(2, 2))),
    "rarely used": Part(
        _put(rare=lambda: nn.Linear(WIDTH, WIDTH)),
        lambda model, h: torch.where(h[:, :1] > 0.5, model.rare(h), h) if bool((h[:, 0] > 0.5).any()) else h,
        not_under=("ddp",),
    ),
    "frozen": Part(
        _put(frozen=lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False)), lambda model, h: torch.tanh(model.frozen(h))
    ),
    "some columns of a table": Part(
        _put(columns=lambda: nn.Parameter(torch.randn(WIDTH, WIDTH + 3, dtype=DOUBLE)[:, 1 : WIDTH + 1])),
        lambda model, h: h @ model.columns / 3,
    ),
    "every other element": Part(
        _put(sparse_bias=lambda: nn.Parameter(torch.randn(2 * WIDTH, dtype=DOUBLE)[::2])),
        lambda model, h: h + model.sparse_bias,
    ),
    "two halves of one table": Part(
        lambda model: (
            [
                setattr(model, name, nn.Parameter(half))
                for name, half in zip("ab", torch.randn(2, WIDTH, dtype=DOUBLE), strict=True)
            ]
            and None
        ),
        lambda model, h: h * model.a + model.b,
    ),
    "transposed": Part(
        _put(turned=lambda: nn.Parameter(torch.randn(WIDTH, WIDTH).t())), lambda model, h: torch.tanh(h @ model.turned)
    ),
    "empty": Part(_put(empty=lambda: nn.Parameter(torch.empty(0, 2))), lambda model, h: h + model.empty.sum()),
    "a number": Part(_put(gain=lambda: nn.Parameter(torch.tensor(1.5))), lambda model, h: h * model.gain),
    "a type of its own": Part(
        _put(short=lambda: nn.Parameter(torch.linspace(0, 1, WIDTH, dtype=torch.bfloat16), requires_grad=False)),
        lambda model, h: h + (h.detach().to(torch.bfloat16) * model.short).to(h.dtype) / 8,
    ),
    "complex buffer": Part(_buffer("turns", lambda: torch.polar(torch.ones(2), torch.tensor([0.5, 2.0]))), _rotary),
    "frozen complex": Part(
        _put(phase=lambda: nn.Parameter(torch.full((WIDTH,), 1 + 2j), requires_grad=False)),
        lambda model, h: (h * model.phase).abs(),
    ),
    "expanded buffer": Part(
        _buffer("wide", lambda: torch.full((1,), 0.5, dtype=DOUBLE).expand(WIDTH)),
        lambda model, h: h * model.wide,
    ),
    "boolean buffer": Part(
        _buffer("mask", lambda: torch.arange(WIDTH) % 3 > 0), lambda model, h: h.masked_fill(~model.mask, 0.1)
    ),
    "infinite buffer": Part(
        _buffer("bias_mask", lambda: torch.tensor([0.0] * (WIDTH - 1) + [-torch.inf])),
        lambda model, h: h + torch.softmax(h + model.bias_mask, 1),
    ),
    "not persistent": Part(
        _buffer("positions", lambda: torch.linspace(0, 1, WIDTH), persistent=False),
        lambda model, h: h + model.positions,
    ),
    "counter": Part(_buffer("forwards", lambda: torch.tensor(0)), _counting, counts_forwards=True),
    "replaced buffer": Part(_buffer("level", lambda: torch.tensor(0.0)), _replaced_buffer, counts_forwards=True),
    "statistics that stay": Part(_still_norm, lambda model, h: model.still(h)),
    "dropout in eval": Part(_put(drop=lambda: nn.Dropout(0.5).eval()), lambda model, h: model.drop(h)),
    "kept table": Part(_put(table=lambda: None), _kept_table),
    "extra state": Part(_put(scaled=Scaled), lambda model, h: model.scaled(h)),
    "spectral norm": Part(_spectral, lambda model, h: torch.tanh(model.spectral(h)), counts_forwards=True),
    "writes in place": Part(lambda model: None, lambda model, h: h.clone().mul_(0.5)),
    "a buffer over a parameter": Part(_alias, lambda model, h: torch.tanh(model.seen(h)) + model.glance),
    "an array over a parameter": Part(
        _array, lambda model, h: torch.tanh(model.shown(h)) + torch.from_numpy(model.reading().copy())
    ),
    "clamped data": Part(
        _put(clipped=lambda: nn.Linear(WIDTH, WIDTH)), _clamp_data, refused="clipped.weight", refused_alone=False
    ),
    "clamped": Part(
        _put(limited=lambda: nn.Linear(WIDTH, WIDTH)), _clamp, refused="limited.weight", refused_alone=False
    ),
    "follows": Part(
        _put(follower=lambda: nn.Parameter(torch.zeros(CLASSES), requires_grad=False)),
        _follow,
        refused="follower",
        refused_alone=False,
        counts_forwards=True,
    ),
    "largest norm": Part(
        _put(table_of_words=lambda: nn.Embedding(4, WIDTH, max_norm=0.1)),
        lambda model, h: h + model.table_of_words((h[:, 0] > 0).long()),
        refused="table_of_words.weight",
        refused_alone=False,
    ),
    "synchronised": Part(_synchronised, refused="synchronised", refused_alone=False),
    "one memory for two": Part(_same_data, lambda model, h: h @ model.sharer + model.owner(h), refused="sharer"),
    "late": Part(_put(late=lambda: None), _late, refused="late.weight"),
    "sparse buffer": Part(_buffer("graph", lambda: torch.eye(WIDTH).to_sparse()), refused="graph"),
    "windows": Part(_buffer("windows", lambda: torch.arange(6.0, dtype=DOUBLE).unfold(0, 3, 1)), refused="windows"),
    "complex": Part(_put(wave=lambda: nn.Parameter(torch.full((2,), 1 + 2j))), refused="wave"),
    "expanded": Part(_put(broad=lambda: nn.Parameter(torch.ones(1, dtype=DOUBLE).expand(3))), refused="broad"),
    "lazy": Part(_put(lazy=lambda: nn.LazyLinear(3)), refused="lazy.weight"),
}


@dataclass(frozen=True)
class Trial:
    """One model and one run. `refused` is the name in the error that is expected, None where training is."""

    number: int
    parts: tuple[str, ...]
    checkpointed: bool
    frozen_first: bool
    workers: int
    sizes: tuple[int, int]  # training and test samples
    options: dict[str, Any]

    @property
    def strategy(self) -> str:
        return str(self.options["strategy"])

    @property
    def refusing(self) -> list[str]:
        """The names of what must be refused; any of them may be told."""
        alone = self.workers == 1 and not self.strategy.startswith("param_server")
        return [
            part.refused
            for part in map(PARTS.__getitem__, self.parts)
            if part.refused is not None and (part.refused_alone or not alone)
        ]

    def make_model(self) -> nn.Module:
        return Mixed(self.parts, self.checkpointed, self.frozen_first)


def make_trial(number: int, strategies: list[str]) -> Trial:
    """The same for the same number. One model in three has something that is refused somewhere."""
    choose = random.Random(number)
    strategy = choose.choice(strategies)
    workers = 1 if strategy == "data_parallel" else choose.choice((1, 2, 2, 3, 3, 4))
    held = [name for name, part in PARTS.items() if part.refused is None]
    refused = [name for name, part in PARTS.items() if part.refused is not None]
    parts = choose.sample(held, choose.randint(1, 4)) + choose.sample(refused, choose.random() < 0.33)
    options: dict[str, Any] = {
        "strategy": strategy,
        "batch_size": choose.randint(2, 9),
        "optimizer": choose.choice(("sgd", "adam", "adamw")),
        "weight_decay": choose.choice((0.0, 0.01)),
        "clip_norm": choose.choice((None, None, 0.5)),
        "not_finite": choose.choice(("stop", "stop", "skip")),
        "bucket_mb": choose.choice((None, 0.0003)),
        "accumulate": choose.choice((1, 1, 2)),
        "epochs": choose.choice((1, 2)),
        "seed": choose.randrange(1000),
    }
    parts = [name for name in parts if strategy not in PARTS[name].not_under]
    if any(PARTS[name].counts_forwards for name in parts) or strategy == "ddp":
        options["accumulate"] = 1
    if strategy.endswith("all_reduce") or strategy in ("param_server", "two_shot_in_place"):
        # autograd counts the versions of two halves together, and may refuse to go on where one is updated early
        options["overlap"] = choose.choice((True, False)) and "two halves of one table" not in parts
    counted = any(PARTS[name].counts_forwards for name in parts)
    return Trial(
        number,
        tuple(choose.sample(parts, len(parts))),
        # a checkpointed middle is run a second time, in backward
        checkpointed=choose.random() < 0.25 and not counted,
        frozen_first=choose.random() < 0.2,
        workers=workers,
        sizes=(choose.randint(2, 20), choose.randint(1, 7)),
        options=options,
    )
