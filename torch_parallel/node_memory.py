"""The memory of one node in a run of processes that others have started: its lowest rank makes it, the others open it.

Rank 0 also has the data there that all ranks read. Other nodes load the same for themselves, and it is compared.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_parallel.mailbox import Outbox, mailbox
from torch_parallel.meeting import Meeting, address_of, opened, wiring_at
from torch_parallel.place import RendezvousError
from torch_parallel.transport.shared_memory import Wiring


def tell_memory(meeting: Meeting, number: int, wiring: Wiring, outboxes: Sequence[Outbox | None]) -> None:
    """To the ranks of the own node: where its memory lies, and with what each is to send its words."""
    fds = [None if outbox is None else outbox.fd for outbox in outboxes]
    meeting.tell(f"memory {number} of node {meeting.node}", {"memory": address_of(wiring), "outboxes": fds})


def digests_of(tensors: dict[str, Tensor]) -> dict[str, tuple[str, int]]:
    """Of each its shape and type, and a number that other values would hardly have."""
    return {
        name: (f"{list(each.shape)} of {each.dtype}", zlib.crc32(_bytes_of(each).numpy().data))
        for name, each in tensors.items()
    }


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


class MemoryOfNode:
    """What the lowest rank of the node has made for a run: its memory, and this rank's outbox."""

    def __init__(self, meeting: Meeting, number: int) -> None:
        lead = meeting.lead
        place = meeting.hear(f"memory {number} of node {meeting.node}", "its memory", teller=lead)
        self.wiring = wiring_at(place["memory"])
        self.outbox = Outbox(opened(meeting.pids[lead], place["outboxes"][meeting.rank], os.O_WRONLY))

    def fill(self, shared: Callable[[], dict[str, Tensor]], told: dict[str, Any]) -> None:
        """The lowest rank does so."""

    def close(self) -> None:
        os.close(self.outbox.fd)
        self.wiring.close()


class OwnMemory(MemoryOfNode):
    """The same, on the lowest rank of a node that is not rank 0's: it makes it, and passes on what its ranks say."""

    def __init__(self, meeting: Meeting, number: int) -> None:
        assert meeting.messenger is not None
        self._meeting, self._number, self._messenger = meeting, number, meeting.messenger
        self.wiring = Wiring.create(meeting.world_size)
        boxes = {rank: mailbox() for rank in meeting.mates}
        self._inboxes = [inbox for inbox, _ in boxes.values()]
        self._outboxes = [boxes[rank][1] if rank in boxes else None for rank in range(meeting.world_size)]
        self.outbox = boxes[meeting.rank][1]
        self._messenger.begin(number, self.wiring, inboxes={rank: inbox.fd for rank, (inbox, _) in boxes.items()})

    def fill(self, shared: Callable[[], dict[str, Tensor]], told: dict[str, Any]) -> None:
        """The same tensors lie at the same places as on rank 0's node. Raises RendezvousError where they differ."""
        meeting = self._meeting
        try:
            if len(meeting.nics) != told["nics"]:
                raise RendezvousError(
                    f"node {meeting.node} has {len(meeting.nics)} named cards, and node 0 has {told['nics']}: give all "
                    "nodes the same --nics, or GLOO_SOCKET_IFNAME"
                )
            with self.wiring.status_board().reporter(meeting.rank).at_work("reading the data"):
                self._fill(shared() if told["digests"] else {}, told)
        finally:  # the others of the node wait for it, and learn of an error by it
            tell_memory(self._meeting, self._number, self.wiring, self._outboxes)

    def _fill(self, tensors: dict[str, Tensor], told: dict[str, Any]) -> None:
        ours, theirs = digests_of(tensors), told["digests"]
        for name in dict.fromkeys((*theirs, *ours)):
            if ours.get(name) != theirs.get(name):
                here, there = (each.get(name, ("missing", 0))[0] for each in (ours, theirs))
                what = f"{here} here and {there} there" if here != there else f"{here}, of other values"
                raise RendezvousError(
                    f"node {self._meeting.node} has other data than node 0 in {name} ({what}): give all nodes the "
                    "same files and the same flags"
                )
        for name, (offset, shape, dtype) in told["settings"]["shared"].items():
            stored = self.wiring.arena.store(tensors[name])
            assert (stored, tuple(tensors[name].shape), tensors[name].dtype) == (offset, tuple(shape), dtype)

    def close(self) -> None:
        self._messenger.end(self._number)
        for outbox in self._outboxes:
            if outbox is not None:
                os.close(outbox.fd)
        for inbox in self._inboxes:
            inbox.close()
        self.wiring.close()
