"""What one step means, in numbers small enough to be worked out by hand, for every strategy."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_parallel import WorkerFailure, launch
from torch_parallel.communicator import Communicator
from torch_parallel.strategies import FROM_SCRATCH
from torch_parallel.strategies.replicas import check_replicas


class Weight(nn.Module):
    """y = w * x, from w = 0."""

    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size, dtype=torch.float64))


def one_rank(
    communicator: Communicator,
    name: str,
    make_model: Callable[[], nn.Module],
    backward: Callable[[nn.Module, int, int], None],
    steps: int,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Runs `backward(model, worker_index, step)` in every step; returns what this rank then holds."""
    model = make_model()
    lr, momentum = options.pop("lr", 1.0), options.pop("momentum", 0.0)
    strategy = FROM_SCRATCH[name](
        model,
        lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=lr, momentum=momentum),
        communicator,
        **options,
    )
    for step in range(steps):
        strategy.begin_step()
        if communicator.worker_index is not None:
            with strategy.synchronising(last=True):
                backward(model, communicator.worker_index, step)
        strategy.step()
    return {
        **{key: value.clone() for key, value in model.state_dict().items()},
        "norm": strategy.last_norm,
        "skipped": strategy.skipped_steps,
    }


def run(
    name: str,
    workers: int,
    backward: Callable[[nn.Module, int, int], None],
    make_model: Callable[[], nn.Module] = Weight,
    steps: int = 1,
    **options: Any,
) -> list[dict[str, Any]]:
    name, _, overlapping = name.partition(" ")
    if overlapping:
        options["overlap"] = True
    servers = FROM_SCRATCH[name].server_count
    return launch(
        one_rank, workers + servers, name, make_model, backward, steps, options, server_count=servers, deadline_s=20
    )


# one of each kind: sums in place, in a region of the rank's own, in one memory for all ranks, on a server, in shards
KINDS = ("ring_all_reduce", "one_shot_all_reduce", "two_shot_in_place", "param_server", "sharded_param_server")
OVERLAPPING = ("ring_all_reduce overlapping", "two_shot_in_place overlapping", "param_server overlapping")
every_strategy = pytest.mark.parametrize("name", KINDS)
overlapping_too = pytest.mark.parametrize("name", KINDS + OVERLAPPING)


@pytest.mark.exhaustive
@overlapping_too
@pytest.mark.parametrize(
    ("shards", "mean"),
    [
        ([[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]], 4.5),  # the mean of the workers' means would be 5.25
        ([[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]], 4.5),  # and 5.0 here
        ([[0, 1], [2], [3], [4]], 2.0),
        ([[0], [1], [2], []], 1.0),  # a worker without samples
        ([[], [], [], [7]], 7.0),
        ([[1, 2], [6]], 3.0),  # the mean of node means would be 3.75
    ],
)
def test_the_gradient_is_the_mean_over_all_samples(name: str, shards: list[list[int]], mean: float) -> None:
    total = sum(map(len, shards))

    def backward(model: nn.Module, worker: int, step: int) -> None:
        if shards[worker]:
            ((model.w * torch.tensor(shards[worker], dtype=torch.float64)).sum() / total).backward()

    for held in run(name, len(shards), backward):
        assert held["w"].item() == pytest.approx(-mean, abs=1e-12)


@overlapping_too
def test_when_a_worker_runs_out_of_samples_the_others_divide_by_what_is_left(name: str) -> None:
    """loss = w * x; first step x = 1 and 2, second step only x = 1: gradients 1.5, then 1.0."""
    shards = [[[1.0], [2.0]], [[1.0], []]]

    def backward(model: nn.Module, worker: int, step: int) -> None:
        mine, total = shards[step][worker], sum(map(len, shards[step]))
        if mine:
            ((model.w * torch.tensor(mine, dtype=torch.float64)).sum() / total).backward()

    for held in run(name, 2, backward, steps=2):
        assert held["w"].item() == -2.5


@every_strategy
def test_accumulated_micro_batches_are_exchanged_once(name: str) -> None:
    """Micro-batches x = 1, 2 on one worker and 3, 6 on the other: the mean gradient is 3."""
    micro_batches = [[1.0, 2.0], [3.0, 6.0]]

    def backward(model: nn.Module, worker: int, step: int) -> None:
        for x in micro_batches[worker]:
            (model.w * x / 4).sum().backward()

    for held in run(name, 2, backward):
        assert held["w"].item() == -3.0


@overlapping_too
def test_two_workers_with_one_gradient_take_one_step_not_two(name: str) -> None:
    """f = (w - 3)^2 / 2 from w = 0 with lr 0.1: 0.3; a sum instead of a mean would give 0.6."""

    def backward(model: nn.Module, worker: int, step: int) -> None:
        (((model.w - 3) ** 2 / 2).sum() / 2).backward()

    for held in run(name, 2, backward, lr=0.1):
        assert held["w"].item() == pytest.approx(0.3, abs=1e-15)


def clipped(model: nn.Module, worker: int, step: int) -> None:
    """Gradients [3, 0] and [0, 4] of two workers of one sample each: the mean is [1.5, 2], of norm 2.5."""
    gradient = torch.tensor([[3.0, 0.0], [0.0, 4.0]][worker], dtype=torch.float64)
    (model.w @ gradient / 2).backward()


@every_strategy
def test_the_norm_is_clipped_after_averaging(name: str) -> None:
    """[0.6, 0.8]; clipping each worker's own first would give [0.5, 0.5]."""
    held = run(name, 2, clipped, make_model=lambda: Weight(2), clip_norm=1.0)
    for each in held:
        assert each["w"].tolist() == pytest.approx([-0.6, -0.8], abs=1e-6)
    norms = [each["norm"] for each in held]
    updating = norms[:1] if FROM_SCRATCH[name].server_count else norms
    assert updating == [pytest.approx(2.5, abs=1e-15)] * len(updating)


@overlapping_too
def test_a_small_norm_is_not_changed_by_clipping(name: str) -> None:
    for each in run(name, 2, clipped, make_model=lambda: Weight(2), clip_norm=100.0):
        assert each["w"].tolist() == [-1.5, -2.0]


class DoublesGradients(torch.optim.SGD):
    """An optimizer that changes `.grad`."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(2)
        super().step()


@pytest.mark.parametrize("name", [name for name in KINDS if name != "sharded_param_server"])  # which refuses it
def test_an_optimizer_may_change_the_gradients(name: str) -> None:
    """Gradients 1 and 3 of two workers: the sum 4, doubled once on each rank. In one memory of all it would be 16."""

    def train(communicator: Communicator) -> list[float]:
        model = Weight(3)
        strategy = FROM_SCRATCH[name](
            model, lambda named: DoublesGradients([each for _, each in named], lr=1.0), communicator
        )
        for _ in range(2):
            strategy.begin_step()
            if communicator.worker_index is not None:
                (model.w * (1.0 + 2 * communicator.worker_index)).sum().backward()
            strategy.step()
        return model.w.tolist()

    servers = FROM_SCRATCH[name].server_count
    assert launch(train, 2 + servers, server_count=servers, deadline_s=20) == [[-16.0] * 3] * (2 + servers)


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
        self.b = nn.Parameter(torch.tensor([12.0], dtype=torch.float64))


@overlapping_too
def test_the_norm_is_over_all_buckets(name: str) -> None:
    """Gradients [3, 4] and [12] in two buckets: the norm is 13, and everything is scaled by one factor."""

    def backward(model: nn.Module, worker: int, step: int) -> None:
        (((model.a**2).sum() + (model.b**2).sum()) / 4).backward()  # 1/2 of half the sum of squares each

    held = run(name, 2, backward, make_model=TwoLayers, clip_norm=1.3, bucket_bytes=16)
    for each in held:
        assert each["a"].tolist() == pytest.approx([3 - 0.3, 4 - 0.4], abs=1e-6)
        assert each["b"].tolist() == pytest.approx([12 - 1.2], abs=1e-6)


def not_finite(model: nn.Module, worker: int, step: int) -> None:
    x = float("nan") if (worker, step) == (1, 1) else 1.0
    (model.w * x / 2).sum().backward()


@overlapping_too
def test_a_gradient_that_is_not_finite_ends_the_run(name: str) -> None:
    with pytest.raises(WorkerFailure, match="the gradient of w is NaN or infinite"):
        run(name, 2, not_finite, steps=3)


@overlapping_too
def test_or_all_ranks_skip_that_step(name: str) -> None:
    """Three steps of gradient 1 of which the second is skipped by all, its momentum too: 0.5 + ... by hand below."""
    held = run(name, 2, not_finite, steps=3, skip_not_finite=True, momentum=0.5)
    # step 1: velocity 1, w = -1; step 2 skipped; step 3: velocity 0.5 * 1 + 1 = 1.5, w = -2.5
    assert [each["w"].item() for each in held] == [-2.5] * len(held)
    assert held[0]["skipped"] == 1


def huge(size: float) -> Callable[[nn.Module, int, int], None]:
    def backward(model: nn.Module, worker: int, step: int) -> None:
        (model.w * size).sum().backward()

    return backward


def single() -> nn.Module:
    return Weight(3).float()


@overlapping_too
@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}])
def test_a_sum_that_overflows_ends_the_run_though_each_gradient_is_finite(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(WorkerFailure, match="the sum of all workers' gradients of w is NaN or infinite"):
        run(name, 2, huge(3e38), make_model=single, **options)


@overlapping_too
def test_or_all_skip_it(name: str) -> None:
    for held in run(name, 2, huge(3e38), make_model=single, skip_not_finite=True):
        assert held["w"].tolist() == [0, 0, 0]


@every_strategy
def test_gradients_whose_squares_overflow_are_clipped_like_any(name: str) -> None:
    """Sums of 2e25 in each of 3 elements: clipped to norm 1, each is 1 / sqrt(3)."""
    for held in run(name, 2, huge(1e25), make_model=single, clip_norm=1.0):
        assert held["w"].tolist() == pytest.approx([-(3**-0.5)] * 3, rel=1e-6)


class PartlyUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(0.0))
        self.b = nn.Parameter(torch.tensor(0.0))
        self.never = nn.Parameter(torch.tensor(7.0))


@overlapping_too
def test_a_parameter_that_only_one_worker_uses(name: str) -> None:
    """loss = a + b on worker 0, a on worker 1: gradients 1 and 0.5 on both; what nobody uses is left alone."""

    def backward(model: nn.Module, worker: int, step: int) -> None:
        ((model.a + model.b if worker == 0 else model.a) / 2).backward()

    for held in run(name, 2, backward, make_model=PartlyUsed):
        assert (held["a"].item(), held["b"].item(), held["never"].item()) == (-1.0, -0.5, 7.0)


@overlapping_too
def test_a_worker_that_uses_nothing(name: str) -> None:
    def backward(model: nn.Module, worker: int, step: int) -> None:
        if worker == 0:
            (model.a / 2).backward()

    for held in run(name, 2, backward, make_model=PartlyUsed, steps=3):
        assert (held["a"].item(), held["b"].item()) == (-1.5, 0.0)


class SeededByRank(nn.Module):
    """Different on every process that makes one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(time.perf_counter_ns())
        self.w = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.register_buffer("buffer", torch.randn(2))
        self.register_buffer("count", torch.randint(0, 10**9, ()))


@every_strategy
def test_all_ranks_start_from_rank_0s_parameters_and_buffers(name: str) -> None:
    def backward(model: nn.Module, worker: int, step: int) -> None:
        model.w.sum().backward()

    first, *others = run(name, 3, backward, make_model=SeededByRank)
    for other in others:
        for key in ("w", "frozen", "buffer", "count"):
            assert torch.equal(other[key], first[key])


@overlapping_too
@pytest.mark.exhaustive
def test_freezing_later_works_and_unfreezing_later_is_refused(name: str) -> None:
    def freeze(model: nn.Module, worker: int, step: int) -> None:
        if step == 1:
            model.w.requires_grad_(False)
        else:
            (model.w / 2).sum().backward()

    for held in run(name, 2, freeze, steps=2):
        assert held["w"].item() == -1.0

    def unfreeze(model: nn.Module, worker: int, step: int) -> None:
        model.w.sum().backward()
        model.frozen.requires_grad_(True)

    with pytest.raises(WorkerFailure, match="frozen was frozen when the strategy was made"):
        run(name, 2, unfreeze, make_model=SeededByRank, steps=2)


@every_strategy
def test_everything_frozen_is_refused(name: str) -> None:
    def make_model() -> nn.Module:
        model = Weight()
        model.w.requires_grad_(False)
        return model

    with pytest.raises(WorkerFailure, match="no trainable parameter"):
        run(name, 2, lambda model, worker, step: None, make_model=make_model)


def different_models(communicator: Communicator, name: str) -> None:
    model = nn.Linear(3, 2) if communicator.rank != 1 else nn.Linear(3, 3)
    FROM_SCRATCH[name](model, lambda named: torch.optim.SGD([each for _, each in named], lr=1.0), communicator)


@every_strategy
def test_models_that_differ_between_ranks_are_refused_by_name(name: str) -> None:
    with pytest.raises(WorkerFailure, match=r"set up weight \[3, 3\]") as failure:
        launch(different_models, 3, name, server_count=FROM_SCRATCH[name].server_count, deadline_s=20)
    assert "set up weight [2, 3]" in str(failure.value)


@pytest.mark.exhaustive
@overlapping_too
def test_sums_do_not_depend_on_who_comes_first(name: str) -> None:
    """1e8 + 1 - 1e8 + 1 in float32 is 1 or 2, by the order: ranks that sleep at random must not change the bits."""
    values = [1e8, 1.0, -1e8, 1.0]

    def make_model() -> nn.Module:
        return Weight(7).float()

    def backward(model: nn.Module, worker: int, step: int) -> None:
        time.sleep(random.random() / 50)
        (model.w * values[worker]).sum().backward()

    runs = [run(name, 4, backward, make_model=make_model, steps=3) for _ in range(3)]
    first = runs[0][0]["w"]
    assert all(torch.equal(held["w"], first) for each in runs for held in each)


@every_strategy
def test_gradients_live_in_the_buffers_that_peers_read(name: str) -> None:
    def gradients_are_shared(communicator: Communicator) -> bool:
        model = Weight(5)
        strategy = FROM_SCRATCH[name](
            model, lambda named: torch.optim.SGD([each for _, each in named], lr=1.0), communicator
        )
        strategy.begin_step()
        model.w.sum().backward()
        strategy.buckets[0].complete()
        return model.w.grad.data_ptr() == strategy.buckets[0].shared.local.data_ptr()

    servers = FROM_SCRATCH[name].server_count
    assert launch(gradients_are_shared, 2 + servers, server_count=servers, deadline_s=20) == [True] * (2 + servers)


def test_check_replicas_names_the_first_parameter_that_differs() -> None:
    def drift(communicator: Communicator, tensor: Tensor | None) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        check_replicas(model, communicator)
        if communicator.rank == 2:
            with torch.no_grad():  # the last bit of one number
                model[1].weight[0, 0] = torch.nextafter(model[1].weight[0, 0], torch.tensor(9.0))
        check_replicas(model, communicator)

    with pytest.raises(WorkerFailure, match=r"parameter 1\.weight is not the same on all ranks: ranks 0, 1, 3, rank 2"):
        launch(drift, 4, None, deadline_s=20)
