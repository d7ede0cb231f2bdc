"""Runs of processes that others have started, by torchrun, srun or mpirun: every process is a rank, and trains itself.

`launch` starts its workers and watches them; here they are there already. Rank 0 prepares the run, and tells the others
what to do by the store; then all of them do it, rank 0 too. A thread of rank 0 does meanwhile what the launcher does:
it hears what ranks report and return, and says who failed and why.

    rank 0    prepares, tells ---.   worker function   results, display and checkpoints
              `- thread: hears all ranks, watches them
    rank 1..  wait to be told <--'   worker function   wait for the outcome

`join()` is the same without a run: it gives a program of its own the Communicator that `launch` gives a worker.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.connection
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from torch_parallel import pickling, shm_files, worker
from torch_parallel.collectives.registry import registered
from torch_parallel.communicator import Communicator
from torch_parallel.devices import threads_per_worker
from torch_parallel.forked import is_stopped
from torch_parallel.generators import seeds_of_launch
from torch_parallel.launcher import Run, WorkerFailure, pickled
from torch_parallel.mailbox import Inbox, Outbox, mailbox
from torch_parallel.meeting import Meeting, address_of, store_of, wiring_at
from torch_parallel.nics import named_by_environment, nic_between
from torch_parallel.node_memory import MemoryOfNode, OwnMemory, digests_of, tell_memory
from torch_parallel.place import RendezvousError, place_of
from torch_parallel.status import DIED, RAISED, RETURNED, RUNNING, StatusBoard
from torch_parallel.topology import Topology
from torch_parallel.transport.base import TransportError
from torch_parallel.transport.process_group import Lines
from torch_parallel.transport.shared_memory import Wiring
from torch_parallel.transport.signals import A_DEADLINE, LONGEST_DEADLINE_S
from torch_parallel.worker_process import Watched

LATE_S = 10.0
"""So long may rank 0 take to say what the others wait for, where it has nothing else to do."""
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


# ---- the Communicator alone ----


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
    assignment = _assignment(meeting, number, wiring, Outbox(_null()), settings)
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


def _assignment(
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


# ---- a run ----


class JoinedProcess(Watched):
    """A rank that others have started, as rank 0 sees it: by its process in the same node, else by the board alone."""

    def __init__(self, rank: int, inbox: Inbox, board: StatusBoard, pid: int | None, pidfd: int | None) -> None:
        super().__init__(rank, inbox)
        self._board = board
        self.pid, self.pidfd = pid, pidfd

    @property
    def handles(self) -> list[int]:
        return [handle for handle in (self.inbox.fd, self.pidfd) if handle is not None]

    def gone(self, timeout_s: float = 0.0) -> bool:
        if self.pid is None:
            return self._board.over(self.rank) == DIED
        return self.pidfd is not None and bool(multiprocessing.connection.wait([self.pidfd], timeout_s))

    def is_orphan(self) -> bool:
        return False

    def look(self) -> None:
        pass

    def is_stopped(self) -> bool:
        return self.pid is not None and is_stopped(self.pid)

    def how_it_ended(self) -> str:
        where = "its process ended" if self.pid is not None else "its process ended, or its node was lost,"
        return f"has died: {where} before it returned a result"


class _JoinedRun(Run):
    """The launcher's part, in a thread of rank 0."""

    meeting: Meeting
    number: int

    def adopt(self, meeting: Meeting, number: int) -> list[Outbox]:
        """Whose processes are known; gives what each is to send its words with."""
        self.meeting, self.number = meeting, number
        outboxes = []
        for rank, pid in enumerate(meeting.pids):
            inbox, outbox = mailbox()
            known = (pid, meeting.pidfds.get(rank)) if rank in meeting.mates else (None, None)
            self.processes.append(JoinedProcess(rank, inbox, self.board, *known))
            outboxes.append(outbox)
        return outboxes

    def stop(self) -> None:
        """Nobody hears any more: ranks that still run learn it at their next wait, or when they next report."""
        for process in self.processes:
            if self.board.over(process.rank) == RUNNING:
                self.board.note_end(process.rank, RAISED)
                if self.meeting.messenger is not None:
                    self.meeting.messenger.say_over(self.number, process.rank, RAISED)
            process.inbox.close()

    def close(self) -> None:
        """Gives back what the run had; the processes go on."""
        for process in self.processes:
            process.inbox.close()
            if process.pid is not None and process.gone():
                shm_files.remove(process.files)
        self.wiring.close()


class Lead:
    """Rank 0's part in one run: it tells the others what to do, by `launch`, and at last how it went."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting, self._number, self._has_told = meeting, meeting.next_run(), False

    def attempts_before(self, folder: str) -> list[str]:
        """The folders of this run's checkpoints, the newest first, where torchrun has started it anew; with the next
        attempt `folder` is one of them."""
        key = f"checkpoints of run {self._number}"
        before = (self._meeting.noted(key) or "").splitlines() if self._meeting.attempt else []
        self._meeting.note(key, "\n".join([folder, *before]))
        return before

    def conclude(self, outcome: Any) -> None:
        """What `follow` returns on the other ranks, or raises there, if it is an error."""
        key = f"{'outcome' if self._has_told else 'run'} {self._number}"
        self._meeting.tell(key, outcome)
        self._meeting.wait_until_heard(key)

    def launch(
        self,
        worker_function: Callable[..., Any],
        n: int,
        *arguments: Any,
        server_count: int = 0,
        threads: int | None = None,
        deadline_s: float = 300.0,
        device: str = "cpu",
        performer: str = "auto",
        shared: dict[str, Tensor] | None = None,
        on_message: Callable[[int, Any], None] | None = None,
        on_tick: Callable[[StatusBoard], None] | None = None,
        links: Topology | None = None,
        seed: int | None = None,
    ) -> list[Any]:
        """As the launcher's, but the processes of the meeting are the workers, this one among them. Raises the same."""
        meeting, number = self._meeting, self._number
        call, collectives = pickled(worker_function, arguments), pickling.dumps(registered())
        wiring = Wiring.create(n, links=links)
        run = _JoinedRun(n, deadline_s, on_message, on_tick, wiring)
        outboxes = run.adopt(meeting, number)
        settings = {
            "server_count": server_count,
            "threads": threads or threads_per_worker(max(map(meeting.nodes.count, meeting.nodes))),
            "deadline_s": deadline_s,
            "device": device,
            "performer": performer,
            "shared": run.store(shared or {}),
            "seeds": seeds_of_launch(seed),
        }
        meeting.look_after(run.board)
        if meeting.messenger is not None:
            far = {rank: outbox.fd for rank, outbox in enumerate(outboxes) if rank not in meeting.mates}
            meeting.messenger.begin(number, wiring, outboxes=far)
        for rank in range(n):
            run.board.reporter(rank)  # its first sign of life
        digests = digests_of(shared or {}) if meeting.node_count > 1 else {}
        told: dict[str, Any] = {"settings": settings, "call": call, "collectives": collectives, "digests": digests}
        told["nics"] = len(meeting.nics)
        tell_memory(meeting, number, wiring, outboxes)
        meeting.tell(f"run {number}", told)
        self._has_told = True
        outcome: list[Any] = []
        listener = threading.Thread(target=_listen, args=(run, outcome), name="listener of rank 0")
        listener.start()
        assignment = _assignment(meeting, number, wiring, outboxes[0], settings, call, collectives)
        try:
            with _own_state_kept(), contextlib.suppress(BrokenPipeError):  # where nobody hears any more
                worker.perform(assignment)
        finally:
            listener.join()
            meeting.look_away_from(run.board)
            if meeting.messenger is not None:
                meeting.messenger.end(number)
            run.close()
            for outbox in outboxes:
                os.close(outbox.fd)
        (results,) = outcome
        if isinstance(results, BaseException):
            raise results
        return list(results)


def _listen(run: _JoinedRun, outcome: list[Any]) -> None:
    try:
        outcome.append(run.results())
    except BaseException as error:
        outcome.append(error)
        run.stop()


@contextlib.contextmanager
def leading(meeting: Meeting) -> Iterator[Lead]:
    """Around what rank 0 does for a run. An error is the outcome for all."""
    lead = Lead(meeting)
    try:
        yield lead
    except BaseException as error:
        lead.conclude(_sendable(error))
        raise


def follow(meeting: Meeting, shared: Callable[[], dict[str, Tensor]] = dict) -> Any:
    """What all ranks but the lowest do in a run: what that tells them, and then they wait for its outcome.

    `shared` gives the tensors that rank 0 shares on its own node; the lowest rank of another node calls it. Returns
    what rank 0 concludes with. Raises the error with which it has ended there, which has `is_told` then, since rank 0
    tells its user, and WorkerFailure where the process of rank 0 has ended.
    """
    number = meeting.next_run()
    told = _heard(meeting, f"run {number}", "what it is to do")
    outcome = f"outcome {number}", "the outcome of the run"
    try:
        memory = OwnMemory(meeting, number) if meeting.is_lead else MemoryOfNode(meeting, number)
    except RendezvousError:  # the run is over before this rank came
        return _heard(meeting, *outcome, LATE_S)
    board = memory.wiring.status_board()
    meeting.look_after(board)
    settings, returned = told["settings"], False
    rest = settings, told["call"], told["collectives"]
    assignment = _assignment(meeting, number, memory.wiring, memory.outbox, *rest)
    try:
        with _own_state_kept(), contextlib.suppress(BrokenPipeError):  # rank 0 has died, or hears no more
            returned = worker.perform(assignment, partial(memory.fill, shared, told))
        # rank 0 may have much to do when all went well; after an error it has this long to say whose it is
        return _heard(meeting, *outcome, None if returned else settings["deadline_s"] + LATE_S)
    except WorkerFailure as failure:
        if not memory.outbox.last_error or getattr(failure, "is_told", False):
            raise
        raise WorkerFailure(f"{failure}\n  rank {meeting.rank} failed: {memory.outbox.last_error}", 0) from None
    finally:  # not before: the lowest rank of a node passes on what the others of it say
        meeting.look_away_from(board)
        memory.close()


@contextlib.contextmanager
def _own_state_kept() -> Iterator[None]:
    """A run seeds the generators and sets the threads of its process, which has others before and after, and one that
    fails may leave torch's process group."""
    had_group = dist.is_initialized()
    threads, states = torch.get_num_threads(), (random.getstate(), numpy.random.get_state(), torch.get_rng_state())
    try:
        yield
    finally:
        if dist.is_initialized() and not had_group:
            dist.destroy_process_group()
        torch.set_num_threads(threads)
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _heard(meeting: Meeting, key: str, what: str, limit_s: float | None = None) -> Any:
    try:
        word = meeting.hear(key, what, limit_s)
    except RendezvousError as error:
        raise WorkerFailure(str(error), 0) from None
    meeting.say_heard(key)
    if isinstance(word, BaseException):
        word.is_told = True  # type: ignore[attr-defined]
        raise word
    return word


def _sendable(error: BaseException) -> BaseException:
    try:
        pickling.loads(pickling.dumps(error))
    except Exception:
        return WorkerFailure(f"rank 0 failed: {type(error).__name__}: {error}", 0)
    return error
