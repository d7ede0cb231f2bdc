"""The fork server dies, or does not answer: before workers are started, meanwhile, and while they run."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_servers import fork_server_pid

from torch_parallel import fork_server, forked
from torch_parallel.communicator import Communicator
from torch_parallel.launcher import FORK_SERVER_DIED, WorkerFailure, launch

pytestmark = pytest.mark.usefixtures("started")

END_LIMIT_S = 10.0


@pytest.fixture
def signalled_server() -> Iterator[Callable[[int], Callable[[int, Any], None]]]:
    """A callback that sends the fork server a signal when the first worker reports."""
    done: list[int] = []

    def callback(number: int) -> Callable[[int, Any], None]:
        def signal_it(rank: int, message: Any) -> None:
            if not done:
                done.append(fork_server_pid())
                os.kill(done[0], number)

        return signal_it

    yield callback
    assert done


def report_and_reduce(communicator: Communicator) -> list[float]:
    communicator.report("running")
    communicator.barrier()
    time.sleep(0.2)
    return communicator.all_reduce(torch.ones(2) * communicator.rank).tolist()


def test_the_fork_server_is_killed(signalled_server: Callable[[int], Any]) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    start_s = time.monotonic()
    with pytest.raises(WorkerFailure) as raised:
        launch(report_and_reduce, 3, deadline_s=20.0, on_message=signalled_server(signal.SIGKILL))
    assert time.monotonic() - start_s < END_LIMIT_S
    assert str(raised.value).splitlines()[0] == FORK_SERVER_DIED
    assert multiprocessing.active_children() == []
    assert launch(report_and_reduce, 3, deadline_s=20.0) == [[3.0, 3.0]] * 3  # by a new server
    del raised
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_fork_server_dies_while_workers_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    real_read = forked.read_number

    def read(fd: int) -> int:
        pid = real_read(fd)
        reads.append(pid)
        if len(reads) == 2:
            os.kill(fork_server_pid(), signal.SIGKILL)
            time.sleep(0.1)
        return pid

    monkeypatch.setattr(forked, "read_number", read)
    # another server would be started for rank 2: this is one that dies after it has been looked at
    monkeypatch.setattr(forked.ForkServer, "is_alive", lambda self: True)
    with pytest.raises(WorkerFailure, match=FORK_SERVER_DIED):
        launch(lambda communicator: time.sleep(60), 3, deadline_s=20.0)
    end = time.monotonic() + 5
    while any(_is_alive(pid) for pid in reads[:2]) and time.monotonic() < end:
        time.sleep(0.01)
    assert [_is_alive(pid) for pid in reads[:2]] == [False, False]


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.exhaustive
def test_the_fork_server_is_stopped(signalled_server: Callable[[int], Any]) -> None:
    """Nobody needs it any more: the run goes on to its end, and the next one has a new server."""
    before = fork_server_pid()
    results = launch(report_and_reduce, 3, deadline_s=20.0, on_message=signalled_server(signal.SIGSTOP))
    assert results == [[3.0, 3.0]] * 3
    assert launch(report_and_reduce, 2, deadline_s=20.0) == [[1.0, 1.0]] * 2
    assert fork_server_pid() != before


def die_alone(communicator: Communicator) -> None:
    communicator.report("running")
    communicator.barrier()
    time.sleep(0.3)
    if communicator.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    communicator.barrier()


def test_a_worker_dies_while_the_fork_server_is_stopped(signalled_server: Callable[[int], Any]) -> None:
    start_s = time.monotonic()
    with pytest.raises(WorkerFailure) as raised:
        launch(die_alone, 3, deadline_s=30.0, on_message=signalled_server(signal.SIGSTOP))
    assert time.monotonic() - start_s < END_LIMIT_S
    headline = "rank 1 ended before it returned a result; the fork server, which knows how, does not answer"
    assert str(raised.value).splitlines()[0] == headline


@pytest.mark.exhaustive
def test_the_fork_server_is_stopped_before_any_worker_is_started() -> None:
    """Nobody else would ever notice: the start itself waits for it, until the deadline. Then another server serves."""
    launch(rank_of, 1, deadline_s=20)
    stopped = fork_server_pid()
    os.kill(stopped, signal.SIGSTOP)
    start_s = time.monotonic()
    assert launch(rank_of, 2, deadline_s=1) == [0, 1]
    assert 1 <= time.monotonic() - start_s < 11
    assert fork_server_pid() != stopped


def test_the_fork_server_hangs_up_before_any_worker_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dying process closes its sockets first. It is seen dead, and another one serves."""
    dying, real_read = fork_server_pid(), forked.read_number

    def hung_up(fd: int) -> int:
        monkeypatch.setattr(forked, "read_number", real_read)
        threading.Timer(0.3, os.kill, (dying, signal.SIGKILL)).start()
        raise EOFError

    monkeypatch.setattr(forked, "read_number", hung_up)
    assert launch(rank_of, 2, deadline_s=20) == [0, 1]
    assert not _is_alive(dying) and _is_alive(fork_server_pid())


@pytest.mark.exhaustive
@pytest.mark.parametrize("pause_s", [0.0, 0.002, 0.01, 0.03])
def test_the_fork_server_was_killed_just_before(pause_s: float) -> None:
    """It is still there, as far as its parent can tell, and takes no call."""
    os.kill(fork_server_pid(), signal.SIGKILL)
    time.sleep(pause_s)
    assert launch(rank_of, 2, deadline_s=20) == [0, 1]


@pytest.mark.exhaustive
def test_no_fork_server_can_start_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are tried."""
    tried: list[int] = []

    def hung_up(fd: int) -> int:
        tried.append(fork_server_pid())
        os.kill(tried[-1], signal.SIGKILL)
        raise EOFError

    monkeypatch.setattr(forked, "read_number", hung_up)
    with pytest.raises(WorkerFailure, match=FORK_SERVER_DIED):
        launch(rank_of, 2, deadline_s=20)
    assert len(set(tried)) == len(tried) == 2


@pytest.mark.exhaustive
def test_after_the_fork_server_was_ended_the_next_start_has_a_new_one() -> None:
    """At once: a start that still finds the old one dying would end with it."""
    for _ in range(2):
        fork_server.kill()
        assert launch(rank_of, 2, deadline_s=20) == [0, 1]


def rank_of(communicator: Communicator) -> int:
    return communicator.rank
