"""What is wrong with an operation by itself: ranks that are not there, chunks outside of the memory, moves that do not
fit. The first part of the proof; what an operation means beside others is in `proof.py`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from torch_parallel.collectives.schedule import Collective, Local, Receive, Round, Send

MAX_ROUNDS = 100_000  # of one rank; a schedule with more is taken to go on for ever


def write_down(collective: Collective, world_size: int) -> tuple[list[list[Round]], list[str]]:
    """Return the rounds of each rank, and what in them is impossible by itself."""
    programs: list[list[Round]] = [[] for _ in range(world_size)]
    faults: list[str] = []
    for rank, program in enumerate(programs):
        try:
            program.extend(list(this) for this in islice(collective.rounds(rank, world_size), MAX_ROUNDS + 1))
        except Exception as error:
            faults.append(f"rank {rank} fails in round {len(program)}: {error!r}")
        if len(program) > MAX_ROUNDS:
            return programs, [*faults, f"rank {rank} does not end: it has more than {MAX_ROUNDS} rounds"]
        shapes = Shapes(collective, rank, world_size)
        for number, this in enumerate(program):
            faults += [f"in round {number} rank {rank} {flaw}" for flaw in shapes.flaws(this)]
    return programs, faults


class Shapes:
    """The memory of one rank, and what of its peers' it can reach."""

    def __init__(self, collective: Collective, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.chunk_count = collective.chunk_count(world_size)
        self.total = collective.total_chunks(rank, world_size)
        self.common = collective.common_chunks(world_size)
        self.equal_chunks = collective.equal_chunks

    def flaws(self, this: Round) -> Iterator[str]:
        """What is wrong in a round, each as the end of a sentence that begins with the rank."""
        has_received = False
        for operation in this:
            has_received |= isinstance(operation, Receive)
            if isinstance(operation, Local):
                flaw = self._of_move(operation) if has_received else "moves chunks without a receive before that"
            elif isinstance(operation, Send):
                flaw = self._of_message("sends to", operation.to, operation.chunks)
            elif isinstance(operation, Receive):
                flaw = self._of_message("receives from", operation.source, operation.chunks)
                flaw = flaw or self._of_receive(operation)
            else:
                flaw = f"yields {operation!r}, which is neither a Send nor a Receive"
            if flaw:
                yield flaw

    def _of_message(self, verb: str, peer: int, chunks: range) -> str:
        if not isinstance(peer, int) or not 0 <= peer < self.world_size:
            return f"{verb} rank {peer!r}, outside 0..{self.world_size - 1}"
        if peer == self.rank:
            return f"{verb} itself"
        if not _is_slice(chunks, self.chunk_count) and not self._is_common(chunks):
            return f"{verb} rank {peer} {chunks!r}, which is no slice of the chunks 0..{self.chunk_count - 1}"
        return ""

    def _of_receive(self, receive: Receive) -> str:
        if receive.chunks and receive.chunks.start in self.common:
            only_waits = not receive.reduce and receive.target == receive.chunks
            return "" if only_waits else f"copies common {receive.chunks!r} in place of using it where it is"
        verb = f"receives from rank {receive.source}"
        targets = [receive.target, receive.addend] if receive.reduce else [receive.target]
        return next((flaw for mine in targets if (flaw := self._misfit(verb, receive.chunks, mine))), "")

    def _of_move(self, move: Local) -> str:
        if not self._is_in_one_region(move.chunks):
            return f"moves its own {move.chunks!r}, which is no slice of one of its regions"
        return self._misfit("moves", move.chunks, move.into)

    def _misfit(self, verb: str, chunks: range, mine: range) -> str:
        if not self._is_in_one_region(mine):
            return f"{verb} {chunks!r} to {mine!r}, which is no slice of one of its regions"
        if len(mine) != len(chunks):
            return f"{verb} {chunks!r} to {mine!r}, of another length"
        if not self.equal_chunks and chunks and (mine.start - chunks.start) % self.chunk_count:
            return f"{verb} {chunks!r} to {mine!r}, which fits only if all chunks have one size"
        return ""

    def _is_common(self, chunks: range) -> bool:
        inside = _is_slice(chunks, self.common.stop) and self.common.start <= chunks.start
        return inside and len(chunks) > 0

    def _is_in_one_region(self, chunks: range) -> bool:
        if not _is_slice(chunks, self.total):
            return False
        return not chunks or chunks[0] // self.chunk_count == chunks[-1] // self.chunk_count


def _is_slice(chunks: range, count: int) -> bool:
    return isinstance(chunks, range) and chunks.step == 1 and 0 <= chunks.start <= chunks.stop <= count
