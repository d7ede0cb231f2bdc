"""Where workers run, and how many processors and how much memory there are. Nothing here starts a GPU."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from torch_parallel.usage import UserError

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def usable_cpus() -> int:
    """Processors this process may use: its affinity, cut to its control groups' quota if that is less."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_cpu_quota()
    return affinity if quota is None else max(1, min(affinity, int(quota)))


def cgroup_cpu_quota(proc: Path = PROC, usual: Path = CGROUP) -> float | None:
    """Processors' worth of time that the control groups allow: the least of this process's own and all above it.

    None where there is no limit or no control group. See `control_groups` for the arguments.
    """
    quotas = [_quota(folder) for folder in control_groups("cpu", proc, usual)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(folder: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError):
        if (folder / "cpu.max").exists():
            quota, period = _text(folder / "cpu.max").split()
        else:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        return None if quota == "max" or float(quota) <= 0 else float(quota) / float(period)
    return None


def free_memory_bytes(proc: Path = PROC, usual: Path = CGROUP) -> int | None:
    """Bytes that may still be taken: of the machine, or of the tightest control group; None where unknown.

    What only caches files counts as free, since the kernel gives it up when it is asked for memory. The limits of all
    groups from this process's own upwards hold. See `control_groups` for the arguments.
    """
    free = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        free.append(1024 * _numbers(proc / "meminfo")["MemAvailable:"])
    for folder in control_groups("memory", proc, usual):
        for limit, used, prefix in (
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            with contextlib.suppress(OSError, ValueError, KeyError):  # of the other version, or "max": no limit
                held = _numbers(folder / "memory.stat")
                cached = held[f"{prefix}inactive_file"] + held[f"{prefix}active_file"]
                free.append(int(_text(folder / limit)) - int(_text(folder / used)) + cached)
    return max(0, min(free)) if free else None


def control_groups(controller: str, proc: Path = PROC, usual: Path = CGROUP) -> list[Path]:
    """The folders of this process's control group and of all above it, own first, for "cpu" or "memory".

    Where it is tells `proc`/self/cgroup, and where groups are mounted `proc`/self/mountinfo: version 1, 2 or both. What
    these do not tell is taken to be as usual: mounted below `usual`, the process in the topmost group. A container may
    be told of a group by its name on the host, which is not below what it sees mounted: then that is its own.
    """
    folders: list[Path] = []
    mounts = _mounts(controller, proc, usual)
    for version, group in _groups(controller, proc):
        shown = [mount for mount in mounts.get(version, []) if _shows(mount[0], group)]
        for root, mount in shown or mounts.get(version, []):
            folder = mount / Path(group).relative_to(root) if shown else mount
            folders += [folder, *(each for each in folder.parents if each.is_relative_to(mount))]
    return folders


def _shows(root: str, group: str) -> bool:
    """Whether the group is that which is mounted, or below it."""
    return Path(group).is_relative_to(root) and ".." not in Path(group).parts


def _groups(controller: str, proc: Path) -> list[tuple[str, str]]:
    """By version, as "cgroup" or "cgroup2", the process's group; its lines are "4:cpu,cpuacct:/name" or "0::/name"."""
    groups = []
    with contextlib.suppress(OSError, ValueError):
        for line in _text(proc / "self" / "cgroup").splitlines():
            _, controllers, group = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                groups.append(("cgroup" if controllers else "cgroup2", group))
    return groups or [("cgroup2", "/"), ("cgroup", "/")]


def _mounts(controller: str, proc: Path, usual: Path) -> dict[str, list[tuple[str, Path]]]:
    """By version, which group is mounted where. A line is "36 35 0:3 /group /where options - cgroup2 name options"."""
    mounts: dict[str, list[tuple[str, Path]]] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in _text(proc / "self" / "mountinfo").splitlines():
            before, _, after = line.partition(" - ")
            root, where = (
                re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), each) for each in before.split()[3:5]
            )
            version, *_, options = after.split()
            if version == "cgroup2" or (version == "cgroup" and controller in options.split(",")):
                mounts.setdefault(version, []).append((root, Path(where)))
    return mounts or {
        "cgroup2": [("/", usual), ("/", usual / "unified")],
        "cgroup": [("/", usual / controller)],
    }


def _numbers(path: Path) -> dict[str, int]:
    """The lines of a file that begin with a name and a number."""
    lines = [line.split() for line in _text(path).splitlines()]
    return {line[0]: int(line[1]) for line in lines if len(line) > 1}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="surrogateescape")  # groups may have any names


def threads_per_worker(process_count: int) -> int:
    """OMP_NUM_THREADS where the user set it, else an equal share of the usable processors, at least one."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    return max(1, usable_cpus() // process_count)


_was_forked = False


def _note_fork() -> None:
    global _was_forked
    _was_forked = True


os.register_at_fork(after_in_child=_note_fork)


@contextlib.contextmanager
def one_thread_after_fork() -> Iterator[None]:
    """In a process that was forked, torch computes in one thread meanwhile: it would wait for its parent's for ever."""
    if not _was_forked:
        yield
        return
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class DeviceError(UserError, ValueError):
    """More GPUs are asked for than there are. One line with both numbers."""


def choose_processes(
    n: int | None, device: str, server_count: int = 0, share: bool = False
) -> tuple[int, str, str | None]:
    """How many processes, on which kind of device, and a line to say where that was not the user's own choice.

    `n` None means all GPUs and at least two processes; on the CPU two workers and the servers. `device` is auto, cpu or
    cuda; auto takes the GPUs where there are any, and for `n` None where there are at least two. Workers have a GPU
    each; a server, which only serves, may share one, and with `share` all may. Raises DeviceError.
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
    if count > most and share and gpu_count:
        gpus = f"{gpu_count} GPU{'s' if gpu_count > 1 else ''}"
        return count, "cuda", f"{count - server_count} workers share {gpus}: times say nothing of a GPU for each"
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
