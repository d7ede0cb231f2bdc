"""Operations on several channels do not mix, in whatever order and at whatever time each rank goes on with them."""

from __future__ import annotations

import random
import time

import pytest
import torch

from torch_parallel import launch
from torch_parallel.collectives import ALL_REDUCE
from torch_parallel.communicator import Communicator
from torch_parallel.gradients.exchanger import Exchanger, Operation
from torch_parallel.transport.channels import Steps, open_channels
from torch_parallel.transport.signals import stores_are_ordered

pytestmark = pytest.mark.skipif(not stores_are_ordered(), reason="channels need an x86-64 processor")

CHANNELS, LENGTH = 3, 4
NAMES = [name for name, collective in ALL_REDUCE.items() if not collective.common_result]


def random_programs(communicator: Communicator, first: int, count: int) -> int:
    """Each is LENGTH sums on each of the channels; every rank goes on with any channel next, now and then late. Returns
    how many sums were right."""
    right = 0
    channels, _ = open_channels(communicator.transport, CHANNELS, communicator.deadline_s)
    rank, world_size = communicator.rank, communicator.world_size
    buffers = {}
    for number in range(first, first + count):
        same, own = random.Random(number), random.Random(f"{number} {rank}")
        left: list[list[tuple[Steps, torch.Tensor, torch.Tensor]]] = []
        for index, channel in enumerate(channels):
            operations = []
            for place in range(LENGTH):
                name, numel = same.choice(NAMES), same.choice((1, 2, 5, 64, 777))
                if (index, place, numel) not in buffers:
                    buffers[index, place, numel] = communicator.share(numel)
                buffer, collective = buffers[index, place, numel], ALL_REDUCE[name]
                addend = same.randrange(1000)
                result = channel.bind(collective, buffer)
                buffer.local.copy_(torch.arange(numel) + rank * addend)
                expected = torch.arange(float(numel)) * world_size + addend * sum(range(world_size))
                operations.append((channel.steps(collective, buffer, f"sum {place}"), result, expected))
            left.append(operations)
        communicator.barrier()
        waits = [None] * CHANNELS
        until_s = time.monotonic() + 30
        while any(left):
            index = own.choice([index for index, operations in enumerate(left) if operations])
            if own.random() < 0.02:
                time.sleep(own.random() * 0.002)
            wait = waits[index]
            if wait is None or wait.is_over():
                steps, result, expected = left[index][0]
                waits[index] = next(steps, None)
                if waits[index] is None:
                    assert torch.equal(result, expected), (number, index)
                    left[index].pop(0)
                    right += 1
            assert time.monotonic() < until_s, number
        communicator.barrier()
    return right


@pytest.mark.parametrize("n", [2, 3, 4])
def test_random_programs_give_the_right_sums(n: int, request: pytest.FixtureRequest) -> None:
    """More of them: --trials 1000 --first_trial 0."""
    first, count = request.config.getoption("first_trial"), request.config.getoption("trials")
    right = launch(random_programs, n, first, count, deadline_s=60)
    assert right == [count * CHANNELS * LENGTH] * n


def waits_for_a_late_rank(communicator: Communicator, seconds: float) -> float:
    """Seconds of a processor that rank 0 uses while rank 1 does not come for so long."""
    (channel,), bells = open_channels(communicator.transport, 1, communicator.deadline_s)
    buffer, collective = communicator.share(100), ALL_REDUCE["ring"]
    channel.bind(collective, buffer)
    buffer.local.fill_(communicator.rank + 1.0)
    to_do = [Operation(0, channel, channel.steps(collective, buffer, "a sum"), communicator.deadline_s)]
    done: list[int] = []
    exchanger = Exchanger(
        communicator.transport,
        bells,
        lambda: to_do.pop() if to_do else None,
        lambda: bool(to_do),
        done.append,
        communicator.deadline_s,
    )
    communicator.barrier()
    start_s = time.process_time()
    if communicator.rank == 1:
        time.sleep(seconds)
    exchanger.start()
    exchanger.wait_until(lambda: bool(done), None)
    used_s = time.process_time() - start_s
    exchanger.close()
    assert buffer.local.tolist() == [3.0] * 100
    return used_s


def test_who_waits_uses_no_processor() -> None:
    used_s, _ = launch(waits_for_a_late_rank, 2, 2.0, deadline_s=60)
    assert used_s < 0.05 * 2.0
