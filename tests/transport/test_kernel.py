"""The Triton kernel without a GPU: Triton's interpreter runs it, a process for each rank, on memory that all map."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch

from torch_parallel import Communicator, launch
from torch_parallel.collectives import COLLECTIVES
from torch_parallel.transport.buffer import SharedBuffer

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def interpreted(communicator: Communicator, sizes: list[int], dtypes: list[torch.dtype]) -> list[str]:
    """Every collective that it can perform, twice; returns what was wrong."""
    global tl  # the interpreter looks for it there
    os.environ["TRITON_INTERPRET"] = "1"
    import triton
    import triton.language as tl

    from torch_parallel.transport import kernel, triton_performer

    @triton.jit
    def no_clock():  # type: ignore[no-untyped-def]  # the interpreter has none
        return tl.full((), 0, tl.int64)

    kernel._nanoseconds = no_clock
    transport, faults = communicator.transport, []
    rank, world_size = transport.rank, transport.world_size
    flags = transport.share(world_size * triton_performer.FLAGS_PER_PEER, torch.int32).parts
    gave_up = torch.zeros(1, dtype=torch.int64)
    performer = triton_performer.TritonPerformer(rank, flags, gave_up.data_ptr(), deadline_s=60)
    performer.settings = triton_performer.Settings(programs=3, block_bytes=64, warps=4)
    triton_performer.try_out(rank, world_size, torch.device("cpu"), gave_up.data_ptr(), deadline_s=60)
    for dtype in dtypes:
        for numel in sizes:
            buffer = transport.share(numel + 3, dtype)
            for name, collective in COLLECTIVES.items():
                chunks = collective.chunk_count(world_size)
                narrow = buffer.narrow(numel)
                if not performer.can_perform(collective, narrow):
                    continue
                for repetition in range(2):
                    unit = (torch.arange(numel) + repetition) % 5 + 1
                    buffer.local.fill_(-1)
                    narrow.local.copy_((rank + 1) * unit)
                    transport.agree("begin")
                    plan = transport._plan(collective, narrow)
                    performer.perform(collective, narrow, plan, name)
                    transport.agree("look")
                    parts = zip(unit.tensor_split(chunks), plan.result.tensor_split(chunks), strict=True)
                    for chunk, (one, found) in enumerate(parts):
                        contributors = collective.contributors(rank, world_size, chunk)
                        if contributors is not None:
                            expected = sum(each + 1 for each in contributors) * one
                            if not torch.equal(found, expected.to(dtype)):
                                faults.append(f"{name} {numel} {dtype} chunk {chunk}: {found} not {expected}")
                    if buffer.local[numel:].tolist() != [-1.0] * 3:
                        faults.append(f"{name} {numel} {dtype}: wrote behind the buffer")
    return faults


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_collective_in_the_interpreter(world_size: int) -> None:
    arguments: list[Any] = [[1, 16, 101], [torch.float32, torch.float16, torch.float64]]
    assert launch(interpreted, world_size, *arguments, threads=1, deadline_s=60) == [[]] * world_size


def what_it_can_perform(communicator: Communicator) -> list[str]:
    from torch_parallel.transport.triton_performer import TritonPerformer

    flags = communicator.share(10, torch.int32).parts
    performer = TritonPerformer(0, flags, 0, deadline_s=60)
    buffer, integers, empty = (communicator.share(*each) for each in ((6,), (6, torch.int64), (0,)))
    assert not performer.can_perform(COLLECTIVES["ring"], integers)
    assert not performer.can_perform(COLLECTIVES["ring"], empty)
    of_rank_0_alone = SharedBuffer([torch.zeros(6), torch.zeros(0)], rank=0)
    assert not performer.can_perform(COLLECTIVES["ring"], of_rank_0_alone)
    return [name for name, each in COLLECTIVES.items() if not performer.can_perform(each, buffer)]


def test_all_but_what_moves_chunks_to_other_places() -> None:
    assert launch(what_it_can_perform, 1, threads=1, deadline_s=60) == [["all_to_all"]]
