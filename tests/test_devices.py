"""How many processes, where, and on how many processors; no GPU is needed to test it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from torch_parallel import devices
from torch_parallel.devices import (
    DeviceError,
    cgroup_cpu_quota,
    choose_processes,
    free_memory_bytes,
    threads_per_worker,
    usable_cpus,
)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """As many GPUs as the test's parameter says, and 4 processors."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)
    monkeypatch.setattr(devices, "usable_cpus", lambda: 4)


@pytest.mark.parametrize(
    "gpus, n, device, servers, expected",
    [
        # no argument at all
        (0, None, "auto", 0, (2, "cpu", "no GPU was found: training on the CPU with 2 processes")),
        (0, None, "auto", 1, (3, "cpu", "no GPU was found: training on the CPU with 3 processes")),
        (1, None, "auto", 0, (2, "cpu", "only 1 GPU was found: training on the CPU with 2 processes")),
        (2, None, "auto", 0, (2, "cuda", None)),
        (8, None, "auto", 1, (8, "cuda", None)),
        # a number
        (0, 1, "auto", 0, (1, "cpu", "no GPU was found: training on the CPU with 1 process")),
        (
            0,
            5,
            "auto",
            0,
            (5, "cpu", "no GPU was found: training on the CPU with 5 processes"),
        ),
        (1, 1, "auto", 0, (1, "cuda", None)),
        (4, 3, "auto", 0, (3, "cuda", None)),
        (2, 3, "auto", 1, (3, "cuda", None)),
        # a device
        (8, 3, "cpu", 0, (3, "cpu", None)),
        (8, None, "cpu", 0, (2, "cpu", "training on the CPU with 2 processes")),
        (8, None, "cpu", 1, (3, "cpu", "training on the CPU with 3 processes")),
        (2, None, "cuda", 0, (2, "cuda", None)),
        (4, 1, "cuda", 0, (1, "cuda", None)),
    ],
    indirect=["gpus"],
)
def test_choice(gpus: None, n: int | None, device: str, servers: int, expected: tuple[int, str, str | None]) -> None:
    assert choose_processes(n, device, servers) == expected


@pytest.mark.parametrize(
    "gpus, n, device, servers, line",
    [
        (
            4,
            99,
            "auto",
            0,
            "--n_gpus 99: this machine has 4 GPUs; ask for at most 4, or train on the CPU with --device cpu",
        ),
        (
            1,
            2,
            "auto",
            0,
            "--n_gpus 2: this machine has 1 GPU; ask for at most 1, or train on the CPU with --device cpu",
        ),
        (
            2,
            4,
            "auto",
            1,
            "--n_gpus 4: this machine has 2 GPUs; ask for at most 3, of which the server shares a GPU, or train on the "
            "CPU with --device cpu",
        ),
        (0, 2, "cuda", 1, "--n_gpus 2: this machine has 0 GPUs; train on the CPU with --device cpu"),
        (0, None, "cuda", 0, "--n_gpus 2: this machine has 0 GPUs; train on the CPU with --device cpu"),
    ],
    indirect=["gpus"],
)
def test_more_than_there_are(gpus: None, n: int | None, device: str, servers: int, line: str) -> None:
    with pytest.raises(DeviceError) as raised:
        choose_processes(n, device, servers)
    assert str(raised.value) == line


def test_cpu_asks_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: pytest.fail("CUDA was asked"))
    assert choose_processes(2, "cpu") == (2, "cpu", None)


@pytest.mark.parametrize(
    "files, expected",
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "25000 100000\n"}, 0.25),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "400000\n"}, None),
        ({"cpu.max": "nonsense\n"}, None),
        ({"cpu.max": ""}, None),
    ],
)
def test_cgroup_quota(tmp_path: Path, files: dict[str, str], expected: float | None) -> None:
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    assert cgroup_cpu_quota(tmp_path / "no", tmp_path) == expected


MEMINFO = "MemTotal:       16000 kB\nMemFree:         1000 kB\nMemAvailable:    6000 kB\nHugePages_Total:  0\n"
STAT_V2 = "anon 1\nfile 9\ninactive_file 300000\nactive_file 200000\n"
STAT_V1 = "cache 9\ninactive_file 7\ntotal_inactive_file 300000\ntotal_active_file 200000\n"


@pytest.mark.parametrize(
    "files, expected",
    [
        ({}, None),
        ({"meminfo": MEMINFO}, 6000 * 1024),
        ({"meminfo": "MemTotal: 16000 kB\n"}, None),
        # a container: the limit less what is used, of which 500,000 bytes only cache files
        (
            {"meminfo": MEMINFO, "memory.max": "5000000\n", "memory.current": "2000000\n", "memory.stat": STAT_V2},
            3_500_000,
        ),
        ({"memory.max": "5000000\n", "memory.current": "2000000\n", "memory.stat": STAT_V2}, 3_500_000),
        ({"memory.max": "5000000\n", "memory.current": "6000000\n", "memory.stat": STAT_V2}, 0),
        ({"meminfo": MEMINFO, "memory.max": "max\n", "memory.current": "1\n", "memory.stat": STAT_V2}, 6000 * 1024),
        (
            {
                "meminfo": MEMINFO,
                "memory/memory.limit_in_bytes": "1000000\n",
                "memory/memory.usage_in_bytes": "900000\n",
                "memory/memory.stat": STAT_V1,
            },
            600_000,
        ),
        (
            {  # no limit is a very large one in version 1
                "meminfo": MEMINFO,
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/memory.usage_in_bytes": "900000\n",
                "memory/memory.stat": STAT_V1,
            },
            6000 * 1024,
        ),
    ],
)
def test_free_memory(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    assert free_memory_bytes(tmp_path, tmp_path) == expected


# Nested control groups.

V2 = "30 24 0:26 / {0}/cg rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_CPU = "31 24 0:27 / {0}/cg/cpu,cpuacct rw shared:10 - cgroup cgroup rw,cpu,cpuacct\n"
V1_MEMORY = "32 24 0:28 / {0}/cg/memory rw shared:11 - cgroup cgroup rw,memory\n"
OTHER = "23 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro\n"


def laid_out(place: Path, own: str | None, mounts: str | None, files: dict[str, str]) -> None:
    """`own` is what the process is told of its groups, `mounts` of what is mounted; `files` lie below cg/."""
    told = {"self/cgroup": own, "self/mountinfo": mounts and OTHER + mounts.format(place)}
    told |= {f"cg/{name}": content for name, content in files.items()}
    for name, content in told.items():
        if content is not None:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(content, encoding="utf-8")


@pytest.mark.parametrize(
    ("own", "mounts", "files", "expected"),
    [
        # a service with a quota of its own, in a slice without, in a slice with a smaller one
        (
            "0::/a.slice/b.slice/c.service\n", V2,
            {"a.slice/cpu.max": "150000 100000", "a.slice/b.slice/cpu.max": "max 100000",
             "a.slice/b.slice/c.service/cpu.max": "400000 100000"}, 1.5,
        ),
        # its own is the smallest; a neighbour's does not count
        ("0::/a/b\n", V2, {"a/cpu.max": "300000 100000", "a/b/cpu.max": "50000 100000", "a/c/cpu.max": "1000 100000"},
         0.5),
        # a group that has no files yet, as where no controller is on
        ("0::/a/b\n", V2, {"a/cpu.max": "200000 100000"}, 2.0),
        # version 1, its controllers together
        (
            "5:memory:/x\n4:cpu,cpuacct:/a/b\n1:name=systemd:/a\n", V1_CPU + V1_MEMORY,
            {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000",
             "cpu,cpuacct/a/cpu.cfs_quota_us": "100000", "cpu,cpuacct/a/cpu.cfs_period_us": "50000",
             "cpu,cpuacct/a/b/cpu.cfs_quota_us": "-1", "cpu,cpuacct/a/b/cpu.cfs_period_us": "100000"}, 2.0,
        ),
        # both versions: the controller is in the first, and the second has its tree elsewhere
        (
            "4:cpu,cpuacct:/a\n0::/s\n", V1_CPU + "33 24 0:29 / {0}/cg/unified rw - cgroup2 cgroup2 rw\n",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "75000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000",
             "unified/s/cgroup.procs": "1"}, 0.75,
        ),
        # a container that is told the host's name of its group, and sees that group mounted
        ("0::/docker/12ab\n", V2.replace(" / ", " /docker/12ab "), {"cpu.max": "250000 100000"}, 2.5),
        # the same with a group of its own inside
        (
            "0::/docker/12ab/job\n", V2.replace(" / ", " /docker/12ab "),
            {"cpu.max": "250000 100000", "job/cpu.max": "100000 100000"}, 1.0,
        ),
        # one that is told of another place than what it sees mounted
        ("0::/kubepods/pod1/c\n", V2.replace(" / ", " /elsewhere "), {"cpu.max": "350000 100000"}, 3.5),
        # somebody else's group is mounted once more, and does not count
        ("0::/a\n", V2 + "34 24 0:26 /other {0}/cg/else rw - cgroup2 cgroup2 rw\n",
         {"a/cpu.max": "200000 100000", "else/cpu.max": "1000 100000"}, 2.0),
        # one that is told of a group above what it sees
        ("0::/../../host\n", V2, {"cpu.max": "450000 100000"}, 4.5),
        # nobody says where the groups are mounted
        ("0::/a\n", None, {"cpu.max": "900000 100000", "a/cpu.max": "800000 100000"}, 8.0),
        # a mount with a space in its name
        ("0::/a\n", "30 24 0:26 / {0}/cg/with\\040space rw - cgroup2 cgroup2 rw\n",
         {"with space/a/cpu.max": "600000 100000"}, 6.0),
    ],
)  # fmt: skip
def test_the_smallest_quota_of_all_levels(
    own: str, mounts: str | None, files: dict[str, str], expected: float, tmp_path: Path
) -> None:
    laid_out(tmp_path, own, mounts, files)
    assert cgroup_cpu_quota(tmp_path, tmp_path / "cg") == expected


def v2_memory(folder: str, limit: str, used: int, cached: int) -> dict[str, str]:
    stat = f"anon 5\ninactive_file {cached - 1}\nactive_file 1\n"
    return {f"{folder}memory.max": limit, f"{folder}memory.current": str(used), f"{folder}memory.stat": stat}


def v1_memory(folder: str, limit: int, used: int, cached: int) -> dict[str, str]:
    stat = f"inactive_file 3\nactive_file 4\ntotal_inactive_file {cached}\ntotal_active_file 0\n"
    return {
        f"{folder}memory.limit_in_bytes": str(limit),
        f"{folder}memory.usage_in_bytes": str(used),
        f"{folder}memory.stat": stat,
    }


@pytest.mark.parametrize(
    ("own", "mounts", "files", "expected"),
    [
        # above 9000 - 8000 + 500 = 1500 are left, and in its own group 5000 - 1000 + 10 = 4010
        ("0::/a/b\n", V2, v2_memory("a/", "9000", 8000, 500) | v2_memory("a/b/", "5000", 1000, 10), 1500),
        # its own is the tightest: 2000 - 1500 + 100
        ("0::/a/b\n", V2, v2_memory("a/", "9000", 3000, 500) | v2_memory("a/b/", "2000", 1500, 100), 600),
        # no limit but at the top: 7000 - 100 + 20
        ("0::/a/b\n", V2, v2_memory("", "7000", 100, 20) | v2_memory("a/b/", "max", 90, 10), 6920),
        # version 1: 3000 - 2500 + 200
        ("5:memory:/a/b\n", V1_MEMORY,
         v1_memory("memory/a/", 3000, 2500, 200) | v1_memory("memory/a/b/", 2**62, 9, 0), 700),
        # a container that is told the host's name
        ("5:memory:/docker/1\n", V1_MEMORY.replace(" / ", " /docker/1 ", 1), v1_memory("memory/", 800, 500, 0), 300),
    ],
)  # fmt: skip
def test_the_least_free_memory_of_all_levels(
    own: str, mounts: str, files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO, encoding="utf-8")
    laid_out(tmp_path, own, mounts, files)
    assert free_memory_bytes(tmp_path, tmp_path / "cg") == expected


def test_free_memory_of_this_machine() -> None:
    free = free_memory_bytes()
    assert free is not None and 0 < free <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    "affinity, quota, expected", [(8, None, 8), (8, 3.9, 3), (2, 16.0, 2), (8, 0.25, 1), (1, None, 1)]
)
def test_usable_cpus(monkeypatch: pytest.MonkeyPatch, affinity: int, quota: float | None, expected: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(affinity)))
    monkeypatch.setattr(devices, "cgroup_cpu_quota", lambda: quota)
    assert usable_cpus() == expected


@pytest.mark.parametrize(
    "cpus, asked, processes, expected",
    [
        (8, None, 2, 4),
        (8, None, 3, 2),
        (2, None, 8, 1),
        (8, "3", 2, 3),
        (2, "16", 8, 16),
        (8, "0", 2, 4),
        (8, "4,2", 2, 4),
        (8, "", 8, 1),
    ],
)
def test_threads_per_worker(
    monkeypatch: pytest.MonkeyPatch, cpus: int, asked: str | None, processes: int, expected: int
) -> None:
    monkeypatch.setattr(devices, "usable_cpus", lambda: cpus)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert threads_per_worker(processes) == expected
