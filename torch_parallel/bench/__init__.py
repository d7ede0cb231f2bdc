"""Timings beside torch's own, taken so that they can be believed.

Both sides run in the same processes, in turns, with the same threads and the same data; a repeat's time is that of the
slowest rank, and medians over the repeats are compared.

    python -m torch_parallel bench all_reduce --n_gpus 2     every all-reduce algorithm beside gloo's
    python -m torch_parallel bench epoch --n_gpus 2          an epoch of training beside DistributedDataParallel's
    python -m torch_parallel bench step --n_gpus 2           a step of training beside it, and the memory of both
"""

from __future__ import annotations

import argparse

from torch_parallel.bench.all_reduce import bench_all_reduce
from torch_parallel.bench.epoch import bench_epoch
from torch_parallel.bench.step import bench_step
from torch_parallel.training.config import OneLineParser

BENCHES = {"all_reduce": bench_all_reduce, "epoch": bench_epoch, "step": bench_step}


def main(arguments: list[str]) -> None:
    """`python -m torch_parallel bench NAME ...`"""
    parser = OneLineParser(
        prog="python -m torch_parallel bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=len(arguments) < 2,
    )
    parser.add_argument("name", choices=tuple(BENCHES), metavar=f"{{{','.join(BENCHES)}}}")
    name = parser.parse_args(arguments[:1]).name
    BENCHES[name](arguments[1:])
