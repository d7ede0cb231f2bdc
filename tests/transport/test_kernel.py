"""The Triton kernel without a GPU: Triton's interpreter runs it, a process for each rank, on memory that all map."""

from __future__ import annotations

import importlib.util
import os
import time
from typing import TYPE_CHECKING

import pytest
import torch

from torch_parallel import Communicator, launch
from torch_parallel.collectives import COLLECTIVES
from torch_parallel.transport.base import Transport
from torch_parallel.transport.buffer import SharedBuffer
from torch_parallel.transport.stream_signals import as_int32

if TYPE_CHECKING:
    from torch_parallel.transport.triton_performer import TritonPerformer

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def performer_in_the_interpreter(transport: Transport, deadline_s: float | None = None) -> TritonPerformer:
    """Of this rank, with a grid of at most three programs; without a deadline it waits for ever."""
    global tl  # the interpreter looks for it there
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl

    from torch_parallel.transport import kernel, triton_performer

    def clock():  # type: ignore[no-untyped-def]  # the interpreter has none
        time.sleep(1e-4)  # asked for while a program waits, which else takes a processor from those it waits for
        return tl.full((), 0 if deadline_s is None else time.monotonic_ns(), tl.int64)

    kernel._nanoseconds, kernel._LOOKS = clock, tl.constexpr(1)
    flags = transport.share(transport.world_size * triton_performer.FLAGS_PER_PEER, torch.int32).parts
    note = transport.share(1, torch.int64).local.data_ptr()  # the transport keeps that memory
    limit_s = deadline_s or 60
    triton_performer.try_out(transport.rank, transport.world_size, torch.device("cpu"), note, limit_s)
    performer = triton_performer.TritonPerformer(transport.rank, flags, note, limit_s)
    performer.settings = triton_performer.Settings(programs=3, block_bytes=64, warps=4)
    return performer


def interpreted(communicator: Communicator, cases: list[tuple[torch.dtype, list[int]]]) -> list[str]:
    """Every collective that it can perform, twice; returns what was wrong."""
    transport, faults = communicator.transport, []
    rank, world_size = transport.rank, transport.world_size
    performer = performer_in_the_interpreter(transport)
    for dtype, sizes in cases:
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


@pytest.mark.exhaustive
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_collective_in_the_interpreter(world_size: int) -> None:
    """The interpreter takes its time: other types than float32 in one size, which neither 2, 3 nor a block divides."""
    cases = [(torch.float32, [1, 16, 101]), (torch.float16, [101]), (torch.float64, [101])]
    assert launch(interpreted, world_size, cases, threads=1, deadline_s=60) == [[]] * world_size


def flags_that_are_ahead(communicator: Communicator) -> tuple[int, list[float]]:
    """A sum by three programs, then by one until numbers have gone round by more than half, then by three.

    Returns how many flags say before the last that its first signal has come, and its result.
    """
    transport, ring = communicator.transport, COLLECTIVES["ring"]
    performer = performer_in_the_interpreter(transport)
    buffer = transport.share(96, torch.float32)  # 48 elements a chunk: three blocks of 64 bytes
    small = buffer.narrow(8)

    def perform(which: SharedBuffer) -> None:
        performer.perform(ring, which, transport._plan(ring, which), "ring")

    transport.agree("begin")
    perform(buffer)
    for near in (2**30 - 1, 2**31 - 1, -(2**30) - 1):  # what many small ones bring it to
        performer._base = near
        perform(small)
    transport.agree("have performed the small ones")
    first_number = as_int32(performer._base + 1)
    from_peer = performer.flags[transport.rank].view(2, -1)[1 - transport.rank]
    ahead = sum(as_int32(flag - first_number) >= 0 for flag in from_peer.tolist())
    buffer.local.fill_(10.0 + communicator.rank)
    transport.agree("have filled")
    perform(buffer)
    transport.agree("look")
    return ahead, buffer.local.unique().tolist()


def test_flags_of_programs_that_were_idle_for_long_are_not_ahead() -> None:
    assert launch(flags_that_are_ahead, 2, threads=1, deadline_s=60) == [(0, [21.0])] * 2


def waits_in_vain(communicator: Communicator) -> tuple[str, list[float], float]:
    """What rank 0 says that it waited for, what its memory holds, and how long it took, while rank 1 does nothing."""
    transport, ring = communicator.transport, COLLECTIVES["ring"]
    performer = performer_in_the_interpreter(transport, deadline_s=0.5)
    buffer = transport.share(96, torch.float32)
    buffer.local.fill_(10.0 + communicator.rank)
    told, start_s = "", time.monotonic()
    if communicator.rank == 0:
        for _ in range(2):  # the second does nothing: it is given up already
            performer.perform(ring, buffer, transport._plan(ring, buffer), "ring")
        told = performer.explain(int(performer._gave_up[0]))
    taken_s = time.monotonic() - start_s
    transport.agree("have waited")
    return told, buffer.local.unique().tolist(), taken_s


def test_who_waits_in_vain_gives_up_at_the_limit_and_says_for_whom() -> None:
    (told, held, taken_s), (_, others, _) = launch(waits_in_vain, 2, threads=1, deadline_s=60)
    assert told == "ring, round 0: no signal from rank 1 for 0.5 s"
    assert (held, others) == ([10.0], [11.0])
    assert 0.5 <= taken_s < 30


def waits_twice(communicator: Communicator) -> list[int]:
    """A wait whose flag comes just after its limit, before the next look, and one whose flag comes within it."""
    global tl, kernel, triton
    os.environ["TRITON_INTERPRET"] = "1"
    import triton
    import triton.language as tl

    from torch_parallel.transport import kernel

    flag, late, states = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64), torch.zeros(2)
    times_ns = iter([0, 100, 100, 105])  # the first wait begins, looks, then the second does; the limit is 10

    def clock():  # type: ignore[no-untyped-def]
        now_ns = next(times_ns)
        flag[0] += now_ns in (100, 105)  # what is waited for comes while the program looks at the clock
        if now_ns == 100 and flag[0] == 2:
            flag[0] = 1  # the second wait begins
        return tl.full((), now_ns, tl.int64)

    kernel._nanoseconds, kernel._LOOKS = clock, tl.constexpr(1)

    @triton.jit
    def twice(flag, late, states, limit_ns):  # type: ignore[no-untyped-def]
        tl.store(states, kernel._came(flag, 1, late, limit_ns))
        tl.store(states + 1, kernel._came(flag, 2, late, limit_ns))

    twice[(1,)](flag, late, states, 10)
    return [int(state) for state in states]


def test_a_wait_that_ends_at_its_limit_leaves_the_next_one_its_own() -> None:
    assert launch(waits_twice, 1, threads=1, deadline_s=60) == [[1, 1]]


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
