"""With the same seed and global batch every synchronous strategy gives, step after step, the parameters that one
process gives on the whole batch, and the same bits on all ranks."""

from __future__ import annotations

import pytest
import torch
from equality import (
    BY_STEPS,
    CLASSES,
    IMAGE,
    MODELS,
    OPTIMIZERS,
    PROCESS_COUNTS,
    SETTINGS,
    Awkward,
    all_strategies,
    digest,
    largest_deviation,
    one_process,
    samples,
    train_everywhere,
)
from torch.nn.functional import cross_entropy

from torch_parallel import launch
from torch_parallel.collectives import Collective, Receive
from torch_parallel.collectives.ring import RING_ALL_REDUCE, all_reduce
from torch_parallel.communicator import Communicator
from torch_parallel.strategies import FROM_SCRATCH, AllReduce, Strategy
from torch_parallel.workloads import build_model


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


@pytest.mark.exhaustive
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
