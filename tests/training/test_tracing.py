"""`--trace`: what every rank did in a run, on one clock."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from torch_parallel import RunConfig, train
from torch_parallel.strategies import FROM_SCRATCH
from torch_parallel.trace import read_chrome_trace


@pytest.mark.parametrize("strategy", list(FROM_SCRATCH))
def test_a_trace_of_all_ranks(tmp_path: Path, strategy: str) -> None:
    """3 steps of 2 workers: computations, updates and transfers counted by hand."""
    servers = FROM_SCRATCH[strategy].server_count
    train(
        RunConfig(
            strategy=strategy,
            n_gpus=2 + servers,
            dataset="digits",
            train_size=48,
            batch_size=16,
            epochs=1,
            device="cpu",
            results_dir=str(tmp_path),
            trace=str(tmp_path / "trace.json"),
        ),
        verbose=False,
    )
    events = read_chrome_trace(tmp_path / "trace.json")
    assert {event.rank for event in events} == set(range(2 + servers))
    assert all(0 <= event.start_s <= event.end_s for event in events)
    steps = Counter((event.rank, event.lane) for event in events if event.name.startswith("step "))
    assert steps == {(rank, "compute"): 3 for rank in range(2 + servers)}
    updates = Counter(event.rank for event in events if event.lane == "update")
    assert updates == ({0: 3} if servers else {0: 3, 1: 3})
    gradients = Counter((event.rank, event.lane) for event in events if event.name.startswith("gradients of bucket 0,"))
    parameters = Counter(
        (event.rank, event.lane) for event in events if event.name.startswith("parameters of bucket 0,")
    )
    if servers:  # the server copies the first worker's gradient and adds the second's; the workers copy parameters
        assert gradients == {(0, "copy"): 3, (0, "reduce"): 3}
        assert parameters == {(1, "copy"): 3, (2, "copy"): 3}
    else:  # one round each way
        assert gradients == {(rank, lane): 3 for rank in (0, 1) for lane in ("copy", "reduce")}
        assert not parameters


def test_an_update_comes_after_the_exchange_and_before_the_next_step(tmp_path: Path) -> None:
    configuration = RunConfig(
        n_gpus=2, dataset="digits", train_size=48, batch_size=16, epochs=1, device="cpu", results_dir=str(tmp_path)
    )
    train(RunConfig(**{**vars(configuration), "trace": str(tmp_path / "t.json")}), verbose=False)
    for rank in (0, 1):
        own = [event for event in read_chrome_trace(tmp_path / "t.json") if event.rank == rank]
        computed = [event for event in own if event.lane == "compute"]
        updated = [event for event in own if event.lane == "update"]
        copied = [event for event in own if event.lane == "copy" and event.name.startswith("gradients")]
        for step in range(3):
            assert computed[step].end_s <= copied[step].start_s <= copied[step].end_s <= updated[step].start_s
        assert all(updated[step].end_s <= computed[step + 1].start_s for step in range(2))
