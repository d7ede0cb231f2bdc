"""MPI's collectives, timed as ours are, in processes of their own: a program that mpiexec starts.

    mpiexec -n 2 python -m torch_parallel.bench.mpi results.json '[["all_reduce", 4096, 200], ...]'

Each entry is an operation, the bytes of its table, and how often to repeat it. Rank 0 writes the seconds of the slowest
rank for every repeat, and how many elements were wrong.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from torch_parallel.bench.operations import base, expected
from torch_parallel.devices import usable_cpus

WARM_UP = 3
LIMIT_S = 900.0


def why_not() -> str | None:
    """What is missing to run MPI here; None where nothing is."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    return None if shutil.which(_mpiexec()) else "there is no mpiexec"


def version() -> str:
    """Whose MPI it is, and which version, in its own words."""
    words = "from mpi4py import MPI; print(MPI.Get_library_version())"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, encoding="utf-8", timeout=60)
    return done.stdout.split(",")[0].strip("\x00\n ")


def _mpiexec() -> str:
    """That of the environment of this Python, if there is one, else the first on the path."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else "mpiexec"


def measure(n: int, jobs: list[tuple[str, int, int]], threads: int) -> list[dict[str, Any]]:
    """For each (operation, bytes, repeats) what rank 0 writes. Raises RuntimeError with MPI's last words."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        command = [_mpiexec(), "-n", str(n), sys.executable, "-m", __name__, str(file), json.dumps(jobs)]
        # Open MPI refuses root, and more processes than processors, unless it is told that they are meant
        allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        if n > usable_cpus():  # else it would yield in its waits, and be slower than it is
            allowed["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
        allowed["OMP_NUM_THREADS"] = str(threads)
        done = subprocess.run(
            command,
            env={**os.environ, **allowed},
            capture_output=True,
            encoding="utf-8",
            timeout=LIMIT_S,
            cwd=Path(__file__).parents[2],
        )
        if done.returncode or not file.exists():
            raise RuntimeError(f"mpiexec: exit code {done.returncode}: {(done.stderr or done.stdout).strip()[-300:]}")
        results: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
        return results


def main(file: str, jobs: list[tuple[str, int, int]]) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    results = [_time(world, MPI, *job) for job in jobs]
    if world.rank == 0:
        Path(file).write_text(json.dumps(results), encoding="utf-8")


def _time(world: Any, mpi: Any, operation: str, size_bytes: int, repeats: int) -> dict[str, Any]:
    n, rank = world.size, world.rank
    start = base(n, size_bytes // 4 // n)
    mine, out = (torch.empty_like(start).numpy() for _ in range(2))
    seconds, wrong = [], 0
    for repeat in range(-WARM_UP, repeats):
        if repeat == repeats - 1:
            start += 1  # so that what lies there of the repeat before is wrong
        mine[...] = (start + rank).numpy()
        promised = expected(operation, start, rank) if repeat in (-WARM_UP, repeats - 1) else None
        if promised:
            out.fill(-1)
        world.Barrier()
        start_s = time.perf_counter()
        result = _perform(world, mpi, operation, mine, out)
        elapsed_s = time.perf_counter() - start_s
        if repeat >= 0:
            seconds.append(elapsed_s)
        if promised:
            rows, values = promised
            wrong += int((torch.from_numpy(result)[rows] != values).sum())
        world.Barrier()
    by_rank, worst = world.gather(seconds), world.gather(wrong)
    if rank:
        return {}
    return {
        "operation": operation,
        "size_bytes": size_bytes,
        "seconds": [max(column) for column in zip(*by_rank, strict=True)],
        "wrong": max(worst),
    }


def _perform(world: Any, mpi: Any, operation: str, mine: Any, out: Any) -> Any:
    rank = world.rank
    match operation:
        case "all_reduce":
            world.Allreduce(mpi.IN_PLACE, mine)
        case "reduce":
            world.Reduce(mpi.IN_PLACE if rank == 0 else mine, mine if rank == 0 else None)
        case "broadcast":
            world.Bcast(mine)
        case "gather":
            world.Gather(mine[rank], out if rank == 0 else None)
        case "scatter":
            world.Scatter(mine if rank == 0 else None, out[rank])
        case "all_gather":
            world.Allgather(mine[rank], out)
        case "reduce_scatter":
            world.Reduce_scatter_block(mine, out[rank])
        case "all_to_all":
            world.Alltoall(mine, out)
        case "barrier":
            world.Barrier()
    return mine if operation in ("all_reduce", "reduce", "broadcast") else out


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
