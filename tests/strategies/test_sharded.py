"""What is particular to shards: one memory, pieces of parameters, and state that is put together again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from torch_parallel import WorkerFailure, launch
from torch_parallel.collectives import DIRECT_REDUCE_SCATTER, Collective, Receive, Send
from torch_parallel.communicator import Communicator
from torch_parallel.strategies import FROM_SCRATCH, ShardedParamServer, optimizer_state, sharded
from torch_parallel.workloads import build_model


class Uneven(nn.Module):
    """5, 1, 0 and 4 elements. From the last to the first they lie in memory as d d d d b a a a a a, d by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        self.b = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.c = nn.Parameter(torch.zeros(0, 2, dtype=torch.float64))
        self.d = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64).t())


def adam(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.Adam([parameter for _, parameter in named], lr=0.1)


def make(communicator: Communicator, optimizer_factory: Any = adam, **options: Any) -> ShardedParamServer:
    return ShardedParamServer(Uneven(), optimizer_factory, communicator, **options)


def gradients(strategy: ShardedParamServer, step: int) -> None:
    """Gradients of a * a's elements 1 .. 5, of b 6, of d 7 .. 10, times the step; from rank 0 only."""
    strategy.begin_step()
    if strategy.communicator.rank == 0:
        model = strategy.model
        a, d = torch.arange(1.0, 6.0).double(), torch.arange(7.0, 11.0).double().view(2, 2)
        (step * ((model.a * a).sum() + model.b * 6 + (model.d * d).sum())).backward()


def pieces(communicator: Communicator) -> list[tuple[str, int, int, tuple[int, ...]]]:
    (shard,) = make(communicator).shards
    return [(each.name, each.start, each.stop, tuple(each.parameter.shape)) for each in shard.pieces]


def test_shards_are_cut_at_the_boundaries_of_parameters() -> None:
    """10 elements on 3 ranks are 4, 3 and 3: d whole; b and two of a; the other three. An empty one is no piece."""
    assert launch(pieces, 3, deadline_s=20) == [
        [("d", 0, 4, (2, 2))],
        [("b", 0, 1, ()), ("a", 0, 2, (2,))],
        [("a", 2, 5, (3,))],
    ]


def one_memory(communicator: Communicator) -> list[list[float]]:
    """What each rank sees in the parameters after rank 1 has written its number into one of them, and so on."""
    model = make(communicator).model
    seen = []
    for writer in range(communicator.world_size):
        if communicator.rank == writer:
            model.a.data[writer] = writer + 1
        communicator.barrier()
        seen.append(model.a.tolist())
        communicator.barrier()
    return seen


def test_the_parameters_of_all_ranks_are_one_memory() -> None:
    expected = [[1, 0, 0, 0, 0], [1, 2, 0, 0, 0], [1, 2, 3, 0, 0]]
    assert launch(one_memory, 3, deadline_s=20) == [expected] * 3


@pytest.mark.parametrize("optimizer", [torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Rprop])
def test_an_optimizer_that_may_need_whole_parameters_is_refused_by_name(optimizer: Any) -> None:
    def factory(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return optimizer([parameter for _, parameter in named])

    with pytest.raises(WorkerFailure, match=f"{optimizer.__name__} may need whole ones: take one of SGD, Adam, AdamW"):
        launch(make, 2, factory, deadline_s=20)


def test_a_subclass_may_do_anything_and_is_refused_too() -> None:
    class Trusting(torch.optim.SGD):
        pass

    with pytest.raises(WorkerFailure, match="Trusting may need whole ones"):
        launch(make, 2, lambda named: Trusting([parameter for _, parameter in named], lr=0.1), deadline_s=20)


def state_elements(communicator: Communicator) -> tuple[int, int]:
    """Elements of optimizer state on this rank, and what a checkpoint would hold."""
    torch.manual_seed(0)
    model = build_model("cnn", (1, 8, 8), 5)
    strategy = ShardedParamServer(model, adam, communicator)
    strategy.begin_step()
    cross_entropy(model(torch.randn(4, 1, 8, 8)), torch.arange(4), reduction="sum").backward()
    strategy.step()
    own = sum(
        value.numel()
        for optimizer in strategy.optimizers
        for state in optimizer.state.values()
        for key, value in state.items()
        if key != "step"
    )
    whole = strategy.optimizer_state()
    return own, sum(value.numel() for state in whole.values() for key, value in state.items() if key != "step")


def test_optimizer_state_is_divided_among_the_ranks() -> None:
    """Adam has two numbers for each of the parameters' elements; together as many as one process has."""
    numel = sum(parameter.numel() for parameter in build_model("cnn", (1, 8, 8), 5).parameters())
    by_rank = launch(state_elements, 3, deadline_s=20)
    assert [own for own, _ in by_rank] == [2 * len(part) for part in torch.arange(numel).tensor_split(3)]
    assert [whole for _, whole in by_rank] == [2 * numel, 0, 0]


def saved_state(communicator: Communicator) -> dict[str, dict[str, Any]]:
    strategy = make(communicator)
    for step in (1, 2):
        gradients(strategy, step)
        strategy.step()
    return strategy.optimizer_state()


def reference() -> dict[str, dict[str, Any]]:
    """The state of torch's Adam after the same two steps on whole parameters."""
    model = Uneven()
    optimizer = adam(list(model.named_parameters()))
    for step in (1, 2):
        model.a.grad = step * torch.arange(1.0, 6.0).double()
        model.b.grad = torch.tensor(6.0 * step).double()
        model.d.grad = step * torch.arange(7.0, 11.0).double().view(2, 2)
        optimizer.step()
    return {name: dict(optimizer.state[parameter]) for name, parameter in model.named_parameters() if name != "c"}


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_saved_state_is_of_whole_parameters(n: int) -> None:
    whole, *others = launch(saved_state, n, deadline_s=20)
    assert others == [{}] * (n - 1)
    expected = reference()
    assert whole.keys() == expected.keys()
    for name, state in expected.items():
        assert whole[name].keys() == state.keys()
        for key, value in state.items():
            assert whole[name][key].shape == value.shape, (name, key)
            assert torch.equal(whole[name][key], value), (name, key)


def in_small_pieces(communicator: Communicator, piece_bytes: int) -> tuple[dict[str, dict[str, Any]], list[int], int]:
    """The state after two steps, how many elements each message had, and the bytes of the buffer that they took."""
    sharded.PIECE_BYTES = piece_bytes
    sent, plain = [], communicator.gather

    def gather(states: Any) -> Any:
        sent.append(sum(each.numel() for state in states.values() for key, each in state.items() if key != "step"))
        return plain(states)

    communicator.gather = gather  # type: ignore[method-assign]
    state = saved_state(communicator)
    return state, sent, communicator._scratch["cpu", torch.uint8].local.numel()


@pytest.mark.parametrize("elements", [1, 2, 3, 100])
def test_state_is_brought_together_in_pieces(elements: int) -> None:
    """Ten elements on three ranks are 4, 3 and 3. Each has two numbers of state; c, of no gradient, has none."""
    results = launch(in_small_pieces, 3, 8 * elements, deadline_s=20)
    expected = reference()
    whole = results[0][0]
    assert list(whole) == list(launch(saved_state, 3, deadline_s=20)[0]) and whole.keys() == expected.keys()
    for name, state in expected.items():
        for key, value in state.items():
            assert torch.equal(whole[name][key], value) and whole[name][key].shape == value.shape, (name, key)
    for _, sent, buffer_bytes in results:
        assert max(sent) <= 2 * elements and len(sent) == max(1, -(-4 // elements))
        assert buffer_bytes <= 4096


def taken_up(communicator: Communicator, state: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    strategy = make(communicator)
    strategy.load_optimizer_state(state)
    return strategy.optimizer_state()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_state_is_cut_for_any_number_of_ranks_and_put_together_again(n: int) -> None:
    expected = reference()
    again = launch(taken_up, n, expected, deadline_s=20)[0]
    assert again.keys() == expected.keys()
    for name, state in expected.items():
        for key, value in state.items():
            assert torch.equal(again[name][key], value) and again[name][key].shape == value.shape, (name, key)


def test_restored_state_lies_as_its_parameter_does() -> None:
    """Fused optimizers go through both by place, and a checkpoint of another strategy may lie otherwise."""
    columns = nn.Parameter(torch.zeros(2, 3).t())
    optimizer = adam([("w", columns)])
    average = torch.arange(6.0).view(3, 2)
    state = {"step": torch.tensor(1.0), "exp_avg": average, "exp_avg_sq": average + 10}
    optimizer_state.restore([([("w", columns)], optimizer)], {"w": state})
    held = optimizer.state[columns]
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(held[key], state[key]) and held[key].stride() == columns.stride() == (1, 3)
    assert held["step"] == 1


def decayed(communicator: Communicator) -> dict[str, Tensor]:
    """Rank 1 alone uses a; nobody uses d, whose piece is another rank's, and which weight decay must not touch."""
    strategy = make(communicator, lambda named: torch.optim.SGD([each for _, each in named], lr=1.0, weight_decay=0.5))
    model = strategy.model
    if communicator.rank == 0:
        for parameter in model.parameters():
            parameter.data.fill_(2.0)
    communicator.barrier()
    strategy.begin_step()
    if communicator.rank == 1:
        model.a.sum().backward()
    strategy.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_piece_knows_whether_any_rank_used_its_parameter(n: int) -> None:
    for held in launch(decayed, n, deadline_s=20):
        assert held["a"].tolist() == [2 - (1 + 0.5 * 2)] * 5
        assert held["b"].item() == 2 and held["d"].tolist() == [[2, 2], [2, 2]]


class Mixed(nn.Module):
    """Parameters of two types: two buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.zeros(3))
        self.wide = nn.Parameter(torch.zeros(5, dtype=torch.float64))


def mixed_types(communicator: Communicator, clip_norm: float | None) -> list[list[float]]:
    model = Mixed()
    strategy = ShardedParamServer(
        model, lambda named: torch.optim.SGD([each for _, each in named], lr=1.0), communicator, clip_norm=clip_norm
    )
    for _ in range(2):
        strategy.begin_step()
        ((model.narrow.sum() + model.wide.sum()) / communicator.world_size).backward()
        strategy.step()
    return [model.narrow.tolist(), model.wide.tolist()]


@pytest.mark.parametrize("n", [2, 3])
def test_parameters_of_two_types(n: int) -> None:
    """Gradients of 1 in 8 elements; clipped to a norm of 1, each is 1 / sqrt(8)."""
    for held in launch(mixed_types, n, None, deadline_s=20):
        assert held == [[-2.0] * 3, [-2.0] * 5]
    for single, double in launch(mixed_types, n, 1.0, deadline_s=20):
        assert single == pytest.approx([-2 / 8**0.5] * 3, rel=1e-6)
        assert double == pytest.approx([-2 / 8**0.5] * 5, rel=1e-6)


def wrong_rounds(rank: int, world_size: int):
    """The direct reduce-scatter, but rank 0 never adds what rank 1 has."""
    for actions in DIRECT_REDUCE_SCATTER.rounds(rank, world_size):
        if rank == 0:
            actions = [each for each in actions if not (isinstance(each, Receive) and each.source == 1)]
        if rank == 1:
            actions = [each for each in actions if not (isinstance(each, Send) and each.to == 0)]
        yield actions


def first_step(communicator: Communicator, wrong: bool) -> list[float]:
    if wrong:
        changed = {"rounds": wrong_rounds, "wrong_on_purpose": True}
        sharded.DIRECT_REDUCE_SCATTER = Collective(**{**vars(DIRECT_REDUCE_SCATTER), **changed})
    strategy = make(communicator, lambda named: torch.optim.SGD([each for _, each in named], lr=1.0))
    strategy.begin_step()
    (strategy.model.d.sum() + strategy.model.a.sum()).backward()
    strategy.step()
    return strategy.model.d.flatten().tolist()


def test_training_performs_the_registered_schedule_itself() -> None:
    """d is rank 0's shard: 3 ranks' ones, and two where it leaves out a rank."""
    assert launch(first_step, 3, False, deadline_s=20) == [[-3.0] * 4] * 3
    wrong = launch(first_step, 3, True, deadline_s=20)
    assert wrong[0] == wrong[2] == [-2.0] * 4  # rank 1, whom rank 0 does not read, does not wait for it either


def test_it_is_registered() -> None:
    assert FROM_SCRATCH["sharded_param_server"] is ShardedParamServer
