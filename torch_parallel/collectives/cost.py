"""How long a collective takes, worked out from its schedule: no formula of its own, so none that can be wrong about it.

A message costs alpha seconds and beta seconds a byte, and adding a byte costs gamma (Hockney, "The communication
challenge for MPP", 1994; with gamma as in Thakur, Rabenseifner and Gropp, 2005). Links are full duplex: a rank receives
one message at a time and in the order listed, as the transport performs them, and can be read by one rank at a time.
All clocks start together. A round begins when the last one has ended, and its sends are signalled then.

What follows from the schedules, for P ranks and S bytes, as the tests compare:

    ring                2(P-1) alpha + 2(P-1)/P S beta + (P-1)/P S gamma
    halving_doubling    2 log2 P alpha + 2(P-1)/P S beta + (P-1)/P S gamma      (P a power of two)
    tree                2 log2 P (alpha + S beta) + log2 P S gamma              (P a power of two)
    two_shot            2(P-1) alpha + 2(P-1)/P S beta + (P-1)/P S gamma
    reduce_broadcast    2(P-1)(alpha + S beta) + (P-1) S gamma
    all_gather_average  (P-1)(alpha + S beta) + (P-1) S gamma

Where messages to different peers overlap fully, the two shots' 2(P-1) alpha would be 2 alpha; here each is waited for.

In memory that all ranks share there are no links. Several ranks may read from one at the same time; to add what is
already here costs as much as to add what a peer has, beta and gamma; a move keeps a processor busy, of which there may
be fewer than ranks; and where several ranks move at the same time, memory serves each of them more slowly.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from torch_parallel.collectives.schedule import Collective, Local, Receive, Round, Send, chunk_bounds


@dataclass(frozen=True)
class Rates:
    """Seconds a message, a byte moved, and a byte added."""

    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_byte: float = 0.0
    contention: float = 0.0
    """In shared memory: by what part a move takes longer for each other rank that moves at the same time."""
    latency_is_on_the_way: bool = False
    """Over links: during alpha a message keeps its receiver waiting, but not its sender's link, as if emulated."""


def predicted_s(
    collective: Collective, world_size: int, nbytes: int, rates: Rates, processors: int | None = None
) -> float:
    """Seconds until the last of `world_size` ranks is done with a buffer of `nbytes` bytes.

    Over links; with a number of `processors`, in memory that all ranks share. Raises ValueError for a schedule that
    gets stuck; `proof.prove` says why.
    """
    clocks = _Clocks(collective, world_size, nbytes, rates, processors)
    end_s = clocks.run()
    if processors is None or not end_s:
        return end_s
    moving = clocks.moved_s / end_s  # ranks that move at the same time, on average
    return end_s * (1 + rates.contention * max(0.0, moving - 1))


def predicted_on_nodes_s(collective: Collective, topology: Links, nbytes: int) -> float:
    """Seconds until the last rank is done, where only what crosses network cards takes time: within a node nothing
    does. Cards serve as emulated ones do: see `transport/links.py`. Raises ValueError as `predicted_s` does."""
    return _ClocksOfNodes(collective, topology, nbytes).run()


class Links(Protocol):
    """What `topology.Topology` is here, which collectives do not import."""

    @property
    def node_of(self) -> tuple[int, ...]: ...
    @property
    def nic_of(self) -> tuple[int, ...]: ...
    @property
    def bytes_per_s(self) -> tuple[float, ...]: ...
    @property
    def latency_s(self) -> float: ...


class _Clocks:
    """Performs the receives of all ranks in the order in which they start."""

    def __init__(
        self, collective: Collective, world_size: int, nbytes: int, rates: Rates, processors: int | None
    ) -> None:
        ranks = range(world_size)
        self.rates = rates
        self.chunk_count = collective.chunk_count(world_size)
        self.bounds = chunk_bounds(nbytes, self.chunk_count)
        self.common = collective.common_chunks(world_size)
        self.programs = [deque(collective.rounds(rank, world_size)) for rank in ranks]
        self.steps: list[deque[Receive | Local]] = [deque() for _ in ranks]  # what is left of each rank's round
        self.now_s = [0.0] * world_size
        self.readable_s = [0.0] * world_size  # when the last read of each rank's memory has ended, over links
        self.free_s = [0.0] * (world_size if processors is None else processors)  # when each processor has
        self.over_links = processors is None
        self.moved_s = 0.0  # by all ranks together
        self.signals: dict[tuple[int, int], deque[tuple[float, int]]] = {(a, b): deque() for a in ranks for b in ranks}
        self.signal_count = 0

    def run(self) -> float:
        for rank in range(len(self.programs)):
            self._advance(rank)
        while starts := [start for rank in range(len(self.programs)) if (start := self._next_start(rank))]:
            start_s, _, rank = min(starts)
            self._receive(rank, start_s)
            self._advance(rank)
        if any(self.steps):
            raise ValueError("the schedule gets stuck")
        return max(self.now_s)

    def _advance(self, rank: int) -> None:
        """Does what needs no peer: the signals of the rounds that begin."""
        while not self.steps[rank] and self.programs[rank]:
            self._begin(rank, self.programs[rank].popleft())

    def _begin(self, rank: int, this: Round) -> None:
        for operation in this:
            if isinstance(operation, Send):
                self.signals[rank, operation.to].append((self.now_s[rank], self.signal_count))
                self.signal_count += 1
            else:
                self.steps[rank].append(operation)

    def _next_start(self, rank: int) -> tuple[float, int, int] | None:
        """When this rank's next receive can start; of several at one time, the first that was signalled goes first."""
        step = self.steps[rank][0] if self.steps[rank] else None
        if not isinstance(step, Receive) or not self.signals[step.source, rank]:
            return None
        signalled_s, number = self.signals[step.source, rank][0]
        free_s = self.readable_s[step.source] if self.over_links else min(self.free_s)
        return max(self.now_s[rank], signalled_s, free_s), number, rank

    def _receive(self, rank: int, start_s: float) -> None:
        step = self.steps[rank].popleft()
        assert isinstance(step, Receive)
        self.signals[step.source, rank].popleft()
        nbytes = self._bytes(step.chunks)
        arrived_s = start_s + self.rates.alpha_s + nbytes * self.rates.beta_s_per_byte
        self.readable_s[step.source] = arrived_s - self.rates.latency_is_on_the_way * self.rates.alpha_s
        self.now_s[rank] = arrived_s + step.reduce * nbytes * self.rates.gamma_s_per_byte
        while self.steps[rank] and isinstance(self.steps[rank][0], Local):  # as the transport does, without a break
            self.now_s[rank] += self._own_s(self.steps[rank].popleft())
        self.moved_s += self.now_s[rank] - start_s
        if not self.over_links:
            self.free_s[self.free_s.index(min(self.free_s))] = self.now_s[rank]

    def _own_s(self, move: Receive | Local) -> float:
        adding, copying = self.rates.gamma_s_per_byte, self.rates.beta_s_per_byte
        if not self.over_links:
            adding += copying
        return self._bytes(move.chunks) * (adding if move.reduce else copying)

    def _bytes(self, chunks: range) -> int:
        """Bytes that move: none of a common chunk."""
        if chunks and chunks.start in self.common:
            return 0
        first = chunks.start // self.chunk_count * self.chunk_count
        return self.bounds[chunks.stop - first] - self.bounds[chunks.start - first]


class _ClocksOfNodes(_Clocks):
    """A message between nodes takes its place in the queues of both cards, when its receiver comes to it."""

    def __init__(self, collective: Collective, topology: Links, nbytes: int) -> None:
        super().__init__(collective, len(topology.node_of), nbytes, Rates(0.0, 0.0), None)
        self.topology = topology
        self.free_nics_s = [[0.0, 0.0] for _ in topology.bytes_per_s]  # of each card: sending, receiving

    def _next_start(self, rank: int) -> tuple[float, int, int] | None:
        step = self.steps[rank][0] if self.steps[rank] else None
        if not isinstance(step, Receive) or not self.signals[step.source, rank]:
            return None
        signalled_s, number = self.signals[step.source, rank][0]
        return max(self.now_s[rank], signalled_s), number, rank

    def _receive(self, rank: int, start_s: float) -> None:
        step = self.steps[rank][0]
        assert isinstance(step, Receive)
        super()._receive(rank, start_s)
        topology = self.topology
        if topology.node_of[step.source] == topology.node_of[rank]:
            return
        nbytes, sender, receiver = self._bytes(step.chunks), topology.nic_of[step.source], topology.nic_of[rank]
        leaves_s = max(start_s, self.free_nics_s[sender][0])
        enters_s = max(leaves_s, self.free_nics_s[receiver][1])
        left_s = leaves_s + nbytes / topology.bytes_per_s[sender]
        entered_s = enters_s + nbytes / topology.bytes_per_s[receiver]
        if nbytes:
            self.free_nics_s[sender][0], self.free_nics_s[receiver][1] = left_s, entered_s
        self.now_s[rank] = max(left_s, entered_s) + topology.latency_s
