"""Training on GPUs, one process each: equal to one process, and to the CPU. `pytest -m gpu` on a machine with GPUs."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from transports import gpu_memory_falls_to, gpu_memory_mb

from torch_parallel import RunConfig, WorkerFailure, train
from torch_parallel.strategies import STRATEGIES, SYNCHRONOUS
from torch_parallel.training import loop
from torch_parallel.training.run import TrainingRun
from torch_parallel.workloads import Dataset, build_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two processes on GPUs need 2 of them"),
]


def made_up_dataset() -> Dataset:
    generator = torch.Generator().manual_seed(3)
    images = torch.randint(0, 256, (90, 1, 8, 8), generator=generator, dtype=torch.uint8)
    targets = torch.randint(0, 10, (90,), generator=generator)
    return Dataset("made_up", images[:70], targets[:70], images[70:], targets[70:], 10, (0.5,), (0.25,), "the test")


def run(folder: Path, strategy: str, n: int, device: str, model: str = "cnn", **more: Any) -> TrainingRun:
    options: dict[str, Any] = {"batch_size": 16, "epochs": 2, "dtype": "float64", "optimizer": "adamw", **more}
    worker_function = options.pop("worker_function", loop.train_worker)
    configuration = RunConfig(strategy=strategy, n_gpus=n, device=device, results_dir=str(folder), **options)

    def make_model() -> nn.Module:
        return build_model(model, (1, 8, 8), 10)

    return train(
        configuration, make_model=make_model, dataset=made_up_dataset(), verbose=False, worker_function=worker_function
    )


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], dict[str, Tensor]]:
    """The weights that one process ends with, by device and model; trained once."""

    @cache
    def weights(device: str, model: str) -> dict[str, Tensor]:
        return run(tmp_path_factory.mktemp("one"), "ring_all_reduce", 1, device, model, clip_norm=0.7).weights

    return weights


@pytest.mark.parametrize("strategy", list(STRATEGIES))
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_float64_weights_are_those_of_one_gpu_and_of_the_cpu(
    tmp_path: Path, strategy: str, model: str, one_process: Callable[[str, str], dict[str, Tensor]]
) -> None:
    """The asynchronous ones too, since two processes are a server and a single worker."""
    for name, value in run(tmp_path, strategy, 2, "cuda", model, clip_norm=0.7).weights.items():
        for device, bound in (("cuda", 1e-12), ("cpu", 1e-10)):
            difference = value - one_process(device, model)[name]
            assert torch.linalg.vector_norm(difference) <= bound * torch.linalg.vector_norm(value), name


@pytest.mark.parametrize("strategy", list(SYNCHRONOUS))
def test_all_ranks_hold_the_same_bits(tmp_path: Path, strategy: str) -> None:
    trained = run(tmp_path, strategy, 2, "cuda", dtype="float32", optimizer="sgd", check_replicas=1)
    assert len(trained.history) == 2


def test_a_checkpoint_of_gpus_goes_on_on_the_cpu(tmp_path: Path) -> None:
    whole = run(tmp_path, "ring_all_reduce", 1, "cpu").weights
    stopped = run(tmp_path, "param_server", 2, "cuda", epochs=1, checkpoint_every=5)
    resumed = run(tmp_path, "ring_all_reduce", 2, "cpu", resume=stopped.folder).weights
    for name, value in whole.items():
        assert torch.linalg.vector_norm(value - resumed[name]) <= 1e-10 * torch.linalg.vector_norm(value), name


def die(communicator: Any, job: Any) -> dict[str, Any]:
    trainer = loop.Trainer(communicator, job)
    if communicator.rank == 1:
        raise RuntimeError("dies here")
    return trainer.run()


@pytest.mark.alone
def test_a_worker_that_dies_gives_its_memory_back(tmp_path: Path) -> None:
    used_before = gpu_memory_mb()
    with pytest.raises(WorkerFailure, match="rank 1 failed: RuntimeError: dies here"):
        run(tmp_path, "ring_all_reduce", 2, "cuda", worker_function=die)
    assert gpu_memory_falls_to(used_before), f"MiB in use by GPU: {gpu_memory_mb()}, before: {used_before}"
    run(tmp_path, "ring_all_reduce", 2, "cuda")


class NotANumberInThirdForward(nn.Module):
    """One layer; what comes out of the third forward of a process is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.forwards = 0

    def forward(self, images: Tensor) -> Tensor:
        self.forwards += 1
        return self.layer(images.flatten(1)) * (torch.nan if self.forwards == 3 else 1.0)


HOW_EXCHANGED = [
    pytest.param({"overlap": False}, id="after backward"),
    pytest.param({"overlap": True}, id="one bucket"),
    pytest.param({"overlap": True, "bucket_mb": 0.001}, id="two buckets"),
]


@pytest.mark.parametrize("how", [*HOW_EXCHANGED, pytest.param({"strategy": "ddp"}, id="ddp")])
def test_a_gradient_that_is_not_finite_is_named_with_its_step_though_it_is_looked_at_later(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    """The third step of four or more, and the last one of an epoch."""
    for train_size in (None, 48):
        configuration = RunConfig(
            n_gpus=2,
            device="cuda",
            batch_size=16,
            epochs=2,
            train_size=train_size,
            results_dir=str(tmp_path),
            **how,
        )
        with pytest.raises(WorkerFailure, match=r"NotFinite: .* layer\.\w+ is .* in step 3 of epoch 1 on rank"):
            train(configuration, make_model=NotANumberInThirdForward, dataset=made_up_dataset(), verbose=False)


class NotANumberOnSecondGPU(NotANumberInThirdForward):
    """Likewise, but on the GPU of rank 1 only."""

    def forward(self, images: Tensor) -> Tensor:
        if images.device.index != 1:
            self.forwards = 0
        return super().forward(images)


@pytest.mark.parametrize("how", HOW_EXCHANGED)
def test_the_rank_is_named_whose_gradient_was_not_finite(tmp_path: Path, how: dict[str, Any]) -> None:
    """The others see it in the sum, in the same step, and may say so first."""
    configuration = RunConfig(n_gpus=2, device="cuda", batch_size=16, results_dir=str(tmp_path), **how)
    with pytest.raises(
        WorkerFailure, match=r"rank 1 failed: NotFinite: the gradient of layer\.\w+ .* in step 3 of epoch 1 on rank 1"
    ):
        train(configuration, make_model=NotANumberOnSecondGPU, dataset=made_up_dataset(), verbose=False)


def profiled(communicator: Any, job: Any, folder: str) -> dict[str, Any]:
    """Trains, and writes down what ran on this rank's GPU, and whether there was a process group."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        result = loop.Trainer(communicator, job).run()
        torch.cuda.synchronize()
    seen = {"ran": [event.key for event in trace.key_averages()], "group": torch.distributed.is_initialized()}
    (Path(folder) / f"rank_{communicator.rank}.json").write_text(json.dumps(seen))
    return result


@pytest.mark.parametrize("performer", ["plain", "triton"])
@pytest.mark.parametrize("strategy", ["ring_all_reduce", "two_shot_in_place", "param_server", "sharded_param_server"])
def test_training_uses_no_kernel_of_nccl_and_no_process_group(tmp_path: Path, strategy: str, performer: str) -> None:
    work = partial(profiled, folder=str(tmp_path))
    run(tmp_path / "results", strategy, 2, "cuda", epochs=1, performer=performer, worker_function=work)
    for rank in range(2):
        seen = json.loads((tmp_path / f"rank_{rank}.json").read_text())
        assert len(seen["ran"]) > 5 and not seen["group"]
        kernel_ran = any("perform_table" in name for name in seen["ran"])
        assert kernel_ran == (performer == "triton") or (not kernel_ran and "server" in strategy)
        assert not [name for name in seen["ran"] if "nccl" in name.lower()]
