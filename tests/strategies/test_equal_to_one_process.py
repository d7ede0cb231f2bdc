"""With the same seed and global batch every synchronous strategy gives, step after step, the parameters that one
process gives on the whole batch, and the same bits on all ranks.

The reference is a plain loop in one process. It shares nothing with the package but the models.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from torch_parallel import WorkerFailure, launch
from torch_parallel.collectives import Collective, Receive
from torch_parallel.collectives.ring import RING_ALL_REDUCE, all_reduce
from torch_parallel.communicator import Communicator
from torch_parallel.strategies import ASYNCHRONOUS, FROM_SCRATCH, AllReduce, Strategy
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
                if len(targets[mine]):
                    with exact_convolutions():
                        loss = cross_entropy(model(inputs[mine]), targets[mine], reduction="sum") / len(targets)
                        with strategy.synchronising(last=True):
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


@pytest.fixture(scope="module")
def references() -> list[list[dict]]:
    return [one_process(MODELS[model], OPTIMIZERS[optimizer], dtype) for model, optimizer, dtype, _ in SETTINGS]


@pytest.mark.parametrize(
    ("name", "n"), [(name, n) for name, counts in PROCESS_COUNTS.items() for n in counts], ids=lambda value: str(value)
)
def test_every_step_is_that_of_one_process(name: str, n: int, references: list[list[dict]]) -> None:
    settings = [(MODELS[model], OPTIMIZERS[optimizer], dtype) for model, optimizer, dtype, _ in SETTINGS]
    first, *others = train_everywhere(BY_STEPS[name], n, settings)
    for index, (model, optimizer, dtype, tolerance) in enumerate(SETTINGS):
        assert largest_deviation(first[index], references[index]) <= tolerance, (model, optimizer, dtype)
        for other in others:
            assert other[index] == [digest(parameters) for parameters in first[index]], (model, optimizer, dtype)


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="there is no GPU")
@pytest.mark.parametrize("performer", ["plain", "triton"])
@pytest.mark.parametrize(
    "names",
    [
        [name for name, strategy in BY_STEPS.items() if not strategy.server_count],
        ["param_server"],
        ["param_server_bounded"],
        ["param_server_backup"],
    ],
    ids=lambda names: names[0] if len(names) == 1 else "without a server",
)
def test_every_step_of_three_processes_on_gpus_is_that_of_one(names: list[str], performer: str) -> None:
    """A server and two workers, or three workers; processes share GPUs where there are fewer."""
    chosen = [
        ("mlp", "sgd", torch.float64, 1e-12),
        ("cnn", "adamw", torch.float64, 1e-12),
        ("awkward", "adam", torch.float64, 1e-12),
        ("cnn", "sgd", torch.float32, 1e-6),
        ("strided", "fused adam", torch.float64, 1e-12),
    ]
    settings = [(MODELS[model], OPTIMIZERS[optimizer], dtype) for model, optimizer, dtype, _ in chosen]
    references = [one_process(*setting, device="cuda") for setting in settings]
    servers = BY_STEPS[names[0]].server_count
    where = {"device": "cuda", "performer": performer, "deadline_s": 60}
    first, *others = launch(all_strategies, 3, names, settings, server_count=servers, **where)
    for position, name in enumerate(names):
        for index, setting in enumerate(chosen):
            ours = first[position][index]
            assert largest_deviation(ours, references[index]) <= setting[3], (name, setting)
            for other in others:
                assert other[position][index] == [digest(parameters) for parameters in ours], (name, setting)


@pytest.mark.parametrize("name", ["ring_all_reduce", "one_shot_all_reduce", "two_shot_in_place", "param_server"])
def test_exchanging_during_backward_changes_no_bit(name: str) -> None:
    """Of the awkward model with Adam and the cnn in float32, in buckets, on 3 processes, some without samples."""
    settings = [
        (MODELS["awkward"], OPTIMIZERS["adam"], torch.float64),
        (MODELS["cnn"], OPTIMIZERS["sgd"], torch.float32),
    ]
    after, during = (train_everywhere(FROM_SCRATCH[name], 3, settings, overlap=overlap) for overlap in (False, True))
    for index in range(len(settings)):
        digests = [digest(parameters) for parameters in after[0][index]]
        assert [digest(parameters) for parameters in during[0][index]] == digests
        assert during[1][index] == during[2][index] == digests


class UsedDetached(nn.Module):
    """Its second weight is used twice, first detached: backward needs it after its gradient is complete."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 5, bias=False), nn.Linear(5, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        detached = linear(self.first(x.flatten(1)), self.second.weight.detach())
        output: Tensor = self.second(torch.tanh(detached))
        return output


@pytest.mark.parametrize("name", ["ring_all_reduce", "two_shot_in_place", "param_server"])
def test_a_parameter_that_backward_needs_after_its_update_is_an_error(name: str) -> None:
    settings = [(UsedDetached, OPTIMIZERS["fused sgd"], torch.float64)]
    workers = 2 + FROM_SCRATCH[name].server_count
    with pytest.raises(WorkerFailure, match=r"used detached, after its gradient was complete .*--no_overlap"):
        train_everywhere(FROM_SCRATCH[name], workers, settings, overlap=True, bucket_bytes=600)
    after = train_everywhere(FROM_SCRATCH[name], workers, settings, overlap=False, bucket_bytes=600)
    assert largest_deviation(after[0][0], one_process(*settings[0])) <= 1e-12


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="there is no GPU")
@pytest.mark.parametrize("performer", ["plain", "triton"])
@pytest.mark.parametrize("name", ["ring_all_reduce", "two_shot_in_place", "param_server"])
def test_exchanging_during_backward_changes_no_bit_on_gpus(name: str, performer: str) -> None:
    """On a stream of its own there: of the awkward model with Adam and the cnn in both types, on 3 processes."""
    settings = [
        (MODELS["awkward"], OPTIMIZERS["adam"], torch.float64),
        *((MODELS["cnn"], OPTIMIZERS["adamw"], dtype) for dtype in (torch.float64, torch.float32)),
    ]
    how = {"device": "cuda", "performer": performer}
    after, during = (train_everywhere(FROM_SCRATCH[name], 3, settings, overlap=each, **how) for each in (False, True))
    for index in range(len(settings)):
        digests = [digest(parameters) for parameters in after[0][index]]
        assert [digest(parameters) for parameters in during[0][index]] == digests
        assert during[1][index] == during[2][index] == digests


@pytest.mark.parametrize("n", range(1, 9))
def test_so_it_is_with_every_algorithm_and_number_of_workers(n: int, references: list[list[dict]]) -> None:
    """In some of the settings, the awkward model among them; all strategies without a server in one run."""
    chosen = [
        SETTINGS.index(("awkward", "adam", torch.float64, 1e-12)),
        SETTINGS.index(("cnn", "sgd", torch.float32, 1e-6)),
        SETTINGS.index(("strided", "fused sgd", torch.float64, 1e-12)),
    ]
    settings = [(MODELS[SETTINGS[k][0]], OPTIMIZERS[SETTINGS[k][1]], SETTINGS[k][2]) for k in chosen]
    names = [name for name, strategy in FROM_SCRATCH.items() if not strategy.server_count]
    first, *others = launch(all_strategies, n, names, settings, deadline_s=60)
    for position, name in enumerate(names):
        for index, k in enumerate(chosen):
            assert largest_deviation(first[position][index], references[k]) <= SETTINGS[k][3], (name, SETTINGS[k])
            for other in others:
                assert other[position][index] == [digest(each) for each in first[position][index]], (name, SETTINGS[k])


def test_the_awkward_model_is_awkward() -> None:
    """The cases above are of use only if the rare layer is used in some steps, by some workers, and not in others."""
    torch.manual_seed(0)
    model = Awkward().double()
    used = []
    for inputs, targets in samples(torch.float64):
        model.zero_grad(set_to_none=True)
        cross_entropy(model(inputs), targets).backward()
        used.append(model.rare.weight.grad is not None)
        assert model.never.weight.grad is None
    assert any(used) and not all(used)


def wrong_ring(rank: int, world_size: int):
    """The ring, but rank 0 adds what it receives in its first round to the chunk beside the right one."""
    for index, actions in enumerate(all_reduce(rank, world_size)):
        if rank == 0 and index == 0:
            send, receive = actions
            start = (receive.chunks.start + 1) % world_size
            actions = [send, Receive(receive.source, range(start, start + 1), receive.reduce)]
        yield actions


def test_training_performs_the_registered_schedule_itself() -> None:
    """With one wrong chunk in the schedule, and nothing else changed, training must go wrong."""

    class WrongRing(AllReduce):
        algorithm = "wrong"

        def __init__(self, *arguments, **options) -> None:
            from torch_parallel.collectives import ALL_REDUCE  # the worker's own registry

            changed = {"name": "wrong", "rounds": wrong_ring, "wrong_on_purpose": True}
            ALL_REDUCE["wrong"] = Collective(**{**vars(RING_ALL_REDUCE), **changed})
            super().__init__(*arguments, **options)

    settings = [(MODELS["mlp"], OPTIMIZERS["sgd"], torch.float64)]
    reference = one_process(*settings[0])
    right, wrong = (
        train_everywhere(strategy, 3, settings)[0][0] for strategy in (FROM_SCRATCH["ring_all_reduce"], WrongRing)
    )
    assert largest_deviation(right, reference) <= 1e-12
    assert largest_deviation(wrong, reference) > 1e-3


def optimizer_state_elements(communicator: Communicator, strategy_class: type[Strategy]) -> int:
    """Elements of optimizer state in this process, found among all objects that are alive in it."""
    import gc

    torch.manual_seed(0)
    model = build_model("cnn", IMAGE, CLASSES)
    strategy = strategy_class(
        model, lambda named: torch.optim.Adam([parameter for _, parameter in named]), communicator
    )
    strategy.begin_step()
    if not communicator.is_server:
        cross_entropy(model(torch.randn(4, *IMAGE)), torch.arange(4), reduction="sum").backward()
    strategy.step()
    optimizers = [thing for thing in gc.get_objects() if isinstance(thing, torch.optim.Optimizer)]
    return sum(
        value.numel() for optimizer in optimizers for state in optimizer.state.values() for value in state.values()
    )


def test_under_param_server_only_the_server_holds_optimizer_state() -> None:
    model = build_model("cnn", IMAGE, CLASSES)
    tensors = list(model.parameters())
    on_server, *on_workers = launch(
        optimizer_state_elements, 3, FROM_SCRATCH["param_server"], server_count=1, deadline_s=30
    )
    # Adam: two moments of every parameter, and a step count a tensor
    assert on_server == 2 * sum(tensor.numel() for tensor in tensors) + len(tensors)
    assert on_workers == [0, 0]
    everywhere = launch(optimizer_state_elements, 2, FROM_SCRATCH["ring_all_reduce"], deadline_s=30)
    assert everywhere == [on_server, on_server]
