"""Options of the command line reach the training that they are meant for: none of them can be without effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from torch_parallel import RunConfig, WorkerFailure, train
from torch_parallel.strategies import FROM_SCRATCH
from torch_parallel.training import loop, schedule
from torch_parallel.training.sampler import epoch_order
from torch_parallel.workloads import Dataset

every_strategy = pytest.mark.parametrize(
    "strategy", ("ring_all_reduce", "two_shot_in_place", "param_server", "sharded_param_server")
)


def eight_samples(bad: int | None = None) -> Dataset:
    """8 samples of 3 features, 2 classes; sample `bad` has a NaN."""
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if bad is not None:
        inputs[bad, 1] = float("nan")
    targets = torch.tensor([0, 1] * 4)
    clean = torch.nan_to_num(inputs)
    return Dataset("eight", inputs, targets, clean, targets, 2, (0.0,), (1.0,), "the test")


def linear() -> nn.Module:
    return nn.Linear(3, 2)


def run(folder: Path, strategy: str, dataset: Dataset, worker_function: Any = loop.train_worker, **more: Any) -> Any:
    """2 epochs in batches of 2 on 2 workers, unless `more` says otherwise."""
    options: dict[str, Any] = {"batch_size": 2, "epochs": 2, "lr": 0.5, **more}
    configuration = RunConfig(
        strategy=strategy,
        n_gpus=2 + FROM_SCRATCH[strategy].server_count,
        device="cpu",
        dtype="float64",
        results_dir=str(folder),
        deadline_s=20,
        **options,
    )
    return train(configuration, make_model=linear, dataset=dataset, verbose=False, worker_function=worker_function)


def plain_loop(dataset: Dataset, lr_of_step: Any, clip_norm: float | None = None, skip: bool = False) -> nn.Module:
    """The same training in one process, written out."""
    torch.manual_seed(0)
    model = linear().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    step = 0
    for epoch in (1, 2):
        for batch in epoch_order(8, 0, epoch).split(2):
            step += 1
            optimizer.param_groups[0]["lr"] = lr_of_step(step)
            optimizer.zero_grad()
            cross_entropy(model(dataset.train_inputs[batch]), dataset.train_targets[batch]).backward()
            if skip and not all(torch.isfinite(each.grad).all() for each in model.parameters()):
                continue
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
    return model


def assert_equal(weights: dict[str, torch.Tensor], model: nn.Module) -> None:
    for name, value in model.state_dict().items():
        assert torch.linalg.vector_norm(weights[name] - value) <= 1e-12 * torch.linalg.vector_norm(value), name


@every_strategy
def test_clip_norm(tmp_path: Path, strategy: str) -> None:
    reference = plain_loop(eight_samples(), lambda step: 0.5, clip_norm=0.1)
    free = plain_loop(eight_samples(), lambda step: 0.5)
    assert (reference.weight - free.weight).norm() > 0.01  # it makes a difference
    assert_equal(run(tmp_path, strategy, eight_samples(), clip_norm=0.1).weights, reference)


@every_strategy
def test_schedule_and_warm_up(tmp_path: Path, strategy: str) -> None:
    """8 steps, 2 of warm-up: 1/3, 2/3, then down a line from 1 to 1/6."""
    factors = [1 / 3, 2 / 3, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]
    reference = plain_loop(eight_samples(), lambda step: 0.5 * factors[step - 1])
    assert_equal(run(tmp_path, strategy, eight_samples(), lr_schedule="linear", warmup_steps=2).weights, reference)


def test_factors_by_hand() -> None:
    assert [schedule.factor("constant", step, 4, 0) for step in (1, 2, 3, 4)] == [1, 1, 1, 1]
    assert [schedule.factor("linear", step, 4, 0) for step in (1, 2, 3, 4)] == [1, 0.75, 0.5, 0.25]
    cosine = [schedule.factor("cosine", step, 4, 0) for step in (1, 2, 3, 4)]
    assert cosine == pytest.approx([1, 0.853553390593, 0.5, 0.146446609407])  # (1 + cos(0, 45, 90, 135 degrees)) / 2
    assert [schedule.factor("constant", step, 9, 3) for step in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1]


@every_strategy
def test_not_finite_skip(tmp_path: Path, strategy: str) -> None:
    """The step with the bad sample is left out in each epoch, by all ranks, and momentum knows nothing of it."""
    trained = run(tmp_path, strategy, eight_samples(bad=5), not_finite="skip")
    assert_equal(trained.weights, plain_loop(eight_samples(bad=5), lambda step: 0.5, skip=True))
    assert [epoch["skipped_steps"] for epoch in trained.history] == [1, 2]


@every_strategy
@pytest.mark.exhaustive
def test_accumulate_splits_the_share_of_a_worker(tmp_path: Path, strategy: str) -> None:
    def largest_batch(communicator: Any, job: Any) -> dict[str, Any]:
        trainer = loop.Trainer(communicator, job)
        forward = trainer._forward_and_backward

        def watched(batch: Any, divided_by: int) -> None:
            assert len(batch["inputs"]) == 1, f"{len(batch['inputs'])} samples in one micro-batch"
            forward(batch, divided_by)

        trainer._forward_and_backward = watched  # type: ignore[method-assign]
        return trainer.run()

    with pytest.raises(WorkerFailure, match="2 samples in one micro-batch"):
        run(tmp_path, strategy, eight_samples(), largest_batch, batch_size=4, epochs=1)
    run(tmp_path, strategy, eight_samples(), largest_batch, batch_size=4, epochs=1, accumulate=2)


def test_check_replicas_finds_a_drift_at_the_next_check(tmp_path: Path) -> None:
    """Rank 1's bias is changed after step 4; checks are after steps 3 and 6."""

    def drift(communicator: Any, job: Any) -> dict[str, Any]:
        trainer = loop.Trainer(communicator, job)
        take_step = trainer._step

        def step(*arguments: Any) -> None:
            take_step(*arguments)
            if communicator.rank == 1 and trainer.steps_done == 4:
                trainer.model.bias.data[0] += 1e-6

        trainer._step = step  # type: ignore[method-assign]
        return trainer.run()

    with pytest.raises(WorkerFailure, match=r"parameter bias is not the same on all ranks: .* in step 2 of epoch 2"):
        run(tmp_path, "ring_all_reduce", eight_samples(), worker_function=drift, check_replicas=3)


@every_strategy
@pytest.mark.parametrize("overlap", [False, True])
def test_a_sample_that_is_nan_is_named(tmp_path: Path, strategy: str, overlap: bool) -> None:
    """And not the gradient alone, of which nobody could tell where it comes from."""
    options = {"overlap": True} if overlap and "overlap" in FROM_SCRATCH[strategy].options else {}
    with pytest.raises(WorkerFailure) as raised:
        run(tmp_path, strategy, eight_samples(bad=5), **options)
    headline = str(raised.value).splitlines()[0]
    assert "the gradient of " in headline
    remedy = "mend the data or leave it out, or take --not_finite skip"
    assert headline.endswith(f"; sample 5 of the 8 that are trained on, in inputs, is NaN: {remedy}")
