"""Timings of collective operations on GPUs, by us and NCCL.

Times are the GPU's own, from events around a call with an idle stream before it (so the host's part of a single call
counts), and around many calls back to back. Ours include the acknowledgement of the last reads. Results are checked
after single calls, and after one more block of calls back to back, for which the memory is filled again each time.
`--settings all` times every grid of the kernel too, by an operation's first algorithm, and says at the end which was
the best of each size.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import re
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_parallel.bench.collectives import Job, Timing, Ways, alternate
from torch_parallel.bench.common import start_group
from torch_parallel.bench.operations import ALGORITHMS, base, bus_factor, by_torch, expected
from torch_parallel.collectives import Collective
from torch_parallel.communicator import Communicator
from torch_parallel.devices import DeviceError
from torch_parallel.launcher import launch
from torch_parallel.transport.cuda_ipc import CudaIpcTransport

PEER = "nccl"
LARGEST_MB = 1024
SIZES_BYTES = tuple(size << 10 for size in (4, 16, 64, 256)) + tuple(
    size << 20 for size in (1, 4, 16, 25, 64, 100, 256, 1024)
)
FEWEST_REPEATS, MOST_REPEATS = 9, 30
BLOCKS, CALLS_PER_BLOCK = 5, 20
"""Calls back to back; in place values grow by the number of ranks at each, which float32 bears 20 times."""
CANDIDATES = [
    {"programs": programs, "block_bytes": block_kib << 10, "warps": warps}
    for programs in (16, 32, 64, 132, 256)
    for block_kib, warps in ((8, 16), (16, 16), (32, 16))
]


@dataclass
class GpuTiming(Timing):
    """And seconds of one call among many back to back, by block."""

    back_to_back_s: list[float] = field(default_factory=list)

    def row(self, n: int, peer: Timing) -> dict[str, Any]:
        assert isinstance(peer, GpuTiming)
        again_s, peers_s = statistics.median(self.back_to_back_s), statistics.median(peer.back_to_back_s)
        quartiles = statistics.quantiles(self.back_to_back_s, n=4)
        return {
            **super().row(n, peer),
            "back_to_back_us": round(again_s * 1e6, 2),
            "back_to_back_lower_quartile_us": round(quartiles[0] * 1e6, 2),
            "back_to_back_upper_quartile_us": round(quartiles[2] * 1e6, 2),
            "back_to_back_busbw": round(self.size_bytes / again_s / 1e9 * bus_factor(self.operation, n), 4),
            "back_to_back_times_faster": round(peers_s / again_s, 3),
        }


def versions() -> dict[str, str]:
    """What NCCL, Triton and driver there are, and a setting of NCCL that changes its speed."""
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    setting = os.environ.get("NCCL_NVLS_ENABLE", "not set")
    return {"NCCL": nccl, "NCCL_NVLS_ENABLE": setting, "Triton": triton_version(), "driver": driver_version()}


def triton_version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=30, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def measure(n: int, jobs: list[Job], all_settings: bool) -> list[list[GpuTiming]]:
    """For each job its ways, NCCL first. Raises DeviceError where these GPUs do not reach each other's memory."""
    with tempfile.TemporaryDirectory() as temporary:
        arguments = (jobs, all_settings, f"{temporary}/store")
        timings: list[list[GpuTiming]] | None = launch(time_jobs, n, *arguments, device="cuda", deadline_s=120)[0]
    if timings is None:
        raise DeviceError("--device cuda: these GPUs do not reach each other's memory, so there is nothing to compare")
    return timings


def time_jobs(
    communicator: Communicator, jobs: list[Job], all_settings: bool, store: str
) -> list[list[GpuTiming]] | None:
    """The worker function: for each job the timings of NCCL and of all our algorithms.

    None where GPUs exchange through the host's memory.
    """
    if not isinstance(communicator.transport, CudaIpcTransport):
        return None
    start_group(communicator, store)
    timings = [_time_job(communicator, operation, size, all_settings) for operation, size, _ in jobs]
    communicator.barrier()
    dist.destroy_process_group()
    return timings


def _time_job(communicator: Communicator, operation: str, size_bytes: int, all_settings: bool) -> list[GpuTiming]:
    n, rank = communicator.world_size, communicator.rank
    start = base(n, size_bytes // 4 // n, communicator.device)
    tensor, out = torch.empty_like(start), torch.empty_like(start)
    ways: Ways = {PEER: (tensor, partial(by_torch, operation, tensor, out, rank))}
    ways |= _ours(communicator, operation, start, all_settings)
    if operation == "all_reduce":
        ways["ring, ordinary tensor"] = (tensor, partial(_of_an_ordinary_tensor, communicator, tensor))
    clock = partial(timed, communicator)
    repeats = MOST_REPEATS if size_bytes <= 64 << 20 else FEWEST_REPEATS
    seconds, wrong = alternate(communicator, ways, start, out, operation, repeats, clock)
    blocks = _back_to_back(communicator, ways, start)
    wrong += _wrong_back_to_back(communicator, ways, start, out, operation)
    slowest, slowest_blocks = (communicator.all_ranks(each).amax(0).tolist() for each in (seconds, blocks))
    worst = communicator.all_ranks(wrong).amax(0)
    return [
        GpuTiming(operation, way, size_bytes, slowest[index], int(worst[index]), slowest_blocks[index])
        for index, way in enumerate(ways)
    ]


def _of_an_ordinary_tensor(communicator: Communicator, tensor: Tensor) -> Tensor:
    """As a user gets it, whatever way was timed before."""
    transport = communicator.transport
    assert isinstance(transport, CudaIpcTransport)
    _take(transport, "auto")
    return communicator.all_reduce(tensor, "ring")


def _take(transport: CudaIpcTransport, performer: str, settings: Any = None) -> None:
    """From now on it performs so; by the kernel, with those settings, or else with its own."""
    transport.performer = performer
    if transport.triton is not None:
        transport.triton.settings = settings or type(transport.triton).settings


def _ours(communicator: Communicator, operation: str, start: Tensor, all_settings: bool) -> Ways:
    """Each algorithm the plain way, by the kernel, and as a user gets it.

    If that is asked for, the first one by the kernel with each of its grids too.
    """
    transport = communicator.transport
    assert isinstance(transport, CudaIpcTransport)
    buffer = communicator.share(start.numel())
    own, triton = buffer.local.view_as(start), transport.triton

    def pre_shared(collective: Collective, performer: str, settings: Any = None) -> Tensor:
        _take(transport, performer, settings)
        result = transport.perform(collective, buffer)
        transport.settle()
        return result

    ways: Ways = {}
    for name, algorithm in ALGORITHMS[operation].items():
        ways[f"{name}, plain"] = (own, partial(pre_shared, algorithm, "plain"))
        if triton is not None and triton.can_perform(algorithm, buffer):
            best = type(triton).settings
            ways[f"{name}, triton"] = (own, partial(pre_shared, algorithm, "triton"))
            ways[f"{name}, auto"] = (own, partial(pre_shared, algorithm, "auto"))
            for each in CANDIDATES if all_settings and name == next(iter(ALGORITHMS[operation])) else ():
                label = f"{name}, {each['programs']}x{each['block_bytes'] >> 10}k/{each['warps']}"
                ways[label] = (own, partial(pre_shared, algorithm, "triton", replace(best, **each)))
    return ways


def timed(communicator: Communicator, perform: Callable[[], Tensor], calls: int = 1) -> tuple[Tensor, float]:
    """The result of the last call, and the seconds of one of them."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        result = perform()
    end.record()
    communicator.transport.synchronize()
    return result, float(start.elapsed_time(end)) / 1e3 / calls


def _back_to_back(communicator: Communicator, ways: Ways, start: Tensor) -> Tensor:
    """Seconds of one call, [ways, BLOCKS]."""
    seconds = torch.zeros(len(ways), BLOCKS, dtype=torch.float64)
    order = list(enumerate(ways.values()))
    for block in range(BLOCKS):
        for index, (filled, perform) in order if block % 2 else reversed(order):
            torch.add(start, communicator.rank, out=filled)
            communicator.barrier()
            _, seconds[index, block] = timed(communicator, perform, CALLS_PER_BLOCK)
            communicator.barrier()
    return seconds


def _wrong_back_to_back(communicator: Communicator, ways: Ways, start: Tensor, out: Tensor, operation: str) -> Tensor:
    """Wrong elements [ways] of the last of many calls back to back, before each of which the memory is filled again.

    Every call is given elements that are larger by 1, so that what lies there of an earlier call is wrong.
    """
    wrong = torch.zeros(len(ways), dtype=torch.int64)
    promised = expected(operation, start, communicator.rank)
    for index, (filled, perform) in enumerate(ways.values()):
        communicator.barrier()
        for calls_left in reversed(range(CALLS_PER_BLOCK)):
            torch.add(start, communicator.rank - calls_left, out=filled)
            out.fill_(-1)
            result = perform()
        if promised:
            rows, values = promised
            wrong[index] = (result.view_as(start)[rows] != values).sum().cpu()
        communicator.barrier()
    return wrong


def best_grids(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each operation, number of processes and size: the fastest grid, and what the chosen one takes of it.

    By the times back to back; `rows` are those of `--settings all`.
    """
    for (operation, n, size_bytes), group in itertools.groupby(
        rows, lambda row: (row["collective"], row["n"], row["size_bytes"])
    ):
        times_us = {row["way"]: row["back_to_back_us"] for row in group}
        grids = {way: us for way, us in times_us.items() if re.search(r", \d+x\d+k/\d+$", way)}
        if grids:
            best = min(grids, key=grids.__getitem__)
            chosen_us = times_us[best.rsplit(",", 1)[0] + ", triton"]
            yield (
                f"{operation}, {n} processes, {size_bytes:,} bytes: {best} is the best grid with {grids[best]:,.1f} us "
                f"in a row; the chosen one takes {chosen_us / grids[best]:.2f} of that"
            )
