"""An epoch of ring_all_reduce, in the loop of train.py, beside DistributedDataParallel's in the plainest loop.

They take turns in the same processes, on the same samples, with the same fused optimizer; DistributedDataParallel at
its best settings. On GPUs the data of both lies there.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from torch_parallel.bench.common import recorded, save, start_group
from torch_parallel.bench.sides import difference_of
from torch_parallel.communicator import Communicator
from torch_parallel.devices import choose_processes
from torch_parallel.launcher import launch
from torch_parallel.results import RunFolder
from torch_parallel.strategies.builtin import at_its_best
from torch_parallel.training.config import DEVICES, RunConfig
from torch_parallel.training.evaluate import step_targets
from torch_parallel.training.job import Job, make_job
from torch_parallel.training.loop import Trainer
from torch_parallel.training.optimizers import make_optimizer
from torch_parallel.usage import ConfigError, OneLineParser
from torch_parallel.workloads import DATASETS, MODELS
from torch_parallel.workloads.load import load_workload
from torch_parallel.workloads.tree import count, rows, to


def time_epochs(communicator: Communicator, job: Job, repeats: int, store: str) -> dict[str, list[float]]:
    """The worker function: seconds of each epoch of the job's strategy and of DistributedDataParallel, in turns."""
    start_group(communicator, store)
    trainer, control = Trainer(communicator, job), Control(communicator, job)
    sides: dict[str, Callable[[int], Any]] = {job.config.strategy: trainer.train_epoch, "ddp": control.train_epoch}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for epoch in range(1, repeats + 2):  # the first of each warms up
        for side, train_epoch in sides.items() if epoch % 2 else reversed(sides.items()):
            torch.manual_seed(epoch * communicator.world_size + communicator.rank)  # the same dropout on both sides
            communicator.barrier()
            start_s = time.perf_counter()
            train_epoch(epoch)
            communicator.transport.synchronize()  # a GPU may still be at work
            communicator.barrier()
            if epoch > 1:
                seconds[side].append(time.perf_counter() - start_s)
    difference = difference_of(trainer.model, control.model.module)
    dist.destroy_process_group()
    return {**seconds, "difference of parameters": [difference]}


class Control:
    """DistributedDataParallel at its best settings, in the plainest loop, on the batches that the trainer takes.

    On a GPU all data lies in its memory.
    """

    def __init__(self, communicator: Communicator, job: Job) -> None:
        self.communicator, self.config, self.task = communicator, job.config, job.task
        device = communicator.device
        self.in_host_memory, _ = job.samples(communicator.shared)
        self.samples = to(self.in_host_memory, device)
        self.batch_size = job.config.batch_size_on(job.data_name)
        torch.manual_seed(job.config.seed)
        model = job.make_model().to(device)
        self.model = at_its_best(model, device_ids=[device.index] if device.type == "cuda" else None)
        self.optimizer = make_optimizer(
            list(model.named_parameters()),
            job.config.optimizer,
            job.config.learning_rate_on(job.data_name),
            job.config.momentum,
            job.config.weight_decay,
        )

    def train_epoch(self, epoch: int) -> None:
        size, world_size = count(self.samples), self.communicator.world_size
        generator = torch.Generator().manual_seed((self.config.seed * 1_000_003 + epoch) % 2**63)
        order = torch.randperm(size, generator=generator)
        targets = step_targets(self.task, self.in_host_memory, order, self.batch_size)
        for whole, total in zip(order.to(self.communicator.device).split(self.batch_size), targets, strict=True):
            mine = whole.tensor_split(world_size)[self.communicator.rank]
            batch = self.task.prepare(rows(self.samples, mine), torch.float32)
            # DDP takes the mean over the ranks: this makes it the mean over the targets
            loss = self.task.loss_sum(self.task.forward(self.model, batch), batch) * (world_size / max(1, total))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()


def bench_epoch(arguments: list[str]) -> None:
    parser = OneLineParser(prog="python -m torch_parallel bench epoch", description=__doc__, allow_abbrev=False)
    parser.add_argument("--n_gpus", type=int, help="workers (default: all GPUs, or 2 on the CPU)")
    parser.add_argument("--device", default="auto", choices=DEVICES, help="where they train (default: auto)")
    parser.add_argument("--model", default="cnn", choices=tuple(MODELS), help="model (default: cnn)")
    parser.add_argument("--batch_size", type=int, default=64, help="global (default: 64)")
    parser.add_argument("--dataset", choices=tuple(DATASETS), help="data set (default: as train.py)")
    parser.add_argument("--data_dir", help="folder with the data (default: as train.py)")
    parser.add_argument("--train_size", type=int, help="samples of an epoch (default: all)")
    parser.add_argument("--repeats", type=int, default=3, help="epochs of each side, one more warms up (default: 3)")
    parser.add_argument("--results_dir", default="results/runs", help="folder for a folder with the figures")
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        raise ConfigError(f"--repeats {options.repeats}: at least 1 epoch of each side is needed")
    n, device, chosen = choose_processes(options.n_gpus, options.device)
    config = RunConfig(n_gpus=n, model=options.model, batch_size=options.batch_size, device=device)
    if chosen is not None:
        print(chosen)
    config = replace(config, dataset=options.dataset, data_dir=options.data_dir, train_size=options.train_size)
    workload, line = load_workload(config.choice)
    folder = RunFolder(options.results_dir, f"bench_epoch_{options.model}_n{n}")
    print(f"{line}; {options.model}, {n} worker{'s' if n > 1 else ''} on {device}, global batch {options.batch_size}")
    samples = workload.samples
    config = config.resolved(samples.known_as, samples.train_size, samples.test_size)
    job, shared = make_job(config, workload.task, workload.samples, workload.make_model)
    entries = {"model": options.model, "data": line, "batch_size": options.batch_size, "device": device}
    with recorded(folder, n=n, **entries), tempfile.TemporaryDirectory() as temporary:
        given = (job, options.repeats, f"{temporary}/store")
        seconds = launch(time_epochs, n, *given, shared=shared, device=device)[0]
    rows = []
    (difference,) = seconds.pop("difference of parameters")
    for side, times in seconds.items():
        rows.append({"side": side, "median_s": statistics.median(times), "all_s": times})
        print(f"{side:20}{statistics.median(times):8.3f} s an epoch   ({', '.join(f'{each:.3f}' for each in times)})")
    ratio = rows[0]["median_s"] / rows[1]["median_s"]
    print(f"{rows[0]['side']} takes {ratio:.3f} of ddp's time; parameters differ by {difference:.1e} of their norm")
    folder.write_manifest(difference_of_parameters=difference)
    save(folder, rows)
