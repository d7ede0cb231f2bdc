"""What is made of a profiler's trace, by hand: two streams, one of which computes."""

from __future__ import annotations

from typing import Any

import pytest

from torch_parallel.bench.gpu_profile import compute_stream, shares, union, work_of


def event(stream: int, start: float, duration: float, category: str = "kernel") -> dict[str, Any]:
    return {
        "cat": category,
        "name": f"work of {stream}",
        "ts": 1000 + start,
        "dur": duration,
        "args": {"stream": stream},
    }


TRACE = [
    event(7, 0, 40),
    event(7, 30, 20),  # computing from 0 to 50
    event(20, 45, 15),  # exchanging from 45 to 60, 5 of it hidden
    event(7, 90, 10, "gpu_memset"),  # and computing again from 90 to 100
    event(20, 0, 100, "gpu_user_annotation"),
    {"cat": "cpu_op", "name": "aten::add", "ts": 900, "dur": 500},
]


def test_only_the_gpus_work_counts_from_its_first_on() -> None:
    work = work_of(TRACE)
    assert [(each.stream, each.start_us, each.end_us) for each in work] == [
        (7, 0, 40),
        (7, 30, 50),
        (20, 45, 60),
        (7, 90, 100),
    ]
    assert compute_stream(work) == 7


def test_parts_of_the_time() -> None:
    """Of 100 microseconds: 0-50 and 90-100 computing, 45-60 beside, together 70 busy, 5 both."""
    assert shares(work_of(TRACE)) == pytest.approx({"busy": 0.7, "compute": 0.6, "beside": 0.15, "hidden": 0.05})


def test_a_union_counts_nothing_twice() -> None:
    assert union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
