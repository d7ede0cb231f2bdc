"""What the processes of a bench of training steps do: they run sides in turns, or one alone, and are timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from torch_parallel.bench import gpu_profile
from torch_parallel.bench.common import start_group
from torch_parallel.bench.setting import Setting
from torch_parallel.bench.sides import (
    ALONE,
    DDP,
    DdpSide,
    OurSide,
    PlainSide,
    difference_between,
    difference_of,
    make_side,
    memory_bytes,
)
from torch_parallel.communicator import Communicator
from torch_parallel.workloads.flops import FEW, flops_of_step

Side = TypeVar("Side")

PROFILED_STEPS = 3


def time_steps(
    communicator: Communicator, setting: Setting, name: str, steps: int, repeats: int, store: str
) -> tuple[dict[str, list[float]], float, dict[str, list[gpu_profile.Work]]]:
    """The worker function: seconds of a step by side and repeat, those of one process alone among them, how far the
    sides' parameters lie apart, and what the GPU of this rank did in a few more steps."""
    start_group(communicator, store)
    alone = {ALONE: PlainSide(communicator, setting).step}
    before = _in_turns(communicator, alone, steps, -(-repeats // 2))
    ours, theirs = OurSide(communicator, setting, name), DdpSide(communicator, setting)
    sides: dict[str, Callable[[], None]] = {name: ours.step, DDP: theirs.step}
    seconds = _in_turns(communicator, sides, steps, repeats)
    after = _in_turns(communicator, alone, steps, repeats // 2)
    seconds[ALONE] = before[ALONE] + after[ALONE]
    difference = difference_of(ours.model, theirs.model) if not theirs.idle else 0.0
    work = {}
    if communicator.device.type == "cuda":
        for side, step in sides.items():
            _meet(communicator)
            work[side] = gpu_profile.profiled(step, PROFILED_STEPS)
    _meet(communicator)
    if not theirs.idle:
        dist.destroy_process_group()
    worst = communicator.all_ranks(torch.tensor(difference, dtype=torch.float64)).amax().item()
    return seconds, worst, work


def time_ddp(
    communicator: Communicator, setting: Setting, buckets_mb: list[float], steps: int, repeats: int, store: str
) -> dict[float, list[float]]:
    """The worker function: seconds of DistributedDataParallel's step by its bucket's size and repeat."""
    start_group(communicator, store)
    sides = {mb: DdpSide(communicator, replace(setting, ddp_bucket_mb=mb)).step for mb in buckets_mb}
    seconds = _in_turns(communicator, sides, steps, repeats)
    dist.destroy_process_group()
    return seconds


def time_apart(
    communicator: Communicator, setting: Setting, name: str, steps: int, kept: str, store: str
) -> tuple[float, float | None]:
    """The worker function: seconds of a step of one side that has the processes for itself.

    Before them as many warm up. The first of two sides that are given the name of a file `kept` writes its parameters
    there, and the second tells how far its own lie apart from them.
    """
    if name == DDP:
        start_group(communicator, store)
    side = make_side(communicator, setting, name)
    seconds = _in_turns(communicator, {name: side.step}, steps, 1)[name][0]
    difference = None
    if kept and communicator.worker_index == 0:
        parameters = [parameter.detach() for parameter in side.model.parameters()]
        if Path(kept).exists():
            difference = difference_between(parameters, torch.load(kept, map_location="cpu", mmap=True))
        else:
            torch.save([parameter.cpu() for parameter in parameters], kept)
    _meet(communicator)
    if name == DDP and not communicator.is_server:
        dist.destroy_process_group()
    return seconds, difference


def count_flops(communicator: Communicator, setting: Setting) -> int | None:
    """The worker function: of a step of all workers together. Here, since counting may start CUDA."""
    return flops_of_step(setting.workload(min(FEW, setting.batch_size)), setting.batch_size)


def _in_turns(
    communicator: Communicator, sides: dict[Side, Callable[[], None]], steps: int, repeats: int
) -> dict[Side, list[float]]:
    """Seconds of a step of each side, by repeat: the slowest rank's."""
    seconds: dict[Side, list[float]] = {side: [] for side in sides}
    for repeat in range(-1, repeats):  # the first turn of each warms up
        for side, step in sides.items() if repeat % 2 else reversed(sides.items()):
            _seed(communicator, repeat + 2)
            step()  # the caches hold the other side's
            _meet(communicator)
            start_s = time.perf_counter()
            for _ in range(steps):
                step()
            _meet(communicator)
            if repeat >= 0:
                seconds[side].append((time.perf_counter() - start_s) / steps)
    slowest = communicator.all_ranks(torch.tensor(list(seconds.values()), dtype=torch.float64)).amax(0)
    return dict(zip(seconds, slowest.tolist(), strict=True))


def _seed(communicator: Communicator, turn: int) -> None:
    """Both sides drop the same out in a turn, and each worker something else: also where a server makes ranks more."""
    torch.manual_seed(turn * communicator.worker_count + (communicator.worker_index or 0))


def _meet(communicator: Communicator) -> None:
    """Returns when all ranks have done all they had to do, their GPUs included."""
    if communicator.device.type == "cuda":
        torch.cuda.synchronize(communicator.device)
    communicator.barrier()


def measure_memory(communicator: Communicator, setting: Setting, name: str, steps: int, store: str) -> int | None:
    """The worker function: bytes after some steps, of all ranks together, or of the fullest GPU; None if unknown.

    On GPUs less what our transport has taken before, where it is not our side's.
    """
    on_gpu = communicator.device.type == "cuda"
    of_transport = torch.cuda.memory_reserved(communicator.device) if on_gpu and name == DDP else 0
    if name == DDP:
        start_group(communicator, store)
    side = make_side(communicator, setting, name)
    for _ in range(steps):
        side.step()
    _meet(communicator)
    of_ranks = communicator.all_ranks(torch.tensor(memory_bytes(communicator.device) - of_transport))
    if name == DDP and not communicator.is_server:
        dist.destroy_process_group()
    return int((of_ranks.amax() if on_gpu else of_ranks.sum()).item()) or None
