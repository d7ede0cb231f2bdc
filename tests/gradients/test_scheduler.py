"""The order in which exchanges begin, by hand: of units that are all of the same size, on three threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from torch_parallel.gradients.scheduler import CHANNELS, Scheduler, Unit
from torch_parallel.transport.base import TransportError
from torch_parallel.transport.channels import Steps, Wait, open_channels
from torch_parallel.transport.local import LocalGroup
from torch_parallel.transport.signals import stores_are_ordered

pytestmark = pytest.mark.skipif(not stores_are_ordered(), reason="channels need an x86-64 processor")


class Bench:
    """A scheduler on each of some threads. Every unit notes its start, and ends when the test lets it."""

    def __init__(self, n: int, buckets: int, parts: int = 1, deadline_s: float = 10.0, **options: Any) -> None:
        self.group = LocalGroup(n, deadline_s)
        self.gates = [threading.Event() for _ in range(buckets * parts)]
        self.begun: list[list[int]] = [[] for _ in range(n)]
        self.schedulers: list[Scheduler] = [None] * n  # type: ignore[list-item]
        self.in_threads(lambda rank: self._make(rank, buckets, parts, deadline_s, options))

    def _make(self, rank: int, buckets: int, parts: int, deadline_s: float, options: dict[str, Any]) -> None:
        transport = self.group.transport(rank)
        channels, bells = open_channels(transport, CHANNELS, deadline_s)

        def steps(index: int) -> Steps:
            self.begun[rank].append(index)
            yield Wait(self.gates[index].is_set, None, "the test")

        units = [
            Unit(index, index // parts, 100, channels[index % CHANNELS], lambda index=index: steps(index))  # type: ignore[misc]
            for index in range(buckets * parts)
        ]
        self.schedulers[rank] = Scheduler(units, transport, bells, 0, deadline_s, **options)

    def in_threads(self, work: Any) -> None:
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(self.schedulers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def begun_when(self, rank: int, count: int) -> list[int]:
        """What has begun there, when it is so many; a moment later it is not more."""
        waiting = threading.Event()
        for _ in range(500):
            if len(self.begun[rank]) >= count:
                break
            waiting.wait(0.01)
        waiting.wait(0.05)
        return self.begun[rank]

    def let(self, *indices: int) -> None:
        """These units end."""
        for index in indices:
            self.gates[index].set()

    def close(self) -> None:
        for scheduler in self.schedulers:
            scheduler.close()


def test_in_the_order_in_which_they_are_ready() -> None:
    bench = Bench(1, 4, by_priority=False, credit_bytes=100)
    for bucket in (2, 0, 3, 1):
        bench.schedulers[0].ready(bucket)
    assert bench.begun_when(0, 1) == [2]
    for done, begun in ((2, [2, 0]), (0, [2, 0, 3]), (3, [2, 0, 3, 1])):
        bench.let(done)
        assert bench.begun_when(0, len(begun)) == begun
    bench.let(1)
    bench.schedulers[0].wait(range(4))
    bench.close()


def test_what_is_needed_first_overtakes() -> None:
    bench = Bench(1, 4, by_priority=True, credit_bytes=100)
    bench.schedulers[0].set_order([1, 3, 0, 2])
    bench.schedulers[0].ready(2)
    assert bench.begun_when(0, 1) == [2]  # it was alone, and what has begun is not interrupted
    for bucket in (0, 3, 1):
        bench.schedulers[0].ready(bucket)
    for done, begun in ((2, [2, 1]), (1, [2, 1, 3]), (3, [2, 1, 3, 0])):
        bench.let(done)
        assert bench.begun_when(0, len(begun)) == begun
    bench.let(0)
    bench.schedulers[0].wait(range(4))
    bench.close()


def test_credit_bounds_what_is_under_way() -> None:
    bench = Bench(1, 3, parts=2, by_priority=False, credit_bytes=299)
    for bucket in range(3):
        bench.schedulers[0].ready(bucket)
    assert bench.begun_when(0, 2) == [0, 1]  # 200 bytes, and 300 would be too many
    bench.let(1)
    assert bench.begun_when(0, 3) == [0, 1, 2]
    bench.let(0, 2, 3, 4, 5)
    bench.schedulers[0].wait(range(3))
    assert sorted(bench.begun[0]) == list(range(6))
    bench.close()


def test_a_unit_larger_than_the_credit_goes_alone() -> None:
    bench = Bench(1, 2, by_priority=False, credit_bytes=10)
    for bucket in range(2):
        bench.schedulers[0].ready(bucket)
    assert bench.begun_when(0, 1) == [0]
    bench.let(0, 1)
    bench.schedulers[0].wait(range(2))
    bench.close()


def test_all_ranks_follow_one() -> None:
    """Rank 0 decides; 1 and 2 have theirs ready in other orders, before and after."""
    bench = Bench(3, 3, by_priority=False, credit_bytes=100)
    for bucket in (0, 1, 2):
        bench.schedulers[1].ready(bucket)
    assert bench.begun_when(1, 0) == []
    for bucket in (2, 0, 1):
        bench.schedulers[0].ready(bucket)
    assert bench.begun_when(1, 1) == [2]
    bench.let(2, 0, 1)
    for bucket in (1, 0, 2):
        bench.schedulers[2].ready(bucket)
    bench.in_threads(lambda rank: bench.schedulers[rank].wait(range(3)))
    assert bench.begun == [[2, 0, 1]] * 3
    bench.close()


def test_who_is_not_told_what_comes_next_says_so_by_the_deadline() -> None:
    bench = Bench(2, 1, by_priority=False, deadline_s=0.5)
    bench.schedulers[1].ready(0)
    with pytest.raises(TransportError, match="rank 1, which gradients are exchanged next: no signal from rank 0 for"):
        bench.schedulers[1].wait([0])
    bench.close()


def test_an_error_of_the_thread_is_raised_where_it_is_waited_for() -> None:
    bench = Bench(1, 1, by_priority=False)
    bench.gates[0].is_set = lambda: 1 // 0  # type: ignore[method-assign,assign,return-value]
    bench.schedulers[0].ready(0)
    with pytest.raises(ZeroDivisionError):
        bench.schedulers[0].wait([0])
    bench.close()


def test_a_step_does_not_overtake_the_one_before() -> None:
    """Bucket 0 is needed first, and its next gradient is there when 1 and 2 of the step before have not begun."""
    bench = Bench(2, 3, by_priority=True, credit_bytes=100)
    bench.schedulers[0].set_order([0, 1, 2])
    for scheduler in bench.schedulers:
        for bucket in (0, 1, 2):
            scheduler.ready(bucket)
    assert bench.begun_when(0, 1) == [0]
    bench.let(0)
    bench.in_threads(lambda rank: bench.schedulers[rank].wait([0]))
    bench.schedulers[0].ready(0)
    bench.let(1, 2)
    bench.schedulers[1].wait([1, 2])  # it makes the next one ready after these
    bench.schedulers[1].ready(0)
    bench.in_threads(lambda rank: bench.schedulers[rank].wait(range(3)))
    assert bench.begun == [[0, 1, 2, 0]] * 2
    bench.close()
