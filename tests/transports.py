"""Every kind of transport under test, and how a function is run on all ranks of one."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from torch_parallel import join
from torch_parallel.communicator import Communicator
from torch_parallel.launcher import launch
from torch_parallel.status import RAISED, RETURNED
from torch_parallel.transport.local import LocalGroup

OVER_NODES = ("process groups", "two nodes")
"""Every rank a node of its own, so that all goes by process groups; and two nodes, so that some goes by memory."""
TRANSPORTS = ("threads", "sequence numbers", "pipes", *OVER_NODES)
GPU_MARKS = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() == 0, reason="there is no GPU")]
GPU_TRANSPORTS = ("gpu plain", "gpu triton")

MEMORIES = tuple(kind for kind in TRANSPORTS if kind not in OVER_NODES)
every_memory = pytest.mark.parametrize("kind", MEMORIES)
every_memory_and_gpus = pytest.mark.parametrize(
    "kind", [*MEMORIES, *(pytest.param(kind, marks=GPU_MARKS) for kind in GPU_TRANSPORTS)]
)
every_transport = pytest.mark.parametrize("kind", TRANSPORTS)
every_transport_and_gpus = pytest.mark.parametrize(
    "kind", [*TRANSPORTS, *(pytest.param(kind, marks=GPU_MARKS) for kind in GPU_TRANSPORTS)]
)


def gpu_memory_mb() -> list[int]:
    """MiB in use on each GPU, this process's own context among them."""
    used = []
    for gpu in range(torch.cuda.device_count()):
        torch.zeros(1, device=f"cuda:{gpu}")
        free, total = torch.cuda.mem_get_info(gpu)
        used.append((total - free) >> 20)
    return used


def gpu_memory_falls_to(before: list[int]) -> bool:
    """Whether within 10 s no GPU has 200 MiB more in use than before; a worker's context alone takes more."""
    end_s = time.monotonic() + 10
    while not (fallen := all(now < then + 200 for now, then in zip(gpu_memory_mb(), before, strict=True))):
        if time.monotonic() > end_s:
            break
        time.sleep(0.2)
    return fallen


def on_all_ranks(
    kind: str, world_size: int, function: Callable[..., Any], *arguments: Any, deadline_s: float = 20.0
) -> list[Any]:
    """The results of `function(transport, *arguments)`, by rank."""
    if kind in GPU_TRANSPORTS:
        return launch(
            lambda communicator: function(communicator.transport, *arguments),
            world_size,
            threads=1,
            deadline_s=60,  # the kernel is compiled when it is first used
            device="cuda",
            performer=kind.split()[1],
        )
    if kind in OVER_NODES:
        with tempfile.TemporaryDirectory() as folder:
            return launch(
                _in_a_node,
                world_size,
                f"{folder}/store",
                kind,
                function,
                arguments,
                deadline_s,
                threads=1,
                deadline_s=deadline_s + 20,
            )
    if kind != "threads":
        return launch(
            lambda communicator: function(communicator.transport, *arguments),
            world_size,
            threads=1,
            deadline_s=deadline_s,
            signal_pipes=kind == "pipes",
        )
    group = LocalGroup(world_size, deadline_s)
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        transport = group.transport(rank)
        try:
            results[rank] = function(transport, *arguments)
            transport.status.is_over(RETURNED)
        except BaseException as error:
            errors.append(error)
            transport.status.is_over(RAISED)

    in_threads(body, world_size, limit_s=60)
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(world_size)]


def _in_a_node(
    communicator: Communicator,
    path: str,
    kind: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    deadline_s: float,
) -> Any:
    rank, world_size = communicator.rank, communicator.world_size
    node = str(rank if kind == "process groups" else 2 * rank // world_size)
    joined = join(FileStore(path, world_size), rank, world_size, node=node, deadline_s=20.0)
    transport = joined.transport
    for signals in (transport._signals, getattr(transport._signals, "near", transport._signals)):
        signals._deadline_s = deadline_s
    try:
        transport.waited_s[:] = [0.0] * world_size
        result = function(transport, *arguments)
        transport.leave()
        joined.status.is_over(RETURNED)
        transport.close()
        communicator.barrier()  # the messenger of a node ends with the process of its lowest rank
        return result
    except BaseException:
        joined.status.is_over(RAISED)
        raise


def in_threads(body: Callable[[int], None], world_size: int, limit_s: float) -> None:
    """Calls `body(rank)` for every rank, each in a thread of its own; all must have ended within the limit."""
    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s)
        assert not thread.is_alive()
