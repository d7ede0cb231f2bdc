"""What workers start ends with the run, however that ends: commands, forks, daemons, other Python processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_servers import fork_server_pid

from torch_parallel.communicator import Communicator
from torch_parallel.launcher import WorkerFailure, launch

pytestmark = pytest.mark.usefixtures("started")

ROOT = Path(__file__).parent.parent
LIMIT_S = 20.0
GONE_S = 5.0  # half a second on an idle machine
STARTED_PER_RANK = 6


def sleep_in(file: str) -> None:
    Path(file).touch()
    time.sleep(60)


def start_all(folder: str, rank: int) -> None:
    """Each process that is started makes a file with its number for a name, and sleeps."""
    made = f"{folder}/{rank}."
    sleeper = "import os, sys, time; open(sys.argv[1] + str(os.getpid()), 'w'); time.sleep(60)"
    subprocess.Popen([sys.executable, "-c", sleeper, made])
    subprocess.Popen([sys.executable, "-c", sleeper, made], start_new_session=True)
    # orphaned at once, in the background of a shell that has ended
    subprocess.run(f'"{sys.executable}" -c "{sleeper}" {made} &', shell=True, check=True)
    for daemonic in (False, True):
        if os.fork() == 0:
            if daemonic and (os.setsid() and os.fork()):
                os._exit(0)
            Path(f"{made}{os.getpid()}").touch()
            time.sleep(60)
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=subprocess.run, args=([sys.executable, "-c", sleeper, made],), daemon=True)
    process.start()


def work(communicator: Communicator, folder: str, end: str) -> None:
    start_all(folder, communicator.rank)
    until = time.monotonic() + LIMIT_S
    while len(list(Path(folder).glob(f"{communicator.rank}.*"))) < STARTED_PER_RANK and time.monotonic() < until:
        time.sleep(0.01)
    communicator.barrier()
    communicator.report("all started")
    if end == "returned":
        return
    if end == "killed" and communicator.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "exited" and communicator.rank == 1:
        os._exit(0)
    time.sleep(60)


def interrupt(rank: int, message: Any) -> None:
    raise KeyboardInterrupt


def kill_the_server(rank: int, message: Any) -> None:
    os.kill(fork_server_pid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("end", "on_message", "error"),
    [
        ("returned", None, None),
        ("killed", None, WorkerFailure),
        ("exited", None, WorkerFailure),
        ("interrupted", interrupt, KeyboardInterrupt),
        ("the server killed", kill_the_server, WorkerFailure),
    ],
)
@pytest.mark.exhaustive
def test_what_workers_started_is_gone(
    tmp_path: Path, end: str, on_message: Callable[[int, Any], None] | None, error: type[BaseException] | None
) -> None:
    def run() -> None:
        launch(work, 2, str(tmp_path), end, deadline_s=LIMIT_S, on_message=on_message)

    if error is None:
        run()
    else:
        with pytest.raises(error):
            run()
    assert_gone(tmp_path)


def assert_gone(folder: Path, *others: int) -> None:
    started = [int(file.name.partition(".")[2]) for file in folder.iterdir() if file.name[0] in "01"]
    pids = [*started, *others]
    end = time.monotonic() + GONE_S
    while any(map(is_alive, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    assert len(started) == 2 * STARTED_PER_RANK
    assert [pid for pid in pids if is_alive(pid)] == []


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


SCRIPT = """
    import sys
    sys.path[:0] = [{root!r}, {tests!r}]
    from torch_parallel import fork_server, launch
    fork_server.PRELOAD[:] = ["torch_parallel.worker"]
    from test_descendants import work
    launch(work, 2, {folder!r}, "", on_message=lambda rank, message: print("started", flush=True))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("server_is_stopped", [False, True])
def test_the_launcher_is_killed(tmp_path: Path, number: int, server_is_stopped: bool) -> None:
    """Also where the fork server, which kills what is left, was stopped."""
    text = SCRIPT.format(root=str(ROOT), tests=str(Path(__file__).parent), folder=str(tmp_path))
    (tmp_path / "script.py").write_text(textwrap.dedent(text))
    process = subprocess.Popen([sys.executable, str(tmp_path / "script.py")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert [process.stdout.readline() for _ in range(2)] == ["started\n"] * 2
        server = next(
            int(child) for child in children(process.pid) if b"forking" in Path(f"/proc/{child}/cmdline").read_bytes()
        )
        if server_is_stopped:
            os.kill(server, signal.SIGSTOP)
        process.send_signal(number)
        assert process.wait(LIMIT_S) == -number
        assert_gone(tmp_path, server)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.exhaustive
def test_what_one_worker_left_behind_is_gone_before_the_others_end(tmp_path: Path) -> None:
    """And what a worker that still runs has sent into the background is left alone."""

    def work(communicator: Communicator) -> tuple[bool, bool]:
        made = tmp_path / str(communicator.rank)
        subprocess.run(f"sleep 60 & echo $! > {made}", shell=True, check=True)
        communicator.barrier()
        if communicator.rank == 1:
            return True, True
        pids = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
        end = time.monotonic() + LIMIT_S
        while is_alive(pids[1]) and time.monotonic() < end:
            time.sleep(0.01)
        return is_alive(pids[0]), is_alive(pids[1])

    assert launch(work, 2, deadline_s=LIMIT_S) == [(True, False), (True, True)]


# ---- data loaders, which are processes that workers start ----


class Squares(torch.utils.data.Dataset[tuple[int, int]]):
    """Of a module that no worker can import. Item, and the seed that its loader's process got."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[int, int]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        return index * index, info.seed


def load(communicator: Communicator, method: str | None) -> tuple[list[int], set[int]]:
    loader = torch.utils.data.DataLoader(Squares(), batch_size=None, num_workers=2, multiprocessing_context=method)
    items = [(int(item), int(seed)) for item, seed in loader]
    return [item for item, _ in items], {seed for _, seed in items}


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", [None, "fork", "spawn", "forkserver"])
def test_data_loaders_in_workers(method: str | None) -> None:
    results = launch(load, 2, method, deadline_s=60.0)
    assert [items for items, _ in results] == [[0, 1, 4, 9]] * 2
    assert len(results[0][1] | results[1][1]) == 4  # two processes of two ranks


def test_shared_memory_of_the_callers_outlives_the_run(tmp_path: Path) -> None:
    """As with multiprocessing's own children: one tracker knows what all of them use."""
    from multiprocessing.shared_memory import SharedMemory

    memory = SharedMemory(create=True, size=8)
    try:

        def work(communicator: Communicator, name: str) -> int:
            mine = SharedMemory(name=name)
            value = mine.buf[0]
            mine.close()
            return int(value)

        memory.buf[0] = 7
        for _ in range(2):
            assert launch(work, 2, memory.name, deadline_s=LIMIT_S) == [7, 7]
    finally:
        memory.close()
        memory.unlink()
