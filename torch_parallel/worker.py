"""A worker process from its first breath to its last. The fork server loads this module, torch included, in advance."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from torch_parallel import pickling, shm_files
from torch_parallel.collectives.registry import adopt
from torch_parallel.collectives.schedule import Nodes
from torch_parallel.communicator import Communicator
from torch_parallel.generators import seed_all
from torch_parallel.lifeline import end_with_pipe
from torch_parallel.mailbox import Failure, Outbox
from torch_parallel.status import COMPUTING, RAISED, RETURNED, RETURNING, StatusReporter
from torch_parallel.surroundings import Surroundings
from torch_parallel.transport.base import Transport
from torch_parallel.transport.cuda_ipc import THROUGH_HOST, connect_gpus, without_kernel
from torch_parallel.transport.hybrid import transport_of
from torch_parallel.transport.process_group import Lines
from torch_parallel.transport.process_groups import in_plain_words, tells_of_a_peer
from torch_parallel.transport.shared_memory import Wiring


@dataclass
class Assignment:
    """All that one worker process is told at its start. What the fork server has in its place is of no account."""

    rank: int
    server_count: int
    threads: int
    deadline_s: float
    device: str
    performer: str
    wiring: Wiring
    outbox: Outbox
    shared: dict[str, tuple[int, tuple[int, ...], torch.dtype]]  # name -> offset in the arena, shape, dtype
    call: bytes  # pickled (function, arguments)
    surroundings: Surroundings | None  # None where the process has its own
    seeds: tuple[int, ...]  # of the launch, for all ranks the same
    collectives: bytes  # pickled, what the launcher's process has registered
    nodes: Nodes = ()  # the node of each rank, where they are of several
    connect: Callable[[], Lines] | None = None  # gives the lines to ranks of other nodes, where there are any
    nics: tuple[str, ...] = ()  # the cards by which nodes exchange, where they are named
    store: Store | None = None  # at which the processes have met, where others have started them


def main(assignment: Assignment) -> None:
    """Runs the worker function, sends its result or its error to the launcher, and ends the process."""
    end_with_parent()
    multiprocessing.current_process().daemon = False  # may start processes of its own, such as a DataLoader's
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where there is no fork server to inherit the mask from
    _prefix_warnings(assignment.rank)
    returned = False
    try:
        assert assignment.surroundings is not None
        returned = perform(assignment, assignment.surroundings.apply)
    finally:
        with contextlib.suppress(Exception):
            multiprocessing.util._exit_function()  # type: ignore[attr-defined]  # ends what a DataLoader left behind
        with contextlib.suppress(Exception):  # `| head` has closed the other end
            sys.stdout.flush()
            sys.stderr.flush()
        with contextlib.suppress(Exception):
            shm_files.remove(shm_files.held_by(os.getpid()))
        os._exit(not returned)  # at once: whatever threads the worker function left do not hold the run up


def perform(assignment: Assignment, prepare: Callable[[], None] = lambda: None) -> bool:
    """Runs the worker function in this process, after `prepare`, and sends its result or its error.

    Returns whether there is a result.
    """
    status: StatusReporter | None = None
    communicator: Communicator | None = None
    try:
        status = assignment.wiring.status_board().reporter(assignment.rank)
        prepare()
        torch.set_num_threads(assignment.threads)
        seed_all(assignment.seeds, assignment.rank)
        communicator = communicator_of(assignment)
        if communicator.device.type == "cuda":  # it may be killed before the launcher has looked for itself
            assignment.outbox.send("files", shm_files.held_by(os.getpid()))
        adopt(pickling.loads(assignment.collectives))
        function, arguments = pickling.loads(assignment.call)
        communicator.status.phase(COMPUTING)
        result = function(communicator, *arguments)
        communicator.status.phase(RETURNING)
        communicator.transport.leave()
        assignment.outbox.send("result", result)
        status.is_over(RETURNED)
        return True
    except BaseException as error:  # sys.exit() too: whatever its code, the worker has not returned a result
        of_a_peer = _is_of_a_group(error) or getattr(error, "of_a_peer", False)
        secondhand = of_a_peer or getattr(error, "secondhand", False)
        trace = "" if getattr(error, "headline_suffices", False) else traceback.format_exc()
        assignment.outbox.send("error", Failure(_headline(error), trace, secondhand, of_a_peer))
        if status is not None:
            status.is_over(RAISED)
        if assignment.surroundings is None and isinstance(error, KeyboardInterrupt | SystemExit):
            raise  # it is the user's own process that is to end
        return False
    finally:
        if communicator is not None:
            communicator.through_host.close()


def _is_of_a_group(error: BaseException) -> bool:
    with contextlib.suppress(Exception):  # str() of it may fail
        return tells_of_a_peer(error)
    return False


def _headline(error: BaseException) -> str:
    try:
        return in_plain_words(error) if tells_of_a_peer(error) else f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, of which str() fails"


def end_with_parent() -> None:
    """Makes sure that this process does not outlive its launcher, however the launcher ends.

    The launcher holds the other end of a pipe. Where the kernel can, it sends SIGKILL when that pipe closes, which
    works even while C code holds the interpreter; elsewhere a thread waits for it. (PR_SET_PDEATHSIG would watch the
    fork server, which is this process's parent, and not the launcher.)
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    if not end_with_pipe(parent.sentinel):
        threading.Thread(target=_exit_after, args=(parent.sentinel,), daemon=True).start()


def _exit_after(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


def communicator_of(assignment: Assignment) -> Communicator:
    rank, wiring, nodes = assignment.rank, assignment.wiring, assignment.nodes
    lines = None if assignment.connect is None else assignment.connect()
    host = transport_of(wiring, rank, assignment.deadline_s, nodes, lines)
    device = torch.device(assignment.device)
    transport: Transport = host
    if device.type == "cuda":
        place = rank - nodes.index(nodes[rank]) if nodes else rank  # on its machine
        device = torch.device("cuda", place % torch.cuda.device_count())
        torch.cuda.set_device(device)
        if lines is not None:
            line = without_kernel(assignment.performer, f"{THROUGH_HOST}: the ranks are on several nodes")
        elif wiring.links is None:
            transport, line = connect_gpus(host, device, assignment.deadline_s, assignment.performer)
        else:
            line = without_kernel(assignment.performer, f"{THROUGH_HOST}: links are emulated there")
        if line and assignment.rank == 0:
            print(line, flush=True)
    return Communicator(
        transport,
        host.status,
        assignment.outbox,
        assignment.server_count,
        device,
        {name: wiring.arena.tensor(*where) for name, where in assignment.shared.items()},
        host_transport=None if transport is host else host,
        deadline_s=assignment.deadline_s,
        nodes=nodes if wiring.links is None else wiring.links.node_of,
        store=assignment.store,
        nics=assignment.nics,
    )


def _prefix_warnings(rank: int) -> None:
    plain = warnings.formatwarning

    def with_rank(*details: object, **more: object) -> str:
        return f"[rank {rank}] {plain(*details, **more)}"  # type: ignore[arg-type]

    warnings.formatwarning = with_rank
