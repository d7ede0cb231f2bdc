"""Collective operations beside gloo's and MPI's.

Buffers are refilled before each repeat, and the first and the last result are checked, element by element. What is
timed of a buffer that was shared beforehand includes waiting until the peers have done reading it.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_parallel.bench import mpi
from torch_parallel.bench.common import recorded, save, start_gloo
from torch_parallel.bench.fit import save_fit
from torch_parallel.bench.operations import ALGORITHMS, base, bus_factor, by_gloo, expected
from torch_parallel.collectives import Collective
from torch_parallel.communicator import Communicator
from torch_parallel.devices import threads_per_worker, usable_cpus
from torch_parallel.launcher import launch
from torch_parallel.results import RunFolder
from torch_parallel.training.config import ConfigError, OneLineParser

SIZES_BYTES = (*(size << 10 for size in (4, 16, 64, 256)), *(size << 20 for size in (1, 2, 4, 8, 16, 32, 64, 100, 400)))
WARM_UP = 3
BYTES_PER_SIZE = 100 << 20
"""So much is moved at each size, within the bounds on the number of repeats, in each round."""
FEWEST_REPEATS, MOST_REPEATS = 5, 100
ROUNDS = 2
"""Our processes, with gloo, and MPI's, take turns so often."""


@dataclass
class Timing:
    """One way to perform one operation: seconds of the slowest rank by repeat, and how many elements were wrong."""

    operation: str
    way: str
    size_bytes: int
    seconds: list[float] = field(default_factory=list)
    wrong: int = 0

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    def row(self, n: int, peer_s: float) -> dict[str, Any]:
        """The columns of nccl-tests, the spread, and the ratio to gloo's time. Bandwidths are in GB/s."""
        algorithm_bandwidth = self.size_bytes / self.median_s / 1e9
        quartiles = statistics.quantiles(self.seconds, n=4)
        return {
            "collective": self.operation,
            "way": self.way,
            "n": n,
            "size_bytes": self.size_bytes,
            "count": self.size_bytes // 4,
            "type": "float",
            "time_us": round(self.median_s * 1e6, 2),
            "lower_quartile_us": round(quartiles[0] * 1e6, 2),
            "upper_quartile_us": round(quartiles[2] * 1e6, 2),
            "algbw": round(algorithm_bandwidth, 4),
            "busbw": round(algorithm_bandwidth * bus_factor(self.operation, n), 4),
            "times_faster_than_gloo": round(peer_s / self.median_s, 3),
            "wrong": self.wrong,
            "repeats": len(self.seconds),
        }


Job = tuple[str, int, int]  # operation, bytes, repeats


def jobs_of(operations: list[str], n: int, largest_bytes: float) -> list[Job]:
    """What is to be timed, by operation and size; sizes are cut to what n ranks divide."""
    jobs = []
    for operation in operations:
        sizes = [0] if operation == "barrier" else [size for size in SIZES_BYTES if size <= largest_bytes]
        for size in sizes:
            repeats = MOST_REPEATS if not size else max(FEWEST_REPEATS, min(MOST_REPEATS, BYTES_PER_SIZE // size))
            jobs.append((operation, size // (4 * n) * 4 * n, repeats))
    return jobs


def time_jobs(communicator: Communicator, jobs: list[Job], store: str) -> list[list[Timing]]:
    """The worker function: for each job the timings of gloo and of all our algorithms."""
    start_gloo(communicator, store)
    try:
        return [_time_job(communicator, *job) for job in jobs]
    finally:
        dist.destroy_process_group()


def _time_job(communicator: Communicator, operation: str, size_bytes: int, repeats: int) -> list[Timing]:
    n, rank = communicator.world_size, communicator.rank
    start = base(n, size_bytes // 4 // n)
    tensor, out = torch.empty_like(start), torch.empty_like(start)
    buffer = communicator.share(start.numel())
    own = buffer.local.view_as(start)

    def pre_shared(collective: Collective) -> Tensor:
        result = communicator.transport.perform(collective, buffer)
        communicator.transport.settle()
        return result

    # each way: what is filled before, and what performs it and returns the result
    ways: dict[str, tuple[Tensor, Callable[[], Tensor]]] = {
        "gloo": (tensor, partial(by_gloo, operation, tensor, out, rank)),
        **{name: (own, partial(pre_shared, each)) for name, each in ALGORITHMS[operation].items()},
    }
    if operation == "all_reduce":
        ways["ring, ordinary tensor"] = (tensor, partial(communicator.all_reduce, tensor, "ring"))
    seconds, wrong = _alternate(communicator, ways, start, out, operation, repeats)
    slowest = communicator.all_ranks(seconds).amax(0)
    worst = communicator.all_ranks(wrong).amax(0)
    return [
        Timing(operation, way, size_bytes, slowest[index].tolist(), int(worst[index])) for index, way in enumerate(ways)
    ]


def _alternate(
    communicator: Communicator,
    ways: dict[str, tuple[Tensor, Callable[[], Tensor]]],
    start: Tensor,
    out: Tensor,
    operation: str,
    repeats: int,
) -> tuple[Tensor, Tensor]:
    """Seconds [ways, repeats] of this rank, and the wrong elements of each way [ways]."""
    seconds = torch.zeros(len(ways), repeats, dtype=torch.float64)
    wrong = torch.zeros(len(ways), dtype=torch.int64)
    order = list(enumerate(ways.values()))
    for repeat in range(-WARM_UP, repeats):
        if repeat == repeats - 1:
            start += 1  # so that what lies there of the repeat before is wrong
        promised = expected(operation, start, communicator.rank) if repeat in (-WARM_UP, repeats - 1) else None
        for index, (filled, perform) in order if repeat % 2 else reversed(order):
            torch.add(start, communicator.rank, out=filled)
            if promised:
                out.fill_(-1)
            communicator.barrier()
            start_s = time.perf_counter()
            result = perform()
            elapsed_s = time.perf_counter() - start_s
            if repeat >= 0:
                seconds[index, repeat] = elapsed_s
            if promised:
                rows, values = promised
                wrong[index] += (result.view_as(start)[rows] != values).sum()
            communicator.barrier()
    return seconds, wrong


def measure(n: int, jobs: list[Job], with_mpi: bool) -> list[list[Timing]]:
    """Ours and gloo's in the same processes, MPI's in others, in turns; for each job its ways, gloo first."""
    timings: list[list[Timing]] = []
    for number in range(ROUNDS):
        sides = [_ours, _mpis] if with_mpi else [_ours]
        together: list[list[Timing]] = [[] for _ in jobs]
        for side in sides if number % 2 == 0 else reversed(sides):
            for of_job, more in zip(together, side(n, jobs), strict=True):
                of_job += more
        for of_job in together:
            of_job.sort(key=lambda timing: (timing.way != "gloo", timing.way == "mpi"))
        timings = [_joined(*both) for both in zip(timings, together, strict=True)] if timings else together
    return timings


def _ours(n: int, jobs: list[Job]) -> list[list[Timing]]:
    with tempfile.TemporaryDirectory() as temporary:
        timings: list[list[Timing]] = launch(time_jobs, n, jobs, f"{temporary}/store", deadline_s=300)[0]
        return timings


def _mpis(n: int, jobs: list[Job]) -> list[list[Timing]]:
    found = mpi.measure(n, jobs, threads_per_worker(n))
    return [[Timing(each["operation"], "mpi", each["size_bytes"], each["seconds"], each["wrong"])] for each in found]


def _joined(before: list[Timing], after: list[Timing]) -> list[Timing]:
    """The same ways with the repeats of both."""
    return [
        Timing(a.operation, a.way, a.size_bytes, a.seconds + b.seconds, a.wrong + b.wrong)
        for a, b in zip(before, after, strict=True)
    ]


HEADING = (
    f"{'size (bytes)':>12} {'count':>11} {'type':>6}  {'way':22}{'time (us)':>12}{'algbw':>9}{'busbw':>9}"
    f"{'x gloo':>9}{'wrong':>7}"
)


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['size_bytes']:12,} {row['count']:11,} {row['type']:>6}  {row['way']:22}{row['time_us']:12,.1f}"
        f"{row['algbw']:9.3f}{row['busbw']:9.3f}{row['times_faster_than_gloo']:9.2f}{row['wrong']:7}"
    )


def bench_collectives(operations: list[str], arguments: list[str]) -> None:
    """`python -m torch_parallel bench NAME`, for one collective or, as `collectives`, for all."""
    name = operations[0] if len(operations) == 1 else "collectives"
    parser = OneLineParser(prog=f"python -m torch_parallel bench {name}", allow_abbrev=False)
    parser.add_argument("--n_gpus", type=int, nargs="+", default=[2], help="processes; one or more counts (default: 2)")
    parser.add_argument("--largest_mb", type=float, default=400, help="no sizes above this many MiB (default: 400)")
    parser.add_argument("--results_dir", default="results/runs", help="folder for a folder with the figures")
    options = parser.parse_args(arguments)
    for n in options.n_gpus:
        if n < 2:
            raise ConfigError(f"--n_gpus {n}: it takes at least 2 processes to exchange anything")
    if not options.largest_mb * 2**20 >= SIZES_BYTES[0]:  # nan too
        raise ConfigError(f"--largest_mb {options.largest_mb}: the smallest size is {SIZES_BYTES[0]} bytes")
    missing = mpi.why_not()
    folder = RunFolder(options.results_dir, f"bench_{name}_n{'_'.join(map(str, options.n_gpus))}")
    print("beside gloo" + ("'s and MPI's" if missing is None else f"'s; MPI's are left out: {missing}"))
    rows: list[dict[str, Any]] = []
    with recorded(folder, n=max(options.n_gpus), counts=options.n_gpus, mpi=missing or mpi.library()):
        for n in options.n_gpus:
            jobs = jobs_of(operations, n, options.largest_mb * 2**20)
            operation = ""
            for of_job in measure(n, jobs, missing is None):
                if of_job[0].operation != operation:
                    operation = of_job[0].operation
                    print(f"\n{operation}, {n} processes\n{HEADING}")
                for timing in of_job:
                    rows.append(timing.row(n, of_job[0].median_s))
                    print(line(rows[-1]))
    wrong = [f"{row['way']} at {row['size_bytes']:,} bytes" for row in rows if row["wrong"]]
    if wrong:
        sys.exit(f"wrong results, so no figure above means anything: {', '.join(wrong)}")
    print("\nbandwidths in GB/s; times are medians of the slowest rank's; x gloo = gloo's time / this one's")
    save(folder, rows)
    with contextlib.suppress(ValueError):  # too few sizes were asked for
        save_fit(folder.path, usable_cpus())
