"""`train(config)`: from a description of a run to its history, its weights and its folder of results."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_parallel import joined, joined_run, preflight
from torch_parallel.collectives.schedule import Nodes
from torch_parallel.devices import choose_processes, one_thread_after_fork
from torch_parallel.files import path_of
from torch_parallel.launcher import launch
from torch_parallel.nics import named_by_environment
from torch_parallel.results import ResultsError, RunFolder, environment
from torch_parallel.strategies import BUILTIN, STRATEGIES
from torch_parallel.trace import write_chrome_trace
from torch_parallel.training import checkpoint, emulation
from torch_parallel.training.compiling import check_compiler
from torch_parallel.training.config import RunConfig
from torch_parallel.training.display import Display
from torch_parallel.training.job import make_job
from torch_parallel.training.loop import train_worker
from torch_parallel.training.network import check_network
from torch_parallel.training.optimizers import DEFAULT_LR
from torch_parallel.transport.signals import stores_are_ordered
from torch_parallel.usage import ConfigError
from torch_parallel.workloads import DataError, Dataset, load_dataset
from torch_parallel.workloads.load import length_of, load_workload, of_images
from torch_parallel.workloads.own import as_workload
from torch_parallel.workloads.trial import is_own, trial_of
from torch_parallel.workloads.workload import Workload

MUST_BE_EQUAL = (
    *("workload", "model", "model_size", "pretrained", "dataset", "length"),
    *("train_size", "seed", "optimizer", "dtype"),
)
"""What a run that goes on must have as the run before it."""


@dataclass(frozen=True)
class TrainingRun:
    """What `train` returns: one dict an epoch, the trained weights on the CPU, and the folder with the results.

    `weights_file` has the weights too: `model.load_state_dict(torch.load(run.weights_file))`, with the bare model.
    """

    history: list[dict[str, Any]]
    weights: dict[str, Tensor]
    folder: str
    weights_file: str
    rank: int = 0
    """Of this process, where others have started it as one of several; what the run shows and writes is rank 0's."""

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
    with functions defined in a cell, any number of times. Under torchrun, srun or mpirun all of their processes call
    it, and are the run's; all return the same, but for `weights`, which processes that do not see rank 0's files have
    not.

    Raises RendezvousError where processes that others have started do not meet, ConfigError, DeviceError, DataError,
    CheckpointError, PreflightError and ResultsError before anything is started, WorkerFailure where a worker failed;
    the epochs that were finished until then are in the results.
    """
    given = make_model, dataset, workload, verbose, worker_function
    meeting = joined.group(config.deadline_s)
    if meeting is None:
        return _train(emulation.on_nodes(config, (0,)), *given, launch, emulation.processes(config))
    meeting.nics = config.nic_names or named_by_environment()
    if meeting.rank > 0:
        run: TrainingRun = joined_run.follow(meeting, partial(_shared_tensors, config, make_model, dataset, workload))
        on_this_machine = Path(run.weights_file).exists()
        weights = torch.load(run.weights_file, weights_only=False) if on_this_machine else {}
        return replace(run, weights=weights, rank=meeting.rank)
    with joined_run.leading(meeting) as lead:
        count = _all_processes(config, meeting.world_size)
        config = emulation.on_nodes(config, meeting.nodes)
        run = _train(config, *given, lead.launch, count, lead.attempts_before, meeting.nodes)
        lead.conclude(replace(run, weights={}))
    return run


def _shared_tensors(
    config: RunConfig,
    make_model: Callable[[], nn.Module] | None,
    dataset: Dataset | None,
    workload: Workload | None,
) -> dict[str, Tensor]:
    """What rank 0 shares with the ranks of its node, made on another one."""
    own, _ = _workload(config, make_model, dataset, workload)
    return make_job(config, own.task, own.samples, own.make_model)[1]


def _all_processes(config: RunConfig, started: int) -> int:
    """Where somebody else has started the processes. Raises ConfigError unless they are as many as are asked for."""
    asked = emulation.processes(config)
    if asked not in (None, started):
        of_nodes = f"--nodes {config.nodes} --workers_per_node {config.workers_per_node}, which are {asked} processes"
        name = of_nodes if config.n_gpus is None else f"--n_gpus {asked}"
        raise ConfigError(f"{name}: {started} were started: start as many as that, or leave it out")
    if (used := replace(config, n_gpus=started).process_count) != started:
        raise ConfigError(
            f"--strategy {config.strategy}: it is {used} process, and {started} were started: run it with plain python"
        )
    return started


def _train(
    config: RunConfig,
    make_model: Callable[[], nn.Module] | None,
    dataset: Dataset | None,
    workload: Workload | None,
    verbose: bool,
    worker_function: Callable[..., Any],
    launch: Callable[..., list[Any]],
    processes_asked: int | None,
    attempts_before: Callable[[str], list[str]] = lambda folder: [],
    nodes: Nodes = (),
) -> TrainingRun:
    """`train`, where `launch` gives it its processes: as many as are asked for, where that is said.

    `attempts_before` takes the folder of this run's checkpoints, and gives those of attempts before: this one goes on
    from the newest that is complete. `nodes` are those on which the processes stand, where they are known.
    """
    servers = STRATEGIES[config.strategy].server_count
    share = config.setup is not None
    if len(set(nodes)) > 1:  # each machine has as many devices as its own ranks need
        here = max(map(nodes.count, nodes))
        _, device, device_line = choose_processes(here, config.device, 0, share)
        n = len(nodes)
    else:
        n, device, device_line = choose_processes(processes_asked, config.device, servers, share)
    config = replace(config, n_gpus=n)
    if config.performer != "auto" and device != "cuda":
        raise ConfigError(f"--performer {config.performer}: this run uses no GPU; take --performer auto")
    if config.performer == "triton" and importlib.util.find_spec("triton") is None:
        raise ConfigError("--performer triton: triton is not installed; take --performer auto")
    if config.schedule != "none" and (device == "cuda" or len(set(nodes)) > 1 or not stores_are_ordered()):
        where = "a GPU" if device == "cuda" else "several nodes" if len(set(nodes)) > 1 else "this processor"
        raise ConfigError(
            f"--schedule {config.schedule}: several exchanges in flight need the CPU of one x86-64 machine, and the "
            f"run is on {where}; leave it out"
        )
    if STRATEGIES[config.strategy].needs_network and config.process_count > 1:
        instead = "take another --strategy: those from scratch need no network"
        check_network(f"--strategy {config.strategy}", instead, device)
    if config.compile:
        check_compiler(device)
    workload_is_given = workload is not None
    is_the_users = make_model is not None or workload is not None or config.workload is not None
    workload, data_line = _workload(config, make_model, dataset, workload)
    samples, model_name = workload.samples, workload.model_name
    defaults = asdict(RunConfig())
    asked = {name: value for name, value in asdict(config).items() if value != defaults[name]}
    config = config.resolved(samples.known_as, samples.train_size, samples.test_size)
    processes = config.process_count
    if processes < n and device == "cpu":
        device_line = f"no GPU: {config.strategy} runs the plain module in {processes} process"
    resume_from, resume_line = None, None
    if config.resume:
        resume_from, resume_line = _checkpoint_to_resume(config, samples.name, workload_is_given)
    batch_norm_line = _check_the_machine(config, workload, is_the_users, device, len(set(nodes)) > 1)
    _check_writable(steps_csv=config.steps_csv, trace=config.trace)
    folder = RunFolder(config.results_dir, f"{config.strategy}_{model_name}_{samples.name}_n{n}")
    checkpoints = str(folder.path / "checkpoints")
    for before in attempts_before(checkpoints):
        if checkpoint.complete_checkpoints(Path(before)):
            resumed = replace(config, resume=before)
            resume_from, resume_line = _checkpoint_to_resume(resumed, samples.name, workload_is_given)
            break
    job, shared = make_job(config, workload.task, samples, workload.make_model, checkpoints, resume_from)
    nics = config.nic_names or named_by_environment()
    display = Display(config, workload, folder, device, verbose, nodes, nics)
    description = {
        "asked": asked,
        "config": asdict(config),
        "model": model_name,
        "dataset": data_line,
        "device": device,
    }
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


def _checkpoint_to_resume(config: RunConfig, dataset_name: str, workload_is_given: bool) -> tuple[str, str]:
    """The complete checkpoint that `config.resume` means, and a line that says so and which settings have changed.

    A workload that is given in Python is not compared with the place of a function. Raises CheckpointError if it is of
    another training.
    """
    path = checkpoint.find(str(config.resume))
    content = checkpoint.load(path)
    saved = asdict(RunConfig()) | content["config"] | {"dataset": content["dataset"]}
    ours = asdict(config) | {"dataset": dataset_name}
    if workload_is_given:
        ours["workload"] = saved["workload"]
    for settings in (saved, ours):
        settings["length"] = length_of(settings["model"], settings["length"])
    for name in MUST_BE_EQUAL:
        if not _same(name, ours[name], saved[name]):
            without, with_it = f"without --{name}", f"with --{name} {saved[name]}"
            raise checkpoint.CheckpointError(
                f"--resume {path}: it was made {without if saved[name] is None else with_it}, and this run has "
                f"{'none' if ours[name] is None else ours[name]}; "
                f"{f'leave --{name} out' if saved[name] is None else f'give --{name} {saved[name]}'}"
            )
    training = ["batch_size", "accumulate", "lr", "momentum", "weight_decay", "lr_schedule", "warmup_steps"]
    training += ["clip_norm", "aggregate", "precision", "not_finite"]
    for settings in (saved, ours):
        settings["epochs"] = replace(config, epochs=settings["epochs"]).epochs_on(dataset_name)
    if saved["lr"] is None:  # it was made when the default was the optimizer's alone
        saved["lr"] = DEFAULT_LR[saved["optimizer"]]
    if config.lr_schedule != "constant":  # else nothing depends on where the training ends
        training += ["epochs", "max_steps"]
    if config.max_steps is not None:
        batch, done = saved["batch_size"], sum(each["steps"] for each in content["history"])
        done += content["samples_done"] // (batch or 1)
        if batch != ours["batch_size"]:
            raise checkpoint.CheckpointError(
                f"--resume {path}: its steps had {batch} samples, those of this run have {ours['batch_size']}; give "
                "the batch that it had, or leave --max_steps out"
            )
        if done >= config.max_steps:
            raise checkpoint.CheckpointError(f"--resume {path}: it has made {done} steps; give --max_steps of more")
    changed = [f"{name} {saved[name]} -> {ours[name]}" for name in training if ours[name] != saved[name]]
    return str(path), f"going on from {path}" + (f"; changed: {', '.join(changed)}" if changed else "")


def _same(name: str, ours: Any, saved: Any) -> bool:
    """Places may be said in several ways: `mine.py:make` and `./mine.py:make` are one."""
    if ours == saved or None in (ours, saved) or name not in ("workload", "pretrained"):
        return bool(ours == saved)
    return os.path.realpath(path_of(ours)) == os.path.realpath(path_of(saved))


def _check_the_machine(
    config: RunConfig, workload: Workload, model_is_given: bool, device: str, over_nodes: bool
) -> str | None:
    """A line to say where a worker's share may be too small.

    Raises PreflightError where the run needs more than there is, and DataError for a task that is wrong.
    """
    strategy, samples = STRATEGIES[config.strategy], workload.samples
    links = emulation.topology(config)
    one_memory = (links is None or links.node_count == 1) and not over_nodes
    preflight.check_open_files(config.process_count)
    model = preflight.dry_build(workload.make_model, model_is_given)
    if model is None:
        _try_out(workload, config)
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
        through_host=strategy.through_host or links is not None or over_nodes,
    )
    preflight.check(required)
    if model.elements <= preflight.LARGEST_TRIED:
        _try_out(workload, config)
    workers = config.process_count - strategy.server_count
    batch_size = config.batch_size_on(samples.name)
    sizes = samples.train_size, batch_size, workers, config.accumulate
    return preflight.batch_norm_line(*sizes) if model.has_batch_norm else None


def _try_out(workload: Workload, config: RunConfig) -> None:
    """Raises DataError where a task of the user's own gives what cannot be trained on: see `workloads/trial.py`."""
    if is_own(workload.task):
        trial = trial_of(workload.task, workload.samples.train, getattr(torch, config.dtype))
        if fault := preflight.try_out(workload.make_model, trial):
            raise DataError(fault)
