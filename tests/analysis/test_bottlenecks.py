"""What is said of slow workers, slow links and ways to average, on hand-made runs; and the formulas, by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from torch_parallel.analysis import bottlenecks, communication
from torch_parallel.analysis.runs import EpochFigures, Run
from torch_parallel.collectives.cost import Rates, predicted_s


def run(strategy: str, epoch_s: float, seed: int = 0, n: int = 4, workers: int = 4, **options: Any) -> Run:
    """Of 160 images in batches of 16, with a first epoch that warms up."""
    settings = {"options": json.dumps(options), "train_size": "160", "batch_size": "16", "steps": "10", "lr": "0.02"}
    epochs = [EpochFigures(k, seconds, 1.0, 0.1, 0.5, {}) for k, seconds in ((1, 99.0), (2, epoch_s))]
    return Run(f"{strategy} {seed}", strategy, n, workers, 1, seed, settings, epochs)


def test_speed_left_is_worked_out_seed_by_seed() -> None:
    runs = [
        *(run("ring_all_reduce", seconds, seed, straggler="3:1x") for seed, seconds in enumerate((1.0, 2.0))),
        *(run("ring_all_reduce", seconds, seed, straggler="3:4x") for seed, seconds in enumerate((4.0, 10.0))),
    ]
    by_times = bottlenecks.slowed(runs)["ring_all_reduce"]
    assert {times: [each.seed for each in of_times] for times, of_times in by_times.items()} == {1: [0, 1], 4: [0, 1]}
    assert bottlenecks.relative_speeds(by_times) == {1: [1, 1], 4: [0.25, 0.2]}


def test_formulas_of_one_slow_worker_of_four() -> None:
    assert bottlenecks.expected_speed(run("param_server", 1.0), 8) == 1 / 8
    assert bottlenecks.expected_speed(run("param_server_bounded", 1.0), 2) == 1 / 2
    assert bottlenecks.expected_speed(run("param_server_async", 1.0), 8) == (3 + 1 / 8) / 4
    assert bottlenecks.expected_speed(run("param_server_backup", 1.0), 8) == 1
    # a step of 10 ms of computing and 2 ms of the rest: 12 ms, and 42 ms at four times
    assert bottlenecks.expected_speed(run("ring_all_reduce", 1.0), 4, rest=0.2) == pytest.approx(12 / 42)
    assert bottlenecks.rest_of([run("ring_all_reduce", 0.12, compute_ms=10)]) == pytest.approx(0.2)


def test_formulas_of_jitter_on_four_workers() -> None:
    """H_4 = 1 + 1/2 + 1/3 + 1/4 = 25/12; without the slowest of them 13/12; by itself each waits one mean."""
    assert bottlenecks.expected_jitter_s(run("ring_all_reduce", 1.0), 0.012) == pytest.approx(0.025)
    assert bottlenecks.expected_jitter_s(run("param_server_backup", 1.0, backup_workers=1), 0.012) == pytest.approx(
        0.013
    )
    assert bottlenecks.expected_jitter_s(run("param_server_async", 1.0), 0.012) == 0.012
    assert bottlenecks.expected_jitter_s(run("param_server_bounded", 1.0, staleness=2), 0.012) is None


def test_what_jitter_added() -> None:
    """Ten batches an epoch: 1.0 s and 1.3 s are 30 ms a step apart."""
    plain = run("ring_all_reduce", 1.0, straggler="3:1x")
    slow = run("ring_all_reduce", 1.3, jitter="10ms")
    assert bottlenecks.jitter_added_ms([slow], [plain, slow]) == [pytest.approx(30)]


def test_an_exchange_is_predicted_from_the_schedule_and_the_link() -> None:
    """A ring of four over 8 Mbit/s, 1e6 bytes a second, and 1 ms: 6 ms and 1.5 times the bytes. Else none is given."""
    unlike = run("ring_all_reduce", 1.0, link="80mbit,3:8mbit", latency="1ms", compute_ms=10)
    assert bottlenecks.expected_exchange_s(unlike, 4000) is None
    ring = run("ring_all_reduce", 1.0, link="8mbit", latency="1ms", compute_ms=10)
    assert bottlenecks.expected_exchange_s(ring, 4000) == pytest.approx(0.006 + 1.5 * 4000e-6)
    plain = run("ring_all_reduce", 0.4, latency="0s", compute_ms=10)
    assert bottlenecks.added_by_links_s([ring], [plain, ring]) == [pytest.approx(0.1 - 0.04)]
    server = run("param_server", 1.0, n=5, link="8mbit", latency="1ms", compute_ms=10)
    # four pushes, each waited for with its latency, then four pulls at once, of which the root's link carries the bytes
    assert bottlenecks.expected_exchange_s(server, 4000) == pytest.approx(4 * (0.001 + 0.004) + 4 * 0.004 + 0.001)
    shards = run("sharded_param_server", 1.0, link="8mbit", latency="1ms", compute_ms=10)
    # two directions of three chunks, and three use marks
    assert bottlenecks.expected_exchange_s(shards, 4000) == pytest.approx(6 * (0.001 + 0.001) + 3 * 0.001, rel=0.001)


def test_the_size_of_the_gradients_is_read_off_what_a_ring_received() -> None:
    """2 (n - 1)/n = 1.5 times the buffer in each of 10 steps."""
    ring = run("ring_all_reduce", 1.0)
    ring.settings["received_bytes"] = json.dumps([0, 0, 0, 60_000])
    assert bottlenecks.gradient_bytes([ring]) == 4000


def test_ways_to_average_are_told_apart() -> None:
    assert bottlenecks.way(run("ring_all_reduce", 1.0), 0.02) == "weighted by samples"
    assert bottlenecks.way(run("ring_all_reduce", 1.0, aggregate="sum"), 0.02) == "sum of the means"
    less = run("ring_all_reduce", 1.0, aggregate="sum")
    less.settings["lr"] = "0.006667"
    assert bottlenecks.way(less, 0.02) == "sum of the means, rate / 3"


def test_messages_of_four_ranks() -> None:
    """A ring sends 2 * 3/4 of the buffer from each; through a root that one sends it to three, and others once."""
    lines = {line.split()[0]: line.split()[1:] for line in communication.messages(4, 1000).splitlines()[1:-1]}
    assert lines["ring"] == ["6", "24", "1.50", "6.00", "1"]
    assert lines["reduce_broadcast"] == ["2", "6", "3.00", "6.00", "1"]
    assert lines["one_shot"] == ["1", "12", "3.00", "12.00", "2"]
    assert lines["two_shot_in_place"] == ["2", "24", "0.75", "3.00", "2"]
    assert lines["all_gather_average"][-1] == "4"


def test_sizes_as_a_reader_says_them() -> None:
    assert [communication.size_told(size) for size in (4096, 4092, 1 << 20, 104857600)] == [
        "4 KiB",
        "4 KiB",
        "1 MiB",
        "100 MiB",
    ]


def test_the_model_is_the_one_that_is_tested_elsewhere() -> None:
    (ring,) = bottlenecks.collectives_of("ring_all_reduce")
    assert predicted_s(ring, 2, 8, Rates(1.0, 0.0)) == 2
