"""Runs of processes that others have started, by torchrun, srun or mpirun: every process is a rank, and trains itself.

`launch` starts its workers and watches them; here they are there already. Rank 0 prepares the run, and tells the others
what to do by the store; then all of them do it, rank 0 too. A thread of rank 0 does meanwhile what the launcher does:
it hears what ranks report and return, and says who failed and why.

    rank 0    prepares, tells ---.   worker function   results, display and checkpoints
              `- thread: hears all ranks, watches them
    rank 1..  wait to be told <--'   worker function   wait for the outcome

The Communicator alone, for a program of its own, is in `joined.py`.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from torch_parallel import pickling, shm_files, worker
from torch_parallel.collectives.registry import registered
from torch_parallel.devices import threads_per_worker
from torch_parallel.forked import is_stopped
from torch_parallel.generators import seeds_of_launch
from torch_parallel.joined import assignment_of
from torch_parallel.launcher import Run, WorkerFailure, pickled
from torch_parallel.mailbox import Inbox, Outbox, mailbox
from torch_parallel.meeting import Meeting
from torch_parallel.node_memory import MemoryOfNode, OwnMemory, digests_of, tell_memory
from torch_parallel.place import RendezvousError
from torch_parallel.status import DIED, RAISED, RUNNING, StatusBoard
from torch_parallel.topology import Topology
from torch_parallel.transport.shared_memory import Wiring
from torch_parallel.worker_process import Watched

LATE_S = 10.0
"""So long may rank 0 take to say what the others wait for, where it has nothing else to do."""


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
        assignment = assignment_of(meeting, number, wiring, outboxes[0], settings, call, collectives)
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
    assignment = assignment_of(meeting, number, memory.wiring, memory.outbox, *rest)
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
