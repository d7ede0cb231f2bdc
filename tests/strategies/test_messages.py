"""Messages and bytes of a real training step, recorded by the transport's observer, against formulas, per purpose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import cross_entropy

from torch_parallel import launch
from torch_parallel.collectives import ALL_REDUCE, Receive
from torch_parallel.communicator import Communicator
from torch_parallel.strategies import FROM_SCRATCH
from torch_parallel.strategies.all_reduce import strategy_of
from torch_parallel.transport.base import Transfer
from torch_parallel.workloads import build_model

BUCKET_BYTES = 50_000
FLOAT = 4


def plainly(each: Transfer) -> tuple:
    return each.source, each.to, each.bytes, each.purpose, each.round


def with_what_is_done(each: Transfer) -> tuple:
    return each.source, each.to, each.bytes, each.purpose, (each.round, each.reduce)


def record_a_step(
    communicator: Communicator, name: str, describe: Callable[[Transfer], tuple]
) -> tuple[list, list[tuple[int, int]]]:
    """This rank's messages, and (elements, parameters) of every bucket."""
    model = build_model("cnn", (1, 8, 8), 10)
    strategy = FROM_SCRATCH[name](
        model,
        lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.1),
        communicator,
        bucket_bytes=BUCKET_BYTES,
    )
    transfers: list = []
    communicator.transport.observer = lambda each: transfers.append(describe(each))
    strategy.begin_step()
    if not communicator.is_server:
        cross_entropy(model(torch.randn(4, 1, 8, 8)), torch.arange(4), reduction="sum").backward()
    strategy.step()
    return transfers, [(bucket.numel, len(bucket.parameters)) for bucket in strategy.buckets]


def record(name: str, n: int, describe: Callable[[Transfer], tuple] = plainly) -> tuple[list, list[tuple[int, int]]]:
    by_rank = launch(record_a_step, n, name, describe, server_count=FROM_SCRATCH[name].server_count, deadline_s=30)
    assert all(buckets == by_rank[0][1] for _, buckets in by_rank)
    return [transfer for transfers, _ in by_rank for transfer in transfers], by_rank[0][1]


def test_the_model_fills_several_buckets_of_sizes_that_nothing_divides() -> None:
    _, buckets = record("ring_all_reduce", 1)
    # from the last layer to the first, at most 12,500 elements, 1,562 in the last: fc3, fc2; fc1, conv2; conv1
    assert buckets == [(10 + 840 + 84 + 10080, 4), (120 + 7680 + 16 + 2400, 4), (6 + 150, 2)]


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


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_each_shard_is_read_once_by_its_owner_and_nothing_else_is_sent(n: int) -> None:
    """One bucket, whatever its size; each rank reads its chunk of the gradients from each other rank."""
    transfers, buckets = record("sharded_param_server", n)
    ((numel, _),) = buckets
    assert numel == 10 + 840 + 84 + 10080 + 120 + 7680 + 16 + 2400 + 6 + 150
    sizes = [len(part) for part in torch.arange(numel).tensor_split(n)]
    expected = Counter(
        (source, rank, sizes[rank] * FLOAT, "gradients of bucket 0", 0)
        for rank in range(n)
        for source in range(n)
        if source != rank
    )
    assert Counter(transfers) == expected
    assert sum(nbytes for _, _, nbytes, _, _ in transfers) == (n - 1) * numel * FLOAT


def sent_by_schedule(algorithm: str, n: int, elements: int) -> Counter:
    """(source, to, bytes, round, added) of every message that its schedule has the ranks receive."""
    collective = ALL_REDUCE[algorithm]
    cuts = collective.chunk_count(n)
    sizes = [len(part) for part in torch.arange(elements).tensor_split(cuts)]
    expected: Counter = Counter()
    for rank in range(n):
        for index, actions in enumerate(collective.rounds(rank, n)):
            for action in actions:
                if isinstance(action, Receive):
                    moved = not (collective.common_result and action.chunks.start >= cuts)  # else it is read in place
                    nbytes = FLOAT * sum(sizes[chunk % cuts] for chunk in action.chunks) if moved else 0
                    expected[action.source, rank, nbytes, index, action.reduce] += 1
    return expected


def test_every_all_reduce_strategy_sends_what_its_own_schedule_says_and_no_two_send_the_same() -> None:
    n, seen = 4, {}
    for algorithm, (name, _) in zip(ALL_REDUCE, map(strategy_of, ALL_REDUCE), strict=True):
        transfers, buckets = record(name, n, describe=with_what_is_done)
        for index, (numel, parameters) in enumerate(buckets):
            mine = Counter((*who, *how) for *who, purpose, how in transfers if purpose.endswith(f"bucket {index}"))
            assert mine == sent_by_schedule(algorithm, n, numel + parameters), name
        assert len(transfers) == sum(ALL_REDUCE[algorithm].message_count(rank, n) for rank in range(n)) * len(buckets)
        seen[name] = frozenset(Counter(transfers).items())
    # some send alike, gather + scatter as reduce + broadcast; the receiver copies then what it adds in the other
    assert len(set(seen.values())) == len(seen) == len(ALL_REDUCE)


def sharded_steps(communicator: Communicator, clip_norm: float | None) -> tuple[list[Counter], list]:
    """(kind, to) of the signals that this rank posts in each of three steps, and the messages that are no gradients."""
    model = build_model("cnn", (1, 8, 8), 10)
    strategy = FROM_SCRATCH["sharded_param_server"](
        model, lambda named: torch.optim.SGD([each for _, each in named], lr=0.1), communicator, clip_norm=clip_norm
    )
    transport = communicator.transport
    post, posted, others = transport._signals.post, [], []

    def counted(kind: int, peer: int) -> None:
        posted[-1][kind, peer] += 1
        post(kind, peer)

    def observe(transfer) -> None:
        if not transfer.purpose.startswith("gradients"):
            others.append((transfer.source, transfer.bytes, transfer.purpose))

    transport._signals.post = counted  # type: ignore[method-assign]
    transport.observer = observe
    for _ in range(3):
        posted.append(Counter())
        strategy.begin_step()
        cross_entropy(model(torch.randn(4, 1, 8, 8)), torch.arange(4), reduction="sum").backward()
        strategy.step()
    return posted, others


def test_a_sharded_step_takes_two_signals_for_each_pair_of_ranks() -> None:
    """Backward is done; and: I have read yours and written mine."""
    for rank, (steps, others) in enumerate(launch(sharded_steps, 3, None, deadline_s=30)):
        assert steps == [Counter({(kind, peer): 1 for kind in (0, 1) for peer in range(3) if peer != rank})] * 3
        assert others == []


def test_clipping_adds_the_exchange_of_one_number_a_rank() -> None:
    """P - 1 messages of 8 bytes around the ring in each step."""
    for rank, (_, others) in enumerate(launch(sharded_steps, 4, 1.0, deadline_s=30)):
        assert others == [((rank - 1) % 4, 8, "norms of the shards")] * 3 * 3
