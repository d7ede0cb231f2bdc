"""A schedule is proved before it is trusted: all ranks are run on symbols, and every promise is checked.

A wrong index in a collective does not crash: it trains, to a slightly worse model, and a wrong order does so only now
and then. So nothing is sampled here. The rounds of all ranks are followed once, with chunks that hold counted
contributions in place of numbers, and with clocks that say what each rank can know. What holds for the symbols holds
for every buffer and every timing:

- no deadlock, even if sends block until they are received (two-sided transports);
- no overwrite, even if they do not (pull transports: a send is only a signal, and the receiver reads the sender's
  memory when it gets to it);
- no round changes a chunk that it sends;
- the k-th send of an ordered pair is the k-th receive, of the same chunks, and no message is left over;
- a common chunk has one writer, who has heard from all others before, so that nobody uses the last result any more, and
  who does not change it after it was sent; the others only wait for it;
- at the end each chunk holds each contribution that the collective promises exactly once, and nothing else.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from torch_parallel.collectives.schedule import Collective, Local, Operation, Receive, Round, Send
from torch_parallel.collectives.shapes import write_down

SHOWN_FAULTS = 20  # one wrong index makes thousands at P = 64
NEVER = sys.maxsize  # the round of what does not happen
NOBODY = -1  # whose contribution scratch holds at first: what was left there by something else


_Contents = Counter[tuple[int, int]]  # how often a chunk holds each contribution: (whose, which of its chunks)


class ProofError(Exception):
    """A schedule breaks a promise. The message lists its faults, causes before consequences."""


@dataclass(frozen=True)
class Report:
    """What `examine` found.

    faults            one sentence each; empty for a correct schedule
    unfinished_reads  (reader, source): when the source's program ends, no message has told it that the reader is done
                      with its memory. Only these need acknowledging before the source may write its buffer again.
                      Meaningful where there are no faults.
    """

    faults: tuple[str, ...]
    unfinished_reads: frozenset[tuple[int, int]]


def prove(collective: Collective, world_size: int) -> Report:
    """Return the report of a correct collective. For any other, raise `ProofError`, which says what is wrong."""
    report = examine(collective, world_size)
    if report.faults:
        lines = [f"{collective.name} is wrong for {world_size} ranks:", *report.faults[:SHOWN_FAULTS]]
        if len(report.faults) > SHOWN_FAULTS:
            lines.append(f"and {len(report.faults) - SHOWN_FAULTS} more")
        raise ProofError("\n  - ".join(lines))
    return report


def examine(collective: Collective, world_size: int) -> Report:
    """Return all that is wrong with a collective on `world_size` ranks.

    A bad schedule does not raise here, even if its generator raises or yields for ever. `ValueError` for no ranks.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}: a collective needs at least one rank")
    rounds, faults = write_down(collective, world_size)
    if faults:  # what follows relies on indices in range
        return Report(tuple(faults), frozenset())
    programs, messages = _pair_up(rounds)
    _, deadlock_if_blocking = _advance(programs, sends_block=True)
    order, deadlock = _advance(programs, sends_block=False)
    pull = _Pull(programs, collective)
    pull.run(order)
    faults = [*_mismatches(messages), *deadlock_if_blocking, *deadlock, *pull.wrong_writes]
    if not deadlock:  # what a stuck rank holds says nothing
        faults += _wrong_contents(collective, pull.contents)
    return Report(tuple(faults), pull.unfinished_reads(messages))


@dataclass(slots=True, eq=False)
class _Message:
    """The k-th send of an ordered pair and the k-th receive; either may be missing."""

    sender: int
    receiver: int
    index: int  # k
    sent_in: int = NEVER  # the sender's round
    sent: range = range(0)
    received_in: int = NEVER  # the receiver's round
    expected: range = range(0)
    receive: Receive | None = None
    known: list[int] = field(default_factory=list)  # the sender's clock when it sent
    heard_of: set[int] = field(default_factory=set)  # the ranks that it then knew to have begun
    payload: list[_Contents] = field(default_factory=list)  # what it sent
    read_number: int = 0  # which of the receiver's reads this was; 0: not read


_Programs = list[list[list[_Message | Local]]]  # [rank][round], in the order listed


def _pair_up(rounds: list[list[Round]]) -> tuple[_Programs, list[_Message]]:
    messages: dict[tuple[int, int, int], _Message] = {}
    sends: defaultdict[tuple[int, int], Iterator[int]] = defaultdict(count)
    receives: defaultdict[tuple[int, int], Iterator[int]] = defaultdict(count)

    def message_of(operation: Operation, rank: int, number: int) -> _Message | Local:
        if isinstance(operation, Local):
            return operation
        pair = (rank, operation.to) if isinstance(operation, Send) else (operation.source, rank)
        index = next((sends if isinstance(operation, Send) else receives)[pair])
        message = messages.setdefault((*pair, index), _Message(*pair, index))
        if isinstance(operation, Send):
            message.sent_in, message.sent = number, operation.chunks
        else:
            message.received_in, message.expected, message.receive = number, operation.chunks, operation
        return message

    programs = [
        [[message_of(operation, rank, number) for operation in this] for number, this in enumerate(program)]
        for rank, program in enumerate(rounds)
    ]
    return programs, list(messages.values())


def _mismatches(messages: list[_Message]) -> Iterator[str]:
    for m in messages:
        sends = f"rank {m.sender} sends chunks {m.sent.start}..{m.sent.stop - 1} to rank {m.receiver}"
        if m.received_in == NEVER:
            yield f"stray message: {sends} in round {m.sent_in}, which never receives it"
        elif m.sent_in != NEVER and m.sent != m.expected:
            expects = f"which expects {m.expected.start}..{m.expected.stop - 1}"
            yield f"mismatch: {sends}, {expects}, message {m.index} of the pair"


def _advance(programs: _Programs, sends_block: bool) -> tuple[list[tuple[int, int]], list[str]]:
    """Let every rank go as far as it can; return (rank, round) in the order ended, and the deadlock if there is one.

    A round's messages are all posted when it begins; it ends when those it waits for are posted at the other side too.
    Only the peers' progress counts, and progress is never undone. So the ranks get equally far in whatever order they
    advance, and this one order shows a deadlock or shows that there is none.
    """
    position = [0] * len(programs)  # the round that each rank is in
    order: list[tuple[int, int]] = []
    ended_before = -1
    while ended_before != len(order):
        ended_before = len(order)
        for rank, program in enumerate(programs):
            while position[rank] < len(program) and not _waits(program[position[rank]], position, sends_block):
                order.append((rank, position[rank]))
                position[rank] += 1
    unfinished = [program[at] for program, at in zip(programs, position, strict=True) if at < len(program)]
    waits = [wait for this in unfinished for wait in _waits(this, position, sends_block)]
    kind = "if sends block" if sends_block else "even if sends do not block"
    return order, [f"deadlock {kind}: {', '.join(waits)}"] if waits else []


def _waits(this: list[_Message | Local], position: list[int], sends_block: bool) -> list[str]:
    # The rank itself is in this round, so its own side of a message is never what is missing.
    messages = [m for m in this if isinstance(m, _Message)]
    late = [m for m in messages if position[m.sender] < m.sent_in]
    waits = [f"rank {m.receiver} waits in round {m.received_in} to receive from rank {m.sender}" for m in late]
    if sends_block:
        late = [m for m in messages if position[m.receiver] < m.received_in]
        waits += [f"rank {m.sender} waits in round {m.sent_in} to send to rank {m.receiver}" for m in late]
    return waits


class _Pull:
    """One run in which a send only signals, and a receive waits for the signal and then reads the sender's memory.

    Why one run decides for every timing: a receive waits for one particular signal, the next of its pair, never for
    "whichever comes first". So what must happen before what is the same in every interleaving; only unrelated events
    change places, and vector clocks tell the related from the unrelated.

    The clocks count reads: of rank b's reads, rank a knows the first `known[a][b]` to be finished. A rank counts its
    own reads as it does them; a signal carries the sender's clock, and its receiver keeps the larger of each entry.
    A write by a is safe if each earlier send of that chunk, being the n-th read of some b, has known[a][b] >= n. The
    signals of a round leave before its receives, so they do not vouch for them.
    """

    def __init__(self, programs: _Programs, collective: Collective) -> None:
        ranks = range(len(programs))
        self.programs = programs
        self.known = [[0 for _ in ranks] for _ in ranks]
        # contents[rank][chunk]; of a common chunk each rank has an entry of its own: what it knows to lie there
        self.contents = [_at_first(collective, rank, len(programs)) for rank in ranks]
        self.sent_since_written: defaultdict[tuple[int, int], list[_Message]] = defaultdict(list)
        self.common = collective.common_chunks(len(programs))
        self.writers: dict[int, int] = {}  # of the common chunks
        self.heard_of = [{rank} for rank in ranks]  # who has begun, as far as each rank knows
        self.wrong_writes: list[str] = []

    def run(self, order: list[tuple[int, int]]) -> None:
        """End the rounds in this order, and begin each as soon as the one before it has ended."""
        for rank in range(len(self.programs)):
            self._begin(rank, 0)
        for rank, number in order:
            for step in self.programs[rank][number]:
                if isinstance(step, Local):
                    mine = self.contents[rank]
                    self._write(rank, step.into, [mine[chunk] for chunk in step.chunks], step, number)
                elif step.receiver == rank:
                    self._receive(step)
            self._begin(rank, number + 1)

    def _begin(self, rank: int, number: int) -> None:
        steps = self.programs[rank][number] if number < len(self.programs[rank]) else []
        for message in steps:
            if isinstance(message, _Message) and message.sender == rank:
                message.known, message.heard_of = self.known[rank].copy(), self.heard_of[rank].copy()
                message.payload = [self.contents[rank][chunk] for chunk in message.sent]
                for chunk in message.sent:
                    self.sent_since_written[rank, chunk].append(message)

    def _receive(self, message: _Message) -> None:
        rank, receive = message.receiver, message.receive
        assert receive is not None
        self.known[rank] = list(map(max, self.known[rank], message.known))
        self.known[rank][rank] += 1
        self.heard_of[rank] |= message.heard_of
        message.read_number = self.known[rank][rank]
        if message.sent and message.sent[0] in self.common:
            self._wait_for_common(message)
        else:  # A mismatched message, a fault already, is followed too: what was sent lands where it was expected.
            self._write(rank, receive.target, message.payload, receive, message.received_in)

    def _wait_for_common(self, message: _Message) -> None:
        for chunk, received in zip(message.sent, message.payload, strict=True):
            self.contents[message.receiver][chunk] = received
            if self.writers.get(chunk) != message.sender:
                waits = f"rank {message.receiver} waits for common chunk {chunk} in round {message.received_in}"
                self.wrong_writes.append(f"{waits} until rank {message.sender} sends it, which does not write it")

    def _write(self, rank: int, into: range, values: list[_Contents], step: Receive | Local, number: int) -> None:
        mine = self.contents[rank]
        addends = step.addend if isinstance(step, Receive) else into
        for chunk, value, addend in zip(into, values, addends, strict=False):
            self._check_write(rank, chunk, number)
            mine[chunk] = mine[addend] + value if step.reduce else value

    def _check_write(self, rank: int, chunk: int, number: int) -> None:
        changes = f"rank {rank} changes chunk {chunk} in round {number}"
        # Clocks only grow: a send that this write cannot hurt, no later write can. Each is judged once.
        sent = self.sent_since_written.pop((rank, chunk), [])
        for m in sent:
            if m.sent_in == number:
                self.wrong_writes.append(f"overlap: {changes}, which sends it to rank {m.receiver}")
            elif m.received_in != NEVER and not 0 < m.read_number <= self.known[rank][m.receiver]:
                reading = f"while rank {m.receiver} may still be reading it (sent in round {m.sent_in})"
                self.wrong_writes.append(f"overwrite if sends do not block: {changes} {reading}")
        if chunk in self.common:
            self.wrong_writes += [f"common chunk: {changes}, {flaw}" for flaw in self._common_flaws(rank, chunk, sent)]

    def _common_flaws(self, rank: int, chunk: int, sent: list[_Message]) -> Iterator[str]:
        writer = self.writers.setdefault(chunk, rank)
        if writer != rank:
            yield f"which rank {writer} writes too"
        if unheard := sorted(set(range(len(self.programs))) - self.heard_of[rank]):
            yield f"while rank {unheard[0]}, from which it has not heard, may still be using the last result"
        if sent:
            yield f"which it has sent to rank {sent[0].receiver} in round {sent[0].sent_in} for good"

    def unfinished_reads(self, messages: list[_Message]) -> frozenset[tuple[int, int]]:
        # A message without chunks signals, and one of a common chunk too: nothing of the sender's own is read.
        read = [m for m in messages if m.expected and m.expected[0] not in self.common]
        return frozenset((m.receiver, m.sender) for m in read if m.read_number > self.known[m.sender][m.receiver])


def _at_first(collective: Collective, rank: int, world_size: int) -> list[_Contents]:
    """In region 0 the rank's own values, in the others what nobody promises."""
    chunk_count, total = collective.chunk_count(world_size), collective.total_chunks(rank, world_size)
    return [Counter({(rank if chunk < chunk_count else NOBODY, chunk): 1}) for chunk in range(total)]


def _wrong_contents(collective: Collective, contents: list[list[_Contents]]) -> Iterator[str]:
    for rank, chunks in enumerate(contents):
        for chunk, holds in enumerate(chunks):
            if (promised := collective.promised(rank, len(contents), chunk)) is not None:
                for complaint in _complaints(holds, promised):
                    yield f"rank {rank} ends with chunk {chunk} {complaint}"


def _complaints(holds: _Contents, promised: frozenset[tuple[int, int]]) -> Iterator[str]:
    for source, chunk in sorted(promised | holds.keys()):
        times = holds[source, chunk]
        if source == NOBODY:
            yield f"holding what lay in chunk {chunk} before"
        elif (source, chunk) not in promised:
            yield f"holding chunk {chunk} of rank {source}, which was not promised"
        elif times == 0:
            yield f"lacking rank {source}'s contribution"
        elif times > 1:  # repeated doubling makes numbers too long to print
            yield f"holding rank {source}'s contribution {times if times < 10**9 else 'over 10^9'} times"
