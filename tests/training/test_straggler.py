"""Slow workers and links on purpose: what the flags mean, and that a run obeys the formulas of stragglers."""

from __future__ import annotations

import csv
import json
import math
import statistics
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torch_parallel import RunConfig, WorkerFailure, train
from torch_parallel.analysis.waits import mean_waits, waits_in_the_end
from torch_parallel.results import ResultsError
from torch_parallel.steps import StepTimes, read_steps
from torch_parallel.strategies import FROM_SCRATCH
from torch_parallel.topology import Topology
from torch_parallel.training import emulation
from torch_parallel.training.config import ConfigError
from torch_parallel.training.straggler import Slowdown, parse_stragglers
from torch_parallel.workloads import Dataset

# ---- what is asked for ----

pytestmark = pytest.mark.alone


def test_stragglers_by_hand() -> None:
    assert parse_stragglers("3:4x") == {3: Slowdown(factor=4.0)}
    assert parse_stragglers(" 0:1.5x , 12:2s ") == {0: Slowdown(factor=1.5), 12: Slowdown(extra_s=2.0)}
    assert parse_stragglers("3:4x,3:2s") == {3: Slowdown(factor=4.0, extra_s=2.0)}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "'' is no straggler: write rank:factor or rank:time, as in 3:4x or 3:50ms"),
        ("4x", "'4x' is no straggler"),
        ("3:", "'3:' is no straggler"),
        ("-1:4x", "'-1:4x' is no straggler"),
        ("all:4x", "'all:4x' is no straggler"),
        ("3:4x,", "'' is no straggler"),
        ("3:4", "'4' is no time"),
        ("3:-5ms", "'-5ms' is no time"),
        ("3:0.5x", "'0.5x' is no factor: write a number of at least 1"),
        ("3:nanx", "'nanx' is no factor"),
        ("3:infx", "'infx' is no factor"),
        ("3:fastx", "'fastx' is no factor"),
        ("3:4x,3:5x", "rank 3 is given two factors"),
        ("3:4s,3:5s", "rank 3 is given two times"),
    ],
)
def test_what_is_no_straggler(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as raised:
        parse_stragglers(text)
    assert "\n" not in str(raised.value)


def test_how_long_a_step_lasts_by_hand() -> None:
    assert Slowdown().seconds(0.03, 1) == 0.03
    assert Slowdown(factor=4).seconds(0.03, 1) == pytest.approx(0.12)
    assert Slowdown(extra_s=0.05).seconds(0.03, 1) == pytest.approx(0.08)
    slow = Slowdown(factor=4, extra_s=0.05, at_least_s=0.02)
    assert slow.seconds(0.001, 1) == pytest.approx(0.13)  # 4 * 20 ms + 50 ms
    assert slow.seconds(0.03, 1) == pytest.approx(0.17)


def test_jitter_has_its_mean_and_spread_and_comes_again() -> None:
    """Exponential: mean and standard deviation are the same, and e^-1 of the draws are above the mean."""
    slow = Slowdown(jitter_s=0.01, seed="0 3")
    drawn = [slow.seconds(0.0, step) for step in range(20_000)]
    assert statistics.mean(drawn) == pytest.approx(0.01, rel=0.03)
    assert statistics.stdev(drawn) == pytest.approx(0.01, rel=0.05)
    assert sum(each > 0.01 for each in drawn) / len(drawn) == pytest.approx(math.exp(-1), abs=0.02)
    assert drawn[:9] == [Slowdown(jitter_s=0.01, seed="0 3").seconds(0.0, step) for step in range(9)]
    assert drawn[:9] != [Slowdown(jitter_s=0.01, seed="0 2").seconds(0.0, step) for step in range(9)]


def test_stretch_sleeps_what_is_missing() -> None:
    start_s = time.perf_counter()
    Slowdown(at_least_s=0.05).stretch(start_s, 1)
    assert 0.05 <= time.perf_counter() - start_s < 0.5
    start_s = time.perf_counter()
    Slowdown(at_least_s=0.05).stretch(start_s - 1.0, 1)  # it took a second already
    assert time.perf_counter() - start_s < 0.05


def config(**options: Any) -> RunConfig:
    return RunConfig(**{"n_gpus": 4, "device": "cpu", **options})


def test_the_slowdown_of_each_rank() -> None:
    given = config(straggler="2:4x", jitter="2s", compute_ms=500.0, seed=7)
    plain = Slowdown(at_least_s=0.5, jitter_s=2.0)
    assert emulation.slowdown(given, 0) == Slowdown(**{**vars(plain), "seed": "7 0"})
    assert emulation.slowdown(given, 2) == Slowdown(**{**vars(plain), "seed": "7 2", "factor": 4.0})
    assert emulation.slowdown(config(), 0) is None
    assert emulation.slowdown(config(strategy="param_server", jitter="2s"), 0) is None  # a server computes nothing
    assert emulation.flags(config()) == {}
    assert emulation.flags(given) == {"straggler": "2:4x", "jitter": "2s", "compute_ms": 500.0}


def test_the_emulated_links_of_a_run() -> None:
    assert emulation.topology(config()) is None
    assert emulation.topology(config(link="1gbit", latency="1s")) == Topology.of(4, "1gbit", "1s")
    given = config(n_gpus=None, link="1gbit", nodes=2, workers_per_node=4, nics=2)
    assert emulation.processes(given) == 8
    assert emulation.topology(given) == Topology.of(8, "1gbit", nodes=2, nics=2)
    served = config(n_gpus=None, link="1gbit", nodes=2, workers_per_node=2, strategy="param_server")
    assert emulation.processes(served) == 5
    assert emulation.topology(served) == Topology.of(5, "1gbit", nodes=2, server_count=1)
    assert emulation.processes(config(n_gpus=None)) is None


BAD: list[tuple[dict[str, Any], str]] = [
    ({"straggler": "4:4x"}, "--straggler 4:4x: there is no rank 4: workers are 0 to 3"),
    ({"straggler": "0:4x", "strategy": "param_server"}, "--straggler 0:4x: rank 0 is a server, which computes nothing"),
    ({"straggler": "much"}, "--straggler much: 'much' is no straggler"),
    ({"straggler": ""}, "--straggler : '' is no straggler"),
    ({"jitter": "10"}, "--jitter 10: '10' is no time"),
    ({"compute_ms": -1.0}, "--compute_ms -1.0: it must be finite and not < 0"),
    ({"compute_ms": math.nan}, "--compute_ms nan: it must be finite"),
    ({"link": "fast"}, "--link fast: 'fast' is no bandwidth"),
    ({"link": "4:1gbit"}, "--link 4:1gbit: '4' is no node"),
    ({"latency": "5"}, "--latency 5: '5' is no time"),
    ({"link": "1gbit", "nodes": 3}, "--link 1gbit --nodes 3: 4 workers do not fill 3 nodes equally"),
    ({"link": "1gbit", "nodes": 2, "nics": 3}, "3 NICs a node"),
    ({"link": "1gbit", "nodes": 0}, "--nodes 0: at least 1 node"),
    ({"nodes": 2, "strategy": "ddp"}, "--nodes 2: ddp exchanges by torch's own means, which know no emulated links"),
    (
        {"nodes": 2, "strategy": "two_shot_in_place"},
        "--nodes 2: two_shot_in_place needs memory that all workers have in common, which links have not",
    ),
    ({"link": "1gbit", "nics": 2}, "--nics 2: .* give --nodes too"),
    ({"link": "1gbit", "workers_per_node": 2}, "--workers_per_node 2: .* give --nodes too"),
    ({"link": "1gbit", "nodes": 2, "workers_per_node": 3}, "--n_gpus 4: .* are 6 processes"),
    ({"link": "1gbit", "strategy": "ddp"}, "--link 1gbit: ddp exchanges by torch's own means"),
    ({"latency": "1ms", "strategy": "ddp"}, "--latency 1ms: ddp exchanges by torch's own means"),
    ({"steps_csv": "x.csv", "strategy": "ddp"}, "--steps_csv x.csv: what ddp waits for cannot be seen"),
    ({"steps_csv": "x.csv", "overlap": True}, "^--overlap: it hides what --steps_csv tells apart: take one"),
]


@pytest.mark.parametrize(("options", "why"), BAD)
def test_what_cannot_be_is_one_line_with_flag_and_remedy(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as raised:
        emulation.on_nodes(config(**options), (0,))  # where all processes are on one node
    assert "\n" not in str(raised.value)


# ---- runs ----


def points(count: int = 80) -> Dataset:
    inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(1))
    targets = (inputs.sum(1) > 0).long()
    return Dataset("points", inputs, targets, inputs, targets, 2, (), (), "this test")


def not_finite() -> nn.Module:
    model = linear()
    nn.init.constant_(next(model.parameters()), math.nan)
    return model


def linear() -> nn.Module:
    return nn.Linear(8, 2)


def run(folder: Path, strategy: str, workers: int = 4, **options: Any) -> tuple[list[StepTimes], Any]:
    """The steps of a run with 10 steps, of all ranks, and the run."""
    given = RunConfig(
        strategy=strategy,
        n_gpus=workers + FROM_SCRATCH[strategy].server_count,
        device="cpu",
        batch_size=8,
        epochs=1,
        results_dir=str(folder),
        steps_csv=str(folder / "steps.csv"),
        deadline_s=30,
        **options,
    )
    trained = train(given, make_model=linear, dataset=points(), verbose=False)
    return read_steps(folder / "steps.csv"), trained


def typical_step_s(steps: list[StepTimes]) -> float:
    """The median over all but the first, which warms up, of the last rank's steps."""
    last = max(step.rank for step in steps)
    return statistics.median(step.step_s for step in steps if step.rank == last and step.step > 1)


@pytest.mark.parametrize("strategy", ["ring_all_reduce", "param_server"])
@pytest.mark.exhaustive
def test_with_one_worker_four_times_slower_a_synchronous_step_takes_four_times_as_long(
    strategy: str, tmp_path: Path
) -> None:
    """Synchronous speed falls to 1/s; whoever waits waits for the slow one, along the ring or at the server."""
    servers = FROM_SCRATCH[strategy].server_count
    slow = servers + 1
    plain, _ = run(tmp_path, strategy, compute_ms=100.0)
    slowed, trained = run(tmp_path, strategy, compute_ms=100.0, straggler=f"{slow}:4x")
    assert typical_step_s(slowed) / typical_step_s(plain) == pytest.approx(4, rel=0.15)
    assert typical_step_s(plain) == pytest.approx(0.1, rel=0.5)
    mean = mean_waits(slowed)
    # 300 ms of every step are waited for the slow worker, by a server 400, directly or through who waits for it in turn
    end = waits_in_the_end(mean)
    for rank in range(4 + servers):
        if rank == slow:
            assert sum(mean[rank]) < 0.25 * 0.3
        else:
            assert sum(mean[rank]) == pytest.approx(0.4 if rank < servers else 0.3, rel=0.3)
            assert end[rank][slow] > 0.75 * sum(end[rank])
    manifest = json.loads((Path(trained.folder) / "manifest.json").read_text())
    assert manifest["emulated"] == {"straggler": f"{slow}:4x", "compute_ms": 100.0}
    with open(Path(trained.folder) / "runs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["kind"] for row in rows} == {"emulated"}
    assert json.loads(rows[0]["options"])["straggler"] == f"{slow}:4x"


@pytest.mark.exhaustive
def test_with_one_worker_four_times_slower_asynchronous_workers_lose_its_share_alone(tmp_path: Path) -> None:
    """(n - 1 + 1/s) / n = 13/16 of the speed: the server's updates from 0.2 s to 1.4 s after the epoch began."""

    def updates_in_the_window(folder: Path, **options: Any) -> int:
        given = RunConfig(
            strategy="param_server_async",
            n_gpus=5,
            device="cpu",
            batch_size=8,
            epochs=1,
            compute_ms=20,
            results_dir=str(folder),
            steps_csv=str(tmp_path / "steps.csv"),
            deadline_s=30,
            **options,
        )
        train(given, make_model=linear, dataset=points(640), verbose=False)
        of_server = [step.step_s for step in read_steps(tmp_path / "steps.csv") if step.rank == 0]
        assert len(of_server) == 320  # one for each share of two samples
        return sum(0.2 < end_s <= 1.4 for end_s in accumulate(of_server))

    # What else runs on the machine takes updates away and never adds any: the most of three is the least disturbed.
    plain = slowed = 0
    for _ in range(3):
        plain = max(plain, updates_in_the_window(tmp_path / "plain"))
        slowed = max(slowed, updates_in_the_window(tmp_path / "slowed", straggler="4:4x"))
    assert slowed / plain == pytest.approx(13 / 16, rel=0.15)


def test_emulation_changes_the_time_and_not_the_result(tmp_path: Path) -> None:
    _, plain = run(tmp_path, "ring_all_reduce", workers=2)
    _, slowed = run(tmp_path, "ring_all_reduce", workers=2, jitter="2ms", link="100mbit", latency="1ms")
    assert all(torch.equal(plain.weights[name], slowed.weights[name]) for name in plain.weights)


def test_shards_cross_links_by_an_all_gather(tmp_path: Path) -> None:
    """Memory is not in common over links: of 18 parameters each of 2 workers reads the other's 9, as of the gradients,
    and the other's two use marks."""
    _, plain = run(tmp_path, "sharded_param_server", workers=2)
    _, linked = run(tmp_path, "sharded_param_server", workers=2, latency="1us")
    assert all(torch.equal(plain.weights[name], linked.weights[name]) for name in plain.weights)
    received = []
    for trained in (plain, linked):
        with open(Path(trained.folder) / "runs.csv", newline="") as file:
            received.append([sum(json.loads(row["received_bytes"])) for row in csv.DictReader(file)])
    assert received == [[10 * 9 * 4] * 2, [10 * (9 + 9 + 2) * 4] * 2]


@pytest.mark.parametrize("flag", [{"link": "1gbit"}, {"latency": "1us"}])
def test_what_is_read_in_place_cannot_cross_links(flag: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"--(link|latency) .*two_shot_in_place needs memory that all"):
        config(strategy="two_shot_in_place", **flag)


def test_steps_of_a_run_add_up(tmp_path: Path) -> None:
    """Over 2 nodes of 2: 18 gradients and 2 marks, 5 elements of 4 bytes a chunk, 3 rounds of 20 ms to add, 3 to copy.

    Within a node nothing is slow: of each pair of neighbours in the ring two are on one node.
    """
    steps, _ = run(tmp_path, "ring_all_reduce", latency="20ms", nodes=2)
    assert [(step.epoch, step.step, step.rank) for step in steps] == [(1, s, r) for s in range(1, 11) for r in range(4)]
    for step in steps:
        parts = [step.compute_s, step.wait_s, step.move_s, step.reduce_s, step.update_s]
        assert min(parts) >= 0 and sum(parts) <= step.step_s + 1e-6
        assert step.wait_s == pytest.approx(sum(step.waited_for_s)) and step.waited_for_s[step.rank] == 0
        across = step.rank in (0, 2)  # whose left neighbour is on the other node
        assert step.move_s >= 0.06 * across and step.reduce_s >= 0.06 * across
    for rank in (1, 3):
        assert statistics.median(step.move_s + step.reduce_s for step in steps if step.rank == rank) < 0.02


def test_the_first_line_says_what_is_emulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = RunConfig(
        n_gpus=2, device="cpu", epochs=1, results_dir=str(tmp_path), latency="1us", straggler="1:1ms", batch_size=80
    )
    train(given, make_model=linear, dataset=points())
    output = capsys.readouterr().out.splitlines()
    assert output[0] == "emulated, not measured: --straggler 1:1ms --latency 1us"


@pytest.mark.parametrize("flag", ["steps_csv", "trace"])
def test_a_file_that_cannot_be_written_is_said_before_the_start(tmp_path: Path, flag: str) -> None:
    given = config(**{flag: str(tmp_path / "no" / "steps.csv")}, results_dir=str(tmp_path))
    with pytest.raises(ResultsError, match=rf"--{flag} .*steps\.csv: it cannot be written \(No such file"):
        train(given, make_model=linear, dataset=points(), verbose=False)


def test_a_run_that_fails_leaves_no_trace_where_there_was_none(tmp_path: Path) -> None:
    """That it can be written has been tried out before."""
    file = tmp_path / "trace.json"
    given = config(trace=str(file), results_dir=str(tmp_path), n_gpus=2)
    with pytest.raises(WorkerFailure, match="NaN or infinite"):
        train(given, make_model=not_finite, dataset=points(), verbose=False)
    assert not file.exists()
