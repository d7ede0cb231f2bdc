"""What ranks do where one of them cannot take part, without a GPU: what needs one is replaced."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torch_parallel import Communicator, WorkerFailure, launch
from torch_parallel.collectives import COLLECTIVES
from torch_parallel.transport import cuda_ipc
from torch_parallel.transport.base import TransportError
from torch_parallel.transport.cuda_driver import DriverError


class FakeSignals:
    note_address = 0

    def __init__(self, rank: int, flags: list[torch.Tensor], device: torch.device, deadline_s: float) -> None:
        pass


class FakeTransport:
    def __init__(self, host: Any, arena: Any, signals: Any, device: Any, deadline_s: float, performer: str) -> None:
        self.performer = performer

    def meet(self) -> None:
        pass


def connected(communicator: Communicator, fails: str, performer: str) -> tuple[bool, str, str]:
    """Whether it is the host's transport, its performer, and the line; rank 1 fails with what `fails` names."""
    here = communicator.rank == 1

    def signals(*arguments: Any) -> FakeSignals:
        if here and fails == "register":
            raise DriverError("the CUDA driver failed with CUDA_ERROR_OPERATING_SYSTEM (304)")
        return FakeSignals(*arguments)

    def try_out(*arguments: Any) -> None:
        if here and fails == "compile":
            raise OSError("no C compiler\nand a second line")

    fake: Any = cuda_ipc
    fake._obstacle = lambda device, indices: "no way" if here and fails == "access" else ""
    fake.atomics_reach = lambda index, peer: not (here and fails == "atomics")
    fake._mapping_obstacle = lambda board, arena, world_size: board.first("")
    fake.StreamSignals, fake.CudaIpcTransport = signals, FakeTransport
    torch.cuda.synchronize = lambda device: None
    sys.modules["torch_parallel.transport.triton_performer"] = SimpleNamespace(try_out=try_out)  # type: ignore
    index = 0 if fails == "shares" else communicator.rank
    transport, line = cuda_ipc.connect_gpus(communicator.transport, torch.device("cuda", index), 20, performer)
    return transport is communicator.transport, getattr(transport, "performer", ""), line


@pytest.mark.parametrize(
    ("fails", "found"),
    [
        ("", (False, "auto", "")),
        ("access", (True, "", f"{cuda_ipc.THROUGH_HOST}: no way (rank 1)")),
        (
            "register",
            (
                True,
                "",
                f"{cuda_ipc.THROUGH_HOST}: GPU 1 cannot reach the host's memory: "
                "the CUDA driver failed with CUDA_ERROR_OPERATING_SYSTEM (304) (rank 1)",
            ),
        ),
        (
            "atomics",
            (
                False,
                "plain",
                "torch's own operations do what one kernel would do faster: "
                "GPU 1 cannot make atomic operations on the memory of GPU 0 (rank 1)",
            ),
        ),
        (
            "compile",
            (
                False,
                "plain",
                "torch's own operations do what one kernel would do faster: "
                "Triton does not work here: no C compiler (rank 1)",
            ),
        ),
        (
            "shares",
            (
                False,
                "plain",
                "torch's own operations do what one kernel would do faster: "
                "processes share a GPU, and while one's kernel waits there, the other's do not run",
            ),
        ),
    ],
)
def test_an_obstacle_of_one_rank_is_one_of_all(fails: str, found: tuple[bool, str, str]) -> None:
    assert launch(connected, 2, fails, "auto", threads=1, deadline_s=30) == [found] * 2


def refused(communicator: Communicator, fails: str) -> str:
    with pytest.raises(TransportError) as raised:
        connected(communicator, fails, "triton")
    return str(raised.value)


@pytest.mark.parametrize(
    ("fails", "why"),
    [("compile", "Triton does not work here: no C compiler"), ("access", f"{cuda_ipc.THROUGH_HOST}: no way")],
)
def test_who_asks_for_triton_is_told_that_it_does_not_work(fails: str, why: str) -> None:
    expected = f"--performer triton: {why} (rank 1); take --performer plain"
    assert launch(refused, 2, fails, threads=1, deadline_s=30) == [expected] * 2


def leaving(communicator: Communicator, told: bool) -> str:
    """What a worker function returns whose stream went on without its peer, with and without having been told so."""
    transport: Any = cuda_ipc.CudaIpcTransport.__new__(cuda_ipc.CudaIpcTransport)
    transport.rank, transport._calls = communicator.rank, communicator.transport._calls
    transport._watchdog = SimpleNamespace(failure="ring, round 0: no signal from rank 1 for 6.0 s")
    if told:
        with pytest.raises(TransportError, match="no signal from rank 1"):
            transport.settle()
    communicator.transport = transport
    return "returned"


def test_a_wait_that_failed_fails_the_run_unless_the_worker_function_was_told() -> None:
    assert launch(leaving, 1, True, threads=1, deadline_s=30) == ["returned"]
    with pytest.raises(WorkerFailure, match=r"rank 0, ring, round 0: no signal from rank 1 for 6\.0 s"):
        launch(leaving, 1, False, threads=1, deadline_s=30)


def test_who_asks_for_triton_on_a_shared_gpu_gets_it() -> None:
    assert launch(connected, 2, "shares", "triton", threads=1, deadline_s=30) == [(False, "triton", "")] * 2


def test_who_asks_for_plain_needs_no_compiler() -> None:
    assert launch(connected, 2, "compile", "plain", threads=1, deadline_s=30) == [(False, "plain", "")] * 2


def arena_without_gpus(communicator: Communicator) -> list[str]:
    """What every rank is told when rank 1 lacks the memory, and what it has when nobody does."""
    fake: Any = cuda_ipc
    lacks = [communicator.rank == 1]

    def current_stream(device: torch.device) -> Any:
        if lacks[0]:
            raise RuntimeError("CUDA out of memory\nand a second line")
        return SimpleNamespace(synchronize=lambda: None)

    torch.cuda.current_stream = current_stream  # type: ignore
    fake._handle = lambda tensor: (int, {"numel": tensor.numel()})
    fake.CudaArena._open = lambda arena, handle: torch.full((handle[1]["numel"],), 7, dtype=torch.uint8)
    board = cuda_ipc.Noticeboard(communicator.transport)
    with pytest.raises(RuntimeError) as raised:
        cuda_ipc.CudaArena(board, communicator.rank, torch.device("cpu")).allocate(2, 3, torch.uint8)
    lacks[0] = False
    arena = cuda_ipc.CudaArena(board, communicator.rank, torch.device("cpu"))
    got = [arena.allocate(count, 3, torch.uint8) for count in (2, 1)]
    return [str(raised.value), *(str([part.tolist() for part in parts]) for parts in got)]


def test_a_gpu_that_is_full_is_told_to_all_ranks() -> None:
    """Nobody waits in vain for a handle. A rank's own memory is zero; the peers' is 7 here."""
    full, own, theirs = "CUDA out of memory on rank 1", [0, 0, 0], [7, 7, 7]
    assert launch(arena_without_gpus, 2, threads=1, deadline_s=30) == [
        [full, str([own, theirs]), str([own])],
        [full, str([theirs, own]), str([theirs])],
    ]


@pytest.mark.parametrize(
    ("name", "two", "three", "four"),
    [
        ("ring", 128, 128, 128),
        ("two_shot", 128, 128, 128),  # adds 3 quarters of a buffer on each of four ranks
        ("one_shot", 128, math.inf, math.inf),  # adds 1, 2 and 3 whole buffers
        ("gather_scatter", 128, 128, 128),  # only rank 0 adds
        ("all_gather_average", 128, math.inf, math.inf),
        ("direct_reduce_scatter", 128, 128, 128),
        ("direct_all_gather", 32, 32, 32),
        ("broadcast", 32, 32, 32),
    ],
)
def test_up_to_which_size_the_kernel_performs(name: str, two: float, three: float, four: float) -> None:
    for world_size, mebibytes in ((2, two), (3, three), (4, four)):
        assert cuda_ipc.kernel_up_to_bytes(COLLECTIVES[name], world_size) == mebibytes * 2**20
