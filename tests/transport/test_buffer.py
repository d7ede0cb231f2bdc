"""A schedule bound to memory, one rank at a time: no process, no signal, only what each bound operation does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from torch_parallel.collectives import ALL_REDUCE, COLLECTIVES, RING_ALL_REDUCE, Receive
from torch_parallel.collectives.proof import ProofError
from torch_parallel.collectives.schedule import Rounds
from torch_parallel.transport.buffer import Memory, SharedBuffer, unfinished_reads


def memory_of(name: str, rank: int, world_size: int, numel: int) -> tuple[Memory, SharedBuffer]:
    """Rank r's buffer is filled with 10^r."""
    parts = [torch.full((numel,), 10.0**r) for r in range(world_size)]
    buffer = SharedBuffer(parts, rank)
    return Memory(COLLECTIVES[name], buffer, world_size, lambda numel, dtype: torch.zeros(numel, dtype=dtype)), buffer


def seen_while_performing(name: str, rank: int, world_size: int, numel: int) -> list[list[float]]:
    """The result after each receive of the first round, from -1 everywhere."""
    memory, _ = memory_of(name, rank, world_size, numel)
    if memory.result is not memory.regions[0]:
        memory.result.fill_(-1.0)
    seen = []
    for _, operation, theirs, _ in memory.pulls(next(iter(COLLECTIVES[name].rounds(rank, world_size)))):
        operation(theirs)
        seen.append(memory.result.tolist())
    return seen


def test_a_copy_and_the_addition_after_it_are_one_pass() -> None:
    """Rank 3 adds up 1 + 10, then 100 and, by itself, its own 1000; nothing is written before there are two."""
    assert seen_while_performing("one_shot", 3, 4, 2) == [[-1.0] * 2, [11.0] * 2, [1111.0] * 2]


def test_the_own_buffer_and_the_first_peers_are_one_pass() -> None:
    assert seen_while_performing("one_shot", 0, 4, 1) == [[11.0], [111.0], [1111.0]]


def test_in_a_common_result_only_the_last_addition_is_written() -> None:
    """Five elements on three ranks are chunks of 2, 2 and 1; rank 1 sums the second."""
    memory, buffer = memory_of("two_shot_in_place", 1, 3, 5)
    first, second = (memory.pulls(this) for this in COLLECTIVES["two_shot_in_place"].rounds(1, 3))
    for _, operation, theirs, _ in first:
        assert memory.result.tolist() == [0.0] * 5
        operation(theirs)
    assert memory.result.tolist() == [0, 0, 111, 111, 0]
    assert buffer.parts[0].tolist() == [1.0] * 5
    assert [theirs.nbytes for _, _, theirs, _ in second] == [0, 0]
    for _, operation, theirs, _ in second:
        operation(theirs)
    assert memory.result.tolist() == [0, 0, 111, 111, 0]


def test_chunks_change_places_in_an_all_to_all() -> None:
    assert seen_while_performing("all_to_all", 1, 3, 6)[-1] == [1, 1, 10, 10, 100, 100]


def test_results_in_place_are_the_buffer_itself() -> None:
    for name, collective in ALL_REDUCE.items():
        memory, buffer = memory_of(name, 0, 3, 4)
        assert (memory.result is buffer.local) == (collective.result_region == 0)
        alone, mine = memory_of(name, 0, 1, 4)
        assert alone.result is mine.local and len(alone.regions) == 1


def test_a_wrong_schedule_is_refused_when_it_is_bound() -> None:
    """One line with the collective and the first fault; unless it is said to be wrong on purpose."""

    def rounds(rank: int, world_size: int) -> Rounds:
        yield [Receive(1 - rank, range(0, 1), reduce=True)]

    wrong = replace(RING_ALL_REDUCE, name="mine", rounds=rounds)
    with pytest.raises(ProofError, match=r"^mine is wrong for 2 ranks: .+$"):
        unfinished_reads(wrong, 2)
    assert unfinished_reads(replace(wrong, wrong_on_purpose=True), 2) is not None
