"""A run that is stopped and resumed is the run that was never stopped."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import resource
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from torch_parallel import RunConfig, WorkerFailure, train
from torch_parallel.strategies import BUILTIN, STRATEGIES
from torch_parallel.training import checkpoint, display, loop, record
from torch_parallel.training.run import TrainingRun
from torch_parallel.workloads import build_model

KINDS = ("ring_all_reduce", "two_shot_in_place", "param_server", "sharded_param_server", *BUILTIN)
every_strategy = pytest.mark.parametrize("strategy", KINDS)


class Regularised(nn.Module):
    """Dropout, BatchNorm and a frozen layer: random states and statistics of each worker must be taken up again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 20)
        self.frozen = nn.Linear(20, 20)
        self.frozen.requires_grad_(False)
        self.norm = nn.BatchNorm1d(20)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(20, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = random.random() / 100  # a draw from Python's generator too
        return self.last(self.drop(self.norm(self.frozen(torch.relu(self.first(x.flatten(1))))))) + noise


class DrawsInTrainingOnly(Regularised):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(self.norm(self.frozen(torch.relu(self.first(x.flatten(1)))))))


def config(folder: Path, strategy: str, workers: int = 2, **more: Any) -> RunConfig:
    return RunConfig(
        strategy=strategy,
        n_gpus=workers + STRATEGIES[strategy].server_count,
        dataset="digits",
        train_size=104,
        batch_size=16,  # 7 steps an epoch
        results_dir=str(folder),
        device="cpu",
        deadline_s=30,
        **more,
    )


def run(configuration: RunConfig, make_model: Any = Regularised) -> TrainingRun:
    return train(configuration, make_model=make_model, verbose=False)


def losses(trained: TrainingRun) -> list[tuple[float, float, float]]:
    return [(each["train_loss"], each["test_loss"], each["test_accuracy"]) for each in trained.history]


def checkpoints(trained: TrainingRun) -> list[Path]:
    return checkpoint.complete_checkpoints(Path(trained.folder) / "checkpoints")


@pytest.mark.exhaustive
@every_strategy
@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "sgd", "momentum": 0.9, "lr_schedule": "cosine", "warmup_steps": 5},
        {"optimizer": "adam", "lr_schedule": "linear", "accumulate": 2, "clip_norm": 0.5},
    ],
    ids=["sgd", "adam"],
)
def test_going_on_gives_the_same_bits_as_never_stopping(tmp_path: Path, strategy: str, options: dict[str, Any]) -> None:
    """Stopped in the middle of an epoch and at its end; weights, BatchNorm statistics and losses are compared."""
    whole = run(config(tmp_path, strategy, epochs=4, checkpoint_every=5, **options))
    steps = [path.name for path in checkpoints(whole)]
    assert steps == ["step_000000020.pt", "step_000000025.pt", "step_000000028.pt"]
    for path in checkpoints(whole):
        resumed = run(config(tmp_path, strategy, epochs=4, resume=str(path), **options))
        assert losses(resumed) == losses(whole)
        assert resumed.weights.keys() == whole.weights.keys()
        for name, value in whole.weights.items():
            assert torch.equal(resumed.weights[name], value), (path, name)


@pytest.mark.exhaustive
@every_strategy
def test_two_epochs_and_two_more_are_four(tmp_path: Path, strategy: str) -> None:
    whole = run(config(tmp_path, strategy, epochs=4))
    half = run(config(tmp_path, strategy, epochs=2, checkpoint_every=1000))
    assert [path.name for path in checkpoints(half)] == ["step_000000014.pt"]
    resumed = run(config(tmp_path, strategy, epochs=4, resume=half.folder))
    assert losses(resumed) == losses(whole)
    assert all(torch.equal(resumed.weights[name], value) for name, value in whole.weights.items())


@pytest.mark.parametrize("strategy", ["ring_all_reduce", "param_server", "ddp"])
@pytest.mark.exhaustive
def test_a_run_that_ended_within_an_epoch_goes_on_there(tmp_path: Path, strategy: str) -> None:
    """After 3 of 7 steps of the second epoch, and a test there. Their loss is a mean that is taken apart again."""
    whole = run(config(tmp_path, strategy, epochs=2), DrawsInTrainingOnly)
    part = run(config(tmp_path, strategy, max_steps=10, checkpoint_every=1000), DrawsInTrainingOnly)
    assert [each["steps"] for each in part.history] == [7, 3]
    resumed = run(config(tmp_path, strategy, epochs=2, resume=part.folder), DrawsInTrainingOnly)
    assert [each["steps"] for each in resumed.history] == [7, 7]
    assert numpy.allclose(losses(resumed), losses(whole), rtol=1e-12, atol=0)
    assert all(torch.equal(resumed.weights[name], value) for name, value in whole.weights.items())


class Growing(nn.Module):
    """Its buffer has another shape after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(64, 10)
        self.register_buffer("seen", torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        if self.training:
            self.seen = torch.cat([self.seen, x[:1, 20:23].detach()])
        return self.last(x)


def test_a_buffer_that_has_grown_is_taken_up(tmp_path: Path) -> None:
    whole = run(config(tmp_path, "ring_all_reduce", epochs=2), Growing)
    half = run(config(tmp_path, "ring_all_reduce", epochs=1, checkpoint_every=1000), Growing)
    resumed = run(config(tmp_path, "ring_all_reduce", epochs=2, resume=half.folder), Growing)
    assert half.weights["seen"].shape == (7, 3) and whole.weights["seen"].shape == (14, 3)
    assert all(torch.equal(resumed.weights[name], value) for name, value in whole.weights.items())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_steps": 3}, "it has made 3 steps; give --max_steps of more"),
        ({"max_steps": 2}, "it has made 3 steps; give --max_steps of more"),
        ({"max_steps": 9, "batch_size": 8}, "its steps had 16 samples, those of this run have 8; give the batch"),
    ],
)
def test_steps_at_most_count_those_of_the_run_before(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    part = run(config(tmp_path, "ring_all_reduce", workers=1, max_steps=3, checkpoint_every=2))
    with pytest.raises(checkpoint.CheckpointError, match=re.escape(said)):
        run(dataclasses.replace(config(tmp_path, "ring_all_reduce", workers=1, resume=part.folder), **options))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("ring_all_reduce", 2, 25.0), ("ring_all_reduce", 4, 0.01)),
        (("ring_all_reduce", 3, 0.01), ("param_server", 2, 25.0)),
        (("param_server", 2, 0.01), ("ring_all_reduce", 1, 25.0)),
        (("sharded_param_server", 3, 25.0), ("sharded_param_server", 2, 25.0)),
        (("sharded_param_server", 2, 25.0), ("ring_all_reduce", 3, 0.01)),
        (("param_server", 2, 0.01), ("sharded_param_server", 4, 25.0)),
    ],
)
def test_another_number_of_workers_strategy_and_bucket_size(tmp_path: Path, before: tuple, after: tuple) -> None:
    """In float64, without dropout and BatchNorm, the run goes on as one process would: to 1e-12 of each norm."""

    def make_model() -> nn.Module:
        return build_model("cnn", (1, 8, 8), 10)

    def described(setting: tuple, **more: Any) -> RunConfig:
        strategy, workers, bucket_mb = setting
        return config(
            tmp_path, strategy, workers, bucket_mb=bucket_mb, optimizer="adamw", dtype="float64", epochs=2, **more
        )

    whole = run(config(tmp_path, "ring_all_reduce", 1, optimizer="adamw", dtype="float64", epochs=2), make_model)
    stopped = run(described(before, checkpoint_every=5), make_model)
    resumed = run(described(after, resume=str(checkpoints(stopped)[0])), make_model)  # step 5, in the first epoch
    assert [each["epoch"] for each in resumed.history] == [1, 2]
    for ours, theirs in zip(losses(resumed), losses(whole), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-11)
    for name, value in whole.weights.items():
        assert (resumed.weights[name] - value).norm() <= 1e-12 * value.norm(), name


def test_the_file_is_plain_and_of_the_bare_model(tmp_path: Path) -> None:
    trained = run(config(tmp_path, "param_server", epochs=1, checkpoint_every=7))
    content = torch.load(checkpoints(trained)[-1])  # with its defaults: tensors, containers and numbers only
    bare = Regularised()
    bare.load_state_dict(content["model"])  # strict
    assert all(torch.equal(content["model"][name], value) for name, value in trained.weights.items())
    # momentum of every trainable parameter, by name, though only the server has it
    trainable = [name for name, parameter in bare.named_parameters() if parameter.requires_grad]
    assert sorted(content["optimizer"]) == sorted(trainable)
    assert content["config"] == dataclasses.asdict(
        config(tmp_path, "param_server", epochs=1, checkpoint_every=7, test_size=360).resolved("digits", 104, 360)
    )


def saved(folder: Path, count: int) -> list[Path]:
    return [checkpoint.save({"format": checkpoint.FORMAT, "step": step}, folder, step) for step in range(1, count + 1)]


def test_only_the_newest_are_kept_and_they_are_whole(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    assert [path.name for path in checkpoint.complete_checkpoints(tmp_path)] == [
        f"step_00000000{step}.pt" for step in (3, 4, 5)
    ]
    assert checkpoint.find(str(tmp_path)).name == "step_000000005.pt"


@pytest.mark.parametrize("where", ["in the middle", "before the rename"])
def test_a_write_that_is_cut_off_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The write of step 3 fails: step 2 is still the newest, and nothing half-written is left."""
    saved(tmp_path, 2)

    def not_renamed(*names: Any) -> None:
        raise OSError(5, "Input/output error")

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if where == "in the middle":
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit[1]))  # no file may become larger
    else:
        monkeypatch.setattr(os, "replace", not_renamed)
    try:
        with pytest.raises(checkpoint.CheckpointError, match=r"step 3 cannot be written .*--results_dir") as error:
            checkpoint.save({"format": checkpoint.FORMAT, "large": torch.zeros(100_000)}, tmp_path, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000000001.pt", "step_000000002.pt"]
    assert checkpoint.find(str(tmp_path)).name == "step_000000002.pt"


class Unwilling:
    """What a user's module may keep as its extra state."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


@pytest.mark.parametrize("error", [OSError("no such key"), RuntimeError("in use"), FileNotFoundError(2, "mine")])
def test_an_error_of_what_is_saved_is_its_own(error: Exception, tmp_path: Path) -> None:
    """It is not taken for a disk that is full."""
    with pytest.raises(type(error)) as raised:
        checkpoint.save({"format": checkpoint.FORMAT, "extra": Unwilling(error)}, tmp_path, 1)
    assert raised.value is error
    assert list(tmp_path.iterdir()) == []


def test_a_file_under_its_own_name_is_always_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is written, whenever that is interrupted, a checkpoint has another name."""
    names: list[set[str]] = []
    write = torch.save

    def look(content: Any, file: Any) -> None:
        write(content, file)
        names.append({path.name for path in tmp_path.iterdir()})

    monkeypatch.setattr(torch, "save", look)
    saved(tmp_path, 1)
    assert names == [{"step_000000001.tmp"}]


def test_a_step_is_announced_only_when_it_is_on_disk(tmp_path: Path) -> None:
    """The third checkpoint cannot be written: two are announced, and the run ends with one line that says why."""

    def third_fails(communicator: Any, job: Any) -> dict[str, Any]:
        replace_file = os.replace

        def replace(source: Any, target: Any) -> None:
            if str(target).endswith("step_000000006.pt"):
                raise OSError(28, "No space left on device")
            replace_file(source, target)

        os.replace = replace
        return loop.Trainer(communicator, job).run()

    announced: list[int] = []

    def listen(self: Any, rank: int, message: Any) -> None:
        if isinstance(message, record.Saved):
            announced.append(message.step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(display.Display, "message", listen)
        with pytest.raises(WorkerFailure, match=r"CheckpointError: the checkpoint of step 6 cannot be written"):
            train(
                config(tmp_path, "ring_all_reduce", epochs=2, checkpoint_every=2),
                make_model=Regularised,
                verbose=False,
                worker_function=third_fails,
            )
    assert announced == [2, 4]


@pytest.mark.parametrize(
    "content",
    [torch.zeros(3), [1, 2], {"w": torch.zeros(2)}, {"format": 2}],
    ids=["tensor", "list", "weights", "newer"],
)
def test_a_file_of_another_kind_is_refused_in_one_line(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(checkpoint.CheckpointError, match="this is no checkpoint of this program") as error:
        checkpoint.find(str(tmp_path / "other.pt"))
    assert "\n" not in str(error.value)


def test_settings_that_change_on_resuming_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = run(config(tmp_path, "ring_all_reduce", epochs=1, checkpoint_every=7, lr=0.1))
    again = config(tmp_path, "ring_all_reduce", epochs=2, resume=trained.folder, not_finite="skip")
    train(dataclasses.replace(again, batch_size=20), make_model=Regularised)
    assert "; changed: batch_size 16 -> 20, lr 0.1 -> 0.004, not_finite stop -> skip" in capsys.readouterr().out
    train(config(tmp_path, "ring_all_reduce", epochs=2, resume=trained.folder, lr=0.1), make_model=Regularised)
    assert "changed" not in capsys.readouterr().out


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_so_is_another_end_where_the_learning_rate_depends_on_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], schedule: str
) -> None:
    trained = run(config(tmp_path, "ring_all_reduce", epochs=1, checkpoint_every=7, lr_schedule=schedule))
    longer = config(tmp_path, "ring_all_reduce", epochs=2, resume=trained.folder, lr_schedule=schedule)
    train(longer, make_model=Regularised)
    assert ("epochs 1 -> 2" in capsys.readouterr().out) == (schedule == "cosine")


@pytest.mark.parametrize("damage", ["truncated", "one byte", "empty", "another file"])
def test_a_damaged_file_is_refused_and_an_earlier_one_is_offered(tmp_path: Path, damage: str) -> None:
    content = {"format": checkpoint.FORMAT, "step": 0, "model": {"w": torch.arange(10_000.0)}}
    first, second = (checkpoint.save(content, tmp_path, step) for step in (1, 2))
    data = bytearray(second.read_bytes())
    if damage == "truncated":
        data = data[: len(data) // 2]
    elif damage == "one byte":
        data[len(data) // 2] ^= 1  # in the middle of the numbers
    elif damage == "empty":
        data = bytearray()
    else:
        data = bytearray(b"not a checkpoint at all")
    second.write_bytes(data)
    for asked in (tmp_path, second):
        with pytest.raises(checkpoint.CheckpointError) as error:
            checkpoint.find(str(asked))
        assert "damaged" in str(error.value) and f"--resume {first}" in str(error.value)
        assert "\n" not in str(error.value)
    first.write_bytes(b"")
    with pytest.raises(checkpoint.CheckpointError, match="no earlier one is complete"):
        checkpoint.find(str(tmp_path))


def test_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(checkpoint.CheckpointError, match="no checkpoint in this folder"):
        checkpoint.find(str(tmp_path))
    with pytest.raises(checkpoint.CheckpointError, match="no such file or folder"):
        checkpoint.find(str(tmp_path / "nothing"))


def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    trained = run(config(tmp_path, "ring_all_reduce", epochs=1, checkpoint_every=7))
    for name, value in (("seed", 1), ("optimizer", "adam"), ("dtype", "float64"), ("model", "mlp")):
        changed = dataclasses.replace(config(tmp_path, "ring_all_reduce", resume=trained.folder), **{name: value})
        with pytest.raises(checkpoint.CheckpointError, match=f"was made with --{name} "):
            run(changed)


def test_a_step_that_was_announced_is_on_disk(tmp_path: Path) -> None:
    """Rank 1 dies right after the checkpoint of step 3 was announced: that step is there, and whole."""

    def die_at_step_5(communicator: Any, job: Any) -> dict[str, Any]:
        trainer = loop.Trainer(communicator, job)
        take_step = trainer._step

        def step(*arguments: Any) -> None:
            if communicator.rank == 1 and trainer.steps_done == 4:
                raise RuntimeError("dies here")
            take_step(*arguments)

        trainer._step = step  # type: ignore[method-assign]
        return trainer.run()

    whole = run(config(tmp_path / "whole", "ring_all_reduce", epochs=2))
    with pytest.raises(WorkerFailure, match="dies here"):
        train(
            config(tmp_path / "died", "ring_all_reduce", epochs=2, checkpoint_every=3),
            make_model=Regularised,
            verbose=False,
            worker_function=die_at_step_5,
        )
    (folder,) = (tmp_path / "died").iterdir()
    path = checkpoint.find(str(folder))
    assert path.name == "step_000000003.pt"
    resumed = run(config(tmp_path, "ring_all_reduce", epochs=2, resume=str(path)))
    assert losses(resumed) == losses(whole)
    assert all(torch.equal(resumed.weights[name], value) for name, value in whole.weights.items())
