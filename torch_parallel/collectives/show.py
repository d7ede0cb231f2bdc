"""A schedule as text: what every rank holds before, and after each round, and who sends what to whom in between.

The drawing above `ring.py`'s functions was made by hand; this one is made from the schedule, so it cannot be wrong
about it, and a new algorithm has one as soon as it is registered:

    python -m torch_parallel collectives                    all algorithms, and what they cost
    python -m torch_parallel collectives --show ring --n 4  one of them, round by round
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from textwrap import wrap

from torch_parallel.collectives import COLLECTIVES, Collective
from torch_parallel.collectives.moves import Message, Table, is_complete, moves, region_name, states
from torch_parallel.collectives.proof import ProofError
from torch_parallel.usage import OneLineParser

MOST_RANKS = 18  # a..r: the upper case letter S is a sum
WIDTH = 100

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
        lines += [
            "",
            *_told(collective, world_size, number, messages),
            *_drawn(collective, "after", tables[number], following[number]),
        ]
    return "\n".join(lines)


def _heading(collective: Collective, world_size: int, rounds: list[list[Message]]) -> list[str]:
    chunk_count = collective.chunk_count(world_size)
    received = [message for messages in rounds for message in messages if not message.is_local]
    message_count = len(received)
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
    if any(not message.chunks for message in received):
        keys.append(("0 --> 1", "rank 0 only signals to rank 1"))
    if any(message.target != message.chunks for message in received):
        keys.append(("0 -k-> 1:j", "which puts it, or the sum, into its chunk j"))
    if any(message.is_local for messages in rounds for message in messages):
        keys.append(("moved", "between a rank's own chunks, without any message"))
    if any(collective.total_chunks(rank, world_size) > chunk_count for rank in range(world_size)):
        keys.append(("-", "nothing yet"))
    if collective.equal_chunks:
        keys.append(("b2", "chunk 2 of what rank 1 contributes"))
    if collective.common_chunks(world_size):
        keys.append(("result", "one memory for all ranks; a rank's row shows what it knows to be there"))
    width = max(len(key) for key, _ in keys)
    title = f"{collective.name}: {', '.join(_counted(number, noun) for number, noun in counts)}"
    return [title, *(f"  {key.ljust(width)}   {meaning}" for key, meaning in keys)]


def _told(collective: Collective, world_size: int, number: int, messages: list[Message]) -> list[str]:
    """The messages of a round, those that are added apart from those that replace, and what ranks move themselves."""
    lines, common = [f"round {number}"], collective.common_chunks(world_size)

    def verb_of(message: Message) -> str:
        if message.is_local:
            return "moved:   "
        if not message.chunks:
            return "signals: "
        if message.chunks[0] in common:
            return "waited:  "
        return "added:   " if message.reduce else "replaced:"

    in_order = sorted(messages, key=lambda message: (message.source, message.to))
    for verb in ("added:   ", "replaced:", "waited:  ", "signals: ", "moved:   "):
        # no-break spaces keep `wrap` from breaking inside of an arrow
        arrows = [_arrow(message).replace(" ", "\xa0") for message in in_order if verb_of(message) == verb]
        lines += wrap("  ".join(arrows), WIDTH, initial_indent=f"  {verb} ", subsequent_indent=" " * 12)
    return [line.replace("\xa0", " ").rstrip() for line in lines]


def _arrow(message: Message) -> str:
    into = f":{_span_of(message.target)}" if message.target != message.chunks else ""
    return f"{message.source} -{_span_of(message.chunks)}-> {message.to}{into}"


def _span_of(chunks: range) -> str:
    first, last = chunks.start, chunks.stop - 1
    return "" if last < first else str(first) if last == first else f"{first}..{last}"


def _drawn(collective: Collective, title: str, table: Table, following: list[Message]) -> list[str]:
    """A table, a row a rank; `following` are the messages of the next round, whose chunks are put into brackets.

    Regions stand below each other, or, of one chunk each, beside each other.
    """
    sent = {(message.source, chunk) for message in following if not message.is_local for chunk in message.chunks}
    cells = [
        [_text(collective, table, rank, chunk, (rank, chunk) in sent) for chunk in range(len(row))]
        for rank, row in enumerate(table)
    ]
    total = max(map(len, table))
    heads = [f"{region_name(collective, len(table), chunk)} {chunk}" for chunk in range(total)]
    width = max(len(text) for row in [*cells, heads] for text in row) + 2
    chunk_count = collective.chunk_count(len(table))
    block_size = total if chunk_count == 1 else chunk_count
    lines = []
    for start in range(0, total, block_size):
        block = slice(start, start + block_size)
        named = [(f"    rank {rank}", row[block]) for rank, row in enumerate(cells) if row[block]]
        rows = [(f"  {title}" if start == 0 else "", heads[block]), *named]
        lines += [f"{name:13}{''.join(text.center(width) for text in row)}".rstrip() for name, row in rows]
    return lines


def _text(collective: Collective, table: Table, rank: int, chunk: int, sent: bool) -> str:
    if not table[rank][chunk]:
        return " - "  # nothing yet
    text = "".join(_letter(source) * times for source, times in sorted(table[rank][chunk].items()))
    if is_complete(collective, table, rank, chunk):
        text = "S" if 1 < len(table) == len(table[rank][chunk]) else text.upper()
    if collective.equal_chunks:  # chunks move to other places, so which one it is matters; `moves` has proved it
        of_input = chunk < collective.chunk_count(len(table))
        text += str(chunk if of_input else collective.source_chunk(rank, len(table), chunk % len(table)))
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


def main(arguments: list[str]) -> None:
    """`python -m torch_parallel collectives`: lists all algorithms, or draws one."""
    description = "Lists all collective algorithms with their costs, or draws one of them round by round."
    parser = OneLineParser(description=description, prog="python -m torch_parallel collectives", allow_abbrev=False)
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
