"""Schedules as tables: performed here on lists of numbers, a row at a time, the ranks in random order."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from torch_parallel.collectives import COLLECTIVES, Collective, Receive, Send
from torch_parallel.collectives.schedule import Rounds, chunk_bounds
from torch_parallel.transport.schedule_table import ADD, COPY, SIGNAL, WAIT, compile_schedule


def two_shot_rounds(rank: int, world_size: int) -> Rounds:
    """Everybody sums its own chunk from all others in one round, then takes the others' chunks from them."""
    others = [(rank + distance) % world_size for distance in range(1, world_size)]
    own = range(rank, rank + 1)
    yield [
        *(Send(other, range(other, other + 1)) for other in others),
        *(Receive(other, own, reduce=True) for other in others),
    ]
    yield [
        *(Send(other, own) for other in others),
        *(Receive(other, range(other, other + 1), reduce=False) for other in others),
    ]


def uneven_rounds(rank: int, world_size: int) -> Rounds:
    """Rank 0 adds both others at once, then the whole goes round: passes over one source and over two."""
    whole = range(1)
    if rank == 0:
        yield [Receive(1, whole, reduce=True), Receive(2, whole, reduce=True)]
        yield [Send(1, whole), Send(2, whole)]
        yield [Receive(2, range(0), reduce=False), Receive(1, whole, reduce=True)]
    else:
        yield [Send(0, whole)]
        yield [Receive(0, whole, reduce=False)]
        yield [Send(0, whole if rank == 1 else range(0))]  # rank 2 only says that it has read


def collective(name: str, rounds: object, chunk_count: object) -> Collective:
    nothing = lambda *arguments: 0  # noqa: E731
    return Collective(name, rounds, chunk_count, lambda *arguments: None, nothing, nothing, nothing)  # type: ignore[arg-type]


TWO_SHOT = collective("two_shot", two_shot_rounds, lambda world_size: world_size)
UNEVEN = collective("uneven", uneven_rounds, lambda world_size: 1)


GARBAGE = -(10**9)


class Machine:
    """All ranks' buffers, further regions and signals.

    `base` is what an operation's numbers are counted from, as in the kernel. A place is a list of numbers in `memory`.
    """

    def __init__(self, world_size: int) -> None:
        self.memory: list[list[int]] = [[] for _ in range(world_size)]  # the ranks' buffers, then what is added
        self.flags = [[0] * world_size for _ in range(world_size)]  # [to][source]
        self.base = 0
        self.results: dict[int, list[int]] = {}

    def places(self, which: Collective, rank: int, world_size: int) -> list[int]:
        """Of the ranks' buffers and of this rank's further regions, of garbage; a common one is the same for all."""
        common = bool(which.common_chunks(world_size))
        count = which.region_count(rank, world_size) - 1
        further = [world_size] if common else [len(self.memory) + index for index in range(count)]
        if not common or rank == 0:
            self.memory += [[GARBAGE] * len(self.memory[0]) for _ in further]
        return [*range(world_size), *further]

    def perform(self, which: Collective, choose: random.Random) -> None:
        world_size = len(self.flags)
        del self.memory[world_size:]
        bounds = chunk_bounds(len(self.memory[0]), which.chunk_count(world_size))
        programs = [compile_schedule(which, rank, world_size) for rank in range(world_size)]
        places = [self.places(which, rank, world_size) for rank in range(world_size)]
        results = [
            where[rank] if which.result_region == 0 or world_size == 1 else where[world_size]
            for rank, where in enumerate(places)
        ]
        running = {
            rank: self.run(rank, program.rows(bounds, where), results[rank])
            for rank, (program, where) in enumerate(zip(programs, places, strict=True))
        }
        idle = 0
        while running:
            rank = choose.choice(list(running))
            step = next(running[rank], None)
            if step is None:
                del running[rank]
            idle = 0 if step != "waits" else idle + 1
            assert idle < 10_000, "deadlock"
        assert len({program.signals for program in programs}) == 1
        self.base += programs[0].signals

    def run(self, rank: int, rows: list[list[int]], result: int) -> Iterator[str]:
        for kind, to, number, stop, *sources in rows:
            if kind == SIGNAL:
                assert self.flags[to][rank] < self.base + number, "numbers only grow"
                self.flags[to][rank] = self.base + number
            elif kind == WAIT:
                while self.flags[rank][to] < self.base + number:
                    yield "waits"
            else:
                assert kind in (COPY, ADD)
                for index in range(number, stop):
                    taken = sources[:1] if kind == COPY else sources
                    self.memory[to][index] = sum(self.memory[source][index] for source in taken)
                    yield "works"
            yield "works"
        self.results[rank] = list(self.memory[result])
        # what the kernel promises when it ends: the buffer may be written again
        self.memory[rank] = [GARBAGE] * len(self.memory[rank])


def performed(which: Collective, world_size: int, numel: int, seed: int) -> list[list[list[int]]]:
    """Results of three operations in a row, each on fresh numbers: rank r holds 10^r * (1 + index)."""
    machine, choose, all_results = Machine(world_size), random.Random(seed), []
    for _ in range(3):
        machine.memory = [[10**rank * (1 + index) for index in range(numel)] for rank in range(world_size)]
        machine.results = {}
        machine.perform(which, choose)
        all_results.append([machine.results[rank] for rank in range(world_size)])
    return all_results


def test_the_ring_of_two_by_hand() -> None:
    """Rank 0 of two, on 5 elements: chunks [0, 3) and [3, 5)."""
    program = compile_schedule(COLLECTIVES["ring"], 0, 2)
    assert program.rows([0, 3, 5], places=[70, 80]) == [
        [SIGNAL, 1, 1, 0, 0, 0],  # my chunk 1 is ready
        [WAIT, 1, 1, 0, 0, 0],
        [ADD, 70, 0, 3, 70, 80],  # chunk 0 becomes the sum
        [SIGNAL, 1, 2, 0, 0, 0],
        [WAIT, 1, 2, 0, 0, 0],
        [COPY, 70, 3, 5, 80, 0],  # the other's sum
        [SIGNAL, 1, 3, 0, 0, 0],  # I have read it
        [WAIT, 1, 3, 0, 0, 0],
    ]
    assert program.signals == 3
    assert [each.round for each in program.instructions] == [0, 0, 0, 1, 1, 1, None, None]


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("name", [name for name, each in COLLECTIVES.items() if not each.equal_chunks])
def test_every_schedule_leaves_what_it_promises(name: str, world_size: int) -> None:
    which = COLLECTIVES[name]
    for numel in (0, 1, world_size, 13):
        chunks = which.chunk_count(world_size)
        bounds = chunk_bounds(numel, chunks)
        for results in performed(which, world_size, numel, seed=numel):
            for rank, result in enumerate(results):
                for chunk in range(chunks):
                    contributors = which.contributors(rank, world_size, chunk)
                    if contributors is not None:
                        where = range(bounds[chunk], bounds[chunk + 1])
                        expected = [sum(10**each for each in contributors) * (1 + index) for index in where]
                        assert result[bounds[chunk] : bounds[chunk + 1]] == expected


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_sources_of_one_round_are_added_in_one_pass(world_size: int) -> None:
    program = compile_schedule(TWO_SHOT, 1, world_size)
    (only,) = [each for each in program.instructions if each.kind == ADD]
    assert only.sources == tuple((1 + distance) % world_size for distance in range(world_size))
    assert program.source_count == world_size
    total = sum(10**rank for rank in range(world_size))
    for seed in range(5):
        for results in performed(TWO_SHOT, world_size, 11, seed):
            assert results == [[total * (1 + index) for index in range(11)]] * world_size


def test_passes_over_unequally_many_sources_are_taken_apart() -> None:
    program = compile_schedule(UNEVEN, 0, 3)
    assert [each.sources for each in program.instructions if each.kind == ADD] == [(0, 1), (0, 2), (0, 1)]
    for results in performed(UNEVEN, 3, 2, seed=0):
        assert results == [[222, 444], [111, 222], [111, 222]]


def data_of(name: str, rank: int, world_size: int) -> list[tuple[int, int, int, tuple[int, ...]]]:
    """Kind, target, chunk and sources of each instruction that moves something."""
    program = compile_schedule(COLLECTIVES[name], rank, world_size)
    return [(each.kind, each.into, each.chunk, each.sources) for each in program.instructions if each.sources]


def test_one_shot_is_one_pass_over_all_buffers_into_the_second_region() -> None:
    """Of four ranks memory 0 to 3 are the buffers, 4 is the second region; all ranks add in the same order."""
    assert data_of("one_shot", 0, 4) == [(ADD, 4, 0, (0, 1, 2, 3))]
    assert data_of("one_shot", 2, 4) == [(ADD, 4, 0, (0, 1, 2, 3))]


def test_a_common_result_is_written_once_and_then_only_waited_for() -> None:
    """Rank 1 of three adds those of rank 2 and then of rank 0 to its own chunk 1, into memory 3."""
    assert data_of("two_shot_in_place", 1, 3) == [(ADD, 1, 1, (1, 2)), (ADD, 3, 1, (1, 0))]
    waits = [
        each for each in compile_schedule(COLLECTIVES["two_shot_in_place"], 1, 3).instructions if each.kind == WAIT
    ]
    assert [(each.peer, each.round) for each in waits] == [(2, 0), (0, 0), (2, 1), (0, 1)]


def test_what_is_gathered_first_is_added_up_from_its_regions() -> None:
    """Rank 0 of three copies both others' buffers into memory 3 and 4 and adds these to its own."""
    copies, (add,) = data_of("gather_scatter", 0, 3)[:2], data_of("gather_scatter", 0, 3)[2:]
    assert copies == [(COPY, 3, 0, (1,)), (COPY, 4, 0, (2,))]
    assert add == (ADD, 0, 0, (0, 3, 4))
