"""What every transport promises, held against all of them: threads, sequence numbers, pipes that carry signals; GPUs.

The last need `pytest -m gpu` and a GPU. With more ranks than GPUs several share one.
"""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transports import (
    GPU_MARKS,
    GPU_TRANSPORTS,
    OVER_NODES,
    TRANSPORTS,
    every_memory,
    every_memory_and_gpus,
    every_transport,
    every_transport_and_gpus,
    on_all_ranks,
)

from torch_parallel.collectives import ALL_REDUCE, COLLECTIVES, HIERARCHICAL, RING_ALL_REDUCE, broadcast_from, reduce_to
from torch_parallel.collectives.schedule import Collective
from torch_parallel.transport.base import Transport, TransportError
from torch_parallel.transport.buffer import SharedBuffer

SUMS = ALL_REDUCE | HIERARCHICAL

DTYPES = (torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.float16)


# ---- results ----


def pattern(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """(rank + 1) * 1 2 3 4 5 6 7 1 2 3 ...: 8 ranks add up to at most 252, which even bfloat16 holds exactly."""
    return ((rank + 1) * (torch.arange(numel) % 7 + 1)).to(dtype)


def promised(name: str, rank: int, world_size: int, numel: int, dtype: torch.dtype) -> list[tuple[slice, Tensor]]:
    """What each collective has to leave on a rank: the parts of the buffer, and what they hold. Worked out by hand."""
    unit = pattern(0, numel, torch.float64)  # what rank 0 contributes; rank r contributes r + 1 times as much
    total = world_size * (world_size + 1) // 2
    ends = [0, *torch.tensor([len(part) for part in torch.arange(numel).tensor_split(world_size)]).cumsum(0).tolist()]
    chunks = [slice(start, stop) for start, stop in pairwise(ends)]
    whole = slice(0, numel)
    unchanged = [(whole, (rank + 1) * unit)]
    if name in SUMS:
        parts = [(whole, total * unit)]
    elif name in ("ring_reduce_scatter", "direct_reduce_scatter"):
        parts = [(chunks[rank], total * unit[chunks[rank]])]
    elif name in ("ring_all_gather", "direct_all_gather") or (name == "gather" and rank == 0):
        parts = [(chunk, (owner + 1) * unit[chunk]) for owner, chunk in enumerate(chunks)]
    elif name == "all_to_all":
        parts = [(chunk, (owner + 1) * unit[chunks[rank]]) for owner, chunk in enumerate(chunks)]
    elif name == "scatter":
        parts = [(chunks[rank], unit[chunks[rank]])]
    elif name in ("gather", "barrier"):
        parts = unchanged
    elif name in ("reduce", "tree_reduce"):
        parts = [(whole, total * unit)] if rank == 0 else [] if name == "tree_reduce" else unchanged
    elif name == "push":
        parts = [(whole, (total - 1) * unit)] if rank == 0 and world_size > 1 else unchanged
    else:
        assert name in ("broadcast", "tree_broadcast"), f"say here what {name} has to leave"
        parts = [(whole, unit)]
    return [(where, values.to(dtype)) for where, values in parts]


def fitting(numel: int, transport: Transport) -> list[str]:
    """The collectives that can be performed on a buffer of that size: all but all_to_all, which needs equal chunks,
    and those that need memory in common, where there is none."""
    return [
        name
        for name, each in COLLECTIVES.items()
        if (not each.equal_chunks or numel % transport.world_size == 0)
        and (transport.one_memory or not each.common_result)
    ]


def sums_on(transport: Transport) -> dict[str, Collective]:
    """The all-reduces that it can perform: without memory in common, the one that needs it in its other form."""
    nodes = (0,) * transport.world_size if transport.one_memory else tuple(range(transport.world_size))
    return {name: each.placed(nodes) if each.common_result else each for name, each in ALL_REDUCE.items()}


def perform_everything(transport: Transport, sizes: list[int], dtypes: tuple[torch.dtype, ...]) -> list[str]:
    """Each collective on each size and dtype; returns what was wrong. Between the buffers lie others, of zeros."""
    faults = []
    for dtype in dtypes:
        guards = []
        for numel in sizes:
            guards.append(transport.share(5, dtype))
            buffer = transport.share(numel, dtype)
            if any(part.count_nonzero() for part in buffer.parts):
                faults.append(f"{numel} {dtype}: not zero-filled")
            transport.agree("have looked at the zeros")
            for name in fitting(numel, transport):
                transport.settle()
                buffer.local.copy_(pattern(transport.rank, numel, dtype))
                result = transport.perform(COLLECTIVES[name], buffer)
                for where, values in promised(name, transport.rank, transport.world_size, numel, dtype):
                    found = result[where].cpu()
                    if not torch.equal(found, values):
                        faults.append(f"{name}, {numel} {dtype}, {where}: {found[:9]} not {values[:9]}")
            if any(part.count_nonzero() for guard in guards for part in guard.parts):
                faults.append(f"{numel} {dtype}: wrote outside the buffer")
    return faults


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "kind, world_size",
    [
        *((kind, n) for kind in TRANSPORTS for n in (1, 2, 3, 4, 5)),
        ("threads", 8),
        *(pytest.param(kind, n, marks=GPU_MARKS) for kind in GPU_TRANSPORTS for n in (1, 2, 3, 4)),
    ],
)
def test_every_collective_every_size_every_dtype(kind: str, world_size: int) -> None:
    sizes = sorted({0, 1, world_size, world_size + 1, 1009, 60 * world_size})
    assert on_all_ranks(kind, world_size, perform_everything, sizes, DTYPES) == [[]] * world_size


@every_transport_and_gpus
@pytest.mark.parametrize("world_size, dtype", [(3, torch.float32), (4, torch.bfloat16)])
@pytest.mark.exhaustive
def test_a_million_and_three_elements(kind: str, world_size: int, dtype: torch.dtype) -> None:
    assert on_all_ranks(kind, world_size, perform_everything, [1_000_003], (dtype,)) == [[]] * world_size


def all_reduced(transport: Transport, values: list[float], numel: int) -> list[float]:
    buffer = transport.share(numel, torch.float32)
    buffer.local.fill_(values[transport.rank])
    transport.perform(RING_ALL_REDUCE, buffer)
    return sorted(set(buffer.local.tolist()))


@every_transport_and_gpus
@pytest.mark.parametrize("world_size, total", [(1, 1.0), (2, 3.0), (3, 6.0), (4, 10.0), (5, 15.0)])
def test_ones_times_rank_plus_one(kind: str, world_size: int, total: float) -> None:
    values = [rank + 1.0 for rank in range(world_size)]
    assert on_all_ranks(kind, world_size, all_reduced, values, 11) == [[total]] * world_size


def reduce_random(transport: Transport, numel: int) -> Tensor:
    """Normal numbers of 16 orders of magnitude, whose float32 sum depends on the order of adding; and all sums."""
    generator = torch.Generator().manual_seed(transport.rank)
    values = torch.randn(numel, generator=generator) * 10 ** (16 * torch.rand(numel, generator=generator) - 8)
    buffer = transport.share(numel, torch.float32)
    sums = []
    for collective in sums_on(transport).values():
        transport.settle()
        buffer.local.copy_(values)
        sums.append(transport.perform(collective, buffer).cpu().clone())
    return torch.stack([values, *sums])


@every_transport_and_gpus
def test_same_bits_on_every_rank(kind: str) -> None:
    results = on_all_ranks(kind, 4, reduce_random, 4099)
    inputs = torch.stack([values for values, *_ in results]).double()
    bound = inputs.abs().sum(0) * 4 * 2**-24
    for name, *sums in zip(ALL_REDUCE, *(of_rank[1:] for of_rank in results), strict=True):
        for total in sums[1:]:
            assert torch.equal(total.view(torch.int32), sums[0].view(torch.int32)), name
        assert bool(((sums[0].double() - inputs.sum(0)).abs() <= bound).all()), name


def reduce_scatter_leaves(transport: Transport, numel: int) -> tuple[list[list[int]], list[int]]:
    """All parts after a ring reduce_scatter, as rank 0 sees them, and what lies behind the narrowed buffer."""
    wide = transport.share(numel + 5, torch.int64)
    wide.local.fill_(-1)
    buffer = wide.narrow(numel)
    buffer.local.fill_(10**transport.rank)
    transport.perform(COLLECTIVES["ring_reduce_scatter"], buffer)
    transport.settle()
    transport.agree("look at the parts")
    reached = [transport._reached(rank) for rank in range(transport.world_size)]
    parts = [part.tolist() if here else [] for part, here in zip(buffer.parts, reached, strict=True)]
    return parts, wide.local[numel:].tolist()


@every_transport_and_gpus
def test_reduce_scatter_changes_only_what_it_sums(kind: str) -> None:
    # One digit a rank, so a number shows whose contributions it holds. Chunk k ends on rank k; on the way it grows on
    # ranks k+1 (its first sender, where it stays as it was), k+2, k+3 and k.
    expected = [
        [1111, 1101, 1001, 1],
        [10, 1111, 1011, 11],  # read: of rank 1, chunks 0, 1, 2 and 3
        [110, 100, 1111, 111],
        [1110, 1100, 1000, 1111],
    ]
    # chunk 0 of rank 3 holds ranks 1, 2, 3; chunk 3 of rank 0 is rank 0's own, first to be sent
    for rank, (parts, behind) in enumerate(on_all_ranks(kind, 4, reduce_scatter_leaves, 4)):
        assert parts[rank] == expected[rank]
        assert all(part in ([], there) for part, there in zip(parts, expected, strict=True))
        assert kind in OVER_NODES or all(parts)
        assert behind == [-1] * 5


# ---- races ----


def digits(rank: int, repetition: int, numel: int) -> Tensor:
    """Three decimal digits a rank: float64 holds sums of five ranks exactly."""
    return ((torch.arange(numel) + repetition) % 1000 * 1000**rank).double()


def hammer(transport: Transport, repetitions: int, numel: int, seed: int) -> list[str]:
    """Random collectives back to back on two buffers, refilled after `settle`, with sleeps at random ranks."""
    common, own = random.Random(seed), random.Random(seed * 100 + transport.rank)
    buffers = [transport.share(numel, torch.float64) for _ in range(2)]
    rank, world_size, faults = transport.rank, transport.world_size, []
    mine = slice(numel * rank // world_size, numel * (rank + 1) // world_size)
    for repetition in range(repetitions):
        name, buffer = common.choice(fitting(numel, transport)), common.choice(buffers)
        if own.random() < 0.1:
            time.sleep(own.random() * 0.004)
        transport.settle()
        buffer.local.copy_(digits(rank, repetition, numel))
        if own.random() < 0.1:
            time.sleep(own.random() * 0.004)
        result = transport.perform(COLLECTIVES[name], buffer)
        if own.random() < 0.1:
            time.sleep(own.random() * 0.004)  # a slow reader of its result
        everyone = [digits(r, repetition, numel) for r in range(world_size)]
        owned = [slice(numel * r // world_size, numel * (r + 1) // world_size) for r in range(world_size)]
        where, expected = slice(None), everyone[rank]
        if name in SUMS:
            expected = torch.stack(everyone).sum(0)
        elif name.endswith("reduce_scatter"):
            where, expected = mine, torch.stack(everyone).sum(0)[mine]
        elif name.endswith("all_gather") or (name == "gather" and rank == 0):
            expected = torch.cat([everyone[r][owned[r]] for r in range(world_size)])
        elif name == "all_to_all":
            expected = torch.cat([each[mine] for each in everyone])
        elif name == "scatter":
            where, expected = mine, everyone[0][mine]
        elif name.endswith("broadcast"):
            expected = everyone[0]
        elif name in ("reduce", "tree_reduce", "push") and rank == 0:
            expected = torch.stack(everyone[1:] if name == "push" else everyone).sum(0)
        elif name == "tree_reduce":
            continue  # half-way sums
        if not torch.equal(result[where].cpu(), expected):
            faults.append(f"{name} in repetition {repetition}")
    return faults


@every_transport_and_gpus
@pytest.mark.parametrize("world_size, numel", [(3, 24_000), (5, 1000)])
@pytest.mark.exhaustive
def test_hundreds_in_a_row_with_slow_ranks(kind: str, world_size: int, numel: int) -> None:
    """Whoever is signalled too early, or twice for once, reads another repetition's numbers."""
    assert on_all_ranks(kind, world_size, hammer, 250, numel, 7) == [[]] * world_size


def read_a_common_result(transport: Transport, announced: bool) -> list[list[float]]:
    """What each rank finds in a common result at once, and again after the others have had 0.2 s for the next one.

    Rank 0 is the slow reader. Without `announced` the fast ones are told that it is there: the guard is taken out.
    """
    collective, found = ALL_REDUCE["two_shot_in_place"], []
    buffer = transport.share(12, torch.float64)
    for repetition in range(3):
        transport.settle()
        buffer.local.fill_(float(10**repetition * (transport.rank + 1)))
        if repetition == 1 and not announced:
            _write_without_waiting(transport, buffer)
        result = transport.perform(collective, buffer)
        found.append(sorted(set(result.tolist())))
        if transport.rank == 0 and repetition == 0:
            time.sleep(0.2)
            found[0] += sorted(set(result.tolist()))
    transport.agree("the end")
    return found


def _write_without_waiting(transport: Transport, buffer: SharedBuffer) -> None:
    assert buffer.common is not None
    if transport.rank != 0:
        buffer.common.fill_(-1.0)


@every_memory_and_gpus
def test_a_slow_reader_of_a_common_result_is_waited_for(kind: str) -> None:
    first, *others = on_all_ranks(kind, 3, read_a_common_result, True)
    assert first == [[6.0, 6.0], [60.0], [600.0]]
    assert others == [[[6.0], [60.0], [600.0]]] * 2


def test_who_does_not_wait_for_the_slow_reader_overwrites_its_result() -> None:
    """That the test above can fail: at the latest after 0.2 s."""
    first, *_ = on_all_ranks("threads", 3, read_a_common_result, False)
    assert -1.0 in first[0]


def test_the_fast_do_not_get_ahead_of_a_slow_reader() -> None:
    """The ranks that are done with the result must not finish the next one while rank 0 still uses the last."""

    def seconds(transport: Transport) -> float:
        buffer = transport.share(6, torch.float32)
        collective = ALL_REDUCE["two_shot_in_place"]
        transport.perform(collective, buffer)
        start_s = time.perf_counter()
        if transport.rank == 0:
            time.sleep(0.3)
        transport.settle()
        transport.perform(collective, buffer)
        return time.perf_counter() - start_s

    assert min(on_all_ranks("threads", 3, seconds)) > 0.25


def narrowed(transport: Transport) -> tuple[list[list[float]], int, bool]:
    """Results of many sizes on one buffer, how much scratch there is then, and whether the common region is one."""
    whole, found = transport.share(64, torch.float64), []
    for numel in (64, 1, 33, 0, 64):
        buffer = whole.narrow(numel)
        for name in ("one_shot", "two_shot_in_place", "all_gather_average"):
            transport.settle()
            buffer.local.fill_(float(transport.rank + 1))
            found.append(sorted(set(transport.perform(ALL_REDUCE[name], buffer).tolist())))
    assert whole.common is not None
    transport.agree("write into it")
    if transport.rank == 0:
        whole.common[5] = 42.0
    transport.agree("look into it")
    return found, sum(region.numel() for region in whole.scratch), whole.common[5].item() == 42.0


@every_memory_and_gpus
def test_a_narrowed_buffer_uses_the_regions_of_the_whole(kind: str) -> None:
    sums = [[6.0]] * 3
    for found, scratch, is_one in on_all_ranks(kind, 3, narrowed):
        assert found == [*sums, *sums, *sums, [], [], [], *sums]
        assert scratch == 2 * 64  # all_gather_average keeps two others' buffers; no size adds to that
        assert is_one


def test_memory_is_allocated_only_where_it_is_needed() -> None:
    def scratch(transport: Transport, name: str) -> tuple[int, bool]:
        buffer = transport.share(10, torch.float32)
        transport.perform(COLLECTIVES[name], buffer)
        return sum(region.numel() for region in buffer.scratch), buffer.common is not None

    assert on_all_ranks("threads", 3, scratch, "ring") == [(0, False)] * 3
    assert on_all_ranks("threads", 3, scratch, "gather_scatter") == [(20, False), (0, False), (0, False)]
    assert on_all_ranks("threads", 3, scratch, "two_shot_in_place") == [(0, True)] * 3


def test_all_to_all_of_a_size_that_cannot_be_cut_evenly() -> None:
    def uneven(transport: Transport) -> None:
        transport.perform(COLLECTIVES["all_to_all"], transport.share(10, torch.float32))

    with pytest.raises(ValueError, match="all_to_all of 10 elements: 3 ranks need a multiple of 3"):
        on_all_ranks("threads", 3, uneven)


def broadcast_to_a_slow_reader(transport: Transport, wait_for_reader: bool) -> tuple[list[float], float]:
    """Rank 0 overwrites its buffer right after a broadcast, of which rank 2 reads its part 0.3 s late."""
    buffer = transport.share(6, torch.float32)
    collective = broadcast_from(0)
    buffer.local.fill_(1.0)
    transport.perform(collective, buffer)  # binds the plan
    transport.settle()
    buffer.local.fill_(2.0)
    if transport.rank == 2:
        rounds = buffer.plans[collective].rounds
        ((source, copy, theirs, nbytes),) = rounds[0][1]
        rounds[0][1][0] = (source, lambda tensor: (time.sleep(0.3), copy(tensor)), theirs, nbytes)
    transport.agree("begin")
    transport.perform(collective, buffer)
    start_s = time.perf_counter()
    if wait_for_reader:
        transport.settle()
    settle_s = time.perf_counter() - start_s
    if transport.rank == 0:
        buffer.local.fill_(3.0)
    return buffer.local.tolist(), settle_s


@every_transport
@pytest.mark.exhaustive
def test_settle_waits_for_a_slow_reader(kind: str) -> None:
    results = on_all_ranks(kind, 3, broadcast_to_a_slow_reader, True)
    assert [values for values, _ in results] == [[3.0] * 6, [2.0] * 6, [2.0] * 6]
    assert results[0][1] > 0.25


@every_memory
def test_without_settle_the_slow_reader_is_overtaken(kind: str) -> None:
    """Why `settle` exists, and that the test above can fail."""
    results = on_all_ranks(kind, 3, broadcast_to_a_slow_reader, False)
    assert results[2][0] == [3.0] * 6


def all_reduce_with_slow_reads(transport: Transport, slow_rank: int) -> list[float]:
    """Every read of one rank starts late; all refill as soon as `settle` lets them."""
    buffer, seen = transport.share(transport.world_size * 2, torch.float64), []
    for repetition in range(4):
        transport.settle()
        buffer.local.fill_(float(10**repetition * (transport.rank + 1)))
        if repetition == 1 and transport.rank == slow_rank:
            _make_reads_slow(buffer)
        transport.perform(RING_ALL_REDUCE, buffer)
        seen += sorted(set(buffer.local.tolist()))
    return seen


def _make_reads_slow(buffer: SharedBuffer) -> None:
    for _, pulls in buffer.plans[RING_ALL_REDUCE].rounds:
        for index, (source, operation, theirs, nbytes) in enumerate(pulls):
            pulls[index] = (source, lambda tensor, read=operation: (time.sleep(0.03), read(tensor)), theirs, nbytes)


@every_transport
@pytest.mark.parametrize("slow_rank", [0, 2])
@pytest.mark.exhaustive
def test_a_rank_that_reads_late_gets_the_right_sums(kind: str, slow_rank: int) -> None:
    results = on_all_ranks(kind, 3, all_reduce_with_slow_reads, slow_rank)
    assert results == [[6.0, 60.0, 600.0, 6000.0]] * 3


# ---- counts ----


def observed(transport: Transport, numel: int, dtype: torch.dtype) -> dict[str, Any]:
    buffer = transport.share(numel, dtype)
    seen: dict[str, Any] = {}
    for name in fitting(numel, transport):
        collective = COLLECTIVES[name]
        transport.settle()
        transfers: list[Any] = []
        transport.observer = transfers.append
        before = list(transport.received_bytes)
        start_s = time.perf_counter()
        transport.perform(collective, buffer, purpose=f"the {name}")
        end_s = time.perf_counter()
        transport.observer = None
        for t in transfers:
            assert t.to == transport.rank and t.purpose == f"the {name}"
            assert start_s <= t.wait_start_s <= t.start_s <= t.end_s <= end_s
        read = [now - then for now, then in zip(transport.received_bytes, before, strict=True)]
        seen[name] = [(t.source, t.bytes, t.round) for t in transfers], read
    return seen


@every_transport_and_gpus
@pytest.mark.parametrize("world_size, numel, dtype", [(4, 1003, torch.float32), (3, 2, torch.float64)])
@pytest.mark.exhaustive
def test_observed_bytes_and_messages_are_the_formulas(
    kind: str, world_size: int, numel: int, dtype: torch.dtype
) -> None:
    results = on_all_ranks(kind, world_size, observed, numel, dtype)
    for name in results[0]:
        collective = COLLECTIVES[name]
        messages: Counter[int] = Counter()
        sent: Counter[int] = Counter()
        for rank, seen in enumerate(results):
            transfers, read = seen[name]
            for source, nbytes, round_index in transfers:
                messages[source] += 1
                sent[source] += nbytes
                assert 0 <= round_index < collective.round_count(rank, world_size)
            by_source = Counter(dict.fromkeys(range(world_size), 0))
            for source, nbytes, _ in transfers:
                by_source[source] += nbytes
            assert read == [by_source[source] for source in range(world_size)], name
        for rank in range(world_size):
            assert messages[rank] == collective.message_count(rank, world_size), name
            assert sent[rank] == collective.sent_elements(rank, world_size, numel) * dtype.itemsize, name


def test_bytes_of_the_ring_by_hand() -> None:
    # 10 float32 on 4 ranks are chunks of 3, 3, 2, 2. A rank sends twice the buffer less its own chunk and its right
    # neighbour's: 20 - 3 - 3, 20 - 3 - 2, 20 - 2 - 2 and 20 - 2 - 3 elements.
    results = on_all_ranks("threads", 4, observed, 10, torch.float32)
    read = [seen["ring"][1] for seen in results]
    assert read == [[0, 0, 0, 60], [56, 0, 0, 0], [0, 60, 0, 0], [0, 0, 64, 0]]
    assert [len(seen["ring"][0]) for seen in results] == [6, 6, 6, 6]


def wait_for_rank_2(transport: Transport) -> list[float]:
    buffer = transport.share(8, torch.float32)
    before = list(transport.waited_s)
    if transport.rank == 2:
        time.sleep(0.4)
    transport.perform(broadcast_from(2), buffer)
    return [now - then for now, then in zip(transport.waited_s, before, strict=True)]


@every_transport
def test_waited_s_names_the_slow_peer(kind: str) -> None:
    waited = on_all_ranks(kind, 3, wait_for_rank_2)
    for rank in (0, 1):
        assert waited[rank][2] > 0.3
        assert waited[rank][:2] == [0.0, 0.0]
    assert waited[2] == [0.0, 0.0, 0.0]


# ---- errors ----


def rank_1_stays_away(transport: Transport, what: str) -> str:
    buffer = transport.share(9, torch.float32)
    if transport.rank == 1:
        time.sleep(2.5)  # past the others' deadline
        return ""
    try:
        if what == "agree":
            transport.agree("meet here")
        elif what == "settle":  # rank 1 is to read what rank 0 broadcasts
            transport.perform(broadcast_from(0), buffer)
            transport.settle()
        elif what == "settle unnamed":
            transport.perform(reduce_to(0), buffer)
        else:
            transport.perform(RING_ALL_REDUCE, buffer, "gradients of bucket 3")
    except TransportError as error:
        time.sleep(1.2)  # nor does who gives up return before the others' deadline
        return str(error)
    return "no error"


@every_transport
@pytest.mark.parametrize(
    "what, on_rank_0, on_rank_2",
    [
        # the ring of 3: rank 2 needs rank 1 in the first round; rank 0 gets rank 2's first chunk and misses the second
        (
            "ring",
            "rank 0, gradients of bucket 3, round 1: no signal from rank 2 for X s",
            "rank 2, gradients of bucket 3, round 0: no signal from rank 1 for X s",
        ),
        (
            "agree",
            "rank 0, meet here: no signal from rank 1 for X s",
            "rank 2, meet here: no signal from rank 1 for X s",
        ),
        ("settle", "rank 0, broadcast, end of the peer's reading: no signal from rank 1 for X s", "no error"),
        ("settle unnamed", "rank 0, reduce, round 0: no signal from rank 1 for X s", "no error"),
    ],
)
@pytest.mark.exhaustive
def test_deadline_names_rank_peer_purpose_and_round(kind: str, what: str, on_rank_0: str, on_rank_2: str) -> None:
    errors = on_all_ranks(kind, 3, rank_1_stays_away, what, deadline_s=0.9)
    assert [re.sub(r"for [0-9]\.\d s$", "for X s", error) for error in errors] == [on_rank_0, "", on_rank_2]


def ask_for(transport: Transport, requests: list[tuple[int, str]]) -> str:
    numel, dtype = requests[transport.rank]
    try:
        transport.share(numel, getattr(torch, dtype))
    except TransportError as error:
        return str(error)
    return "no error"


@every_transport_and_gpus
def test_ranks_that_share_different_buffers_are_told_so(kind: str) -> None:
    *errors, last = on_all_ranks(kind, 3, ask_for, [(5, "float32"), (5, "float32"), (6, "float64")])
    advice = "all ranks must call the same operations in the same order"
    five, six = "share 5 elements of torch.float32", "share 6 elements of torch.float64"
    assert errors == [
        f"call 1: rank 0 wants to {five}, but rank 2 wants to {six}: {advice}",
        f"call 1: rank 1 wants to {five}, but rank 2 wants to {six}: {advice}",
    ]
    # of two that differ from it, whoever came first
    assert last in [f"call 1: rank 2 wants to {six}, but rank {other} wants to {five}: {advice}" for other in (0, 1)]


def agree_on_a_long_text(transport: Transport, ends: str) -> str:
    """400 bytes and more, of two-byte letters too, that differ in the last one only."""
    try:
        transport.agree("sum by " + "é" * 200 + ends[transport.rank])
    except TransportError as error:
        return str(error)
    return "no error"


@every_transport
def test_texts_too_long_to_be_sent_are_told_apart_all_the_same(kind: str) -> None:
    assert on_all_ranks(kind, 2, agree_on_a_long_text, "aa") == ["no error"] * 2
    for rank, error in enumerate(on_all_ranks(kind, 2, agree_on_a_long_text, "ab")):
        assert re.match(
            rf"call 1: rank {rank} wants to sum by é+\.\.\. \w+, but rank {1 - rank} "
            rf"wants to sum by é+\.\.\. \w+:",
            error,
        )


# ---- one buffer for all, and acknowledging later ----


def write_in_common(transport: Transport, numel: int, dtype: torch.dtype) -> tuple[list[float], list[float]]:
    """What a rank finds in the common buffer before and after every rank wrote its own elements of it."""
    own = transport.share(3, dtype)  # buffers of both kinds lie beside each other
    common = transport.share_common(numel, dtype)
    behind = transport.share_common(4, dtype)
    before = common.tolist()
    transport.agree("have looked at the zeros")
    common[transport.rank :: transport.world_size] = transport.rank + 1
    transport.agree("have written")
    after = common.tolist()
    assert not own.local.count_nonzero() and not behind.count_nonzero()
    return before, after


@every_memory_and_gpus
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_all_ranks_write_and_read_one_buffer(kind: str, dtype: torch.dtype) -> None:
    for before, after in on_all_ranks(kind, 3, write_in_common, 7, dtype):
        assert before == [0] * 7
        assert after == [1, 2, 3, 1, 2, 3, 1]
    assert on_all_ranks(kind, 3, write_in_common, 0, dtype) == [([], [])] * 3


def share_differently(transport: Transport, in_common: int) -> str:
    """Rank `in_common` asks for a common buffer, the others for one of each rank."""
    share = transport.share_common if transport.rank == in_common else transport.share
    try:
        share(5, torch.float32)
    except TransportError as error:
        return str(error)
    return "no error"


def test_one_buffer_for_all_and_one_for_each_are_not_the_same() -> None:
    errors = on_all_ranks("sequence numbers", 2, share_differently, 1)
    each, common = "share 5 elements of torch.float32", "share 5 elements of torch.float32 in common"
    assert errors[0].startswith(f"call 1: rank 0 wants to {each}, but rank 1 wants to {common}:")
    assert errors[1].startswith(f"call 1: rank 1 wants to {common}, but rank 0 wants to {each}:")


def update_then_acknowledge(transport: Transport, slow_rank: int) -> list[list[float]]:
    """In each step all ranks sum their chunks, write the sums into the common buffer, acknowledge, and read all of it.

    Between the two another schedule is performed and acknowledged at once, which must not acknowledge for the first.
    """
    numel = 2 * transport.world_size
    gradients, other = transport.share(numel, torch.float64), transport.share(numel, torch.float64)
    common = transport.share_common(numel, torch.float64)
    mine = slice(2 * transport.rank, 2 * transport.rank + 2)
    seen = []
    for step in range(1, 4):
        gradients.local.fill_(step * 10.0**transport.rank)
        transport.perform(COLLECTIVES["direct_reduce_scatter"], gradients, acknowledge=False)
        transport.perform(COLLECTIVES["ring_all_gather"], other)
        if transport.rank == slow_rank:
            time.sleep(0.05)
        common[mine] = gradients.local[mine]
        transport.acknowledge()
        transport.settle()
        seen.append(common.tolist())
    return seen


@every_memory_and_gpus
@pytest.mark.parametrize("slow_rank", [0, 2])
def test_who_has_settled_sees_what_was_written_before_the_acknowledgement(kind: str, slow_rank: int) -> None:
    expected = [[111.0 * step] * 6 for step in (1, 2, 3)]
    assert on_all_ranks(kind, 3, update_then_acknowledge, slow_rank) == [expected] * 3


# ---- agreement ----


def agree_again_and_again(transport: Transport, texts: list[str], odd_one: int) -> tuple[int, str]:
    """How many agreements were reached, and the error that ended them."""
    reached = 0
    try:
        for index, text in enumerate(texts):
            own = "something else" if (transport.rank, index) == (1, odd_one) else text
            transport.agree(own)
            reached += 1
    except TransportError as error:
        return reached, str(error)
    return reached, ""


@every_transport
def test_agreement_of_any_text(kind: str) -> None:
    texts = ["", "a", "é" * 150, "a" * 199 + "é", "x" * 500, *(f"step {index}" for index in range(300))]
    assert on_all_ranks(kind, 3, agree_again_and_again, texts, -1) == [(305, "")] * 3


@every_transport_and_gpus
@pytest.mark.parametrize("odd_one", [3, 4])
def test_the_one_agreement_that_differs(kind: str, odd_one: int) -> None:
    texts = [f"step {index}" for index in range(6)]
    results = on_all_ranks(kind, 3, agree_again_and_again, texts, odd_one)
    assert [reached for reached, _ in results] == [odd_one] * 3
    assert results[0][1].startswith(
        f"call {odd_one + 1}: rank 0 wants to step {odd_one}, but rank 1 wants to something else:"
    )
    others = rf"call {odd_one + 1}: rank 1 wants to something else, but rank [02] wants to step {odd_one}:"
    assert re.match(others, results[1][1]), results[1][1]  # whichever it has looked at first
    assert results[2][1].startswith(
        f"call {odd_one + 1}: rank 2 wants to step {odd_one}, but rank 1 wants to something else:"
    )
