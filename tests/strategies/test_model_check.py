"""What is compared over the ranks, what is refused by name, and two strategies beside each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_parallel import WorkerFailure, launch
from torch_parallel.collectives import RING_ALL_REDUCE, register
from torch_parallel.collectives.registry import RegistryError
from torch_parallel.communicator import Communicator
from torch_parallel.gradients.layout import (
    as_bytes,
    lies_over_itself,
    overlap,
    read_by_others,
    without_gaps,
    written_once,
)
from torch_parallel.strategies import FROM_SCRATCH, STRATEGIES
from torch_parallel.strategies.model_check import UnsupportedModel, check_model
from torch_parallel.strategies.replicas import broadcast_all, extra_state

KINDS = ("ring_all_reduce", "two_shot_in_place", "all_reduce", "param_server", "sharded_param_server")


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.1)


# ---- how tensors lie in memory ----

TABLE = torch.arange(24.0).view(4, 6)


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        (TABLE, TABLE[1], True),
        (TABLE[:2], TABLE[2:], False),
        (TABLE[:2], TABLE[1:], True),
        (TABLE[:, :2], TABLE[:, 2:], False),  # side by side in every row
        (TABLE[:, :3], TABLE[:, 2:], True),
        (TABLE[:, ::2], TABLE[:, 1::2], False),
        (TABLE[0, :1].expand(3), TABLE[0], True),
        (TABLE[0, :1].expand(3), TABLE[0, 1:], False),
        (TABLE[:0], TABLE, False),
    ],
)
def test_overlap(one: Tensor, other: Tensor, common: bool) -> None:
    places = [
        set(each.view(-1).tolist() if each.is_contiguous() else each.reshape(-1).tolist()) for each in (one, other)
    ]
    assert bool(places[0] & places[1]) == common  # every element of the table is its own place
    assert overlap(one, other) == overlap(other, one) == common


@pytest.mark.parametrize(
    ("tensor", "over_itself", "gaps"),
    [
        (torch.ones(2, 3), False, False),
        (torch.ones(2, 3).t(), False, False),
        (torch.ones(4, 6)[:, :2], False, True),
        (torch.ones(1).expand(3), True, True),
        (torch.ones(2, 1).expand(2, 3), True, True),
        (torch.arange(6.0).unfold(0, 3, 1), True, True),
        (torch.ones(1, 1).expand(1, 1), False, False),
        (torch.tensor(1.0), False, False),
        (torch.ones(0, 3), False, False),
    ],
)
def test_how_a_tensor_lies(tensor: Tensor, over_itself: bool, gaps: bool) -> None:
    assert lies_over_itself(tensor) == over_itself
    assert without_gaps(tensor) != gaps or tensor.numel() == 0


def test_what_is_written_once_the_whole_tensor_holds() -> None:
    wide = torch.zeros(2, 1).expand(2, 3)
    written_once(wide).copy_(torch.tensor([[1.0], [2.0]]))
    assert wide.tolist() == [[1.0] * 3, [2.0] * 3]


@pytest.mark.parametrize("tensor", [TABLE.t(), TABLE[:, 1:3], torch.ones(1).expand(3), torch.tensor([1 + 2j]).conj()])
def test_bytes_come_in_the_order_of_indices(tensor: Tensor) -> None:
    assert bytes(as_bytes(tensor).tolist()) == tensor.resolve_conj().contiguous().numpy().tobytes()


# ---- what is refused, and what is compared ----


@dataclass
class Box:
    inside: Any


def reader(holder: str, weight: Tensor) -> Callable[[], Tensor]:
    """Holds the memory of `weight`, [2, 2], in some way, and gives what reads the first row there."""
    view = weight.detach()
    if holder == "a NumPy array":
        array = view.numpy()
        return lambda: torch.from_numpy(array[0].copy())
    if holder == "a dataclass":
        box = Box(Box(view))
        return lambda: box.inside.inside[0]
    if holder == "deep lists":
        deep = [[[[[view]]]]]
        return lambda: deep[0][0][0][0][0][0]
    row = {"a view": view[0], "its data": weight.data[0]}[holder]
    return lambda: row


HOLDERS = ("a view", "its data", "a dataclass", "deep lists", "a NumPy array")


class Kept(nn.Module):
    """Adds to its output what it reads behind the parameter's back."""

    def __init__(self, holder: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 2, dtype=torch.float64)
        if holder == "made of NumPy":
            table = self.layer.weight.detach().numpy().copy()
            self.layer.weight = nn.Parameter(torch.from_numpy(table))
            self.read = lambda: torch.from_numpy(table[0].copy())
        else:
            self.read = reader(holder, self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (1 + self.read())


@pytest.mark.parametrize("name", ["param_server", "sharded_param_server", "param_server_bounded", "ring_all_reduce"])
def test_what_else_holds_the_memory_of_a_parameter_sees_every_update(name: str) -> None:
    holders = [*HOLDERS, "made of NumPy"]
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).view(4, 2)

    def work(communicator: Communicator) -> list[list[float]]:
        index, count = communicator.worker_index, communicator.worker_count
        share = slice(0, 0) if index is None else slice(4 * index // count, 4 * (index + 1) // count)
        weights = []
        for holder in holders:
            model = Kept(holder)
            strategy = STRATEGIES[name](model, sgd, communicator)
            for _ in range(3):
                strategy.begin_step()
                if index is not None:
                    ((model(x[share]) - 1) ** 2).sum().div(4).backward()
                strategy.step()
            weights.append([*model.layer.weight.flatten().tolist(), *model.read().tolist()])
        return weights

    servers = STRATEGIES[name].server_count
    by_rank = launch(work, 2 + servers, server_count=servers, deadline_s=20)
    for place, holder in enumerate(holders):
        model = Kept(holder)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            ((model(x) - 1) ** 2).sum().div(4).backward()
            optimizer.step()
        expected = [*model.layer.weight.flatten().tolist(), *model.layer.weight[0].tolist()]
        for rank in by_rank:
            assert rank[place] == pytest.approx(expected, rel=1e-12), holder


class ReadEarlier(nn.Module):
    """Its first layer's gradient needs the second one's weight, of which it holds the data."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(2, 2, dtype=torch.float64), nn.Linear(2, 2, dtype=torch.float64)
        self.register_buffer("seen", self.second.weight.data, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) @ self.seen)


def trained(
    communicator: Communicator, names: list[str], make: Callable[[], nn.Module], between: bool, **options: Any
) -> list[float]:
    """The parameters after three steps under each of the strategies, one after the other; all ranks change the model
    between two steps, if asked to."""
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).view(4, 2)
    index, count = communicator.worker_index, communicator.worker_count
    share = slice(0, 0) if index is None else slice(4 * index // count, 4 * (index + 1) // count)
    model = make()
    for name in names:
        strategy = STRATEGIES[name](model, sgd, communicator, **options)
        for _ in range(3):
            strategy.begin_step()
            if index is not None:
                with strategy.synchronising(last=True):
                    ((model(x[share]) - 1) ** 2).sum().div(4).backward()
            strategy.step()
            if between:
                _halve(model)
    return torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()


def _halve(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def in_one_process(make: Callable[[], nn.Module], steps: int, between: bool) -> list[float]:
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).view(4, 2)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        ((model(x) - 1) ** 2).sum().div(4).backward()
        optimizer.step()
        if between:
            _halve(model)
    return torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()


@pytest.mark.parametrize("name", ["ring_all_reduce", "param_server"])
def test_with_overlap_nothing_is_updated_that_backward_yet_reads(name: str) -> None:
    servers = STRATEGIES[name].server_count
    work = partial(trained, names=[name], make=ReadEarlier, between=False, overlap=True, bucket_bytes=16)
    for rank in launch(work, 2 + servers, server_count=servers, deadline_s=20):
        assert rank == pytest.approx(in_one_process(ReadEarlier, 3, between=False), rel=1e-12)


@pytest.mark.parametrize("name", ["sharded_param_server", "param_server", "ring_all_reduce"])
def test_what_all_ranks_write_between_two_steps_stays(name: str) -> None:
    seeded = partial(Kept, "a view")  # so parameters lie apart; where they are in common, one rank may write them
    servers = STRATEGIES[name].server_count
    work = partial(trained, names=[name], make=seeded, between=True)
    by_rank = launch(work, 2 + servers, server_count=servers, deadline_s=20)
    for rank in by_rank[: 1 if servers else None]:  # a worker's last write is its own, until the server answers
        assert rank == pytest.approx(in_one_process(seeded, 3, between=True), rel=1e-12)


@pytest.mark.parametrize("second", ["ring_all_reduce", "two_shot_in_place", "sharded_param_server"])
def test_a_model_may_have_another_strategy_afterwards(second: str) -> None:
    """The first one has given all ranks' parameters one memory."""

    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(2, 2, dtype=torch.float64)

    work = partial(trained, names=["sharded_param_server", second], make=seeded, between=False)
    for rank in launch(work, 2, deadline_s=20):
        assert rank == pytest.approx(in_one_process(seeded, 6, between=False), rel=1e-12)


@pytest.mark.parametrize("holder", ["table", "array"])
def test_what_else_holds_memory_with_gaps_is_refused(holder: str) -> None:
    table = torch.ones(2, 4)
    model = nn.Module()
    model.columns = nn.Parameter((torch.from_numpy(table.numpy()) if holder == "array" else table)[:, :2])
    with pytest.raises(UnsupportedModel, match=r"parameter columns has gaps .*: make the parameter of a .clone"):
        check_model(model, alone=False, in_process_group=False)
    model.columns = nn.Parameter(table.clone()[:, :2])
    check_model(model, alone=False, in_process_group=False)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(3, 3),
        lambda: nn.LSTM(3, 4, num_layers=2),
        lambda: nn.TransformerEncoderLayer(4, 2),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).to(memory_format=torch.channels_last),
    ],
)
def test_nobody_else_holds_the_memory_of_ordinary_models(make: Callable[[], nn.Module]) -> None:
    """So a server moves their parameters, and nothing is copied in a step."""
    model = make()
    assert read_by_others(model.parameters()) == set()
    kept = next(model.parameters()).detach()
    assert read_by_others(model.parameters()) == {id(next(model.parameters()))}
    del kept
    assert read_by_others(model.parameters()) == set()


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.SyncBatchNorm(3), "at the top .SyncBatchNorm. needs a process group"),
        (nn.Sequential(nn.DataParallel(nn.Linear(1, 1))), "module 0 .DataParallel. exchanges by torch's own means"),
        (nn.LazyLinear(3), "parameter weight has no shape yet"),
        (nn.Linear(2, 2, device="meta"), "parameter weight has no memory"),
    ],
)
def test_modules_that_cannot_be_held_are_named(module: nn.Module, words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        check_model(module, alone=False, in_process_group=False)


def otherwise(what: str) -> Callable[[Communicator], None]:
    """A worker function in which rank 1's model, or strategy, differs in `what`."""

    def work(communicator: Communicator) -> None:
        other = communicator.rank == 1
        width = 4 if other and what == "shape" else 3
        model = nn.Sequential(nn.Conv2d(2, width, 2), nn.BatchNorm2d(width))
        model[0].to(memory_format=torch.channels_last if other and what == "layout" else torch.contiguous_format)
        model[1].train(not (other and what == "mode"))
        if what == "key" and other:
            model.register_parameter("weight", nn.Parameter(torch.ones(1)))
        if what == "dtype" and other:
            model[1].double()
        clip_norm = 1.0 if what == "clipping" and other else 2.0
        FROM_SCRATCH["ring_all_reduce"](model, sgd, communicator, clip_norm=clip_norm)

    return work


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("shape", r"0\.weight \[3, 2, 2, 2\].*0\.weight \[4, 2, 2, 2\]|0\.weight \[4, 2, 2, 2\].*0\.weight \[3"),
        ("layout", r"0\.weight .*strides \[8, 1, 4, 2\]"),
        ("mode", "in eval mode: 1"),
        ("key", r"set up weight \[1\]"),
        ("dtype", r"1\.weight \[3\] torch.float64"),
        ("clipping", "clip_norm=1.0"),
    ],
)
def test_ranks_whose_models_or_strategies_differ_are_told_in_what(what: str, named: str) -> None:
    with pytest.raises(WorkerFailure, match=named):
        launch(otherwise(what), 2, deadline_s=20)


def test_tensors_of_any_type_are_broadcast() -> None:
    def work(communicator: Communicator) -> bool:
        def made(value: int) -> list[Tensor]:
            return [
                torch.full((3,), value, dtype=torch.int8),
                torch.full((2, 2), value + 0.5, dtype=torch.float64).t(),
                torch.full((1,), value, dtype=torch.bool).expand(4),
                torch.full((2,), complex(value, 1)),
                torch.full((3,), value + 0.25, dtype=torch.bfloat16),
                torch.full((2,), value, dtype=torch.float8_e4m3fn),
                torch.tensor(value),
                torch.empty(0, 2),
            ]

        tensors = made(communicator.rank)
        broadcast_all(tensors, communicator, root=1)
        return all(torch.equal(as_bytes(one), as_bytes(other)) for one, other in zip(tensors, made(1), strict=True))

    assert launch(work, 3, deadline_s=20) == [True] * 3


# ---- two models, two strategies ----


@pytest.mark.parametrize("name", [*KINDS, "ring_all_reduce overlapping", "param_server_bounded"])
def test_gradients_after_a_step_are_nobodys(name: str) -> None:
    """Equal to one process, in which `zero_grad` of the discriminator's optimizer forgets what the generator left."""

    def models() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        return nn.Linear(6, 1).double(), nn.Linear(4, 6).double()

    def losses(d: nn.Module, g: nn.Module, noise: Tensor, share: slice) -> tuple[Callable[[], Tensor], ...]:
        mine = noise[share]
        return (lambda: (d(g(mine).detach()) ** 2).sum() / 8, lambda: -d(g(mine)).tanh().sum() / 8)

    def noises() -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        return [torch.randn(8, 4, generator=generator, dtype=torch.float64) for _ in range(3)]

    def work(communicator: Communicator, registry: str, overlap: bool) -> list[list[float]]:
        d, g = models()
        options = {"overlap": True} if overlap else {}
        both = [STRATEGIES[registry](model, sgd, communicator, **options) for model in (d, g)]
        index, count = communicator.worker_index, communicator.worker_count
        share = slice(0, 0) if index is None else slice(8 * index // count, 8 * (index + 1) // count)
        for noise in noises():
            for strategy, loss in zip(both, losses(d, g, noise, share), strict=True):
                strategy.begin_step()
                if index is not None:
                    with strategy.synchronising(last=True):
                        loss().backward()
                strategy.step()
        return [parameter.flatten().tolist() for parameter in (*d.parameters(), *g.parameters())]

    registry, _, overlapping = name.partition(" ")
    servers = STRATEGIES[registry].server_count
    ours = launch(work, 2 + servers, registry, bool(overlapping), server_count=servers, deadline_s=20)
    d, g = models()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (d, g)]
    for noise in noises():
        for optimizer, loss in zip(optimizers, losses(d, g, noise, slice(0, 8)), strict=True):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
    theirs = [parameter.flatten().tolist() for parameter in (*d.parameters(), *g.parameters())]
    for rank in ours:
        for one, other in zip(rank, theirs, strict=True):
            assert one == pytest.approx(other, rel=1e-12, abs=1e-14)


def test_tensors_of_other_shapes_are_not_summed() -> None:
    def work(communicator: Communicator) -> None:
        communicator.all_reduce(torch.ones(1, 3) if communicator.rank else torch.ones(3, 1))

    with pytest.raises(WorkerFailure, match=r"all_reduce 3 elements \[3, 1\] of torch.float32"):
        launch(work, 2, deadline_s=20)


def test_the_name_auto_is_taken() -> None:
    with pytest.raises(RegistryError, match="the name auto is taken"):
        register(dataclasses.replace(RING_ALL_REDUCE, name="auto"))


def test_tensors_of_inference_mode_are_refused_by_name() -> None:
    with torch.inference_mode():
        frozen, buffer = nn.Linear(2, 2), torch.ones(2)
    trained = nn.Sequential(nn.Linear(2, 2), frozen.requires_grad_(False))
    with pytest.raises(UnsupportedModel, match=r"parameter 1\.weight was made in inference mode"):
        check_model(trained, alone=True, in_process_group=False)
    model = nn.Linear(2, 2)
    model.register_buffer("scale", buffer)
    with pytest.raises(UnsupportedModel, match="buffer scale was made in inference mode"):
        check_model(model, alone=True, in_process_group=False)


def test_what_a_module_tells_and_cannot_take_back_is_no_state() -> None:
    class TellsOnly(nn.Linear):
        def get_extra_state(self) -> int:
            return 7

    assert extra_state(TellsOnly(2, 2)) == {}
