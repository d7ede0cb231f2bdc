"""A schedule on one clock: which messages arrive in which round, and what every rank then holds.

A schedule has no common clock: each rank has rounds of its own, and waits in them. To draw all ranks side by side,
`moves` gives them one, as if all messages took equally long: every rank begins a round when its last one has ended, and
a message arrives in the round in which its sender sends and its receiver waits for it. Only proved schedules are drawn,
so nobody can be stuck, and a chunk still holds at its arrival what it held when it was sent.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch_parallel.collectives.proof import prove
from torch_parallel.collectives.schedule import Collective, Local, Placed, Receive, Send

Contributions = Counter[int]
"""Whose values a chunk is the sum of, and how often each is in it."""

Table = list[list[Contributions]]
"""table[rank][chunk]"""


@dataclass(frozen=True, slots=True)
class Message(Placed):
    """Chunks on their way from rank `source` to rank `to`, which adds them to its own (`reduce`) or replaces those.

    `into` and `plus` are those of `Receive`. A move between a rank's own chunks is a message to itself.
    """

    source: int
    to: int
    chunks: range
    reduce: bool
    into: range | None = None
    plus: range | None = None

    @property
    def is_local(self) -> bool:
        return self.source == self.to


def moves(collective: Collective, world_size: int) -> list[list[Message]]:
    """The messages of each round, a receiver's in the order in which it performs them.

    Raises `ProofError` for a schedule that is wrong, and `ValueError` for no ranks.
    """
    prove(collective, world_size)
    programs = [[list(this) for this in collective.rounds(rank, world_size)] for rank in range(world_size)]
    sent: Counter[tuple[int, int]] = Counter()  # signals that wait for their receiver, by (source, to)
    missing: list[list[Receive | Local]] = [[] for _ in programs]  # what each rank's present round has yet to do
    rounds = []
    while any(programs) or any(missing):
        for rank, program in enumerate(programs):
            if program and not missing[rank]:
                this = program.pop(0)
                sent.update((rank, operation.to) for operation in this if isinstance(operation, Send))
                missing[rank] = [operation for operation in this if not isinstance(operation, Send)]
        rounds.append([message for rank in range(world_size) for message in _arrivals(rank, missing[rank], sent)])
    return rounds


def _arrivals(rank: int, missing: list[Receive | Local], sent: Counter[tuple[int, int]]) -> list[Message]:
    """Takes from `missing` what can be done. A round's receives keep their order, so one that is late delays all."""
    arrived = []
    while missing:
        step = missing[0]
        if isinstance(step, Local):
            arrived.append(Message(rank, rank, step.chunks, step.reduce, step.into))
        elif sent[step.source, rank]:
            arrived.append(Message(step.source, rank, step.chunks, step.reduce, step.into, step.plus))
            sent[step.source, rank] -= 1
        else:
            break
        missing.pop(0)
    return arrived


def states(collective: Collective, world_size: int) -> list[Table]:
    """What each rank holds in each chunk: before, and after each of the rounds of `moves`. Raises as `moves` does.

    Of common chunks each rank has those that it knows to be there.
    """
    tables: list[Table] = [[_at_first(collective, rank, world_size) for rank in range(world_size)]]
    for messages in moves(collective, world_size):
        before = tables[-1]
        after = [list(row) for row in before]
        for message in messages:
            mine, theirs = after[message.to], (after if message.is_local else before)[message.source]
            for chunk, target, addend in zip(message.chunks, message.target, message.addend, strict=True):
                mine[target] = mine[addend] + theirs[chunk] if message.reduce else theirs[chunk]
        tables.append(after)
    return tables


def _at_first(collective: Collective, rank: int, world_size: int) -> list[Contributions]:
    chunk_count = collective.chunk_count(world_size)
    empty = collective.total_chunks(rank, world_size) - chunk_count
    return [Counter([rank]) for _ in range(chunk_count)] + [Counter() for _ in range(empty)]


def is_complete(collective: Collective, table: Table, rank: int, chunk: int) -> bool:
    """Whether a chunk holds what the collective promises for it; never, where it promises nothing."""
    promised = collective.promised(rank, len(table), chunk)
    return promised is not None and table[rank][chunk] == Counter(source for source, _ in promised)


def region_name(collective: Collective, world_size: int, chunk: int) -> str:
    """What the region of a chunk is called: "chunk" for the input, "result" or "scratch"."""
    if chunk < collective.chunk_count(world_size):
        return "chunk"
    return "result" if chunk in collective.result_chunks(world_size) else "scratch"
