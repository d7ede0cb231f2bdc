"""The memory that processes share, and the two ways to signal through it, without any process where none is needed."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from torch_parallel.collectives import broadcast_from
from torch_parallel.communicator import Communicator
from torch_parallel.launcher import WorkerFailure, launch
from torch_parallel.status import StatusBoard
from torch_parallel.transport import arena as arena_module
from torch_parallel.transport import signals
from torch_parallel.transport.arena import MAPPING_BYTES, PAGE_BYTES, Arena, page_aligned
from torch_parallel.transport.shared_memory import SharedMemoryTransport, Wiring
from torch_parallel.transport.signals import (
    READ,
    READY,
    Inboxes,
    PipeSignals,
    SequenceNumbers,
    Signals,
    WaitTimeout,
)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create()
    yield arena
    arena.close()


# ---- memory ----


@pytest.mark.parametrize(
    "nbytes, pages", [(0, 1), (1, 1), (PAGE_BYTES - 1, 1), (PAGE_BYTES, 1), (PAGE_BYTES + 1, 2), (10 * PAGE_BYTES, 10)]
)
def test_page_aligned(nbytes: int, pages: int) -> None:
    assert page_aligned(nbytes) == pages * PAGE_BYTES


def test_pieces_do_not_overlap_and_lie_in_one_mapping(arena: Arena) -> None:
    sizes = [0, 1, PAGE_BYTES, MAPPING_BYTES - 5 * PAGE_BYTES, 3 * PAGE_BYTES, MAPPING_BYTES + 1, 7, MAPPING_BYTES, 1]
    offsets = [arena.allocate(size) for size in sizes]
    ends = [offset + page_aligned(size) for offset, size in zip(offsets, sizes, strict=True)]
    assert offsets[:3] == [0, PAGE_BYTES, 2 * PAGE_BYTES]
    for end, following in zip(ends, offsets[1:], strict=False):
        assert end <= following
    for offset, end in zip(offsets, ends, strict=True):
        assert offset % PAGE_BYTES == 0
        in_one = offset // MAPPING_BYTES == (end - 1) // MAPPING_BYTES
        assert in_one or offset % MAPPING_BYTES == 0  # larger than a mapping: it has its own


def test_what_is_written_is_read_through_another_mapping(arena: Arena) -> None:
    """A second Arena on the same file stands for another process; it grows it, and allocates, by itself."""
    other = Arena(os.dup(arena.fd), arena.next_byte)
    mine: list[torch.Tensor] = []
    shapes = [(3,), (2, 5), (), (0,), (MAPPING_BYTES // 4 - 5,), (MAPPING_BYTES // 4 + 5,), (7,)]
    for index, shape in enumerate(shapes):
        nbytes = torch.Size(shape).numel() * 4
        mine.append(arena.tensor(arena.allocate(nbytes), shape, torch.float32))
        assert not mine[-1].count_nonzero()
        mine[-1].fill_(index + 1)
    for index, shape in enumerate(shapes):
        theirs = other.tensor(other.allocate(torch.Size(shape).numel() * 4), shape, torch.float32)
        assert theirs.shape == shape
        assert bool((theirs == index + 1).all())
        theirs.fill_(-1)
        assert bool((mine[index] == -1).all())
    other.close()


def test_store_keeps_shape_type_and_values(arena: Arena) -> None:
    for tensor in (
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor(7, dtype=torch.int16),
        torch.tensor([True, False]),
        torch.zeros(0, 4, dtype=torch.float64),
    ):
        offset = arena.store(tensor)
        assert torch.equal(arena.tensor(offset, tuple(tensor.shape), tensor.dtype), tensor)


def test_hundreds_of_buffers_take_two_descriptors(arena: Arena) -> None:
    before = open_descriptors()
    tensors = [arena.store(torch.full((100,), float(index))) for index in range(500)]
    assert open_descriptors() == before + 1
    assert arena.tensor(tensors[123], (100,), torch.float32).tolist() == [123.0] * 100


def test_nothing_is_left_when_it_is_closed_and_dropped() -> None:
    before = open_descriptors()
    arena = Arena.create()
    tensor = arena.tensor(arena.allocate(4000), (1000,), torch.float32)
    big = arena.tensor(arena.allocate(2 * MAPPING_BYTES), (10,), torch.float32)
    tensor.fill_(2.0)
    arena.close()
    arena.close()
    assert tensor.sum().item() == 2000.0  # what is mapped stays
    del arena, tensor, big
    assert open_descriptors() == before


def test_missing_memory_is_an_error_before_anybody_writes(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "free_memory_bytes", lambda: 3_999_999)
    taken: list[Any] = []
    monkeypatch.setattr(arena_module.os, "posix_fallocate", lambda *arguments: taken.append(arguments))
    with pytest.raises(MemoryError) as raised:
        arena.store(torch.zeros(1_000_000))
    assert str(raised.value) == "4,000,000 bytes of shared memory are needed, and 3,999,999 bytes are free"
    assert taken == []
    monkeypatch.setattr(arena_module, "free_memory_bytes", lambda: 4_000_000)
    arena.take(arena.allocate(4_000_000), 4_000_000)
    assert taken[0][2] == page_aligned(4_000_000)


def test_memory_that_the_kernel_refuses(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(arena_module.os, "posix_fallocate", refuse)
    with pytest.raises(MemoryError) as raised:
        arena.store(torch.zeros(1000))
    assert str(raised.value) == "4,000 bytes of shared memory are not to be had: No space left on device"


def test_memory_is_taken_at_once(arena: Arena) -> None:
    arena.take(arena.allocate(40 * PAGE_BYTES), 40 * PAGE_BYTES)
    assert os.fstat(arena.fd).st_blocks * 512 == 40 * PAGE_BYTES


def share_on_a_small_machine(communicator: Communicator) -> None:
    arena_module.free_memory_bytes = lambda: 10_000
    communicator.share(1_000_000)


def test_a_share_that_finds_no_memory_ends_the_run() -> None:
    with pytest.raises(WorkerFailure) as raised:
        launch(share_on_a_small_machine, 2, threads=1, deadline_s=20.0)
    first_line = str(raised.value).splitlines()[0]
    # two parts of 4,000,000 bytes, each on whole pages
    needed = 2 * page_aligned(4_000_000)
    assert first_line == (
        f"rank 0 failed: MemoryError: {needed:,} bytes of shared memory are needed, and 10,000 bytes are free"
    )


# ---- signals ----


@pytest.fixture(params=["sequence numbers", "pipes"])
def two_ranks(request: pytest.FixtureRequest) -> Iterator[tuple[Signals, Signals, StatusBoard]]:
    """The signals of ranks 0 and 1 of 3, and the board that they report their waits on."""
    board = StatusBoard(memoryview(bytearray(StatusBoard.bytes_needed(3))), 3)
    inboxes = Inboxes.create(3)
    memory = memoryview(bytearray(SequenceNumbers.bytes_needed(3)))

    def signals_of(rank: int) -> Signals:
        if request.param == "pipes":
            return PipeSignals(inboxes, rank, 3, board.reporter(rank), 0.3)
        return SequenceNumbers(memory, rank, 3, board.reporter(rank), 0.3)

    yield signals_of(0), signals_of(1), board
    inboxes.close()


def test_every_signal_is_taken_once(two_ranks: tuple[Signals, Signals, StatusBoard]) -> None:
    first, second, _ = two_ranks
    for _ in range(3):
        first.post(READY, 1)
    first.post(READ, 1)
    for _ in range(3):
        second.wait(READY, 0, "x", 0)
    second.wait(READ, 0, "x", 0)
    for kind in (READY, READ):
        with pytest.raises(WaitTimeout, match=r"^no signal from rank 0 for 0\.[3-9] s$"):
            second.wait(kind, 0, "x", 0)
    assert first.waited_s == [0.0, 0.0, 0.0]


def test_signals_of_others_and_of_the_other_kind_do_not_count(two_ranks: tuple[Signals, Signals, StatusBoard]) -> None:
    first, second, board = two_ranks
    first.post(READ, 1)
    second.post(READY, 0)
    first.post(READY, 2)
    with pytest.raises(WaitTimeout, match="no signal from rank 0"):
        second.wait(READY, 0, "gradients of bucket 3", 5)
    # the wait is on the board for the launcher to read, even after the time is up
    assert str(board.read(1)) == "rank 1 was starting, waiting for rank 0 (gradients of bucket 3, round 5)"
    first.wait(READY, 1, "x", 0)
    assert board.read(0).waiting_for is None


def test_a_wait_ends_with_the_signal_and_is_added_up(two_ranks: tuple[Signals, Signals, StatusBoard]) -> None:
    first, second, board = two_ranks
    threading.Timer(0.15, first.post, (READY, 1)).start()
    second.wait(READY, 0, "x", 0)
    assert 0.1 < second.waited_s[0] < 0.3
    assert second.waited_s[1:] == [0.0, 0.0]
    assert board.read(1).waiting_for is None


def test_ranks_of_a_pair_have_numbers_of_their_own() -> None:
    """All signals of 4 ranks, taken in another order than posted: each is counted for its pair and kind."""
    board = StatusBoard(memoryview(bytearray(StatusBoard.bytes_needed(4))), 4)
    memory = memoryview(bytearray(SequenceNumbers.bytes_needed(4)))
    inboxes = Inboxes.create(4)
    makers: list[Callable[[int], Signals]] = [
        lambda rank: SequenceNumbers(memory, rank, 4, board.reporter(rank), 0.05),
        lambda rank: PipeSignals(inboxes, rank, 4, board.reporter(rank), 0.05),
    ]
    for make in makers:
        ranks = [make(rank) for rank in range(4)]
        count = {(kind, a, b): 1 + (kind + 3 * a + b) % 3 for kind in (0, 1) for a in range(4) for b in range(4)}
        for (kind, source, to), times in count.items():
            for _ in range(times):
                ranks[source].post(kind, to)
        for (kind, source, to), times in reversed(count.items()):
            for _ in range(times):
                ranks[to].wait(kind, source, "x", 0)
            if (source + to) % 3 == 0:
                with pytest.raises(WaitTimeout):
                    ranks[to].wait(kind, source, "x", 0)
    inboxes.close()


@pytest.mark.parametrize(
    "machine, ordered",
    [("x86_64", True), ("AMD64", True), ("i686", True), ("aarch64", False), ("arm64", False), ("ppc64le", False)],
)
def test_where_stores_are_ordered(monkeypatch: pytest.MonkeyPatch, machine: str, ordered: bool) -> None:
    monkeypatch.setattr(signals.platform, "machine", lambda: machine)
    assert signals.stores_are_ordered() is ordered
    wiring = Wiring.create(2)
    assert (wiring.inboxes is None) is ordered
    wiring.close()


@pytest.mark.parametrize("pipes", [False, True])
def test_wiring_gives_everything_back(pipes: bool) -> None:
    gc.collect()  # what other tests have left
    before = open_descriptors()
    wiring = Wiring.create(5, pipes)
    assert open_descriptors() == before + 1 + (10 if pipes else 0)
    transports = [SharedMemoryTransport(wiring, rank, 1.0) for rank in range(5)]
    wiring.close()
    del wiring, transports
    assert open_descriptors() == before


def send_without_settling(communicator: Communicator, count: int) -> float:
    """Rank 0 signals far more often than a pipe holds (64 kB) before rank 1 takes the first."""
    transport, collective = communicator.transport, broadcast_from(0)
    buffer = transport.share(1, torch.float32)
    buffer.local.fill_(float(transport.rank))
    if transport.rank == 1:
        time.sleep(0.5)
    for _ in range(count):
        transport.perform(collective, buffer)
    transport.settle()
    return buffer.local.item()


def test_a_full_inbox_only_holds_the_sender_up() -> None:
    results: list[Any] = launch(send_without_settling, 2, 40_000, signal_pipes=True, threads=1, deadline_s=20.0)
    assert results == [0.0, 0.0]
