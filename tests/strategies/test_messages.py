"""Messages and bytes of a real training step, recorded by the transport's observer, against formulas, per purpose."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.nn.functional import cross_entropy

from torch_parallel import launch
from torch_parallel.communicator import Communicator
from torch_parallel.strategies import FROM_SCRATCH
from torch_parallel.workloads import build_model

BUCKET_BYTES = 50_000
FLOAT = 4


def record_a_step(communicator: Communicator, name: str) -> tuple[list, list[tuple[int, int]]]:
    """This rank's (source, to, bytes, purpose, round), and (elements, parameters) of every bucket."""
    model = build_model("cnn", (1, 8, 8), 10)
    strategy = FROM_SCRATCH[name](
        model,
        lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.1),
        communicator,
        bucket_bytes=BUCKET_BYTES,
    )
    transfers: list = []
    communicator.transport.observer = lambda each: transfers.append(
        (each.source, each.to, each.bytes, each.purpose, each.round)
    )
    strategy.begin_step()
    if not communicator.is_server:
        cross_entropy(model(torch.randn(4, 1, 8, 8)), torch.arange(4), reduction="sum").backward()
    strategy.step()
    return transfers, [(bucket.numel, len(bucket.parameters)) for bucket in strategy.buckets]


def record(name: str, n: int) -> tuple[list, list[tuple[int, int]]]:
    by_rank = launch(record_a_step, n, name, server_count=FROM_SCRATCH[name].server_count, deadline_s=30)
    assert all(buckets == by_rank[0][1] for _, buckets in by_rank)
    return [transfer for transfers, _ in by_rank for transfer in transfers], by_rank[0][1]


def test_the_model_fills_several_buckets_of_sizes_that_nothing_divides() -> None:
    _, buckets = record("ring_all_reduce", 1)
    # from the last layer to the first, at most 12,500 elements: fc3, fc2 and fc1.bias; fc1.weight, conv2 and conv1
    assert buckets == [(10 + 840 + 84 + 10080 + 120, 5), (7680 + 16 + 2400 + 6 + 150, 5)]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_ring_sends_its_2_p_minus_1_messages_a_bucket_and_nothing_else(n: int) -> None:
    transfers, buckets = record("ring_all_reduce", n)
    expected: Counter = Counter()
    for index, (numel, parameters) in enumerate(buckets):
        elements = numel + parameters  # a use mark for each parameter
        sizes = [len(part) for part in torch.arange(elements).tensor_split(n)]
        for rank in range(n):
            left = (rank - 1) % n
            # what the left neighbour sends: all chunks but its own to be added, all but mine to be copied
            for step in range(n - 1):
                for half, chunk in ((0, left - 1 - step), (n - 1, left - step)):
                    nbytes = sizes[chunk % n] * FLOAT
                    expected[left, rank, nbytes, f"gradients of bucket {index}", half + step] += 1
    assert Counter(transfers) == expected
    assert len(transfers) == len(buckets) * n * 2 * (n - 1)
    total = sum(nbytes for _, _, nbytes, _, _ in transfers)
    assert total == sum(2 * (n - 1) * (numel + parameters) * FLOAT for numel, parameters in buckets)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_workers_push_gradients_to_the_server_and_pull_parameters_from_it(n: int) -> None:
    transfers, buckets = record("param_server", n)
    expected: Counter = Counter()
    for index, (numel, parameters) in enumerate(buckets):
        for worker in range(1, n):
            expected[worker, 0, (numel + parameters) * FLOAT, f"gradients of bucket {index}", 0] += 1
            expected[0, worker, numel * FLOAT, f"parameters of bucket {index}", 0] += 1
    assert Counter(transfers) == expected
