"""`train(config)`: from a description of a run to its history, its weights and its folder of results."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from torch_parallel import preflight
from torch_parallel.devices import choose_processes, one_thread_after_fork
from torch_parallel.files import path_of
from torch_parallel.launcher import launch
from torch_parallel.results import ResultsError, RunFolder, environment
from torch_parallel.strategies import BUILTIN, STRATEGIES
from torch_parallel.trace import write_chrome_trace
from torch_parallel.training import checkpoint, emulation
from torch_parallel.training.compiling import check_compiler
from torch_parallel.training.config import ConfigError, RunConfig
from torch_parallel.training.display import Display
from torch_parallel.training.job import make_job
from torch_parallel.training.loop import train_worker
from torch_parallel.training.network import check_network
from torch_parallel.training.optimizers import DEFAULT_LR
from torch_parallel.workloads import DataError, Dataset, load_dataset
from torch_parallel.workloads.load import load_workload, of_images
from torch_parallel.workloads.own import as_workload
from torch_parallel.workloads.workload import Workload


@dataclass(frozen=True)
class TrainingRun:
    """What `train` returns: one dict an epoch, the trained weights on the CPU, and the folder with the results.

    `weights_file` has the weights too: `model.load_state_dict(torch.load(run.weights_file))`, with the bare model.
    """

    history: list[dict[str, Any]]
    weights: dict[str, Tensor]
    folder: str
    weights_file: str

    @property
    def test_accuracy(self) -> float:
        """Of the last epoch."""
        return float(self.history[-1]["test_accuracy"])


@one_thread_after_fork()
def train(
    config: RunConfig,
    *,
    make_model: Callable[[], nn.Module] | None = None,
    dataset: Dataset | None = None,
    workload: Workload | None = None,
    verbose: bool = True,
    worker_function: Callable[..., Any] = train_worker,
) -> TrainingRun:
    """Trains as `config` says, prints one line an epoch, and returns history and trained weights.

    `make_model` and `dataset` take the place of `config.model` and `config.dataset`: any model that maps a batch of
    inputs to logits, any four tensors. `workload` takes the place of both: any model, a task that says its loss, any
    tensors. `worker_function` is for those who wrap `train_worker`. Works in a notebook,
    with functions defined in a cell, any number of times.

    Raises ConfigError, DeviceError, DataError, CheckpointError, PreflightError and ResultsError before anything is
    started, WorkerFailure where a worker failed; the epochs that were finished until then are in the results.
    """
    _refuse_a_launcher_around_this_one()
    servers = STRATEGIES[config.strategy].server_count
    n, device, device_line = choose_processes(emulation.processes(config), config.device, servers)
    config = replace(config, n_gpus=n)
    if config.performer != "auto" and device != "cuda":
        raise ConfigError(f"--performer {config.performer}: this run uses no GPU; take --performer auto")
    if config.performer == "triton" and importlib.util.find_spec("triton") is None:
        raise ConfigError("--performer triton: triton is not installed; take --performer auto")
    if STRATEGIES[config.strategy].needs_network and config.process_count > 1:
        instead = "take another --strategy: those from scratch need no network"
        check_network(f"--strategy {config.strategy}", instead, device)
    if config.compile:
        check_compiler(device)
    is_the_users = make_model is not None or workload is not None or config.workload is not None
    workload, data_line = _workload(config, make_model, dataset, workload)
    samples, model_name = workload.samples, workload.model_name
    config = config.on_dataset(samples.name)
    config = replace(config, train_size=samples.train_size, test_size=samples.test_size)
    processes = config.process_count
    if processes < n and device == "cpu":
        device_line = f"no GPU: {config.strategy} runs the plain module in {processes} process"
    resume_from, resume_line = _checkpoint_to_resume(config, samples.name) if config.resume else (None, None)
    batch_norm_line = _check_the_machine(config, workload, is_the_users, device)
    _check_writable(steps_csv=config.steps_csv, trace=config.trace)
    folder = RunFolder(config.results_dir, f"{config.strategy}_{model_name}_{samples.name}_n{n}")
    checkpoints = str(folder.path / "checkpoints")
    job, shared = make_job(config, workload.task, samples, workload.make_model, checkpoints, resume_from)
    display = Display(config, samples, folder, model_name, device, verbose)
    description = {"config": asdict(config), "model": model_name, "dataset": data_line, "device": device}
    description["emulated"] = emulation.flags(config)
    description["strategy_options"] = config.strategy_options_on(device)  # defaults may differ by device
    with folder.running(**environment(), **description), contextlib.closing(display):
        display.introduce([device_line, data_line, resume_line, batch_norm_line])
        results = launch(
            worker_function,
            processes,
            job,
            server_count=servers,
            threads=display.threads,
            deadline_s=config.deadline_s,
            device=device,
            performer=config.performer,
            shared=shared,
            on_message=display.message,
            on_tick=display.tick,
            links=emulation.topology(config),
        )
        first_worker, weights_file = results[servers], folder.path / "weights.pt"
        checkpoint.write_whole(first_worker["weights"], weights_file, "the trained weights")
    if config.trace:
        write_chrome_trace([event for result in results for event in result["events"]], config.trace)
        without = (
            f" ({config.strategy} exchanges by torch's own means: not in it)" if config.strategy in BUILTIN else ""
        )
        display.say(f"trace in {config.trace}: open it in ui.perfetto.dev{without}")
    return TrainingRun(first_worker["history"], first_worker["weights"], str(folder.path), str(weights_file))


def _workload(
    config: RunConfig,
    make_model: Callable[[], nn.Module] | None,
    dataset: Dataset | None,
    workload: Workload | None,
) -> tuple[Workload, str]:
    """What is trained, and one line about its data."""
    sizes = config.train_size, config.seed, config.test_size
    others = make_model is not None or dataset is not None
    if (workload is not None) + (config.workload is not None) + others > 1:
        raise ConfigError("a workload is the model and the data: give it alone, without make_model and dataset")
    if workload is not None:
        own = as_workload(workload, "workload is")
        return own.subset(*sizes), f"{own.samples.name} from {own.samples.source}"
    if not others:
        return load_workload(config.choice)
    if dataset is None:
        dataset, line = load_dataset(config.dataset, config.data_dir, *sizes)
    else:
        if not isinstance(dataset, Dataset):
            raise DataError(f"dataset is of type {type(dataset).__name__}; a torch_parallel.Dataset is wanted")
        dataset.require_samples()
        line = f"{dataset.name} from {dataset.source}"
        dataset = dataset.subset(*sizes)
    if make_model is None:
        return of_images(dataset, config.choice), line
    return Workload(make_model, dataset.task, dataset.samples, getattr(make_model, "__name__", "model")), line


def _refuse_a_launcher_around_this_one() -> None:
    """Under torchrun every one of its processes would start workers of its own. Raises ConfigError."""
    found = [name for name in ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK") if name in os.environ]
    if found:
        raise ConfigError(
            f"{found[0]} is set, as torchrun does: this program starts its processes itself; run it with plain python "
            f"(python train.py --n_gpus N), or unset {found[0]}"
        )


def _check_writable(**files: str | None) -> None:
    """Raises ResultsError for a file that was asked for and cannot be written. It leaves all as it was."""
    for name, path in files.items():
        try:
            if path:
                file = path_of(path)
                was_there = file.exists()
                file.open("ab").close()
                if not was_there:
                    file.unlink()
        except OSError as error:
            raise ResultsError(
                f"--{name} {path}: it cannot be written ({error.strerror}); name another file"
            ) from error


def _checkpoint_to_resume(config: RunConfig, dataset_name: str) -> tuple[str, str]:
    """The complete checkpoint that `config.resume` means, and a line that says so and which settings have changed.

    Raises CheckpointError if it is of another training.
    """
    path = checkpoint.find(str(config.resume))
    content = checkpoint.load(path)
    saved = asdict(RunConfig()) | content["config"] | {"dataset": content["dataset"]}
    ours = asdict(config) | {"dataset": dataset_name}
    for name in ("model", "model_size", "dataset", "train_size", "seed", "optimizer", "dtype"):
        if ours[name] != saved[name]:
            raise checkpoint.CheckpointError(
                f"--resume {path}: it was made with --{name} {saved[name]}, and this run has {ours[name]}; "
                f"give --{name} {saved[name]}"
            )
    training = ["batch_size", "accumulate", "lr", "momentum", "weight_decay", "lr_schedule", "warmup_steps"]
    training += ["clip_norm", "aggregate", "precision", "not_finite"]
    for settings in (saved, ours):
        settings["epochs"] = replace(config, epochs=settings["epochs"]).epochs_on(dataset_name)
    if saved["lr"] is None:  # it was made when the default was the optimizer's alone
        saved["lr"] = DEFAULT_LR[saved["optimizer"]]
    if config.lr_schedule != "constant":  # else nothing depends on where the training ends
        training.append("epochs")
    changed = [f"{name} {saved[name]} -> {ours[name]}" for name in training if ours[name] != saved[name]]
    return str(path), f"going on from {path}" + (f"; changed: {', '.join(changed)}" if changed else "")


def _check_the_machine(config: RunConfig, workload: Workload, model_is_given: bool, device: str) -> str | None:
    """Raises PreflightError where the run needs more than there is. A line to say where a share may be too small."""
    strategy, samples = STRATEGIES[config.strategy], workload.samples
    links = emulation.topology(config)
    one_memory = links is None or links.node_count == 1
    preflight.check_open_files(config.process_count)
    model = preflight.dry_build(workload.make_model, model_is_given)
    if model is None:
        return None
    required = preflight.needs(
        model,
        itemsize=getattr(torch, config.dtype).itemsize,
        n=config.process_count,
        has_server=strategy.server_count > 0 or (strategy.common_parameters and not one_memory),
        data_bytes=samples.nbytes,
        common_parameters=strategy.common_parameters and one_memory,
        common_sums=strategy.common_sums,
        staleness=config.staleness,
        device=device,
        through_host=strategy.through_host or links is not None,
    )
    preflight.check(required)
    workers = config.process_count - strategy.server_count
    batch_size = config.batch_size_on(samples.name)
    sizes = samples.train_size, batch_size, workers, config.accumulate
    return preflight.batch_norm_line(*sizes) if model.has_batch_norm else None
