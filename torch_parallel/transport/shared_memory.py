"""Processes of one machine: every buffer lies in memory that all of them map, so a receive reads the peer's bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torch_parallel.status import StatusBoard
from torch_parallel.topology import Topology
from torch_parallel.transport.arena import Arena, page_aligned
from torch_parallel.transport.base import Transport
from torch_parallel.transport.calls import CallBoard, Calls
from torch_parallel.transport.links import EmulatedLinks, FileLock
from torch_parallel.transport.signals import Inboxes, PipeSignals, SequenceNumbers, Signals, stores_are_ordered


@dataclass
class Wiring:
    """What the launcher lays out before the workers start and every process of the run inherits.

    The arena begins with four tables: the counters of `SequenceNumbers`, the status board, the calls that each rank has
    made, and the clocks of emulated links. `inboxes` is None where sequence numbers serve, `links` where links are not
    emulated.
    """

    world_size: int
    arena: Arena
    offsets: tuple[int, ...]
    inboxes: Inboxes | None
    links: Topology | None = None

    @classmethod
    def create(cls, world_size: int, pipes: bool | None = None, links: Topology | None = None) -> Wiring:
        """`pipes` chooses how to signal; None means sequence numbers where the processor allows them."""
        arena = Arena.create()
        offsets = tuple(arena.allocate(size) for size in _table_bytes(world_size, links))
        arena.take(0, arena.next_byte)
        with_pipes = not stores_are_ordered() if pipes is None else pipes
        return cls(world_size, arena, offsets, Inboxes.create(world_size) if with_pipes else None, links)

    def table(self, index: int) -> memoryview:
        return self.arena.map(self.offsets[index], _table_bytes(self.world_size, self.links)[index])

    def status_board(self) -> StatusBoard:
        return StatusBoard(self.table(1), self.world_size)

    def call_board(self) -> CallBoard:
        return CallBoard(self.table(2), self.world_size)

    def close(self) -> None:
        self.arena.close()
        if self.inboxes is not None:
            self.inboxes.close()


def _table_bytes(world_size: int, links: Topology | None) -> tuple[int, ...]:
    return (
        SequenceNumbers.bytes_needed(world_size),
        StatusBoard.bytes_needed(world_size),
        CallBoard.bytes_needed(world_size),
        EmulatedLinks.bytes_needed(links),
    )


class SharedMemoryTransport(Transport):
    """The transport of one rank among the processes that share `wiring`."""

    def __init__(self, wiring: Wiring, rank: int, deadline_s: float) -> None:
        self.status = wiring.status_board().reporter(rank)
        signals: Signals
        if wiring.inboxes is None:
            signals = SequenceNumbers(wiring.table(0), rank, wiring.world_size, self.status, deadline_s)
        else:
            signals = PipeSignals(wiring.inboxes, rank, wiring.world_size, self.status, deadline_s)
        super().__init__(rank, wiring.world_size, signals, Calls(wiring.call_board(), rank))
        self._arena = wiring.arena
        if wiring.links is not None:
            lock = FileLock(wiring.arena.fd, deadline_s)
            links = EmulatedLinks(wiring.links, rank, wiring.table(3), lock, deadline_s)
            self.over_link, self.send_over_link, self.arrival_s = links.slowed, links.send, links.arrival_s
            self.one_memory = self.common_is_near = links.within_one_node

    def _allocate(self, count: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """Each buffer begins on a page of its own; all of them are one mapping."""
        stride = page_aligned(numel * dtype.itemsize)
        offset = self._arena.allocate(stride * count)
        self._take(offset, stride, count)
        together = self._arena.tensor(offset, (count, stride // dtype.itemsize), dtype)
        return [together[index, :numel] for index in range(count)]

    def _take(self, offset: int, stride: int, count: int) -> None:
        if self.rank == 0:
            self._arena.take(offset, stride * count)
