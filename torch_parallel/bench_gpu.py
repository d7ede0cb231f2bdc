"""Collectives on GPUs beside NCCL's, taken so that the figures can be believed.

All ways run in the same processes, in turns. Times are the GPU's own, from events around a call with an idle stream
before it (so the host's part of a single call counts), and around many calls back to back; a repeat's time is that of
the slowest rank. Buffers are refilled before each repeat and every result is checked. Ours includes the acknowledgement
of the last reads. Settings of the kernel's grid are chosen by `--settings all` in one run, and reported from another.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_parallel.collectives import ALL_REDUCE, COLLECTIVES, Collective
from torch_parallel.communicator import Communicator
from torch_parallel.launcher import launch
from torch_parallel.results import RunFolder, environment, write_rows
from torch_parallel.transport.cuda_ipc import PERFORMERS, CudaIpcTransport

SIZES_BYTES = tuple(
    kib << 10 for kib in (4, 16, 64, 256, 1 << 10, 4 << 10, 16 << 10, 25 << 10, 64 << 10, 256 << 10, 1 << 20)
)
OURS: dict[str, dict[str, Collective]] = {
    "all_reduce": ALL_REDUCE,
    "reduce_scatter": {"ring": COLLECTIVES["ring_reduce_scatter"]},
    "all_gather": {"ring": COLLECTIVES["ring_all_gather"]},
    "broadcast": {"pull": COLLECTIVES["broadcast"]},
}
PEER = "nccl"
WARM_UP = 3
SINGLE_CALLS = 30
BLOCKS, CALLS_PER_BLOCK = 5, 20
"""Calls back to back; with an all-reduce values grow by the number of ranks at each, which float32 bears 20 times."""
GRID = ("programs", "block_bytes", "warps")
CANDIDATES = [
    (programs, block_kib << 10, warps)
    for programs in (16, 32, 64, 132, 256)
    for block_kib, warps in ((8, 16), (16, 16), (32, 16))
]


@dataclass(frozen=True)
class Way:
    """One way to do the collective: refills go to `filled`, and afterwards `result` is compared."""

    name: str
    filled: Tensor
    result: Tensor
    perform: Callable[[], Any]


@dataclass(frozen=True)
class GpuTiming:
    """Seconds of the slowest rank: of single calls, and of one call among many; and the largest error."""

    way: str
    size_bytes: int
    single_s: list[float]
    back_to_back_s: list[float]
    error: float

    def row(self, collective: str, n: int, peer: GpuTiming) -> dict[str, Any]:
        """Bandwidths, in GB/s, of calls back to back, as nccl-tests defines them."""
        single_s, back_to_back_s = statistics.median(self.single_s), statistics.median(self.back_to_back_s)
        quartiles = statistics.quantiles(self.single_s, n=4)
        bandwidth = self.size_bytes / back_to_back_s / 1e9
        factor = {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0}.get(collective, (n - 1) / n)
        return {
            "collective": collective,
            "way": self.way,
            "n": n,
            "size_bytes": self.size_bytes,
            "time_us": round(single_s * 1e6, 2),
            "lower_quartile_us": round(quartiles[0] * 1e6, 2),
            "upper_quartile_us": round(quartiles[2] * 1e6, 2),
            "back_to_back_us": round(back_to_back_s * 1e6, 2),
            "algbw": round(bandwidth, 3),
            "busbw": round(bandwidth * factor, 3),
            "times_faster_than_nccl": round(statistics.median(peer.single_s) / single_s, 3),
            "back_to_back_times_faster": round(statistics.median(peer.back_to_back_s) / back_to_back_s, 3),
            "error": self.error,
            "repeats": len(self.single_s),
        }


def time_collective(
    communicator: Communicator, collective: str, sizes_bytes: tuple[int, ...], all_settings: bool, store: str
) -> tuple[list[list[GpuTiming]], dict[str, str]]:
    """The worker function: the timings by size, and what ran them."""
    rank, n = communicator.rank, communicator.world_size
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=n, device_id=communicator.device
    )
    timings = [_time_size(communicator, collective, size, all_settings) for size in sizes_bytes]
    communicator.barrier()
    dist.destroy_process_group()
    machine = {
        "card": torch.cuda.get_device_name(communicator.device),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE", "not set"),
    }
    return timings, machine


def _time_size(communicator: Communicator, collective: str, size_bytes: int, all_settings: bool) -> list[GpuTiming]:
    rank, n, device = communicator.rank, communicator.world_size, communicator.device
    numel = size_bytes // 4 // n * n
    mine, expected = _inputs(collective, numel, rank, n, device)
    where = _chunk(numel, rank, n) if collective == "reduce_scatter" else slice(0, numel)
    ways = [_nccl(collective, numel, rank, n, device), *_ours(communicator, collective, numel, where, all_settings)]
    figures = _alternate(communicator, ways, mine, expected, grows=n if collective == "all_reduce" else None)
    singles, blocks, errors = (communicator.all_ranks(each).amax(0) for each in figures)  # of the slowest rank
    return [
        GpuTiming(way.name, size_bytes, singles[index].tolist(), blocks[index].tolist(), errors[index].item())
        for index, way in enumerate(ways)
    ]


def _chunk(numel: int, rank: int, n: int) -> slice:
    return slice(rank * numel // n, (rank + 1) * numel // n)


def _inputs(collective: str, numel: int, rank: int, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """What this rank contributes, and what it has to end with."""
    everyones = [
        torch.randn(numel, generator=torch.Generator(device).manual_seed(seed), device=device) for seed in range(n)
    ]
    if collective == "broadcast":
        expected = everyones[0]
    elif collective == "all_gather":
        expected = torch.cat([theirs[_chunk(numel, owner, n)] for owner, theirs in enumerate(everyones)])
    else:
        expected = sum(theirs.double() for theirs in everyones).float()  # type: ignore[union-attr]
    return everyones[rank], expected[_chunk(numel, rank, n)] if collective == "reduce_scatter" else expected


def _nccl(collective: str, numel: int, rank: int, n: int, device: torch.device) -> Way:
    tensor, own = torch.empty(numel, device=device), torch.empty(numel // n, device=device)
    chunk = tensor[_chunk(numel, rank, n)]
    perform, result = {
        "all_reduce": (lambda: dist.all_reduce(tensor), tensor),
        "reduce_scatter": (lambda: dist.reduce_scatter_tensor(own, tensor), own),
        "all_gather": (lambda: dist.all_gather_into_tensor(tensor, chunk), tensor),
        "broadcast": (lambda: dist.broadcast(tensor, 0), tensor),
    }[collective]
    return Way(PEER, tensor, result, perform)


def _ours(communicator: Communicator, collective: str, numel: int, where: slice, all_settings: bool) -> list[Way]:
    transport = communicator.transport
    assert isinstance(transport, CudaIpcTransport), "these GPUs do not reach each other's memory"
    buffer = communicator.share(numel)
    local = buffer.local

    def choose(performer: str, settings: Any = None) -> None:
        transport.performer = performer
        if transport.triton is not None:
            transport.triton.settings = settings or type(transport.triton).settings

    def perform(algorithm: Collective, *chosen: Any) -> None:
        choose(*chosen)
        transport.perform(algorithm, buffer)
        transport.settle()

    ways = []
    for name, algorithm in OURS[collective].items():
        for performer in PERFORMERS if transport.triton is not None else ("plain",):
            ways.append(Way(f"{name}, {performer}", local, local[where], partial(perform, algorithm, performer)))
        if transport.triton is not None:
            for candidate in CANDIDATES if all_settings else ():
                settings = replace(type(transport.triton).settings, **dict(zip(GRID, candidate, strict=True)))
                label = f"{name}, triton {candidate[0]}x{candidate[1] >> 10}k/{candidate[2]}"
                ways.append(Way(label, local, local[where], partial(perform, algorithm, "triton", settings)))
    if collective == "all_reduce":
        tensor = torch.empty(numel, device=communicator.device)

        def ordinary() -> None:
            choose("auto")
            communicator.all_reduce(tensor)

        ways.append(Way("ordinary tensor", tensor, tensor, ordinary))
    return ways


def _alternate(
    communicator: Communicator, ways: list[Way], mine: Tensor, expected: Tensor, grows: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Seconds of single calls [ways, SINGLE_CALLS], of one call of a block [ways, BLOCKS], and largest errors [ways].

    `grows` is by what one more call multiplies a result; None where that is not known, and blocks are not checked.
    """
    singles = torch.zeros(len(ways), SINGLE_CALLS, dtype=torch.float64)
    blocks = torch.zeros(len(ways), BLOCKS, dtype=torch.float64)
    errors = torch.zeros(len(ways), dtype=torch.float64)
    size, order = expected.abs().max(), list(enumerate(ways))
    for repeat in range(-WARM_UP, SINGLE_CALLS):
        for index, way in order if repeat % 2 else reversed(order):
            elapsed_s = _timed(communicator, way, mine, calls=1)
            error = (way.result - expected).abs().max() / size
            errors[index] = torch.maximum(errors[index], error.cpu())
            if repeat >= 0:
                singles[index, repeat] = elapsed_s
    for block in range(BLOCKS):
        for index, way in order if block % 2 else reversed(order):
            blocks[index, block] = _timed(communicator, way, mine, CALLS_PER_BLOCK) / CALLS_PER_BLOCK
            if grows is not None:
                factor = float(grows) ** (1 - CALLS_PER_BLOCK)
                error = (way.result * factor - expected).abs().max() / size
                errors[index] = torch.maximum(errors[index], error.cpu())  # NaN stays
    return singles, blocks, errors


def _timed(communicator: Communicator, way: Way, mine: Tensor, calls: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    way.filled.copy_(mine)
    communicator.barrier()
    start.record()
    for _ in range(calls):
        way.perform()
    end.record()
    communicator.transport.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def run(collective: str, n: int, largest_mb: float, all_settings: bool, results_dir: str) -> None:
    """The command `bench all_reduce --device cuda` and the like."""
    sizes = tuple(size for size in SIZES_BYTES if size <= largest_mb * 2**20)
    folder = RunFolder(results_dir, f"bench_{collective}_gpu_n{n}")
    with folder.running(**environment(), n=n, collective=collective), tempfile.TemporaryDirectory() as temporary:
        arguments = (collective, sizes, all_settings, f"{temporary}/store")
        timings, machine = launch(time_collective, n, *arguments, device="cuda", deadline_s=120)[0]
    folder.write_manifest(**machine)
    print(f"{n} x {machine['card']}, NCCL {machine['nccl']}, NCCL_NVLS_ENABLE {machine['NCCL_NVLS_ENABLE']}")
    print(f"{'size (bytes)':>14}  {'way':26}{'single (us)':>12}{'back to back':>13}{'busbw':>8}{'x nccl':>16}  error")
    rows = [timing.row(collective, n, of_size[0]) for of_size in timings for timing in of_size]
    for row in rows:
        print(
            f"{row['size_bytes']:14,}  {row['way']:26}{row['time_us']:12,.1f}{row['back_to_back_us']:13,.1f}"
            f"{row['busbw']:8.1f}{row['times_faster_than_nccl']:8.2f}{row['back_to_back_times_faster']:8.2f}"
            f"  {row['error']:.0e}"
        )
    wrong = [f"{row['way']} at {row['size_bytes']:,} bytes" for row in rows if not row["error"] < 1e-5]
    if wrong:
        sys.exit(f"wrong results, so no figure above means anything: {', '.join(wrong)}")
    print(
        "times of the slowest rank, medians; busbw in GB/s and x nccl = nccl's time / this one's: single, back to back"
    )
    write_rows(folder, rows)
