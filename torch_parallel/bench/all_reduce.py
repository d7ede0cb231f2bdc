"""All-reduces beside gloo's. Buffers are refilled before each repeat, and every result is checked.

What is timed of the pre-shared buffer includes waiting until the peers have done reading it.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_parallel.bench.common import recorded, save, start_gloo
from torch_parallel.collectives import ALL_REDUCE
from torch_parallel.communicator import Communicator
from torch_parallel.launcher import launch
from torch_parallel.results import RunFolder
from torch_parallel.training.config import ConfigError, OneLineParser

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
    start_gloo(communicator, store)
    try:
        return [_time_size(communicator, size_bytes) for size_bytes in sizes_bytes]
    finally:
        dist.destroy_process_group()


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


def bench_all_reduce(arguments: list[str]) -> None:
    parser = OneLineParser(prog="python -m torch_parallel bench all_reduce", allow_abbrev=False)
    parser.add_argument("--n_gpus", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--largest_mb", type=float, default=100, help="no sizes above this many MiB (default: 100)")
    parser.add_argument("--results_dir", default="results/runs", help="folder for a folder with the figures")
    options = parser.parse_args(arguments)
    if options.n_gpus < 2:
        raise ConfigError(f"--n_gpus {options.n_gpus}: it takes at least 2 processes to exchange anything")
    sizes = tuple(size for size in SIZES_BYTES if size <= options.largest_mb * 2**20)
    if not sizes:
        raise ConfigError(f"--largest_mb {options.largest_mb}: the smallest size is {SIZES_BYTES[0]} bytes")
    folder = RunFolder(options.results_dir, f"bench_all_reduce_n{options.n_gpus}")
    with recorded(folder, n=options.n_gpus), tempfile.TemporaryDirectory() as temporary:
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
    save(folder, rows)
