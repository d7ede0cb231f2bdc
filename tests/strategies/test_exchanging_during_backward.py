"""What leaves while backward is still at work trains to the same bits as what leaves after it."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import MODELS, OPTIMIZERS, BackToFront, digest, largest_deviation, one_process, train_everywhere
from torch import Tensor, nn
from torch.nn.functional import linear

from torch_parallel import Communicator, WorkerFailure, launch
from torch_parallel.collectives.schedule import Collective
from torch_parallel.strategies import FROM_SCRATCH, FromScratch
from torch_parallel.transport.buffer import SharedBuffer

GPUS = torch.cuda.device_count()


@pytest.mark.exhaustive
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
    _assert_same_bits(name, settings, micro_batches=micro_batches)


def _assert_same_bits(name: str, settings: list, **how: Any) -> None:
    """On all ranks and after every step, exchanging after backward and during it."""
    after, during = (train_everywhere(FROM_SCRATCH[name], 3, settings, overlap=each, **how) for each in (False, True))
    for index in range(len(settings)):
        digests = [digest(parameters) for parameters in after[0][index]]
        assert [digest(parameters) for parameters in during[0][index]] == digests
        assert during[1][index] == during[2][index] == digests


def ring_over(
    layers: nn.Module, communicator: Communicator, overlap: bool, optimizer: type = torch.optim.SGD
) -> FromScratch:
    """Each layer of 50 x 50 float32 is a bucket."""
    return FROM_SCRATCH["ring_all_reduce"](
        layers,
        lambda named: optimizer([parameter for _, parameter in named], lr=0.01),
        communicator,
        bucket_bytes=50 * 50 * 4,
        overlap=overlap,
    )


def layers_of_a_bucket(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(50, 50, bias=False) for _ in range(count)))


def note_purposes(communicator: Communicator, fails: Callable[[str], bool] = lambda purpose: False) -> list[str]:
    """To which those of this rank's exchanges are added from now on, but for those that fail."""
    purposes: list[str] = []
    perform = communicator.transport.perform

    def noting(collective: Collective, buffer: SharedBuffer, purpose: str = "") -> Tensor:
        if fails(purpose):
            raise Injected
        purposes.append(purpose)
        return perform(collective, buffer, purpose)

    communicator.transport.perform = noting  # type: ignore[method-assign,assignment]
    return purposes


class Injected(Exception):
    """An error that the worker function catches."""


def order_of_leaving(communicator: Communicator, first_to_reverse: int) -> tuple[list[str], int]:
    """Of three layers, "abc", each a bucket, that are used in the order in which they are registered, or in the reverse
    one by all ranks from `first_to_reverse` on: which leave in each of three steps, and how often all met about it.

    Rank 0 has no samples.
    """
    layers = layers_of_a_bucket(3).to(communicator.device)
    strategy = ring_over(layers, communicator, overlap=True)
    left, purposes = [], note_purposes(communicator)
    for step in range(3):
        strategy.begin_step()
        if communicator.rank:
            used = reversed(layers) if communicator.rank >= first_to_reverse else layers
            with strategy.synchronising(last=True):
                nn.Sequential(*used)(torch.ones(1, 50, device=communicator.device)).sum().backward()
        strategy.step()
        gradients = re.findall(r"gradients of bucket (\d)", " ".join(purposes))[3 * step :]
        left.append("".join("cba"[int(index)] for index in gradients))
    return left, purposes.count("the order of buckets")


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="no GPU")])]
)
def test_after_the_first_step_buckets_leave_in_the_order_of_use_on_all_ranks(device: str) -> None:
    """Bucket 0 holds layer c, registered last, whose gradient comes last where it is used first. Where rank 1 and ranks
    2 and 3 disagree, the mean decides."""
    as_registered = launch(order_of_leaving, 4, 4, device=device, deadline_s=60)
    assert as_registered == [(["cba", "cba", "cba"], 1)] * 4
    reverse = launch(order_of_leaving, 4, 2, device=device, deadline_s=60)
    assert reverse == [(["cba", "abc", "abc"], 1)] * 4


def goes_on_after_an_error(communicator: Communicator, where: str, overlap: bool) -> list[list[str]]:
    """Which buckets are exchanged in the step after one that all ranks gave up, for an error in backward or in the
    exchange, and in one more; rank 1 has no samples in the first of the two."""
    layers, failing = layers_of_a_bucket(3), [where]
    strategy = ring_over(layers, communicator, overlap)
    purposes = note_purposes(communicator, lambda purpose: failing == ["exchange"] and purpose.endswith("bucket 1"))

    def hook(gradient: Tensor) -> None:
        if failing == ["backward"]:
            raise Injected

    layers[0].weight.register_hook(hook)
    exchanged = []
    for step in range(3):
        strategy.begin_step()
        with contextlib.suppress(Injected):
            if step != 1 or communicator.rank != 1:
                with strategy.synchronising(last=True):
                    layers(torch.ones(1, 50)).sum().backward()
            strategy.step()
        failing.clear()
        exchanged.append([purpose[-1] for purpose in purposes if purpose.startswith("gradients")])
        purposes.clear()
    return exchanged[1:]


@pytest.mark.parametrize("where, overlap", [("backward", True), ("exchange", True), ("exchange", False)])
def test_the_step_after_an_error_exchanges_all_buckets(where: str, overlap: bool) -> None:
    for exchanged in launch(goes_on_after_an_error, 3, where, overlap, deadline_s=10):
        assert [sorted(indices) for indices in exchanged] == [["0", "1", "2"]] * 2


class SlowOnRank1(torch.optim.SGD):
    seconds = 0.0

    def step(self, closure: None = None) -> None:
        time.sleep(self.seconds)
        super().step(closure)


def seconds_beside_waiting(communicator: Communicator) -> float:
    """What a strategy counts as exchange in a first step, less what the transport counts as waiting in it."""
    SlowOnRank1.seconds = 0.1 * communicator.rank
    layers = layers_of_a_bucket(2)
    strategy = ring_over(layers, communicator, overlap=True, optimizer=SlowOnRank1)
    strategy.begin_step()
    waited_s = sum(communicator.transport.waited_s)
    with strategy.synchronising(last=True):
        layers(torch.ones(1, 50)).sum().backward()
    strategy.step()
    return strategy.exchange_clock.total_s - (sum(communicator.transport.waited_s) - waited_s)


def test_waiting_for_the_order_of_others_counts_as_exchange() -> None:
    """Rank 1 comes to it a tenth of a second after rank 0."""
    assert min(launch(seconds_beside_waiting, 2)) >= 0


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
@pytest.mark.skipif(not GPUS, reason="there is no GPU")
@pytest.mark.parametrize("performer, micro_batches", [("plain", 1), ("triton", 1), ("triton", 3)])
@pytest.mark.parametrize("name", ["ring_all_reduce", "two_shot_in_place", "param_server"])
def test_exchanging_during_backward_changes_no_bit_on_gpus(name: str, performer: str, micro_batches: int) -> None:
    """On a stream of its own there: of the awkward model with Adam and the cnn in both types, on 3 processes."""
    settings = [
        (MODELS["awkward"], OPTIMIZERS["adam"], torch.float64),
        *((MODELS["cnn"], OPTIMIZERS["adamw"], dtype) for dtype in (torch.float64, torch.float32)),
        (BackToFront, OPTIMIZERS["sgd"], torch.float64),
    ]
    _assert_same_bits(name, settings, device="cuda", performer=performer, micro_batches=micro_batches)
