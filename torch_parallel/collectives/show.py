"""A schedule as text: what every rank holds before, and after each round, and who sends what to whom in between.

The drawing above `ring.py`'s functions was made by hand; this one is made from the schedule, so it cannot be wrong
about it, and a new algorithm has one as soon as it is registered:

    python -m torch_parallel collectives                    all algorithms, and what they cost
    python -m torch_parallel collectives --show ring --n 4  one of them, round by round

A schedule has no common clock: each rank has rounds of its own, and waits in them. To draw all ranks side by side,
`moves` gives them one, as if all messages took equally long: every rank begins a round when its last one has ended, and
a message arrives in the round in which its sender sends and its receiver waits for it. Only proved schedules are drawn,
so nobody can be stuck, and a chunk still holds at its arrival what it held when it was sent.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import NoReturn

from torch_parallel.collectives import COLLECTIVES, Collective, Receive, Round, Send
from torch_parallel.collectives.proof import ProofError, prove

MOST_RANKS = 18  # a..r: the upper case letter S is a sum
WIDTH = 100

Contributions = Counter[int]
"""Whose values a chunk is the sum of, and how often each is in it."""

Table = list[list[Contributions]]
"""table[rank][chunk]"""


@dataclass(frozen=True, slots=True)
class Message:
    """Chunks on their way from rank `source` to rank `to`, which adds them to its own (`reduce`) or replaces those."""

    source: int
    to: int
    chunks: range
    reduce: bool


def moves(collective: Collective, world_size: int) -> list[list[Message]]:
    """The messages of each round, a receiver's in the order in which it performs them.

    Raises `ProofError` for a schedule that is wrong, and `ValueError` for no ranks.
    """
    prove(collective, world_size)
    programs = [[list(this) for this in collective.rounds(rank, world_size)] for rank in range(world_size)]
    sent: Counter[tuple[int, int]] = Counter()  # signals that wait for their receiver, by (source, to)
    missing: list[Round] = [[] for _ in programs]  # the receives that each rank's present round still waits for
    rounds = []
    while any(programs) or any(missing):
        for rank, program in enumerate(programs):
            if program and not missing[rank]:
                this = program.pop(0)
                sent.update((rank, operation.to) for operation in this if isinstance(operation, Send))
                missing[rank] = [operation for operation in this if isinstance(operation, Receive)]
        rounds.append([message for rank in range(world_size) for message in _arrivals(rank, missing[rank], sent)])
    return rounds


def _arrivals(rank: int, missing: Round, sent: Counter[tuple[int, int]]) -> list[Message]:
    """Takes from `missing` what has been sent. A round's receives keep their order, so one that is late delays all."""
    arrived = []
    while missing and isinstance(missing[0], Receive) and sent[missing[0].source, rank]:
        arrived.append(Message(missing[0].source, rank, missing[0].chunks, missing[0].reduce))
        sent[missing[0].source, rank] -= 1
        missing.pop(0)
    return arrived


def states(collective: Collective, world_size: int) -> list[Table]:
    """What each rank holds in each chunk: before, and after each of the rounds of `moves`. Raises as `moves` does."""
    chunks = range(collective.chunk_count(world_size))
    tables: list[Table] = [[[Counter([rank]) for _ in chunks] for rank in range(world_size)]]
    for messages in moves(collective, world_size):
        before = tables[-1]
        after = [list(row) for row in before]
        for message in messages:
            mine, theirs = after[message.to], before[message.source]
            for chunk in message.chunks:
                mine[chunk] = mine[chunk] + theirs[chunk] if message.reduce else theirs[chunk]
        tables.append(after)
    return tables


def is_complete(collective: Collective, table: Table, rank: int, chunk: int) -> bool:
    """Whether a chunk holds what the collective promises for it; never, where it promises nothing."""
    promised = collective.contributors(rank, len(table), chunk)
    return promised is not None and table[rank][chunk] == Counter(promised)


# ---- the drawing ----


def show(collective: Collective, world_size: int) -> str:
    """The drawing of a collective: a table before, and for each round its messages and the table after.

    Raises `ProofError` for a schedule that is wrong, and `ValueError` for more than `MOST_RANKS` ranks, or none.
    """
    if not 1 <= world_size <= MOST_RANKS:
        raise ValueError(f"{world_size} ranks: a drawing shows 1 to {MOST_RANKS}")
    rounds, tables = moves(collective, world_size), states(collective, world_size)
    following = [*rounds, []]
    lines = [*_heading(collective, world_size, rounds), "", *_drawn(collective, "before", tables[0], following[0])]
    for number, messages in enumerate(rounds, start=1):
        lines += ["", *_told(number, messages), *_drawn(collective, "after", tables[number], following[number])]
    return "\n".join(lines)


def _heading(collective: Collective, world_size: int, rounds: list[list[Message]]) -> list[str]:
    chunk_count, message_count = collective.chunk_count(world_size), sum(map(len, rounds))
    counts = ((world_size, "rank"), (chunk_count, "chunk"), (len(rounds), "round"), (message_count, "message"))
    letters = [_letter(rank) for rank in range(world_size)]
    everyone, promised = frozenset(range(world_size)), collective.contributors
    has_sums = any(promised(rank, world_size, k) == everyone for rank in everyone for k in range(chunk_count))
    keys = [
        (
            " ".join(letters),
            f"what ranks 0..{world_size - 1} contribute" if world_size > 1 else "what rank 0 contributes",
        ),
        ("upper case", f"complete; S = {' + '.join(letters)}" if has_sums and world_size > 1 else "complete"),
    ]
    if rounds:
        keys += [("[ ]", "sent in the next round"), ("0 -k-> 1", "rank 0 sends chunk k to rank 1")]
    width = max(len(key) for key, _ in keys)
    title = f"{collective.name}: {', '.join(_counted(number, noun) for number, noun in counts)}"
    return [title, *(f"  {key.ljust(width)}   {meaning}" for key, meaning in keys)]


def _told(number: int, messages: list[Message]) -> list[str]:
    """The messages of a round, those that are added apart from those that replace."""
    lines = [f"round {number}"]
    in_order = sorted(messages, key=lambda message: (message.source, message.to))
    for reduce, verb in ((True, "added:   "), (False, "replaced:")):
        # no-break spaces keep `wrap` from breaking inside of an arrow
        arrows = [_arrow(message).replace(" ", "\xa0") for message in in_order if message.reduce == reduce]
        lines += wrap("  ".join(arrows), WIDTH, initial_indent=f"  {verb} ", subsequent_indent=" " * 12)
    return [line.replace("\xa0", " ").rstrip() for line in lines]


def _arrow(message: Message) -> str:
    first, last = message.chunks.start, message.chunks.stop - 1
    chunks = "" if last < first else str(first) if last == first else f"{first}..{last}"
    return f"{message.source} -{chunks}-> {message.to}"


def _drawn(collective: Collective, title: str, table: Table, following: list[Message]) -> list[str]:
    """A table, a row a rank; `following` are the messages of the next round, whose chunks are put into brackets."""
    sent = {(message.source, chunk) for message in following for chunk in message.chunks}
    cells = [
        [_text(collective, table, rank, chunk, (rank, chunk) in sent) for chunk in range(len(row))]
        for rank, row in enumerate(table)
    ]
    heads = [f"chunk {chunk}" for chunk in range(len(table[0]))]
    width = max(len(text) for row in [*cells, heads] for text in row) + 2
    rows = [(f"  {title}", heads), *((f"    rank {rank}", row) for rank, row in enumerate(cells))]
    return [f"{name:13}{''.join(text.center(width) for text in row)}".rstrip() for name, row in rows]


def _text(collective: Collective, table: Table, rank: int, chunk: int, sent: bool) -> str:
    text = "".join(_letter(source) * times for source, times in sorted(table[rank][chunk].items()))
    if is_complete(collective, table, rank, chunk):
        text = "S" if 1 < len(table) == len(table[rank][chunk]) else text.upper()
    return f"[{text}]" if sent else f" {text} "


def _letter(rank: int) -> str:
    return chr(ord("a") + rank)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# ---- the command ----


def overview(world_size: int, numel: int) -> str:
    """All registered algorithms with their costs a rank, by their formulas: the least and the most of all ranks."""
    rows = [("", "rounds", "messages sent", "elements sent")]
    for name, collective in COLLECTIVES.items():
        ranks = range(world_size)
        rounds = [collective.round_count(rank, world_size) for rank in ranks]
        messages = [collective.message_count(rank, world_size) for rank in ranks]
        elements = [collective.sent_elements(rank, world_size, numel) for rank in ranks]
        rows.append((name, _span(rounds), _span(messages), _span(elements)))
    widths = [max(map(len, column)) + 3 for column in zip(*rows, strict=True)]
    lines = [f"A rank of {world_size}, a buffer of {numel} elements:", ""]
    for name, *costs in rows:
        lines.append(name.ljust(widths[0]) + "".join(map(str.rjust, costs, widths[1:])))
    return "\n".join(lines)


def _span(values: Sequence[int]) -> str:
    return str(min(values)) if min(values) == max(values) else f"{min(values)}..{max(values)}"


class _OneLineParser(argparse.ArgumentParser):
    """An error is one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(arguments: list[str]) -> None:
    """`python -m torch_parallel collectives`: lists all algorithms, or draws one."""
    description = "Lists all collective algorithms with their costs, or draws one of them round by round."
    parser = _OneLineParser(description=description, prog="python -m torch_parallel collectives", allow_abbrev=False)
    parser.add_argument("--show", choices=tuple(COLLECTIVES), metavar="NAME", help=f"one of {', '.join(COLLECTIVES)}")
    parser.add_argument("--n", type=int, default=4, help="number of ranks (default: %(default)s)")
    parser.add_argument("--numel", type=int, default=1_000_000, help="elements of the buffer (default: %(default)s)")
    options = parser.parse_args(arguments)
    if not 1 <= options.n <= MOST_RANKS:
        parser.error(f"argument --n: {options.n} is not in 1..{MOST_RANKS}")
    if options.numel < 0:
        parser.error(f"argument --numel: {options.numel} is negative")
    if options.show is None:
        print(overview(options.n, options.numel))
        return
    try:
        print(show(COLLECTIVES[options.show], options.n))
    except ProofError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
