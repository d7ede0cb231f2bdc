"""Calls have numbers: ranks that do not call the same operations in the same order learn it at once.

Every call that all ranks make together has a number, 1, 2, 3, ..., and a signature, 32 bits made of what it is. Each
rank writes down its calls in memory that all ranks read, before it signals anything, and looks at what its peers have
written when it has waited for them, and while it waits:

  number     1          2          3          4
  rank 0     all_reduce barrier    all_reduce            is in call 3
  rank 1     all_reduce barrier    broadcast             call 3 differs: both say so

What is written for a call is not its signature alone but a digest of all calls up to it. So a difference that nobody
saw when it came about (a rank may run ahead of its peers) is seen at any later look; the first call that differs is
then found by looking back. Only the last SLOTS calls are kept: a peer that is more calls ahead is not looked at until
the ranks are closer again.

A call costs one store, and one load for each peer: number and digest lie in one word, so that they are read together.
"""

from __future__ import annotations

import hashlib
import time
import zlib
from functools import cache, lru_cache

from torch_parallel.collectives.schedule import Collective

SLOTS = 64
TEXTS = 256
"""Different texts that each rank keeps for its peers to read."""
TEXT_LIMIT = 200
"""Bytes (UTF-8) of the text that says what a call is; what is longer is cut, and a digest of it put in its place."""

_FACTOR, _MASK = 31, 0xFFFFFFFF  # small factors are multiplied sooner
_TEXT_BYTES = TEXT_LIMIT + 8  # the signature first
_RECORD_BYTES = 8 * (SLOTS + 1) + TEXTS * _TEXT_BYTES
UNKNOWN = "call something else"
"""In place of what is not known of a call (any more)."""
ADVICE = "all ranks must call the same operations in the same order"


class TransportError(RuntimeError):
    """A wait that reached its deadline or has nobody to wait for, or ranks that do not call the same things.

    `secondhand`: see mailbox.Failure; `of_a_peer` where all it says is that a peer has raised an error.
    """

    def __init__(self, message: str, secondhand: bool = True, of_a_peer: bool = False) -> None:
        super().__init__(message)
        self.secondhand = secondhand
        self.of_a_peer = of_a_peer

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.secondhand, self.of_a_peer), vars(self)


def at_most(limit: int, text: str) -> str:
    """The text, which stays unlike any other, in so many bytes."""
    encoded = text.encode()
    if len(encoded) <= limit:
        return text
    digest = hashlib.blake2b(encoded, digest_size=8).hexdigest()
    return f"{encoded[: limit - len(digest) - 4].decode(errors='ignore')}... {digest}"


@lru_cache(maxsize=1024)
def signature_of(text: str) -> int:
    """32 bits, the same on every rank."""
    return zlib.crc32(text.encode())


@cache
def schedule_signature(collective: Collective, world_size: int) -> int:
    """Of what all ranks do: schedules of one name may differ, as broadcasts from two ranks do."""
    rounds = [list(collective.rounds(rank, world_size)) for rank in range(world_size)]
    return zlib.crc32(repr((collective.name, rounds)).encode())


class CallBoard:
    """What all ranks have called, on `memory`, which holds `bytes_needed(world_size)` bytes, zeros at first."""

    def __init__(self, memory: memoryview, world_size: int) -> None:
        self.world_size = world_size
        self._bytes = memory.cast("B")
        self.words = memory.cast("B").cast("Q")

    @staticmethod
    def bytes_needed(world_size: int) -> int:
        return world_size * _RECORD_BYTES

    @staticmethod
    def first_word(rank: int) -> int:
        """Where the slots of a rank begin. Behind them lies a mark that the rank has been told of an error."""
        return rank * _RECORD_BYTES // 8

    def record(self, rank: int) -> memoryview:
        """All words of one rank."""
        first = self.first_word(rank)
        return self.words[first : first + _RECORD_BYTES // 8]

    @staticmethod
    def rank_at(index: int) -> int:
        """Whose slot that is."""
        return 8 * index // _RECORD_BYTES

    def entry(self, rank: int, number: int) -> int | None:
        """The digest of a rank's calls up to this one; None where it has not made it yet, or it is not kept."""
        if number == 0:
            return 0
        word = self.words[self.first_word(rank) + number % SLOTS]
        return word & _MASK if word >> 32 == _lap(number) else None

    def count(self, rank: int) -> int:
        """How many calls a rank has made."""
        first = self.first_word(rank)
        laps = [word >> 32 for word in self.words[first : first + SLOTS]]
        return max((lap - 1) * SLOTS + place for place, lap in enumerate(laps)) if any(laps) else 0

    def is_told(self, rank: int) -> bool:
        return bool(self.words[self.first_word(rank) + SLOTS])

    def tell(self, rank: int) -> None:
        """An error of a call has been raised on this rank: what it calls from now on is its own affair."""
        self.words[self.first_word(rank) + SLOTS] = 1

    def note(self, rank: int, number: int, word: int) -> None:
        """What a rank of another node has written for a call; what is known of a later one stays."""
        index = self.first_word(rank) + number % SLOTS
        if number and word > self.words[index]:
            self.words[index] = word

    def adopt(self, rank: int, start: int, words: memoryview) -> None:
        """Some of the words of a rank of another node, from the place `start` of its record on."""
        first = self.first_word(rank) + start
        for index, word in enumerate(words, first):
            if index - self.first_word(rank) >= SLOTS or word > self.words[index]:  # as `note`
                self.words[index] = word

    def put_text(self, rank: int, place: int, signature: int, text: str) -> None:
        start = self._text_start(rank, place)
        encoded = text.encode()[:TEXT_LIMIT].ljust(TEXT_LIMIT, b"\0")
        self._bytes[start + 8 : start + _TEXT_BYTES] = encoded
        self.words[start // 8] = signature + 1

    def text(self, rank: int, signature: int) -> str | None:
        """What a rank's call of this signature is; None where it keeps no such text any more."""
        for place in range(TEXTS):
            start = self._text_start(rank, place)
            if self.words[start // 8] == signature + 1:
                return bytes(self._bytes[start + 8 : start + _TEXT_BYTES]).rstrip(b"\0").decode(errors="replace")
        return None

    def what(self, rank: int, number: int) -> str | None:
        """What a rank's call of this number is; None where that is not known (any more)."""
        before, after = self.entry(rank, number - 1), self.entry(rank, number)
        if before is None or after is None:
            return None
        return self.text(rank, (after - before * _FACTOR) & _MASK)

    def difference(self, one: int, other: int, number: int) -> str:
        """Says which call of two ranks differs first, given that those up to `number` do."""
        while number > 1 and self.entry(one, number - 1) != self.entry(other, number - 1):
            number -= 1
            if self.entry(one, number - 1) is None or self.entry(other, number - 1) is None:
                break
        mine, theirs = (self.what(rank, number) or UNKNOWN for rank in (one, other))
        if mine == theirs:
            theirs += ", which is another one"
        return f"call {number}: rank {one} wants to {mine}, but rank {other} wants to {theirs}: {ADVICE}"

    def unequal_ends(self, ended: list[int]) -> tuple[int, str] | None:
        """Where ranks whose function has ended did not make all calls that others made, or others: whose fault that
        may be, and a line that says so. None where all is well, and where a rank has been told already."""
        if any(self.is_told(rank) for rank in range(self.world_size)):
            return None
        counts = [self.count(rank) for rank in range(self.world_size)]
        for rank in ended:
            for peer in range(self.world_size):
                if counts[rank] < counts[peer]:
                    what = self.what(peer, counts[rank] + 1)
                    return rank, (
                        f"rank {rank} has returned after {_calls(counts[rank])}, and rank {peer} made "
                        f"{_calls(counts[peer])}: call {counts[rank] + 1} of rank {peer} was to "
                        f"{what or 'call something'}, and {ADVICE}"
                    )
                number = counts[rank]
                if peer in ended and number == counts[peer] and self.entry(rank, number) != self.entry(peer, number):
                    return rank, self.difference(rank, peer, number)
        return None

    def _text_start(self, rank: int, place: int) -> int:
        return rank * _RECORD_BYTES + 8 * (SLOTS + 1) + place * _TEXT_BYTES


class Calls:
    """One rank's own calls, and what it compares them with."""

    def __init__(self, board: CallBoard, rank: int) -> None:
        self.board = board
        self.words = board.words
        self.entry = 0
        """What this rank has written for the present call, or for the last one."""
        self._rank = rank
        self._own = board.first_word(rank)
        self._place, self._lap = 0, _lap(0) << 32
        peers = [peer for peer in range(board.world_size) if peer != rank]
        # by place, so that nothing is left to add up
        self._theirs = [[board.first_word(peer) + place for peer in peers] for place in range(SLOTS)]
        self.theirs = self._theirs[0]
        """Where in `words` the peers write theirs for the same call."""
        self.words_s = 0.0
        """So long may it take until it is known here what a peer's call is."""
        self._texts: dict[int, None] = {}  # signatures of which the board holds the text, the oldest first
        self._texts_written = 0

    @property
    def number(self) -> int:
        """Of the present call, or of the last one."""
        return ((self._lap >> 32) - 1) * SLOTS + self._place

    def say(self, signature: int, text: str) -> int:
        """Lets the peers read what calls of this signature are: `text`, of at most TEXT_LIMIT bytes. Returns it."""
        if signature in self._texts:
            return signature
        if len(self._texts) == TEXTS:
            del self._texts[next(iter(self._texts))]
        self._texts[signature] = None
        self.board.put_text(self._rank, self._texts_written % TEXTS, signature, text)
        self._texts_written += 1
        return signature

    def enter(self, signature: int) -> None:
        """Begins the next call."""
        self._place = place = (self._place + 1) % SLOTS
        if not place:
            self._lap += 1 << 32
        self.entry = self.words[self._own + place] = self._lap | (self.entry * _FACTOR + signature) & _MASK
        self.theirs = self._theirs[place]

    def compare(self, heard: list[int] | None = None) -> None:
        """Compares the last call that both have made, with each peer. Raises TransportError where they differ, or where
        one of whom this rank has `heard` since its call began has not made it."""
        for index in self.theirs:
            if self.words[index] != self.entry:
                peer = self.board.rank_at(index)
                difference = self._closer_look(peer)
                if difference is None and heard and peer in heard:
                    difference = self._not_come(peer)
                if difference is not None:
                    difference = self._with_words(peer, difference)
                    raise self.told(TransportError(difference, secondhand=False))

    @property
    def is_told(self) -> bool:
        """Whether this rank has been told of an error."""
        return self.board.is_told(self._rank)

    def told(self, error: TransportError) -> TransportError:
        """The error, with a note that this rank has been told of one."""
        self.board.tell(self._rank)
        return error

    def hear(self, peer: int, number: int, word: int) -> None:
        """A peer of another node has said with a message in which call it is."""
        self.board.note(peer, number, word)

    def _with_words(self, peer: int, difference: str) -> str:
        """The same, with what the peer wants to do, once that is known here."""
        until_s = time.monotonic() + self.words_s
        while UNKNOWN in difference and time.monotonic() < until_s:
            time.sleep(0.01)
            difference = self._closer_look(peer) or difference
        return difference

    def _not_come(self, peer: int) -> str | None:
        """Where the peer, which has signalled within this call, is not in it or beyond."""
        count = self.board.count(peer)
        if count >= self.number:
            return None
        mine = self.board.what(self._rank, self.number) or "call something"
        return (
            f"call {self.number}: rank {self._rank} wants to {mine}, but rank {peer} has made {_calls(count)} and does "
            f"something else: {ADVICE}"
        )

    def _closer_look(self, peer: int) -> str | None:
        for number in range(self.number, max(0, self.number - SLOTS), -1):
            theirs = self.board.entry(peer, number)
            if theirs is not None:
                return (
                    None
                    if theirs == self.board.entry(self._rank, number)
                    else (self.board.difference(self._rank, peer, number))
                )
        return None


def _lap(number: int) -> int:
    return number // SLOTS + 1


def _calls(count: int) -> str:
    return f"{count} call{'s' * (count != 1)}"
