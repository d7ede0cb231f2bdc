"""Starts the workers of a run, listens to them, and ends them: all of them, whatever happens.

    def work(communicator, base):
        return communicator.all_reduce(torch.full((3,), base + communicator.rank)).tolist()

    launch(work, 4, 1.0)     # [[10.0, 10.0, 10.0]] * 4

A run ends in one of three ways. Every worker returns a result: they are returned, by rank. A worker raises, dies, ends
without a result, or gives no sign of life for `deadline_s`: all are killed and `WorkerFailure` says which one it was,
what it was doing and who waited for whom. The launcher itself is interrupted or killed: the workers are gone at once.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from torch_parallel import fork_server, pickling, worker
from torch_parallel.collectives.registry import registered
from torch_parallel.devices import one_thread_after_fork, threads_per_worker
from torch_parallel.generators import seeds_of_launch
from torch_parallel.mailbox import Failure, mailbox
from torch_parallel.status import StatusBoard
from torch_parallel.surroundings import Surroundings
from torch_parallel.topology import Topology
from torch_parallel.transport.shared_memory import Wiring
from torch_parallel.transport.signals import A_DEADLINE, LONGEST_DEADLINE_S
from torch_parallel.worker_process import WorkerProcess

TICK_S = 0.1
"""How often the launcher looks around when nobody sends anything."""
GRACE_S = 5.0
"""A silent rank is left to its peers, who know what they waited for; only after this much more the launcher speaks."""
LAST_STEPS_S = 1.0
"""How long the workers that have returned their results may take to end."""
KILL_LIMIT_S = 10.0
LAST_WORDS_S = 0.5
"""After a first error, the time that the other ranks have to say what they saw."""
FIRST_HAND_S = 2.0
"""The same as long as nothing but consequences were told: whose failure it was may come late on a busy machine."""
LAST_CALLS_S = 0.5
"""How long after a rank has returned the others may take to say themselves that they wait for it."""
FORK_SERVER_DIED = "the fork server, from which the workers are started, died or did not answer"


class WorkerFailure(RuntimeError):
    """A worker raised, died, or fell silent. The message says which, what it was doing, and who waited for whom."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class _NothingStarted(WorkerFailure):
    """The fork server did not start the first worker, so that nothing has been done yet."""


class NotPicklable(ValueError):
    """The worker function or an argument cannot be sent to another process."""


@one_thread_after_fork()
def launch(
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
    signal_pipes: bool | None = None,
    links: Topology | None = None,
    seed: int | None = None,
) -> list[Any]:
    """Runs `worker_function(communicator, *arguments)` in `n` processes and returns their results, by rank.

    The function may come from anywhere, a notebook's cell included: what cannot be imported is sent by value. `shared`
    tensors are put once into memory that all workers map (`communicator.shared`). `threads` a worker: see
    `threads_per_worker`. `on_message(rank, message)` gets what workers `report`; `on_tick(board)` is called about ten
    times a second. `performer` is who performs schedules on GPUs (`transport/cuda_ipc.py`); with more ranks than GPUs,
    several share one. `signal_pipes` overrides how ranks signal (see `transport/signals.py`). With `links`, messages
    take as long as over those links (see `transport/links.py`), on GPUs too, by way of the host's memory.

    Workers see their caller as it is at the launch: environment variables, current folder, `sys.path`, limits, filters
    of warnings, standard output, and torch's defaults, such as the default dtype. What they start themselves, data
    loaders and other processes, ends with them. Their generators, of Python, NumPy and torch, differ on each rank, and
    from one launch of a process to the next; they follow from the caller's `torch.manual_seed`, and so are the same
    when the program runs again. With `seed` each launch has the same ones.

    Raises ValueError for n < 1, for what is no function, for links of another number of ranks and for a deadline that
    is none, NotPicklable, and WorkerFailure. `deadline_s` bounds every wait of a worker, and how long a worker may go
    without communicating or reporting; it is at most LONGEST_DEADLINE_S.
    """
    if not isinstance(n, int) or n < 1:
        raise ValueError(f"n = {n}: a whole number of processes is needed, at least one")
    if links is not None and links.world_size != n:
        raise ValueError(f"links of {links.world_size} ranks for n = {n}: make the topology for {n}")
    if not 0 < deadline_s <= LONGEST_DEADLINE_S:
        raise ValueError(f"deadline_s = {deadline_s}: {A_DEADLINE}")
    if not callable(worker_function):
        raise ValueError(f"worker_function is {_one_line(repr(worker_function))[:80]}, which cannot be called")
    call, collectives = pickled(worker_function, arguments), pickling.dumps(registered())
    surroundings, seeds = Surroundings.here(), seeds_of_launch(seed)

    def run_once() -> list[Any]:
        run = Run(n, deadline_s, on_message, on_tick, Wiring.create(n, signal_pipes, links))
        try:
            run.start(
                call,
                {
                    "server_count": server_count,
                    "threads": threads or threads_per_worker(n),
                    "deadline_s": deadline_s,
                    "device": device,
                    "performer": performer,
                    "shared": run.store(shared or {}),
                    "surroundings": surroundings,
                    "seeds": seeds,
                    "collectives": collectives,
                },
            )
            return run.results()
        finally:
            with _uninterrupted():
                run.end()

    try:
        return run_once()
    except _NothingStarted:  # the fork server may have died long ago, or was dying: another one serves
        return run_once()


def pickled(worker_function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    try:
        return pickling.dumps((worker_function, arguments))
    except Exception:
        _name_what_cannot_be_pickled(worker_function, arguments)
        raise


def _name_what_cannot_be_pickled(worker_function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    for what, thing in [("worker function", worker_function), *(("argument", argument) for argument in arguments)]:
        try:
            pickling.dumps(thing)
        except Exception as error:
            name = getattr(thing, "__name__", None) or _one_line(repr(thing))[:80]
            raise NotPicklable(
                f"the {what} {name} cannot be sent to worker processes ({_one_line(str(error))}): define what it uses "
                "at the top level of a module, and create locks, files and generators inside the worker function"
            ) from error


def _one_line(text: str) -> str:
    return " ".join(text.split())


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Puts off SIGINT and SIGTERM until the block has ended; drops them where another one is the reason for it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    interrupted = isinstance(sys.exception(), KeyboardInterrupt | SystemExit)
    previous = {
        number: signal.signal(number, lambda number, frame: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if came and not interrupted:
            signal.raise_signal(came[0])


class Run:
    """The processes of one `launch`."""

    def __init__(
        self,
        n: int,
        deadline_s: float,
        on_message: Callable[[int, Any], None] | None,
        on_tick: Callable[[StatusBoard], None] | None,
        wiring: Wiring,
    ) -> None:
        self.n = n
        self.deadline_s = deadline_s
        self.on_message = on_message
        self.on_tick = on_tick
        self.wiring = wiring
        self.board = wiring.status_board()
        self.calls = wiring.call_board()
        self.processes: list[Any] = []  # WorkerProcess, or others that are `Watched`

    def store(self, shared: dict[str, Tensor]) -> dict[str, tuple[int, tuple[int, ...], Any]]:
        return {
            name: (self.wiring.arena.store(tensor), tuple(tensor.shape), tensor.dtype)
            for name, tensor in shared.items()
        }

    def start(self, call: bytes, settings: dict[str, Any]) -> None:
        for rank in range(self.n):
            self._start_rank(rank, call, settings)
        for rank in range(self.n):
            self.board.reporter(rank)  # its first sign of life; the first start takes as long as torch's import

    def _start_rank(self, rank: int, call: bytes, settings: dict[str, Any]) -> None:
        inbox, outbox = mailbox()
        try:
            assignment = worker.Assignment(rank=rank, wiring=self.wiring, outbox=outbox, call=call, **settings)
            process = fork_server.start_worker(worker.main, assignment, f"torch_parallel rank {rank}", self.deadline_s)
            self.processes.append(WorkerProcess(rank, process, inbox))
        except BaseException as error:
            inbox.close()
            if isinstance(error, EOFError | ConnectionError):
                raise (WorkerFailure if self.processes else _NothingStarted)(FORK_SERVER_DIED, rank) from error
            raise
        finally:
            os.close(outbox.fd)

    def results(self) -> list[Any]:
        """Listens until every worker has returned. Raises WorkerFailure."""
        next_tick_s = 0.0
        while not all(process.finished for process in self.processes):
            waiting = [process for process in self.processes if not process.finished]
            multiprocessing.connection.wait([handle for process in waiting for handle in process.handles], TICK_S)
            self._listen(waiting)
            self._check(waiting)
            if self.on_tick is not None and time.monotonic() >= next_tick_s:
                next_tick_s = time.monotonic() + TICK_S
                self.on_tick(self.board)
        self._check_calls(older_than_s=0.0)
        return [process.result for process in self.processes]

    def _listen(self, waiting: list[WorkerProcess]) -> None:
        for process in waiting:
            for kind, content in self._received(process):
                if kind == "message":
                    if self.on_message is not None:
                        self.on_message(process.rank, content)
                elif kind == "error":
                    process.error = content
                elif kind == "files":
                    process.files |= content
                else:
                    process.result = content
                    process.finished = True
                    process.finished_s = time.monotonic()

    def _received(self, process: WorkerProcess) -> list[tuple[str, Any]]:
        try:
            return process.inbox.receive()
        except Exception as error:
            reason = f"what rank {process.rank} sent cannot be read: {type(error).__name__}: {error}"
            raise self._failure(process, reason) from error

    def _check(self, waiting: list[WorkerProcess]) -> None:
        self._check_alive(waiting)  # first: that the others wait for it in vain comes of that
        if any(process.error is not None for process in waiting):
            self._gather_last_words()
            if self._cause()[1].secondhand:  # a peer sees that a connection has closed before a process has ended
                self._check_alive(waiting)
                self._check_calls(older_than_s=0.0)
            stopped = [f"rank {process.rank} is stopped; " for process in waiting if process.is_stopped()]
            failed, error = self._cause()
            raise self._failure(failed, f"{''.join(stopped)}rank {failed.rank} failed: {error.headline}")
        self._check_calls(older_than_s=LAST_CALLS_S)
        for process in waiting:
            process.look()
            if not process.finished and process.is_orphan():
                raise self._failure(process, FORK_SERVER_DIED)
            silent_s = self.board.read(process.rank).silent_s
            if not process.finished and silent_s > self.deadline_s + GRACE_S:
                raise self._failure(process, f"rank {process.rank} gave no sign of life for {silent_s:.0f} s")

    def _check_alive(self, waiting: list[WorkerProcess]) -> None:
        ended = [process for process in waiting if process.gone()]
        if ended:
            self._listen(ended)  # what it sent last may have come between the two looks
        for process in ended:
            if not process.finished and process.error is None:
                raise self._failure(process, f"rank {process.rank} {process.how_it_ended()}")

    def _check_calls(self, older_than_s: float) -> None:
        """Raises WorkerFailure where a rank has returned, and others made calls in which it has no part.

        A rank that waits for it says so itself, and where; not one whose GPU waits, or that needed nothing of it.
        """
        before_s = time.monotonic() - older_than_s
        ended = [each.rank for each in self.processes if each.finished and each.finished_s <= before_s]
        unequal = self.calls.unequal_ends(ended) if ended else None
        if unequal is not None:
            raise self._failure(self.processes[unequal[0]], unequal[1])

    def _gather_last_words(self) -> None:
        start_s = time.monotonic()
        while True:
            _, first = self._cause()
            left_s = start_s + (FIRST_HAND_S if first.secondhand else LAST_WORDS_S) - time.monotonic()
            open_inboxes = [process.inbox.fd for process in self.processes if not process.gone()]
            if left_s <= 0 or not open_inboxes:
                break
            multiprocessing.connection.wait(open_inboxes, min(left_s, TICK_S))
            self._listen(self.processes)

    def _cause(self) -> tuple[WorkerProcess, Failure]:
        """The error that tells most: one that may be another's consequence only if there is nothing else, and one that
        says only that a peer has failed after all others."""
        errors = [(process, process.error) for process in self.processes if process.error is not None]
        return min(errors, key=lambda of_rank: (of_rank[1].secondhand, of_rank[1].says_nothing_new))

    def _failure(self, culprit: WorkerProcess, headline: str) -> WorkerFailure:
        """The whole story: a traceback, if there is one, what each rank was doing, and which processes are stopped."""
        lines = [headline]
        cause_is_known = culprit.error is not None and not culprit.error.secondhand
        for process in self.processes:
            stopped = " (its process is stopped)" if process.is_stopped() else ""
            lines.append(f"  {self.board.read(process.rank)}{stopped}")
            if process.error is None or process is culprit:
                continue
            if not (cause_is_known and process.error.says_nothing_new):
                lines.append(f"    it said: {process.error.headline}")
        if culprit.error is not None and culprit.error.traceback:
            lines += ["", culprit.error.traceback.rstrip()]
        return WorkerFailure("\n".join(lines), culprit.rank)

    def end(self) -> None:
        """Kills what still runs and gives everything back. Workers that returned are about to end by themselves."""
        no_server = any(process.is_orphan() for process in self.processes)
        for process in self.processes:
            if not process.finished:
                process.kill(with_all_below=no_server)
        now = time.monotonic()
        for process in self.processes:
            if not process.gone(max(0.0, now + LAST_STEPS_S - time.monotonic())):
                process.kill()
        for process in self.processes:
            process.gone(max(0.0, now + KILL_LIMIT_S - time.monotonic()))
        self._reap()
        if not self.processes:
            fork_server.kill_if_stopped()
        for process in self.processes:
            process.close()
        self.wiring.close()

    def _reap(self) -> None:
        """Takes the exit codes from the fork server; one that does not answer is of no use to anybody and is ended."""
        left = [process.process.sentinel for process in self.processes]
        deadline = time.monotonic() + 2.0
        while left:
            told = multiprocessing.connection.wait(left, max(0.0, deadline - time.monotonic()))
            if not told:
                for process in self.processes:
                    fork_server.kill_of(process.process)
                break
            left = [each for each in left if each not in told]
        for process in self.processes:
            process.process.join(1.0)
