"""`--trace`: what every rank did in a run, on one clock."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torch_parallel import RunConfig, train
from torch_parallel.strategies import FROM_SCRATCH
from torch_parallel.trace import Event, read_chrome_trace
from torch_parallel.training.tracing import Tracer
from torch_parallel.transport.base import Transfer


@pytest.mark.parametrize("strategy", list(FROM_SCRATCH))
@pytest.mark.exhaustive
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
        assert gradients == {(0, "copy"): 3, (0, "reduce"): 3, (1, "send"): 3, (2, "send"): 3}
        assert parameters == {(1, "copy"): 3, (2, "copy"): 3, (0, "send"): 6}
    elif strategy == "sharded_param_server":  # each adds the other's part of its shard, and nobody sends parameters
        assert gradients == {(rank, lane): 3 for rank in (0, 1) for lane in ("reduce", "send")}
        assert not parameters
    else:
        assert gradients == {key: 3 * count for key, count in each_step(strategy).items()}
        assert not parameters


def each_step(strategy: str) -> dict[tuple[int, str], int]:
    """How often each of two ranks reads and is read from in one step, by hand."""
    both = (0, 1)
    if strategy == "one_shot_all_reduce":  # each adds the other's buffer to its own
        return {(rank, lane): 1 for rank in both for lane in ("reduce", "send")}
    if strategy in ("all_gather_average", "gather_scatter"):  # each copies the other's buffer, or rank 1 the sum
        return {(rank, lane): 1 for rank in both for lane in ("copy", "send")}
    if strategy == "hierarchical_multi_nic":  # both halves, and each says once, in no bytes, that it has read
        return {(rank, lane): count for rank in both for lane, count in (("copy", 2), ("reduce", 1), ("send", 3))}
    if strategy in (
        "tree_all_reduce",
        "reduce_broadcast",
        "hierarchical_leaders",
    ):  # rank 0 adds, rank 1 copies the sum
        return {(0, "reduce"): 1, (0, "send"): 1, (1, "send"): 1, (1, "copy"): 1}
    # half of the buffer is added and the other half copied, or waited for where the result is common
    return {(rank, lane): count for rank in both for lane, count in (("copy", 1), ("reduce", 1), ("send", 2))}


def test_a_send_is_what_the_receiver_saw_of_it() -> None:
    """Rank 2 waits for rank 1 from 1 s to 3 s, then adds 40 bytes until 4 s."""
    strategy = SimpleNamespace(on_update=None, transport=SimpleNamespace(observer=None))
    tracer = Tracer(SimpleNamespace(rank=2, device=torch.device("cpu")), strategy)  # type: ignore[arg-type]
    strategy.transport.observer(Transfer(1, 2, 40, "gradients", 5, 1.0, 3.0, 4.0, True))
    assert sorted(tracer.events, key=lambda event: event.lane) == [
        Event(2, "reduce", "gradients, round 5, 40 bytes from rank 1", 3.0, 4.0),
        Event(1, "send", "gradients, round 5, 40 bytes to rank 2", 3.0, 4.0),
        Event(2, "wait", "for rank 1: gradients", 1.0, 3.0),
    ]


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
