"""Timings of collective operations, by us, gloo and MPI, on the CPU.

Before each timed call the same way is performed once untimed, so that none pays for the caches that another has left;
every repeat begins with the next way. Buffers are refilled before each call, and the first and the last result are
checked, element by element. What is timed of a buffer that was shared beforehand includes waiting until the peers have
done reading it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_parallel.bench import mpi
from torch_parallel.bench.common import start_group
from torch_parallel.bench.operations import ALGORITHMS, base, bus_factor, by_torch, expected
from torch_parallel.collectives import Collective
from torch_parallel.communicator import Communicator
from torch_parallel.devices import threads_per_worker
from torch_parallel.launcher import launch

SIZES_BYTES = (*(size << 10 for size in (4, 16, 64, 256)), *(size << 20 for size in (1, 2, 4, 8, 16, 32, 64, 100, 400)))
WARM_UP = 1
BYTES_PER_SIZE = 100 << 20
"""So much is moved at each size, within the bounds on the number of repeats, in each round."""
FEWEST_REPEATS, MOST_REPEATS = 3, 100
PEER = "gloo"
LARGEST_MB = 400
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

    def row(self, n: int, peer: Timing) -> dict[str, Any]:
        """The columns of nccl-tests, the spread, and the ratio to the peer's time. Bandwidths are in GB/s."""
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
            f"times_faster_than_{peer.way}": round(peer.median_s / self.median_s, 3),
            "wrong": self.wrong,
            "repeats": len(self.seconds),
        }


Job = tuple[str, int, int]  # operation, bytes, repeats
Ways = dict[str, tuple[Tensor, Callable[[], Tensor]]]  # what is filled before, and what performs it, to the result


def jobs_of(operations: list[str], n: int, largest_bytes: float, all_sizes: Iterable[int] = SIZES_BYTES) -> list[Job]:
    """What is to be timed, by operation and size; sizes are cut to what n ranks divide."""
    jobs = []
    for operation in operations:
        sizes = [0] if operation == "barrier" else [size for size in all_sizes if size <= largest_bytes]
        for size in sizes:
            repeats = MOST_REPEATS if not size else max(FEWEST_REPEATS, min(MOST_REPEATS, BYTES_PER_SIZE // size))
            jobs.append((operation, size // (4 * n) * 4 * n, repeats))
    return jobs


def time_jobs(communicator: Communicator, jobs: list[Job], store: str) -> list[list[Timing]]:
    """The worker function: for each job the timings of gloo and of all our algorithms."""
    start_group(communicator, store)
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

    ways: Ways = {
        PEER: (tensor, partial(by_torch, operation, tensor, out, rank)),
        **{name: (own, partial(pre_shared, each)) for name, each in ALGORITHMS[operation].items()},
    }
    if operation == "all_reduce":
        ways["ring, ordinary tensor"] = (tensor, partial(communicator.all_reduce, tensor, "ring"))
    seconds, wrong = alternate(communicator, ways, start, out, operation, repeats)
    slowest = communicator.all_ranks(seconds).amax(0)
    worst = communicator.all_ranks(wrong).amax(0)
    return [
        Timing(operation, way, size_bytes, slowest[index].tolist(), int(worst[index])) for index, way in enumerate(ways)
    ]


def timed(perform: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """The result of one call, and its seconds."""
    start_s = time.perf_counter()
    result = perform()
    return result, time.perf_counter() - start_s


def alternate(
    communicator: Communicator,
    ways: Ways,
    start: Tensor,
    out: Tensor,
    operation: str,
    repeats: int,
    timed: Callable[[Callable[[], Tensor]], tuple[Tensor, float]] = timed,
) -> tuple[Tensor, Tensor]:
    """Seconds [ways, repeats] of this rank, and the wrong elements of each way [ways]."""
    seconds = torch.zeros(len(ways), repeats, dtype=torch.float64)
    wrong = torch.zeros(len(ways), dtype=torch.int64)
    order = list(enumerate(ways.values()))
    for repeat in range(-WARM_UP, repeats):
        if repeat == repeats - 1:
            start += 1  # so that what lies there of the repeat before is wrong
        promised = expected(operation, start, communicator.rank) if repeat in (-WARM_UP, repeats - 1) else None
        first = repeat % len(order)
        for index, (filled, perform) in order[first:] + order[:first]:
            for _ in range(2):  # the time of the second counts
                torch.add(start, communicator.rank, out=filled)
                if promised:
                    out.fill_(-1)
                communicator.barrier()
                result, elapsed_s = timed(perform)
            if repeat >= 0:
                seconds[index, repeat] = elapsed_s
            if promised:
                rows, values = promised
                wrong[index] += (result.view_as(start)[rows] != values).sum().cpu()
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
            of_job.sort(key=lambda timing: (timing.way != PEER, timing.way == "mpi"))
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
