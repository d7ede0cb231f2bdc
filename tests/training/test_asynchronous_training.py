"""Runs whose server does not wait for everybody: what they train, what they record, and what stops them."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from torch_parallel import RunConfig, WorkerFailure, launch, train
from torch_parallel.communicator import Communicator
from torch_parallel.status import StatusBoard
from torch_parallel.steps import read_steps
from torch_parallel.strategies import ASYNCHRONOUS, STRATEGIES
from torch_parallel.training import checkpoint
from torch_parallel.training.config import ConfigError
from torch_parallel.training.run import TrainingRun
from torch_parallel.workloads import build_model, load_dataset

NOT_IN_STEP = [
    ("param_server_async", {}),
    ("param_server_bounded", {"staleness": 2}),
    ("param_server_backup", {"backup_workers": 1}),
]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., TrainingRun]:
    def run(strategy: str, workers: int = 2, make_model: Any = None, **options: Any) -> TrainingRun:
        config = RunConfig(
            strategy=strategy,
            n_gpus=workers + 1,
            dataset="digits",
            device="cpu",
            results_dir=str(tmp_path),
            deadline_s=30,
            **options,
        )
        return train(config, make_model=make_model, verbose=False)

    return run


class Fussy(nn.Module):
    """In training, logits that are NaN for the two of so many images with the most ink."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        few, _ = load_dataset("digits", None, count, 0)
        ink = few.normalize(few.train_inputs, torch.float32).flatten(1).sum(1).sort().values
        self.most = float(ink[-3] + ink[-2]) / 2

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layer(images.flatten(1))
        bad = images.flatten(1).sum(1, keepdim=True) > self.most
        return logits + torch.where(bad, torch.nan, 0.0) if self.training else logits


def same_bits(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        value.numpy().tobytes() == theirs[name].numpy().tobytes() for name, value in ours.items()
    )


def server_rows(run: TrainingRun) -> list[dict[str, str]]:
    with open(Path(run.folder, "runs.csv")) as file:
        rows = list(csv.DictReader(file))
    workers = [row for row in rows if row["role"] == "worker"]
    assert {row[name] for row in workers for name in ("updates", "staleness_counts", "dropped")} == {""}
    return [row for row in rows if row["role"] == "server"]


# ---- what is trained ----

SMALL = {"epochs": 2, "train_size": 70, "batch_size": 16, "bucket_mb": 0.02}


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "adam", "clip_norm": 0.05, "accumulate": 2},
        {"not_finite": "skip", "make_model": partial(Fussy, 70)},  # some steps are skipped
        {"lr_schedule": "cosine", "warmup_steps": 3, "check_replicas": 2},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.exhaustive
def test_that_wait_for_everybody_train_the_same_bits(options: dict[str, Any], run: Callable[..., TrainingRun]) -> None:
    """As the synchronous server: two that are told to wait for all workers, and one that has a single worker."""
    alike = [
        run(name, 3, **SMALL, **options) for name in ("param_server", "param_server_bounded", "param_server_backup")
    ]
    options.pop("check_replicas", None)
    alone = [run(name, 1, **SMALL, **options) for name in ("param_server", "param_server_async")]
    for first, *others in (alike, alone):
        for other in others:
            assert same_bits(first.weights, other.weights)
            for ours, theirs in zip(first.history, other.history, strict=True):
                for name in ("steps", "train_loss", "test_accuracy", "skipped_steps"):
                    assert ours[name] == theirs[name], name
            assert (first.history[-1]["skipped_steps"] > 0) == ("not_finite" in options)


@pytest.mark.parametrize(("strategy", "options"), NOT_IN_STEP)
@pytest.mark.exhaustive
def test_they_learn(strategy: str, options: dict[str, Any], run: Callable[..., TrainingRun]) -> None:
    # Momentum and stale gradients do not go together: with both, one process too needs more than these ten epochs.
    optimizer = "adam" if strategy == "param_server_bounded" else "sgd"
    rate = {"batch_size": 64, **({"lr": 0.02} if optimizer == "sgd" else {})}
    trained = run(strategy, **options, **rate, optimizer=optimizer)
    assert trained.test_accuracy > 0.85
    rows = server_rows(trained)
    slices = 2 if strategy == "param_server_async" else 1  # updates a batch
    assert [int(row["updates"]) for row in rows] == [23 * slices] * 10
    for row in rows:
        counts = json.loads(row["staleness_counts"])
        # a gradient a worker and batch, but for those that were left out
        assert sum(counts) == 46 - int(row["dropped"])
        assert int(row["staleness_max"]) == len(counts) - 1
        mean = sum(staleness * count for staleness, count in enumerate(counts)) / sum(counts)
        assert float(row["staleness_mean"]) == pytest.approx(mean)
        if strategy == "param_server_bounded":
            assert len(counts) <= 3
        if strategy == "param_server_backup":  # of 22 batches of 64 a half is lost, of the last one 14 or 15
            assert row["dropped"] == "23" and int(row["samples_lost"]) in (22 * 32 + 14, 22 * 32 + 15)
            assert json.loads(row["options"])["backup_workers"] == 1


class EachSample(nn.Module):
    """A weight for each sample: its gradient tells which samples were used, and how often."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(samples, dtype=torch.float64))


def use_samples(
    communicator: Communicator, name: str, options: dict[str, Any], samples: int
) -> tuple[list[float], int]:
    """Two epochs with random pauses: the weights, and how many samples the server says were lost."""
    model = EachSample(samples)
    strategy = ASYNCHRONOUS[name](
        model, lambda named: torch.optim.SGD([each for _, each in named], lr=1.0), communicator, **options
    )
    lost = 0
    for _ in range(2):
        for share in strategy.shares(samples, batch_size=2):
            strategy.begin_step()
            if not communicator.is_server:
                time.sleep(random.random() / 200)
                (model.w[share.places].sum() / share.count).backward()
            strategy.step()
        assert strategy.tally is not None
        lost += strategy.tally.samples_lost
        communicator.barrier()
    return model.w.tolist(), lost


@pytest.mark.parametrize(("strategy", "options"), NOT_IN_STEP)
def test_every_sample_is_used_once_an_epoch_or_counted_as_lost(strategy: str, options: dict[str, Any]) -> None:
    first, *others = launch(use_samples, 3, strategy, options, 31, server_count=1, deadline_s=20)
    weights, lost = first
    assert all(other[0] == weights for other in others)
    once = -0.5 if strategy == "param_server_bounded" else -1.0  # the mean over one sample, or over two
    if strategy == "param_server_backup":
        assert lost == 2 * 15  # one of two in 15 steps, and the last step has one sample only
        assert sum(weights) == 2 * 16 * once
    elif strategy == "param_server_async":
        assert (weights, lost) == ([2 * once] * 31, 0)
    else:
        assert (weights, lost) == ([2 * once] * 30 + [-2.0], 0)


# ---- a worker that is stopped ----


def slow_steps(communicator: Communicator, name: str, options: dict[str, Any], samples: int) -> None:
    model = EachSample(1)
    strategy = ASYNCHRONOUS[name](
        model, lambda named: torch.optim.SGD([each for _, each in named], lr=1.0), communicator, **options
    )
    communicator.report(os.getpid())
    for step, share in enumerate(strategy.shares(samples, batch_size=2), start=1):
        communicator.status.step(1, step, share.done)
        strategy.begin_step()
        if not communicator.is_server:
            time.sleep(0.002)
            model.w.sum().backward()
        strategy.step()


class Stopper:
    """Stops rank 2 when it has begun 20 steps, for 2 s, and notes where rank 0 and rank 1 are after 1 s and 2 s."""

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}
        self.stopped_s: float | None = None
        self.notes: list[tuple[int, int]] = []

    def message(self, rank: int, pid: int) -> None:
        self.pids[rank] = pid

    def tick(self, board: StatusBoard) -> None:
        if self.stopped_s is None:
            if len(self.pids) == 3 and board.read(2).step >= 20:
                os.kill(self.pids[2], signal.SIGSTOP)
                self.stopped_s = time.monotonic()
        elif len(self.notes) < 2 and time.monotonic() - self.stopped_s >= 1 + len(self.notes):
            self.notes.append((board.read(0).step, board.read(1).step))
            if len(self.notes) == 2:
                os.kill(self.pids[2], signal.SIGCONT)


@pytest.mark.alone
@pytest.mark.parametrize(
    ("strategy", "options", "samples"),
    [
        ("param_server_async", {}, 2000),
        ("param_server_backup", {"backup_workers": 1}, 2000),
        ("param_server_bounded", {"staleness": 2}, 300),
    ],
)
@pytest.mark.exhaustive
def test_a_worker_that_is_stopped(strategy: str, options: dict[str, Any], samples: int) -> None:
    stopper = Stopper()
    launch(
        slow_steps,
        3,
        strategy,
        options,
        samples,
        server_count=1,
        deadline_s=30,
        on_message=stopper.message,
        on_tick=stopper.tick,
    )
    (updates, steps), (later_updates, later_steps) = stopper.notes
    if strategy == "param_server_bounded":
        # the server waits for the gradients of a step, and the other worker is two steps further
        assert (updates, steps) == (later_updates, later_steps)
        assert steps == updates + 2
    else:
        assert later_updates > updates + 20 and later_steps > steps + 20


def die(communicator: Communicator, name: str) -> None:
    strategy = ASYNCHRONOUS[name](
        EachSample(1), lambda named: torch.optim.SGD([each for _, each in named], lr=1.0), communicator
    )
    for step, _ in enumerate(strategy.shares(10**4, batch_size=2)):
        strategy.begin_step()
        if communicator.rank == 2 and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        strategy.step()


@pytest.mark.parametrize("strategy", list(ASYNCHRONOUS))
def test_a_worker_that_is_killed_ends_the_run(strategy: str) -> None:
    with pytest.raises(WorkerFailure, match="rank 2 was killed") as failure:
        launch(die, 3, strategy, server_count=1, deadline_s=30)
    assert failure.value.rank == 2


def test_a_gradient_that_is_not_finite_ends_the_run(run: Callable[..., TrainingRun]) -> None:
    with pytest.raises(
        WorkerFailure,
        match=r"the gradient of \S+ is NaN or infinite in step \d+ of epoch 1 on rank [12]; a smaller --lr",
    ) as failure:
        run("param_server_async", epochs=1, lr=1e200)
    assert "Traceback" not in str(failure.value)  # no line of code is to blame


# ---- checkpoints ----


@pytest.mark.parametrize("strategy", list(ASYNCHRONOUS))
@pytest.mark.exhaustive
def test_a_run_goes_on_at_the_end_of_an_epoch(strategy: str, run: Callable[..., TrainingRun]) -> None:
    """With one worker, or nobody ahead, there is one result; 7 steps an epoch."""
    workers = 1 if strategy == "param_server_async" else 2
    options = {"train_size": 104, "batch_size": 16, "optimizer": "adam", "lr_schedule": "linear"}
    whole = run(strategy, workers, epochs=4, **options)
    # as long as the schedule is that of four epochs, the first two of them may be had from the checkpoint of the whole
    saved = run(strategy, workers, epochs=4, checkpoint_every=14, **options)
    files = checkpoint.complete_checkpoints(Path(saved.folder, "checkpoints"))
    assert [path.name for path in files] == ["step_000000014.pt", "step_000000028.pt"]
    resumed = run(strategy, workers, epochs=4, resume=str(files[0]), **options)
    assert same_bits(whole.weights, resumed.weights)
    assert [each["served"] for each in resumed.history] == [each["served"] for each in whole.history]


@pytest.mark.parametrize(("strategy", "options"), NOT_IN_STEP)
@pytest.mark.exhaustive
def test_what_is_not_in_step_is_saved_between_epochs(
    strategy: str, options: dict[str, Any], run: Callable[..., TrainingRun]
) -> None:
    """10 steps, or 20 updates of one worker each, an epoch; every 25 of them, and at the end."""
    more = {"train_size": 80, "batch_size": 8, "checkpoint_every": 25, **options}
    first = run(strategy, epochs=4, **more)
    files = checkpoint.complete_checkpoints(Path(first.folder, "checkpoints"))
    ends = {"param_server_async": [40, 60, 80]}.get(strategy, [30, 40])
    assert [int(path.stem.split("_")[1]) for path in files] == ends
    resumed = run(strategy, epochs=5, **{**more, "resume": first.folder})
    assert [each["epoch"] for each in resumed.history] == [1, 2, 3, 4, 5]
    for name in ("train_loss", "test_loss", "test_accuracy", "served"):  # times are each rank's own
        assert [each[name] for each in resumed.history[:4]] == [each[name] for each in first.history]
    content = torch.load(files[-1])
    assert content["step"] == ends[-1] and content["history"][3]["served"] == first.history[3]["served"]
    build_model("cnn", (1, 8, 8), 10).load_state_dict(content["model"])


# ---- what is emulated ----


@pytest.mark.parametrize(("strategy", "options"), NOT_IN_STEP)
def test_a_straggler_and_links(
    strategy: str, options: dict[str, Any], run: Callable[..., TrainingRun], tmp_path: Path
) -> None:
    """Told in the results, and each rank's steps are recorded: 20 batches of 10, of which rank 2 computes slowly."""
    emulated = {"straggler": "2:100ms", "link": "1gbit", "latency": "1ms"}
    file = tmp_path / "steps.csv"
    trained = run(strategy, train_size=200, batch_size=10, epochs=1, steps_csv=str(file), **emulated, **options)
    (row,) = server_rows(trained)
    assert (row["kind"], row["nodes"]) == ("emulated", "3")
    assert json.loads(row["options"]) == {"bucket_mb": 25.0, **options, **emulated}
    steps = read_steps(file)
    done = [sum(step.rank == rank for step in steps) for rank in range(3)]
    if strategy == "param_server_async":
        assert done[0] == done[1] + done[2] == int(row["updates"]) == 40
        assert done[2] < done[1]
    elif strategy == "param_server_backup":
        assert done[0] == int(row["updates"]) == 20 and done[1] + done[2] >= 20
    else:
        assert done == [20] * 3
    assert all(step.compute_s >= 0.1 for step in steps if step.rank == 2)
    # every push and every answer crosses a link of 1 ms: the push on the worker's time, which is no part of its own
    if strategy == "param_server_bounded":
        assert all(step.move_s + step.reduce_s >= 0.001 for step in steps if step.rank == 0)
    else:
        assert all(step.step_s - step.compute_s >= 0.002 and step.move_s >= 0.001 for step in steps if step.rank)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"strategy": "param_server", "staleness": 2},
            "--staleness 2: param_server does not take it; give --strategy param_server_bounded",
        ),
        (
            {"strategy": "param_server_bounded", "backup_workers": 1},
            "--backup_workers 1: param_server_bounded does not take it; give --strategy param_server_backup",
        ),
        ({"strategy": "param_server_bounded", "staleness": -1}, "--staleness -1: it must not be < 0"),
        (
            {"strategy": "param_server_backup", "n_gpus": 3, "backup_workers": 2},
            "--backup_workers 2: it must be less than the number of workers, 2: one at least is waited for",
        ),
        (
            {"strategy": "param_server_async", "check_replicas": 3},
            "--check_replicas 3: with param_server_async ranks hold different parameters between the ends of epochs; "
            "leave it out",
        ),
        (
            {"strategy": "param_server_async", "aggregate": "mean"},
            "--aggregate mean: param_server_async updates by the gradients of some workers, averaged over their "
            "samples; leave it out",
        ),
        (
            {"strategy": "param_server_backup", "backup_workers": 1, "aggregate": "sum"},
            "--aggregate sum: param_server_backup updates by the gradients of some workers, averaged over their "
            "samples; leave it out",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_options_of_other_strategies(options: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        RunConfig(**options)
    assert str(refused.value) == line


def test_who_is_in_step() -> None:
    in_step = {name: RunConfig(strategy=name).in_step for name in STRATEGIES}
    assert [name for name, value in in_step.items() if not value] == ["param_server_async"]
    assert [RunConfig(strategy=name, **options).in_step for name, options in NOT_IN_STEP] == [False] * 3
    assert RunConfig(strategy="param_server_bounded", check_replicas=2).own_options == {"staleness": 0}


# ---- messages and memory ----


def record_an_epoch(communicator: Communicator, name: str, options: dict[str, Any]) -> tuple[dict, int, list]:
    """Messages by (source, to, bytes, purpose), bytes shared by all ranks, (elements, parameters) of each bucket."""
    shared_bytes = 0
    share = communicator.transport.share

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal shared_bytes
        buffer = share(*arguments, **named)
        owner = named.get("owner")
        parts = buffer.parts if owner is None else buffer.parts[owner : owner + 1]
        shared_bytes += sum(part.nbytes for part in parts) if buffer.local.dtype == torch.float32 else 0
        return buffer

    model = build_model("cnn", (1, 8, 8), 10)
    communicator.transport.share = counted  # type: ignore[method-assign]
    communicator.broadcast(torch.zeros(40_000, dtype=torch.float32))  # what set-up takes for its own
    shared_bytes = 0
    strategy = ASYNCHRONOUS[name](
        model,
        lambda named: torch.optim.SGD([each for _, each in named], lr=0.1),
        communicator,
        bucket_bytes=50_000,
        **options,
    )
    messages: dict[tuple[int, int, int, str], int] = {}

    def observe(each: Any) -> None:
        key = (each.source, each.to, each.bytes, each.purpose)
        messages[key] = messages.get(key, 0) + 1

    communicator.transport.observer = observe
    for share_ in strategy.shares(16, batch_size=4):
        strategy.begin_step()
        if not communicator.is_server:
            logits = model(torch.randn(share_.places.stop - share_.places.start, 1, 8, 8))
            cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64)).backward()
        strategy.step()
    return messages, shared_bytes, [(bucket.numel, len(bucket.parameters)) for bucket in strategy.buckets]


@pytest.mark.parametrize(
    ("strategy", "options", "copies"),
    [
        # buffers of gradients and of parameters on every rank, and of parameters on the server besides
        ("param_server_async", {}, (1, 1, 0)),
        ("param_server_backup", {}, (1, 1, 0)),
        ("param_server_bounded", {}, (1, 1, 0)),
        ("param_server_bounded", {"staleness": 2}, (3, 1, 3)),
    ],
)
def test_messages_and_memory(strategy: str, options: dict[str, Any], copies: tuple[int, int, int]) -> None:
    """4 steps on 2 workers. Each push is read once, each answer or version pulled once."""
    by_rank = launch(record_an_epoch, 3, strategy, options, server_count=1, deadline_s=30)
    buckets = by_rank[0][2]
    totals: dict[tuple[int, int, int, str], int] = {}
    for messages, _, _ in by_rank:
        totals |= messages
    pushes = {key: count for key, count in totals.items() if key[1] == 0}
    pulls = {key: count for key, count in totals.items() if key[0] == 0}
    assert len(pushes) + len(pulls) == len(totals)
    for index, (numel, parameters) in enumerate(buckets):
        sizes = {
            count
            for key, count in pushes.items()
            if key[2:] == ((numel + parameters) * 4, f"gradients of bucket {index}")
        }
        assert sizes and sum(pushes[key] for key in pushes if key[3] == f"gradients of bucket {index}") == 8
        pulled = sum(count for key, count in pulls.items() if key[2] == numel * 4)
        assert pulled == (
            8 + 2 if strategy == "param_server_async" else 8
        )  # after the epoch all take the last update's
    gradients, parameters_, on_server = copies
    elements, marks = (sum(sizes) for sizes in zip(*buckets, strict=True))
    expected = 3 * (gradients * (elements + marks) + parameters_ * elements) + on_server * elements
    assert {shared for _, shared, _ in by_rank} == {4 * expected}
