"""Which samples a worker takes: each once an epoch, in an order that all agree on, in steps that do not depend on N."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import Tensor

from torch_parallel.strategies.shares import Share, shard, synchronous_shares
from torch_parallel.training import sampler
from torch_parallel.training.sampler import epoch_order, looking_ahead, step_count


def batches(
    sample_count: int,
    batch_size: int,
    seed: int,
    epoch: int,
    worker_index: int | None,
    worker_count: int,
    first_sample: int = 0,
) -> list[tuple[Tensor, int]]:
    """For each step this worker's samples, and the samples of all workers together."""
    shares = synchronous_shares(sample_count, batch_size, worker_index, worker_count, first_sample)
    order = epoch_order(sample_count, seed, epoch)
    return [(indices, share.count) for indices, share in sampler.batches(order, shares)]


def taken(sample_count: int, batch_size: int, seed: int, epoch: int, workers: int) -> list[list[list[int]]]:
    """By worker and step, the indices of the samples."""
    return [
        [indices.tolist() for indices, _ in batches(sample_count, batch_size, seed, epoch, worker, workers)]
        for worker in range(workers)
    ]


def test_an_epoch_is_split_into_disjoint_shards_that_cover_it() -> None:
    by_epoch = [taken(1000, 64, 0, epoch, workers=4) for epoch in (1, 2)]
    for by_worker in by_epoch:
        sets = [{index for step in steps for index in step} for steps in by_worker]
        assert [len(each) for each in sets] == [250, 250, 250, 250]
        assert set.union(*sets) == set(range(1000))  # 4 * 250 = 1000, so they are disjoint
    for first, second in zip(*by_epoch, strict=True):
        shards = [{index for step in steps for index in step} for steps in (first, second)]
        assert shards[0] != shards[1]  # not the old shard in a new order


def test_the_same_seed_gives_the_same_lists_and_another_seed_others() -> None:
    assert taken(1000, 64, 7, 2, workers=4) == taken(1000, 64, 7, 2, workers=4)
    assert taken(1000, 64, 7, 2, workers=4) != taken(1000, 64, 8, 2, workers=4)


def test_no_two_epochs_of_neighbouring_seeds_share_an_order() -> None:
    orders = {tuple(epoch_order(50, seed, epoch).tolist()) for seed in range(10) for epoch in range(1, 11)}
    assert len(orders) == 100
    assert len({tuple(epoch_order(50, 2**63 - 1, epoch).tolist()) for epoch in (1, 2)}) == 2  # the largest seed


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7])
def test_steps_and_the_samples_of_each_step_do_not_depend_on_the_number_of_workers(workers: int) -> None:
    order = epoch_order(1024, 3, 1).tolist()
    by_worker = taken(1024, 64, 3, 1, workers)
    assert [len(steps) for steps in by_worker] == [16] * workers == [step_count(1024, 64)] * workers
    for step in range(16):
        together = [index for steps in by_worker for index in steps[step]]
        assert together == order[64 * step : 64 * step + 64]


@pytest.mark.parametrize(
    ("sample_count", "steps", "last"),
    [
        (257, 5, [1, 0, 0, 0]),  # 257 = 4 * 64 + 1
        (4001, 63, [9, 8, 8, 8]),  # 4001 = 62 * 64 + 33
        (3, 1, [1, 1, 1, 0]),
        (1, 1, [1, 0, 0, 0]),
        (256, 4, [16, 16, 16, 16]),
    ],
)
def test_sizes_that_nothing_divides(sample_count: int, steps: int, last: list[int]) -> None:
    by_worker = taken(sample_count, 64, 0, 1, workers=4)
    assert step_count(sample_count, 64) == steps
    assert [len(each) for each in by_worker] == [steps] * 4  # every rank takes part in every step
    assert [len(each[-1]) for each in by_worker] == last
    assert all(len(step) == 16 for each in by_worker for step in each[:-1])
    assert sorted(index for each in by_worker for step in each for index in step) == list(range(sample_count))


def test_every_rank_is_told_the_samples_of_all_workers_together() -> None:
    for worker in (0, 3, None):
        assert [count for _, count in batches(257, 64, 0, 1, worker, 4)] == [64, 64, 64, 64, 1]


def test_a_batch_smaller_than_the_workers_leaves_some_without_samples() -> None:
    for step in range(5):
        assert [len(each[step]) for each in taken(10, 2, 0, 1, workers=4)] == [1, 1, 0, 0]


def test_a_server_takes_no_sample() -> None:
    assert [indices.tolist() for indices, _ in batches(10, 4, 0, 1, None, 3)] == [[], [], []]
    assert shard(10, None, 3) == slice(0, 0)


def test_shards_of_the_test_samples() -> None:
    assert [shard(10, worker, 4) for worker in range(4)] == [slice(0, 3), slice(3, 6), slice(6, 8), slice(8, 10)]
    assert [shard(2, worker, 3) for worker in range(3)] == [slice(0, 1), slice(1, 2), slice(2, 2)]


def test_a_resumed_epoch_takes_what_is_left_of_it() -> None:
    for workers in (1, 3):
        whole = [list(batches(257, 64, 5, 2, worker, workers)) for worker in range(workers)]
        rest = [list(batches(257, 64, 5, 2, worker, workers, first_sample=128)) for worker in range(workers)]
        for all_steps, last_steps in zip(whole, rest, strict=True):
            assert [(indices.tolist(), count) for indices, count in last_steps] == [
                (indices.tolist(), count) for indices, count in all_steps[2:]
            ]
    assert list(batches(257, 64, 5, 2, 0, 3, first_sample=257)) == []


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_looking_ahead(steps: int) -> None:
    """Each step with the very tensor of the next one, which is drawn one step early and no sooner."""
    asked: list[int] = []

    def shares() -> Iterator[Share]:
        for step in range(steps):
            asked.append(step)
            yield Share(slice(2 * step, 2 * step + 2), 2, 2 * step + 2)

    drawn = looking_ahead(sampler.batches(epoch_order(8, 0, 1), shares()))
    following = None
    for step, (indices, share, upcoming) in enumerate(drawn):
        assert share.done == 2 * step + 2 and indices.tolist() == epoch_order(8, 0, 1)[2 * step : 2 * step + 2].tolist()
        assert following is None or indices is following
        assert asked == list(range(min(step + 2, steps)))
        following = upcoming
        assert (upcoming is None) == (step == steps - 1)
    assert asked == list(range(steps))
