"""The Communicator of processes that others have started, by torchrun, srun or mpirun, or by hand.

`join()` gives a program of its own the Communicator that `launch` gives a worker: here the processes are there already,
and meet (`meeting.py`). Whole runs of training are in `joined_run.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from torch_parallel import worker
from torch_parallel.communicator import Communicator
from torch_parallel.mailbox import Outbox
from torch_parallel.meeting import Meeting, address_of, store_of, wiring_at
from torch_parallel.nics import named_by_environment, nic_between
from torch_parallel.place import RendezvousError, place_of
from torch_parallel.status import RAISED, RETURNED, RUNNING, StatusBoard
from torch_parallel.topology import Topology
from torch_parallel.transport.base import TransportError
from torch_parallel.transport.process_group import Lines
from torch_parallel.transport.shared_memory import Wiring
from torch_parallel.transport.signals import A_DEADLINE, LONGEST_DEADLINE_S

MEETING_S = 300.0
"""How long processes wait for each other at their start, where nothing else is said: torchrun's own default."""

_group: Meeting | None = None


def group(deadline_s: float = MEETING_S) -> Meeting | None:
    """The processes with which this one was started, which meet the first time; None where it was started alone."""
    global _group
    if _group is None:
        place = place_of()
        if place is None:
            return None
        store = store_of(place, deadline_s)
        _group = Meeting(store, place.rank, place.world_size, deadline_s, node=place.node, host=place.host)
    return _group


def join(
    store: Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    *,
    server_count: int = 0,
    device: str = "cpu",
    performer: str = "auto",
    deadline_s: float = 300.0,
    links: Topology | None = None,
    node: str = "",
    nics: Sequence[str] = (),
) -> Communicator:
    """This process's Communicator, among processes that somebody else has started, on one machine or several.

        torchrun --nproc_per_node 4 mine.py          communicator = torch_parallel.join()

    Who it is tells the environment of torchrun, srun or mpirun, or `store`, any Store of torch.distributed, with `rank`
    and `world_size`. All ranks call it, in the same order where they do so several times. `device`, `performer` and
    `links` are those of `launch`. Threads and generators stay as they are. A rank that ends is known to the others at
    once, whether it has raised an error, or died. What it holds is given back when the program ends, or before:

        with torch_parallel.join() as communicator: ...          or communicator.close(), which all ranks call

    Processes of several machines are of several nodes; on one machine `node`, a name, tells nodes apart. Ranks of one
    node reach each other's memory, others exchange messages, by the network cards `nics`, of the same names on all
    nodes, if they are given: each rank of a node has one, in turn of equal groups.

    Raises RendezvousError where the ranks do not meet within `deadline_s`, and ValueError for arguments that are none.
    """
    if (store is None) != (rank is None) or (store is None) != (world_size is None):
        raise ValueError("store, rank and world_size are given together, or all are left to the environment")
    meeting_is_own = store is not None
    if store is not None and rank is not None and world_size is not None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size}: ranks are 0 to world_size - 1")
        _check(server_count, world_size, deadline_s)
        meeting = Meeting(store, rank, world_size, deadline_s, node=node)
    else:
        found = group(deadline_s)
        if found is None:
            raise RendezvousError(
                "nobody has started this process as one of several: run it by torchrun (torchrun --nproc_per_node 4 "
                "mine.py), or give store, rank and world_size"
            )
        meeting = found
        _check(server_count, meeting.world_size, deadline_s)
    if links is not None and links.world_size != meeting.world_size:
        raise ValueError(f"links of {links.world_size} ranks for {meeting.world_size}: make the topology for those")
    if links is not None and meeting.node_count > 1:
        raise ValueError(f"links are emulated on one machine, and the ranks are on {meeting.node_count} nodes")
    number = meeting.next_run()
    _compare_with_rank_0(meeting, f"join {number}", f"{server_count} servers, on {device}")
    key = f"memory {number} of node {meeting.node}"
    if meeting.is_lead:
        wiring = Wiring.create(meeting.world_size, links=links)
        meeting.tell(key, address_of(wiring))
    else:
        wiring = wiring_at(meeting.hear(key, "its memory", deadline_s, meeting.lead))
    settings = {"server_count": server_count, "device": device, "performer": performer, "deadline_s": deadline_s}
    meeting.nics = tuple(nics) or named_by_environment()
    assignment = assignment_of(meeting, number, wiring, Outbox(_null()), settings)
    board = wiring.status_board()
    meeting.look_after(board)
    if meeting.messenger is not None:
        meeting.messenger.begin(number, wiring)
    communicator = worker.communicator_of(assignment)
    membership = _Membership(communicator, assignment, board, meeting, number, meeting_is_own)
    communicator.ending = membership.close
    communicator.transport.agree("have joined", numbered=False)
    return communicator


def _compare_with_rank_0(meeting: Meeting, key: str, text: str) -> None:
    """Raises RendezvousError where rank 0 has another text."""
    if meeting.rank == 0:
        meeting.tell(key, text)
    elif (theirs := meeting.hear(key, f"rank 0 to {key}", meeting.deadline_s)) != text:
        raise RendezvousError(f"rank {meeting.rank} joins with {text}, and rank 0 with {theirs}: give all the same")


def _check(server_count: int, world_size: int, deadline_s: float) -> None:
    if not 0 <= server_count < world_size:
        raise ValueError(f"server_count = {server_count}: of {world_size} ranks at least one must be a worker")
    if not 0 < deadline_s <= LONGEST_DEADLINE_S:
        raise ValueError(f"deadline_s = {deadline_s}: {A_DEADLINE}")


def _null() -> int:
    """Where reports go of ranks without a launcher."""
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


class _Membership:
    """What one `join` holds in its process, until the communicator is closed or the program ends."""

    def __init__(
        self,
        communicator: Communicator,
        assignment: worker.Assignment,
        board: StatusBoard,
        meeting: Meeting,
        number: int,
        meeting_is_own: bool,
    ) -> None:
        self._communicator, self._assignment, self._board = communicator, assignment, board
        self._meeting, self._number, self._meeting_is_own = meeting, number, meeting_is_own
        self._process, self._has_raised, self._hook_before = os.getpid(), False, sys.excepthook
        sys.excepthook = self._excepthook
        atexit.register(self._at_exit)

    def _excepthook(self, *error: Any) -> None:
        self._has_raised = True
        self._note_end()
        self._hook_before(*error)

    def _at_exit(self) -> None:
        if os.getpid() == self._process:  # a fork of it may end too
            self._note_end()
            self._end_messages()

    def _note_end(self) -> None:
        """On the board, for the other ranks."""
        if self._has_raised:
            self._board.note_end(self._communicator.rank, RAISED)
            return
        with contextlib.suppress(TransportError):  # nobody is there to be told
            self._communicator.through_host.leave()
        self._board.note_end(self._communicator.rank, RETURNED)

    def _end_messages(self) -> None:
        if self._meeting.messenger is not None:
            self._meeting.messenger.end(self._number)  # which passes on what was written last

    def close(self, has_raised: bool) -> None:
        """Says how it ended, and gives everything back. Whoever passes on the words of others waits for them."""
        atexit.unregister(self._at_exit)
        if sys.excepthook == self._excepthook:
            sys.excepthook = self._hook_before
        self._has_raised |= has_raised
        self._note_end()
        if self._meeting_is_own and self._meeting.messenger is not None:
            self._await(self._meeting.mates if self._meeting.rank else range(self._meeting.world_size))
        self._end_messages()
        self._meeting.look_away_from(self._board)
        self._communicator.through_host.close()
        os.close(self._assignment.outbox.fd)
        self._assignment.wiring.close()
        if self._meeting_is_own:
            self._meeting.close()

    def _await(self, ranks: Sequence[int]) -> None:
        """Until all of them are over; as long as the deadline allows."""
        until_s = time.monotonic() + self._assignment.deadline_s
        while any(self._board.over(rank) == RUNNING for rank in ranks) and time.monotonic() < until_s:
            time.sleep(0.01)


def _connect(meeting: Meeting, number: int, deadline_s: float) -> Lines:
    """The lines of this rank to all of other nodes. Raises RendezvousError."""
    peers = {}
    for peer, node in enumerate(meeting.nodes):
        if node != meeting.node:
            nic = nic_between(meeting.nodes, meeting.rank, peer, meeting.nics)
            peers[peer] = {"interface": nic} if nic else {"hostname": meeting.address}
    try:
        return Lines.connect(meeting.store, meeting.rank, peers, deadline_s, f"run {number}")
    except ConnectionError as error:
        raise RendezvousError(str(error)) from None


def assignment_of(
    meeting: Meeting,
    number: int,
    wiring: Wiring,
    outbox: Outbox,
    settings: dict[str, Any],
    call: bytes = b"",
    collectives: bytes = b"",
) -> worker.Assignment:
    rest = {"threads": torch.get_num_threads(), "shared": {}, "seeds": (0,), **settings}
    return worker.Assignment(
        rank=meeting.rank,
        wiring=wiring,
        outbox=outbox,
        call=call,
        collectives=collectives,
        surroundings=None,
        nodes=meeting.nodes if meeting.node_count > 1 else (),
        connect=partial(_connect, meeting, number, settings["deadline_s"]) if meeting.node_count > 1 else None,
        store=meeting.store,
        nics=meeting.nics if meeting.node_count > 1 else (),
        **rest,
    )
