"""The command that times collective operations beside others': gloo's and MPI's on the CPU, NCCL's on GPUs."""

from __future__ import annotations

import contextlib
import sys
from argparse import Namespace
from functools import partial
from typing import Any

from torch_parallel.bench import collectives, gpu, mpi
from torch_parallel.bench.common import recorded, save
from torch_parallel.bench.fit import save_fit
from torch_parallel.devices import choose_processes, usable_cpus
from torch_parallel.results import RunFolder
from torch_parallel.usage import ConfigError, OneLineParser

HEADING = f"{'size (bytes)':>13} {'count':>11} {'type':>6}  {'way':32}{'time (us)':>12}{'algbw':>9}{'busbw':>9}"


def heading(peer: str) -> str:
    again = f"{'in a row (us)':>15}{'busbw':>9}{f'x {peer}':>9}" if peer == gpu.PEER else ""
    return f"{HEADING}{f'x {peer}':>9}{again}{'wrong':>7}"


def line(row: dict[str, Any], peer: str) -> str:
    again = ""
    if "back_to_back_us" in row:
        in_a_row_us, busbw, ratio = (row[f"back_to_back_{each}"] for each in ("us", "busbw", "times_faster"))
        again = f"{in_a_row_us:15,.1f}{busbw:9.3f}{ratio:9.2f}"
    return (
        f"{row['size_bytes']:13,} {row['count']:11,} {row['type']:>6}  {row['way']:32}{row['time_us']:12,.1f}"
        f"{row['algbw']:9.3f}{row['busbw']:9.3f}{row[f'times_faster_than_{peer}']:9.2f}{again}{row['wrong']:7}"
    )


def bench_collectives(operations: list[str], arguments: list[str]) -> None:
    """`python -m torch_parallel bench NAME`, for one collective or, as `collectives`, for all."""
    name = operations[0] if len(operations) == 1 else "collectives"
    options = _parse(name, arguments)
    on_gpus = options.device == "cuda"
    measure: Any
    if on_gpus:
        peer, name, entries = gpu.PEER, f"{name}_gpu", gpu.versions()
        measure, sizes = partial(gpu.measure, all_settings=options.settings == "all"), gpu.SIZES_BYTES
        print("beside NCCL's: " + ", ".join(f"{key} {value}" for key, value in entries.items()))
    else:
        missing = mpi.why_not()
        peer, entries = collectives.PEER, {"mpi": missing or mpi.version()}
        measure, sizes = partial(collectives.measure, with_mpi=missing is None), collectives.SIZES_BYTES
        print("beside gloo" + ("'s and MPI's" if missing is None else f"'s; MPI's are left out: {missing}"))
    folder = RunFolder(options.results_dir, f"bench_{name}_n{'_'.join(map(str, options.n_gpus))}")
    rows: list[dict[str, Any]] = []
    with recorded(folder, n=max(options.n_gpus), counts=options.n_gpus, **entries):
        for n in options.n_gpus:
            jobs = collectives.jobs_of(operations, n, options.largest_mb * 2**20, sizes)
            operation = ""
            for of_job in measure(n, jobs):
                if of_job[0].operation != operation:
                    operation = of_job[0].operation
                    print(f"\n{operation}, {n} processes\n{heading(peer)}")
                for timing in of_job:
                    rows.append(timing.row(n, of_job[0]))
                    print(line(rows[-1], peer))
    wrong = [f"{row['way']} at {row['size_bytes']:,} bytes" for row in rows if row["wrong"]]
    if wrong:
        sys.exit(f"wrong results, so no figure above means anything: {', '.join(wrong)}")
    print(f"\nbandwidths in GB/s; times are medians of the slowest rank's; x {peer} = {peer}'s time / this one's")
    for best in gpu.best_grids(rows) if on_gpus else ():
        print(best)
    save(folder, rows)
    if not on_gpus:
        with contextlib.suppress(ValueError):  # too few sizes were asked for
            save_fit(folder.path, usable_cpus())


def _parse(name: str, arguments: list[str]) -> Namespace:
    """Raises ConfigError and DeviceError."""
    parser = OneLineParser(prog=f"python -m torch_parallel bench {name}", allow_abbrev=False)
    parser.add_argument("--n_gpus", type=int, nargs="+", default=[2], help="processes; one or more counts (default: 2)")
    parser.add_argument(
        "--largest_mb",
        type=float,
        help=f"no sizes above this many MiB (default: {collectives.LARGEST_MB}, on GPUs {gpu.LARGEST_MB})",
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cuda: beside NCCL (default: cpu)")
    parser.add_argument(
        "--settings",
        default="best",
        choices=("best", "all"),
        help="all: every grid of the GPU's kernel, by one algorithm",
    )
    parser.add_argument("--results_dir", default="results/runs", help="folder for a folder with the figures")
    options = parser.parse_args(arguments)
    if options.largest_mb is None:
        options.largest_mb = gpu.LARGEST_MB if options.device == "cuda" else collectives.LARGEST_MB
    if options.settings == "all" and options.device != "cuda":
        raise ConfigError("--settings all: the grids are those of the GPU's kernel; give --device cuda too")
    for n in options.n_gpus:
        if n < 2:
            raise ConfigError(f"--n_gpus {n}: it takes at least 2 processes to exchange anything")
        choose_processes(n, options.device)
    smallest = collectives.SIZES_BYTES[0]
    if not options.largest_mb * 2**20 >= smallest:  # nan too
        raise ConfigError(f"--largest_mb {options.largest_mb}: the smallest size is {smallest} bytes")
    return options
