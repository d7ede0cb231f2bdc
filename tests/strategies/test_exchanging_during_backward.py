"""What leaves while backward is still at work trains to the same bits as what leaves after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equality import MODELS, OPTIMIZERS, BackToFront, digest, largest_deviation, one_process, train_everywhere
from torch import Tensor, nn
from torch.nn.functional import linear

from torch_parallel import Communicator, WorkerFailure, launch
from torch_parallel.strategies import FROM_SCRATCH


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", ["ring_all_reduce", "one_shot_all_reduce", "two_shot_in_place", "param_server"])
def test_exchanging_during_backward_changes_no_bit(name: str, micro_batches: int) -> None:
    """Of the awkward model with Adam, the cnn in float32 and layers whose buckets leave in another order from the
    second step on; in several buckets, on 3 processes, some without samples."""
    settings = [
        (MODELS["awkward"], OPTIMIZERS["adam"], torch.float64),
        (MODELS["cnn"], OPTIMIZERS["sgd"], torch.float32),
        (BackToFront, OPTIMIZERS["sgd"], torch.float64),
    ]
    after, during = _both_ways(name, settings, micro_batches=micro_batches)
    for index in range(len(settings)):
        digests = [digest(parameters) for parameters in after[0][index]]
        assert [digest(parameters) for parameters in during[0][index]] == digests
        assert during[1][index] == during[2][index] == digests


def _both_ways(name: str, settings: list, **how: Any) -> list[list[list[list]]]:
    return [train_everywhere(FROM_SCRATCH[name], 3, settings, overlap=each, **how) for each in (False, True)]


def order_of_leaving(communicator: Communicator, first_to_be_used: int) -> list[list[int]]:
    """Indices of the buckets in each of three steps: of layers that are registered as 0, 1, 2, and used in the reverse
    order by all ranks from `first_to_be_used` on."""
    layers = nn.Sequential(*(nn.Linear(50, 50, bias=False) for _ in range(3)))
    strategy = FROM_SCRATCH["ring_all_reduce"](
        layers,
        lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.01),
        communicator,
        bucket_bytes=50 * 50 * 4,
        overlap=True,
    )
    left: list[int] = []
    reduce = strategy.reduce
    strategy.reduce = lambda bucket: (left.append(bucket.index), reduce(bucket))  # type: ignore[method-assign]
    for _ in range(3):
        strategy.begin_step()
        if communicator.rank:
            used = reversed(layers) if communicator.rank >= first_to_be_used else layers
            with strategy.synchronising(last=True):
                nn.Sequential(*used)(torch.ones(1, 50)).sum().backward()
        strategy.step()
    return [left[0:3], left[3:6], left[6:9]]


def test_from_the_second_step_on_buckets_leave_in_the_order_of_use_on_all_ranks() -> None:
    """Bucket 0 holds layer 2, registered last. Where layer 2 is used first, its gradient comes last. Rank 0 has no
    samples and says nothing about it; where rank 1 and ranks 2 and 3 disagree, the mean decides."""
    assert launch(order_of_leaving, 4, 4) == [[[0, 1, 2], [0, 1, 2], [0, 1, 2]]] * 4
    assert launch(order_of_leaving, 4, 2) == [[[0, 1, 2], [2, 1, 0], [2, 1, 0]]] * 4


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
@pytest.mark.parametrize("performer, micro_batches", [("plain", 1), ("triton", 1), ("triton", 3)])
@pytest.mark.parametrize("name", ["ring_all_reduce", "two_shot_in_place", "param_server"])
def test_exchanging_during_backward_changes_no_bit_on_gpus(name: str, performer: str, micro_batches: int) -> None:
    """On a stream of its own there: of the awkward model with Adam and the cnn in both types, on 3 processes."""
    settings = [
        (MODELS["awkward"], OPTIMIZERS["adam"], torch.float64),
        *((MODELS["cnn"], OPTIMIZERS["adamw"], dtype) for dtype in (torch.float64, torch.float32)),
        (BackToFront, OPTIMIZERS["sgd"], torch.float64),
    ]
    after, during = _both_ways(name, settings, device="cuda", performer=performer, micro_batches=micro_batches)
    for index in range(len(settings)):
        digests = [digest(parameters) for parameters in after[0][index]]
        assert [digest(parameters) for parameters in during[0][index]] == digests
        assert during[1][index] == during[2][index] == digests
