"""What all benches do: keep the environment with the figures, and put torch's own side together."""

from __future__ import annotations

import csv
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torch_parallel.communicator import Communicator
from torch_parallel.devices import threads_per_worker
from torch_parallel.results import RunFolder, environment

STREAMS_USED_UP = 2
"""Once NCCL has started in a process, kernels begin 1 us later beside one of the streams that are used next, as long as
that waits: 1.4 ms of a step of 78 in bf16, whoever exchanges on it (two H200, driver 580). Neither side is to get it.
Without NCCL there was no such stream."""


def start_group(communicator: Communicator, store: str) -> None:
    """A process group of all workers, by way of a file, so that no port has to be chosen. Servers are not in it."""
    rank, world_size = communicator.worker_index, communicator.worker_count
    on_gpu = communicator.device.type == "cuda"
    if rank is not None:
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            device_id=communicator.device if on_gpu else None,
        )
    if on_gpu:
        use_up_streams(communicator.device)


def use_up_streams(device: torch.device) -> None:
    """Lets as many streams do something as neither side is to get."""
    word = torch.zeros(1, device=device)
    torch.cuda.synchronize(device)
    for _ in range(STREAMS_USED_UP):
        with torch.cuda.stream(torch.cuda.Stream(device)):
            word.add_(1)
    torch.cuda.synchronize(device)


def recorded(folder: RunFolder, n: int, **entries: Any) -> AbstractContextManager[None]:
    return folder.running(**environment(), n=n, threads=threads_per_worker(n), **entries)


def write_table(file: Path, rows: list[dict[str, Any]]) -> None:
    with open(file, "w", newline="", encoding="utf-8") as opened:
        writer = csv.DictWriter(opened, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def save(folder: RunFolder, rows: list[dict[str, Any]]) -> None:
    write_table(folder.path / "bench.csv", rows)
    print(f"results in {folder.path}")
