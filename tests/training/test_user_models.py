"""The model belongs to the user: what it keeps beside parameters, its modes, and what is not finite in it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from torch_parallel import Dataset, RunConfig, WorkerFailure, train
from torch_parallel.strategies import STRATEGIES, SYNCHRONOUS
from torch_parallel.training import checkpoint
from torch_parallel.training.run import TrainingRun

pytestmark = pytest.mark.exhaustive

KINDS = ("ring_all_reduce", "two_shot_in_place", "param_server", "sharded_param_server", "ddp", "data_parallel")
WAITING = (*SYNCHRONOUS, "param_server_bounded", "param_server_backup")
every_kind = pytest.mark.parametrize("strategy", KINDS)
NAN = float("nan")


def points(count: int = 24, bad: tuple[int, ...] = (), bad_test: bool = False, scale: float = 1.0) -> Dataset:
    """[count, 6] points in three classes; those that are `bad` hold a NaN."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(count, 6, generator=generator) * scale
    targets = torch.randint(3, (count,), generator=generator)
    test_inputs, test_targets = inputs[:9].clone(), targets[:9].clone()
    inputs[list(bad)] = NAN
    test_inputs[0] = NAN if bad_test else test_inputs[0]
    return Dataset("points", inputs, targets, test_inputs, test_targets, 3, (), (), "this test")


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., TrainingRun]:
    def run(
        strategy: str, make_model: Any, dataset: Dataset | None = None, workers: int = 2, **options: Any
    ) -> TrainingRun:
        workers = 1 if strategy == "data_parallel" else workers
        config = RunConfig(
            strategy=strategy,
            n_gpus=workers + STRATEGIES[strategy].server_count,
            device="cpu",
            results_dir=str(tmp_path / "runs"),
            deadline_s=30,
            **{"batch_size": 8, "epochs": 2, "lr": 0.1, **options},
        )
        return train(config, make_model=make_model, dataset=dataset or points(), verbose=False)

    return run


class Keeping(nn.Module):
    """Keeps much beside its parameters: buffers that are not persistent, expanded, aliased, made by forward, of several
    types, and a number that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.same_layer = self.layer
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("same_steps", self.steps)
        self.register_buffer("sum_of_steps", torch.tensor(0.0, dtype=torch.float64), persistent=False)
        self.register_buffer("wide", torch.ones(1).expand(6))
        self.register_buffer("cis", torch.polar(torch.ones(3), torch.tensor([0.5, 1.0, 2.0])))
        self.register_buffer("table", None)
        self.calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.full((6,), 0.5)
        if self.training:
            self.steps += 1
            self.sum_of_steps += self.steps
            self.calls += 1
            self.table = self.table + 0.25
        turned = torch.view_as_complex(x.view(-1, 3, 2)) * self.cis
        scaled = torch.view_as_real(turned).flatten(1) * self.wide * self.table
        return self.layer(scaled + self.sum_of_steps.to(x.dtype) / 100)


@every_kind
def test_what_a_model_keeps_is_that_of_one_process_and_goes_through_a_checkpoint(
    strategy: str, run: Callable[..., TrainingRun]
) -> None:
    """3 steps an epoch, the last of one sample only: three workers, of which two have none then."""
    data, workers = points(17), 3
    whole = run(strategy, Keeping, data, workers, checkpoint_every=2)
    one = run("ring_all_reduce", Keeping, data, 1)
    fresh = Keeping()
    fresh.table = torch.empty(6)  # as forward makes it
    assert list(whole.weights) == list(fresh.state_dict())
    assert whole.weights["steps"] == whole.weights["same_steps"] == 6
    assert whole.weights["_extra_state"] == {"calls": 6}
    assert whole.weights["cis"].dtype == torch.complex64
    assert whole.weights["table"].tolist() == [0.5 + 6 * 0.25] * 6
    for name, value in one.weights.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(whole.weights[name], value, rtol=1e-6, atol=1e-6)
    saved = sorted(Path(whole.folder, "checkpoints").iterdir())
    content = torch.load(saved[0])  # step 2, in the midst of an epoch
    assert list(content["model"]) == list(fresh.state_dict())
    assert content["model"]["steps"] == 2 and content["model"]["_extra_state"] == {"calls": 2}
    again = run(strategy, Keeping, data, workers, resume=str(saved[0]))
    rounding = 1e-6 if strategy == "ddp" else 0.0  # its first step has other buckets, which it sums in another order
    for name, value in whole.weights.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(again.weights[name], value, rtol=rounding, atol=rounding)
        else:
            assert again.weights[name] == value
    alone = run("ring_all_reduce", Keeping, data, 1, resume=str(saved[0]))  # with another number of workers
    assert alone.weights["steps"] == 6 and alone.weights["_extra_state"] == {"calls": 6}


def test_extra_state_that_cannot_be_loaded_again_is_refused_before_training(run: Callable[..., TrainingRun]) -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> Any:
            return Path("a path is no plain thing")

        def set_extra_state(self, state: Any) -> None: ...

    assert run("ring_all_reduce", lambda: Odd(6, 3)).history  # it may train
    with pytest.raises(WorkerFailure, match=r"module at the top: its extra state cannot be in a checkpoint"):
        run("ring_all_reduce", lambda: Odd(6, 3), checkpoint_every=1)


class Frozen(nn.Module):
    """Statistics and dropout that are to stay as they are, in a model that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.layer = nn.BatchNorm1d(6), nn.Dropout(0.9), nn.Linear(6, 3)
        self.norm.running_mean.fill_(3.0)
        self.norm.eval()
        self.drop.eval()

    def forward(self, x: Tensor) -> Tensor:
        assert not self.norm.training and not self.drop.training
        return self.layer(self.drop(self.norm(x)))


@every_kind
def test_modules_stay_in_the_modes_they_come_in(strategy: str, run: Callable[..., TrainingRun]) -> None:
    trained = run(strategy, Frozen)
    assert trained.weights["norm.running_mean"].tolist() == [3.0] * 6
    assert trained.weights["norm.num_batches_tracked"] == 0


def test_a_model_in_eval_mode_trains_in_it_and_that_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = RunConfig(n_gpus=2, device="cpu", batch_size=8, epochs=1, results_dir=str(tmp_path))
    trained = train(
        config, make_model=lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)).eval(), dataset=points()
    )
    assert trained.weights["0.running_mean"].tolist() == [0.0] * 6
    assert "the model came in eval mode and trains in it" in capsys.readouterr().out


@every_kind
def test_evaluation_leaves_a_model_as_it_was(strategy: str, run: Callable[..., TrainingRun]) -> None:
    """What forward keeps then may be used in training, and what it writes into buffers is taken back."""

    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 3)
            self.register_buffer("calls", torch.tensor(0))
            self.mask: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1  # in evaluation too
            if self.mask is None or len(self.mask) < len(x):
                self.mask = torch.ones(len(x), 1)
            return super().forward(x) * self.mask[: len(x)]

    assert run(strategy, Counting).weights["calls"] == 6  # two epochs of three steps


class TwoTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 4).double(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x.double())).float())


@every_kind
def test_parts_keep_the_types_they_have(strategy: str, run: Callable[..., TrainingRun]) -> None:
    trained, one = run(strategy, TwoTypes), run("ring_all_reduce", TwoTypes, workers=1)
    assert trained.weights["first.weight"].dtype == torch.float64
    assert trained.weights["last.weight"].dtype == torch.float32
    for name, value in one.weights.items():
        torch.testing.assert_close(trained.weights[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make_model", "words"),
    [
        (lambda: nn.Linear(6, 3).double(), r"parameters are torch.float64 \(weight\).*give --dtype float64"),
        (lambda: nn.Linear(6, 3).bfloat16(), r"parameters are torch.bfloat16 .*--precision bf16"),
        (lambda: "not a model", "make_model returned a str"),
    ],
)
def test_models_of_another_type_are_refused(make_model: Any, words: str, run: Callable[..., TrainingRun]) -> None:
    with pytest.raises(WorkerFailure, match=words):
        run("ring_all_reduce", make_model)


# ---- what is not finite ----


class Noting(nn.Module):
    """Forward writes three buffers: one from the samples, one that counts, and BatchNorm's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.register_buffer("last", torch.zeros(6))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.last = x.detach().mean(0)
            self.steps += 1
        return self.layer(self.norm(x))


@pytest.mark.parametrize("strategy", WAITING)
def test_a_skipped_step_leaves_no_trace(strategy: str, run: Callable[..., TrainingRun]) -> None:
    """One bad sample of 24, so one step of three is skipped in each epoch, on all ranks."""
    trained = run(strategy, Noting, points(bad=(5,)), not_finite="skip", checkpoint_every=3)
    assert [epoch["skipped_steps"] for epoch in trained.history] == [1, 2]
    assert trained.weights["steps"] == trained.weights["norm.num_batches_tracked"] == 4
    saved = torch.load(max(Path(trained.folder, "checkpoints").iterdir()))
    for state in (trained.weights, saved["model"], *(rank["buffers"] for rank in saved["ranks"])):
        assert all(torch.isfinite(value).all() for value in state.values())
    for epoch in trained.history:  # the mean over the sixteen samples that were trained on
        assert 0.5 < epoch["train_loss"] < 3


def test_the_training_loss_is_that_of_the_samples_trained_on(run: Callable[..., TrainingRun]) -> None:
    data = points(bad=(5,))
    trained = run("ring_all_reduce", lambda: nn.Linear(6, 3), data, not_finite="skip", lr=0.0, momentum=0.0, epochs=1)
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1)).split(8)
    kept = torch.cat([batch for batch in order if 5 not in batch])
    expected = cross_entropy(model(data.train_inputs[kept]), data.train_targets[kept]).item()
    assert len(kept) == 16 and trained.history[0]["train_loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("strategy", ["param_server_async", "param_server_bounded", "param_server_backup"])
def test_those_that_do_not_wait_keep_buffers_finite_too(strategy: str, run: Callable[..., TrainingRun]) -> None:
    own = {"param_server_bounded": {"staleness": 1}, "param_server_backup": {"backup_workers": 1}}.get(strategy, {})
    trained = run(strategy, Noting, points(48, bad=(5,)), 2, not_finite="skip", checkpoint_every=6, **own)
    saved = torch.load(max(Path(trained.folder, "checkpoints").iterdir()))
    for state in (trained.weights, *(rank["buffers"] for rank in saved["ranks"])):
        assert all(torch.isfinite(value).all() for value in state.values())


@every_kind
def test_an_overflow_of_the_last_update_stops_the_run(strategy: str, run: Callable[..., TrainingRun]) -> None:
    with pytest.raises(WorkerFailure, match=r"the parameter \S*(weight|bias) is NaN or infinite") as caught:
        run(strategy, lambda: nn.Linear(6, 3), points(8, scale=100.0), lr=1e38, epochs=1, checkpoint_every=1)
    assert "step 1 of epoch 1" in str(caught.value)


def test_nothing_is_saved_then(run: Callable[..., TrainingRun], tmp_path: Path) -> None:
    with pytest.raises(WorkerFailure):
        run("ring_all_reduce", lambda: nn.Linear(6, 3), points(8, scale=100.0), lr=1e38, epochs=1, checkpoint_every=1)
    (folder,) = (tmp_path / "runs").iterdir()
    assert not checkpoint.complete_checkpoints(folder / "checkpoints")
    assert not list(folder.glob("*.pt"))
    assert '"status": "failed"' in (folder / "manifest.json").read_text()


class Tilting(nn.Module):
    """A buffer that overflows in the third step, whatever the samples are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("level", torch.tensor(1e15))
        self.register_buffer("mask", torch.tensor([-torch.inf, 0.0]))  # on purpose

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.level *= self.level
        return self.layer(x)


@pytest.mark.parametrize("strategy", ["ring_all_reduce", "param_server", "ddp"])
@pytest.mark.parametrize(
    ("make_model", "options", "words"),
    [
        (Tilting, {}, "the buffer level is NaN or infinite"),
        # 1e30 squared is more than float32 holds: Adam then divides by infinity, and the parameters stay finite
        (
            lambda: nn.Sequential(nn.Linear(6, 3), nn.Hardtanh(), Steep()),
            {"optimizer": "adam", "lr": 0.001},
            "the optimizer's exp_avg_sq of 0.(weight|bias) is NaN or infinite",
        ),
        (lambda: nn.Linear(6, 3), {"dataset": points(bad_test=True)}, "the test loss is NaN or infinite"),
    ],
    ids=["buffer", "optimizer", "test loss"],
)
def test_whatever_is_not_finite_stops_the_run(
    strategy: str, make_model: Any, options: dict[str, Any], words: str, run: Callable[..., TrainingRun]
) -> None:
    with pytest.raises(WorkerFailure, match=words):
        run(strategy, make_model, **options)


class Steep(nn.Module):
    """Multiplies gradients by 1e30 on their way back."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach() + (x - x.detach()) * 1e30


@every_kind
def test_a_run_that_skipped_most_steps_fails_and_says_so(strategy: str, run: Callable[..., TrainingRun]) -> None:
    bad = tuple(range(0, 24, 2))
    with pytest.raises(WorkerFailure, match="3 of 3 steps have been skipped, because a gradient was NaN or infinite"):
        run(strategy, lambda: nn.Linear(6, 3), points(bad=bad), not_finite="skip")


class Counts(nn.Module):
    """In extra state how often forward was called, and in evaluation too; where the first sample is infinite, a NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.mean = nn.Linear(6, 3), 0, torch.zeros(6)

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "mean": self.mean}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls, self.mean = state["calls"], state["mean"]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = x.detach().mean(0)
        return self.layer(x)


@every_kind
def test_extra_state_is_put_back_where_buffers_are(strategy: str, run: Callable[..., TrainingRun]) -> None:
    """Six steps of which two are skipped, and two evaluations."""
    state = run(strategy, Counts, points(bad=(5,)), not_finite="skip").weights["_extra_state"]
    assert state["calls"] == 4 and torch.isfinite(state["mean"]).all()


@pytest.mark.parametrize("strategy", ["ring_all_reduce", "param_server"])
def test_extra_state_that_is_not_finite_stops_the_run(strategy: str, run: Callable[..., TrainingRun]) -> None:
    class Bad(Counts):
        def forward(self, x: Tensor) -> Tensor:
            logits = super().forward(x)
            self.mean = self.mean / 0
            return logits

    with pytest.raises(WorkerFailure, match="the extra state of the model is NaN or infinite"):
        run(strategy, Bad)


class Follows(nn.Module):
    """Buffers that are the parameter, and a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("same", self.layer.weight)
        self.register_buffer("row", self.layer.weight.detach()[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.row[:, None] / 10


@pytest.mark.parametrize("strategy", ["ring_all_reduce", "two_shot_in_place", "ddp"])
def test_buffers_over_a_parameter_follow_it(strategy: str, run: Callable[..., TrainingRun]) -> None:
    trained, one = run(strategy, Follows), run("ring_all_reduce", Follows, workers=1)
    assert torch.equal(trained.weights["same"], trained.weights["layer.weight"])
    assert torch.equal(trained.weights["row"], trained.weights["layer.weight"][0])
    torch.testing.assert_close(trained.weights["layer.weight"], one.weights["layer.weight"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", ["ring_all_reduce", "param_server"])
def test_scripted_models_and_rare_types_train(strategy: str, run: Callable[..., TrainingRun]) -> None:
    def scripted() -> nn.Module:
        module: nn.Module = torch.jit.script(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)))
        return module

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that its scripts are of yesterday
        assert run(strategy, scripted).weights["1.num_batches_tracked"] == 6

    class Rare(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 3)
            for name in ("uint16", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"):
                self.register_buffer(name, torch.ones(2, 2).to(getattr(torch, name)))

    weights = run(strategy, Rare, checkpoint_every=2).weights
    assert [str(value.dtype) for value in weights.values()][2:] == [
        *("torch.uint16", "torch.uint64", "torch.float8_e4m3fn", "torch.float8_e5m2", "torch.float8_e8m0fnu")
    ]
    assert weights["float8_e8m0fnu"].float().tolist() == [[1.0, 1.0]] * 2


def test_a_checkpoint_that_could_not_be_resumed_is_refused_before(run: Callable[..., TrainingRun]) -> None:
    class Renames(nn.Linear):
        def state_dict(self, *arguments: Any, **options: Any) -> dict[str, Any]:
            return {f"old.{name}": value for name, value in super().state_dict(*arguments, **options).items()}

    with pytest.raises(WorkerFailure, match="no run could go on from a checkpoint of this model"):
        run("ring_all_reduce", lambda: Renames(6, 3), checkpoint_every=3)


class FailsLater(nn.Linear):
    """Its logits are NaN from the fourth step on, which is the second epoch."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        return super().forward(x) * (NAN if self.training and self.steps > 3 else 1)


def test_an_epoch_of_which_nothing_was_used_fails_too(run: Callable[..., TrainingRun]) -> None:
    with pytest.raises(WorkerFailure, match="3 of 6 steps have been skipped, because a gradient was NaN or infinite"):
        run("ring_all_reduce", FailsLater, not_finite="skip")


# ---- what forward does to parameters ----


class Late(nn.Module):
    """The second layer gets its first gradient in the third step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.steps = nn.Linear(6, 3), nn.Linear(3, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        h = self.first(x)
        return self.second(torch.tanh(h)) if self.steps > 2 else h


@pytest.mark.parametrize("strategy", [name for name in KINDS if name != "ddp"])  # it wants the same graph in each step
def test_parameters_may_get_their_first_gradient_after_others(strategy: str, run: Callable[..., TrainingRun]) -> None:
    trained = run(strategy, Late, dtype="float64", epochs=2)
    torch.manual_seed(0)
    model = Late().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = points()
    for epoch in (1, 2):
        for batch in torch.randperm(24, generator=torch.Generator().manual_seed(epoch)).split(8):
            optimizer.zero_grad()
            cross_entropy(model(data.train_inputs[batch].double()), data.train_targets[batch]).backward()
            optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(trained.weights[name], value, rtol=1e-12, atol=1e-13)


class WritesInEvaluation(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.weight.data.mul_(0.5)
        return super().forward(x)


@pytest.mark.parametrize("strategy", ["ring_all_reduce", "param_server", "sharded_param_server", "ddp"])
def test_a_parameter_written_in_evaluation_is_named(strategy: str, run: Callable[..., TrainingRun]) -> None:
    with pytest.raises(WorkerFailure, match="UnsupportedModel: parameter weight was written during evaluation"):
        run(strategy, WritesInEvaluation)


class WritesNowAndThen(nn.Linear):
    """In the third step, by a way that autograd counts."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        if self.steps == 3 and self.training:
            with torch.no_grad():
                self.bias.clamp_(-1, 1)
        return super().forward(x)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("strategy", ["ring_all_reduce", "param_server"])
def test_one_written_in_a_later_step_is_named_too(
    strategy: str, overlap: bool, run: Callable[..., TrainingRun]
) -> None:
    with pytest.raises(WorkerFailure, match="parameter bias was written during forward or backward") as caught:
        run(strategy, WritesNowAndThen, overlap=overlap, bucket_mb=0.00003)
    assert "step 3 of epoch 1" in str(caught.value)
