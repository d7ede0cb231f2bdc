"""Timings beside torch's own, taken so that they can be believed.

Both sides run in the same processes, in turns, with the same threads and the same data; a repeat's time is that of the
slowest rank, and medians over the repeats are compared. Buffers are refilled before each repeat and every result is
checked. What is timed of the pre-shared buffer includes waiting until the peers have done reading it.

    python -m torch_parallel bench all_reduce --n_gpus 2     every all-reduce algorithm beside gloo's, on the CPU
    python -m torch_parallel bench all_reduce --device cuda --largest_mb 1024     beside NCCL's, on GPUs
    python -m torch_parallel bench epoch --n_gpus 2          an epoch of training beside DistributedDataParallel's
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from torch_parallel import bench_gpu
from torch_parallel.collectives import ALL_REDUCE
from torch_parallel.communicator import Communicator
from torch_parallel.devices import choose_processes, threads_per_worker
from torch_parallel.launcher import launch
from torch_parallel.results import RunFolder, environment, write_rows
from torch_parallel.training.config import ConfigError, OneLineParser, RunConfig
from torch_parallel.training.loop import TENSORS, Job, Trainer, make_job
from torch_parallel.training.optimizers import make_optimizer
from torch_parallel.workloads import DATASETS, MODELS, build_model, load_dataset

SIZES_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 100 << 20)
WARM_UP = 3
BYTES_PER_SIZE = (2 << 30) // 10
"""So much is reduced at each size, within the bounds on the number of repeats."""
FEWEST_REPEATS, MOST_REPEATS = 15, 200


@dataclass(frozen=True)
class Timing:
    """One way to all-reduce one size: seconds of the slowest rank by repeat, and the largest error seen."""

    way: str
    size_bytes: int
    seconds: list[float]
    error: float

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    def row(self, n: int, peer_s: float) -> dict[str, Any]:
        """The columns of nccl-tests, the spread, and the ratio to the peer's time. Bandwidths are in GB/s."""
        algorithm_bandwidth = self.size_bytes / self.median_s / 1e9
        quartiles = statistics.quantiles(self.seconds, n=4)
        return {
            "way": self.way,
            "n": n,
            "size_bytes": self.size_bytes,
            "time_us": round(self.median_s * 1e6, 2),
            "lower_quartile_us": round(quartiles[0] * 1e6, 2),
            "upper_quartile_us": round(quartiles[2] * 1e6, 2),
            "algbw": round(algorithm_bandwidth, 4),
            "busbw": round(algorithm_bandwidth * 2 * (n - 1) / n, 4),
            "times_faster_than_gloo": round(peer_s / self.median_s, 3),
            "error": self.error,
            "repeats": len(self.seconds),
        }


def time_all_reduce(communicator: Communicator, sizes_bytes: tuple[int, ...], store: str) -> list[list[Timing]]:
    """The worker function: for each size, the timings of gloo and of all our ways."""
    _start_gloo(communicator, store)
    try:
        return [_time_size(communicator, size_bytes) for size_bytes in sizes_bytes]
    finally:
        dist.destroy_process_group()


def _start_gloo(communicator: Communicator, store: str) -> None:
    """By way of a file, so that no port has to be chosen."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=communicator.rank, world_size=communicator.world_size
    )


def _time_size(communicator: Communicator, size_bytes: int) -> list[Timing]:
    numel = size_bytes // 4
    addends = [
        torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(communicator.world_size)
    ]
    mine, expected = addends[communicator.rank], torch.stack(addends).double().sum(0)
    buffer, tensor = communicator.share(numel), torch.empty(numel)

    def pre_shared(algorithm: str) -> Callable[[], None]:
        def perform() -> None:
            communicator.transport.perform(ALL_REDUCE[algorithm], buffer)
            communicator.transport.settle()

        return perform

    ways: dict[str, tuple[Tensor, Callable[[], Any]]] = {"gloo": (tensor, lambda: dist.all_reduce(tensor))}
    for algorithm in ALL_REDUCE:
        ways[algorithm] = (buffer.local, pre_shared(algorithm))
        ways[f"{algorithm}, ordinary tensor"] = (tensor, partial(communicator.all_reduce, tensor, algorithm))
    repeats = min(MOST_REPEATS, max(FEWEST_REPEATS, BYTES_PER_SIZE // size_bytes))
    seconds, errors = _alternate(communicator, ways, mine, expected, repeats)
    slowest = communicator.all_ranks(seconds).amax(0)
    worst = communicator.all_ranks(errors).amax(0)
    return [Timing(way, size_bytes, slowest[index].tolist(), worst[index].item()) for index, way in enumerate(ways)]


def _alternate(
    communicator: Communicator,
    ways: dict[str, tuple[Tensor, Callable[[], Any]]],
    mine: Tensor,
    expected: Tensor,
    repeats: int,
) -> tuple[Tensor, Tensor]:
    """Seconds [ways, repeats] of this rank, and each way's largest error [ways] as a part of the largest value."""
    seconds = torch.zeros(len(ways), repeats, dtype=torch.float64)
    errors = torch.zeros(len(ways), dtype=torch.float64)
    order = list(enumerate(ways.values()))
    for repeat in range(-WARM_UP, repeats):
        for index, (target, perform) in order if repeat % 2 else reversed(order):
            target.copy_(mine)
            communicator.barrier()
            start_s = time.perf_counter()
            perform()
            elapsed_s = time.perf_counter() - start_s
            if repeat >= 0:
                seconds[index, repeat] = elapsed_s
            error = (target - expected).abs().max() / expected.abs().max()
            errors[index] = max(errors[index], error)
            communicator.barrier()
    return seconds, errors


def time_epochs(communicator: Communicator, job: Job, repeats: int, store: str) -> dict[str, list[float]]:
    """The worker function: seconds of each epoch of the job's strategy and of DistributedDataParallel, in turns."""
    _start_gloo(communicator, store)
    trainer, control = Trainer(communicator, job), Control(communicator, job)
    trainer.model.train()
    sides: dict[str, Callable[[int], Any]] = {job.config.strategy: trainer.train_epoch, "ddp": control.train_epoch}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for epoch in range(1, repeats + 2):  # the first of each warms up
        for side, train_epoch in sides.items() if epoch % 2 else reversed(sides.items()):
            torch.manual_seed(epoch * communicator.world_size + communicator.rank)  # the same dropout on both sides
            communicator.barrier()
            start_s = time.perf_counter()
            train_epoch(epoch)
            communicator.barrier()
            if epoch > 1:
                seconds[side].append(time.perf_counter() - start_s)
    difference = max(
        (ours - theirs).norm().item() / theirs.norm().item()
        for ours, theirs in zip(trainer.model.parameters(), control.model.module.parameters(), strict=True)
    )
    dist.destroy_process_group()
    return {**seconds, "largest difference of parameters": [difference]}


class Control:
    """DistributedDataParallel at its best settings, in the plainest loop, on the batches that the trainer takes."""

    def __init__(self, communicator: Communicator, job: Job) -> None:
        self.communicator, self.config, self.dataset = communicator, job.config, job.dataset
        self.data = {name: communicator.shared[name] for name in TENSORS}
        torch.manual_seed(job.config.seed)
        model = job.make_model()
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
        self.optimizer = make_optimizer(
            list(model.named_parameters()),
            job.config.optimizer,
            job.config.learning_rate,
            job.config.momentum,
            job.config.weight_decay,
        )

    def train_epoch(self, epoch: int) -> None:
        count, world_size = len(self.data["train_targets"]), self.communicator.world_size
        generator = torch.Generator().manual_seed((self.config.seed * 1_000_003 + epoch) % 2**63)
        order = torch.randperm(count, generator=generator)
        for batch in order.split(self.config.batch_size):
            mine = batch.tensor_split(world_size)[self.communicator.rank]
            logits = self.model(self.dataset.normalize(self.data["train_inputs"][mine], torch.float32))
            # DDP takes the mean over the ranks: this makes it the mean over the samples
            loss = cross_entropy(logits, self.data["train_targets"][mine], reduction="sum") * world_size / len(batch)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()


def bench_all_reduce(arguments: list[str]) -> None:
    parser = OneLineParser(prog="python -m torch_parallel bench all_reduce", allow_abbrev=False)
    parser.add_argument("--n_gpus", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--largest_mb", type=float, default=100, help="no sizes above this many MiB (default: 100)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cuda: beside NCCL (default: cpu)")
    parser.add_argument(
        "--collective", default="all_reduce", choices=tuple(bench_gpu.OURS), help="with cuda, any other"
    )
    parser.add_argument(
        "--settings", default="best", choices=("best", "all"), help="with cuda, all grids of the kernel"
    )
    parser.add_argument("--results_dir", default="results/runs", help="folder for a folder with the figures")
    options = parser.parse_args(arguments)
    if options.n_gpus < 2:
        raise ConfigError(f"--n_gpus {options.n_gpus}: it takes at least 2 processes to exchange anything")
    sizes = tuple(size for size in SIZES_BYTES if size <= options.largest_mb * 2**20)
    if not sizes:
        raise ConfigError(f"--largest_mb {options.largest_mb}: the smallest size is {SIZES_BYTES[0]} bytes")
    choose_processes(options.n_gpus, options.device)  # raises DeviceError
    if options.device == "cuda":
        settings = options.settings == "all"
        return bench_gpu.run(options.collective, options.n_gpus, options.largest_mb, settings, options.results_dir)
    folder = RunFolder(options.results_dir, f"bench_all_reduce_n{options.n_gpus}")
    with _recorded(folder, n=options.n_gpus), tempfile.TemporaryDirectory() as temporary:
        timings = launch(time_all_reduce, options.n_gpus, sizes, f"{temporary}/store", deadline_s=120)[0]
    rows = []
    print(f"{'size (bytes)':>12}  {'way':24}{'time (us)':>12}{'algbw':>9}{'busbw':>9}{'x gloo':>8}  {'error':>7}")
    for of_size in timings:
        for timing in of_size:
            row = timing.row(options.n_gpus, of_size[0].median_s)
            rows.append(row)
            print(
                f"{row['size_bytes']:12,}  {row['way']:24}{row['time_us']:12,.1f}{row['algbw']:9.3f}"
                f"{row['busbw']:9.3f}{row['times_faster_than_gloo']:8.2f}  {row['error']:7.0e}"
            )
    wrong = [f"{each.way} at {each.size_bytes:,} bytes" for of_size in timings for each in of_size if each.error > 1e-5]
    if wrong:
        sys.exit(f"wrong results, so no figure above means anything: {', '.join(wrong)}")
    print("bandwidths in GB/s; times are medians of the slowest rank's; x gloo = gloo's time / this one's")
    write_rows(folder, rows)


def bench_epoch(arguments: list[str]) -> None:
    parser = OneLineParser(prog="python -m torch_parallel bench epoch", allow_abbrev=False)
    parser.add_argument("--n_gpus", type=int, default=2, help="workers (default: 2)")
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
    config = RunConfig(n_gpus=options.n_gpus, model=options.model, batch_size=options.batch_size, device="cpu")
    dataset, line = load_dataset(options.dataset, options.data_dir, options.train_size, config.seed)
    folder = RunFolder(options.results_dir, f"bench_epoch_{options.model}_n{options.n_gpus}")
    print(f"{line}; {options.model}, {options.n_gpus} workers, global batch {options.batch_size}")
    make_model = partial(build_model, options.model, dataset.image_shape, dataset.class_count)
    job, shared = make_job(config, dataset, make_model)
    entries = {"model": options.model, "data": line, "batch_size": options.batch_size}
    with _recorded(folder, n=options.n_gpus, **entries), tempfile.TemporaryDirectory() as temporary:
        seconds = launch(time_epochs, options.n_gpus, job, options.repeats, f"{temporary}/store", shared=shared)[0]
    rows = []
    (difference,) = seconds.pop("largest difference of parameters")
    for side, times in seconds.items():
        rows.append({"side": side, "median_s": statistics.median(times), "all_s": times})
        print(f"{side:20}{statistics.median(times):8.3f} s an epoch   ({', '.join(f'{each:.3f}' for each in times)})")
    ratio = rows[0]["median_s"] / rows[1]["median_s"]
    print(f"{rows[0]['side']} takes {ratio:.3f} of ddp's time; parameters differ by {difference:.1e} of their norm")
    folder.write_manifest(largest_difference_of_parameters=difference)
    write_rows(folder, rows)


def _recorded(folder: RunFolder, n: int, **entries: Any) -> AbstractContextManager[None]:
    return folder.running(**environment(), n=n, threads=threads_per_worker(n), **entries)


BENCHES = {"all_reduce": bench_all_reduce, "epoch": bench_epoch}


def main(arguments: list[str]) -> None:
    """`python -m torch_parallel bench NAME ...`"""
    parser = OneLineParser(
        prog="python -m torch_parallel bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=len(arguments) < 2,
    )
    parser.add_argument("name", choices=tuple(BENCHES), metavar=f"{{{','.join(BENCHES)}}}")
    name = parser.parse_args(arguments[:1]).name
    BENCHES[name](arguments[1:])
