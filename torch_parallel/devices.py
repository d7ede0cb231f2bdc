"""Where workers run, and how many processors and how much memory there are. Nothing here starts a GPU."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def usable_cpus() -> int:
    """Processors this process may use: its affinity, cut to the container's quota (cgroup v2 or v1) if that is less."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_cpu_quota()
    return affinity if quota is None else max(1, min(affinity, int(quota)))


def cgroup_cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Processors' worth of time that the container allows, None where there is no limit or no cgroup."""
    try:
        if (root / "cpu.max").exists():
            quota, period = (root / "cpu.max").read_text().split()
        else:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text()
            period = (root / "cpu/cpu.cfs_period_us").read_text()
        return None if quota == "max" or float(quota) <= 0 else float(quota) / float(period)
    except (OSError, ValueError):
        return None


def free_memory_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that may still be taken: of the machine, or of the container's limit if that is less; None where unknown.

    What only caches files counts as free, since the kernel gives it up when it is asked for memory.
    """
    free = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        free.append(1024 * _numbers(meminfo)["MemAvailable:"])
    for folder, limit, used, prefix in (
        (cgroup, "memory.max", "memory.current", ""),
        (cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        with contextlib.suppress(OSError, ValueError, KeyError):  # no such cgroup, or "max": no limit
            held = _numbers(folder / "memory.stat")
            cached = held[f"{prefix}inactive_file"] + held[f"{prefix}active_file"]
            free.append(int((folder / limit).read_text()) - int((folder / used).read_text()) + cached)
    return max(0, min(free)) if free else None


def _numbers(path: Path) -> dict[str, int]:
    """The lines of a file that begin with a name and a number."""
    lines = [line.split() for line in path.read_text().splitlines()]
    return {line[0]: int(line[1]) for line in lines if len(line) > 1}


def threads_per_worker(process_count: int) -> int:
    """OMP_NUM_THREADS where the user set it, else an equal share of the usable processors, at least one."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    return max(1, usable_cpus() // process_count)


class DeviceError(ValueError):
    """More GPUs are asked for than there are. One line with both numbers."""


def choose_processes(n: int | None, device: str, server_count: int = 0) -> tuple[int, str, str | None]:
    """How many processes, on which kind of device, and a line to say where that was not the user's own choice.

    `n` None means all GPUs and at least two processes; on the CPU two workers and the servers. `device` is auto, cpu or
    cuda; auto takes the GPUs where there are any, and for `n` None where there are at least two. Workers have a GPU
    each; a server, which only serves, may share one. Raises DeviceError.
    """
    gpu_count = 0
    if device != "cpu":
        import torch

        gpu_count = torch.cuda.device_count()  # of those that CUDA_VISIBLE_DEVICES lets this process see
    if device == "cpu" or (device == "auto" and gpu_count < (2 if n is None else 1)):
        count = n if n is not None else 2 + server_count
        chosen = device == "cpu" and n is not None
        return count, "cpu", None if chosen else _cpu_line(device, count, gpu_count)
    count = n if n is not None else max(gpu_count, 2)
    most = gpu_count + server_count if gpu_count else 0
    if count > most:
        shared = ", of which the server shares a GPU" if server_count else ""
        raise DeviceError(
            f"--n_gpus {count}: this machine has {gpu_count} GPU{'s' if gpu_count != 1 else ''}; "
            f"{f'ask for at most {most}{shared}, or ' if gpu_count else ''}train on the CPU with --device cpu"
        )
    return count, "cuda", None


def _cpu_line(device: str, count: int, gpu_count: int) -> str:
    why = f"{'only 1' if gpu_count else 'no'} GPU was found: " if device == "auto" else ""
    return f"{why}training on the CPU with {count} process{'es' if count > 1 else ''}"
