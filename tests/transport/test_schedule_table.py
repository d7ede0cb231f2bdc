"""Schedules as tables: performed here on lists of numbers, a row at a time, the ranks in random order."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from torch_parallel.collectives import COLLECTIVES, Collective, Receive, Send
from torch_parallel.collectives.schedule import Rounds, chunk_bounds
from torch_parallel.transport.schedule_table import COPY, REDUCE, SIGNAL, WAIT, compile_schedule


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


class Machine:
    """All ranks' buffers and signals. `base` is what an operation's numbers are counted from, as in the kernel."""

    def __init__(self, buffers: list[list[int]]) -> None:
        self.buffers = buffers
        self.flags = [[0] * len(buffers) for _ in buffers]  # [to][source]
        self.base = 0

    def perform(self, which: Collective, choose: random.Random) -> None:
        world_size = len(self.buffers)
        bounds = chunk_bounds(len(self.buffers[0]), which.chunk_count(world_size))
        programs = [compile_schedule(which, rank, world_size) for rank in range(world_size)]
        running = {rank: self.run(rank, program.rows(bounds)) for rank, program in enumerate(programs)}
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

    def run(self, rank: int, rows: list[list[int]]) -> Iterator[str]:
        mine = self.buffers[rank]
        for kind, peer, number, stop, *sources in rows:
            if kind == SIGNAL:
                assert self.flags[peer][rank] < self.base + number, "numbers only grow"
                self.flags[peer][rank] = self.base + number
            elif kind == WAIT:
                while self.flags[rank][peer] < self.base + number:
                    yield "waits"
            else:
                for index in range(number, stop):
                    if kind == COPY:
                        mine[index] = self.buffers[peer][index]
                    else:
                        assert kind == REDUCE
                        mine[index] += sum(self.buffers[source][index] for source in sources)
                    yield "works"
            yield "works"
        # what the kernel promises when it ends: the buffer may be written again
        mine_at_the_end = list(mine)
        self.buffers[rank] = [-(10**9)] * len(mine)
        self.results[rank] = mine_at_the_end

    results: dict[int, list[int]]


def performed(which: Collective, world_size: int, numel: int, seed: int) -> list[list[list[int]]]:
    """Results of three operations in a row, each on fresh numbers: rank r holds 10^r * (1 + index)."""
    machine, choose, all_results = Machine([[] for _ in range(world_size)]), random.Random(seed), []
    for _ in range(3):
        machine.buffers = [[10**rank * (1 + index) for index in range(numel)] for rank in range(world_size)]
        machine.results = {}
        machine.perform(which, choose)
        all_results.append([machine.results[rank] for rank in range(world_size)])
    return all_results


def test_the_ring_of_two_by_hand() -> None:
    """Rank 0 of two, on 5 elements: chunks [0, 3) and [3, 5)."""
    program = compile_schedule(COLLECTIVES["ring"], 0, 2)
    assert program.rows([0, 3, 5]) == [
        [SIGNAL, 1, 1, 0, 0],  # my chunk 1 is ready
        [WAIT, 1, 1, 0, 0],
        [REDUCE, 1, 0, 3, 1],  # chunk 0 becomes the sum
        [SIGNAL, 1, 2, 0, 0],
        [WAIT, 1, 2, 0, 0],
        [COPY, 1, 3, 5, 0],  # the other's sum
        [SIGNAL, 1, 3, 0, 0],  # I have read it
        [WAIT, 1, 3, 0, 0],
    ]
    assert program.signals == 3
    assert [each.round for each in program.instructions] == [0, 0, 0, 1, 1, 1, None, None]


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("name", COLLECTIVES)
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
    (only,) = [each for each in program.instructions if each.kind == REDUCE]
    assert only.sources == tuple((1 + distance) % world_size for distance in range(1, world_size))
    assert program.source_count == world_size - 1
    total = sum(10**rank for rank in range(world_size))
    for seed in range(5):
        for results in performed(TWO_SHOT, world_size, 11, seed):
            assert results == [[total * (1 + index) for index in range(11)]] * world_size


def test_passes_over_unequally_many_sources_are_taken_apart() -> None:
    program = compile_schedule(UNEVEN, 0, 3)
    assert [each.sources for each in program.instructions if each.kind == REDUCE] == [(1,), (2,), (1,)]
    for results in performed(UNEVEN, 3, 2, seed=0):
        assert results == [[222, 444], [111, 222], [111, 222]]
