"""What leaves while backward is still at work trains to the same bits as what leaves after it."""

from __future__ import annotations

import pytest
import torch
from equality import MODELS, OPTIMIZERS, digest, largest_deviation, one_process, train_everywhere
from torch import Tensor, nn
from torch.nn.functional import linear

from torch_parallel import WorkerFailure
from torch_parallel.strategies import FROM_SCRATCH


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
