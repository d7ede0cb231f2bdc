"""`launch`: any function, any number of times, results of any size; and nothing is left of a run when it has ended."""

from __future__ import annotations

import multiprocessing.resource_tracker
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_servers import fork_server_pid, workers_alive

from torch_parallel import fork_server, forked, launcher
from torch_parallel.communicator import Communicator
from torch_parallel.devices import threads_per_worker
from torch_parallel.launcher import NotPicklable, WorkerFailure, launch
from torch_parallel.status import COMPUTING, StatusBoard

LIMIT_S = 20.0  # no wait of these workers is longer


def add_up(communicator: Communicator, base: float, factor: int = 1) -> list[float]:
    return communicator.all_reduce(torch.full((3,), base + factor * communicator.rank)).tolist()


def assert_nothing_runs(limit_s: float = 5.0) -> None:
    end = time.monotonic() + limit_s
    while workers_alive() and time.monotonic() < end:
        time.sleep(0.01)
    assert workers_alive() == []
    assert multiprocessing.active_children() == []


def open_descriptors(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


# ---- what is run, and what comes back ----


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_results_by_rank(n: int) -> None:
    results = launch(lambda c: (c.rank, c.world_size, os.getpid()), n, deadline_s=LIMIT_S)
    assert [(rank, size) for rank, size, _ in results] == [(rank, n) for rank in range(n)]
    assert len({pid for _, _, pid in results} - {os.getpid()}) == n


def _closure(offset: int) -> Callable[[Communicator], int]:
    return lambda communicator: communicator.rank * 10 + offset


def _from_a_cell() -> Callable[[Communicator], str]:
    """A function of a module that no worker can import, with a class and a helper of the same cell."""
    cell: dict[str, Any] = {"__name__": "cell_of_a_notebook"}
    exec(
        "class Point:\n"
        "    def __init__(self, x): self.x = x\n"
        "def helper(point): return f'x={point.x}'\n"
        "def work(communicator): return helper(Point(communicator.rank))\n",
        cell,
    )
    return cell["work"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "function, arguments, expected",
    [
        (add_up, (1.0,), [[3.0] * 3] * 2),  # 1 + 2
        (add_up, (1.0, 5), [[7.0] * 3] * 2),  # 1 + 6
        (lambda communicator: communicator.rank + 0.5, (), [0.5, 1.5]),
        (_closure(7), (), [7, 17]),
        (_from_a_cell(), (), ["x=0", "x=1"]),
        (lambda communicator: None, (), [None, None]),
    ],
    ids=["top level", "arguments", "lambda", "closure", "notebook cell", "nothing"],
)
def test_functions_from_anywhere(function: Callable[..., Any], arguments: tuple[Any, ...], expected: list[Any]) -> None:
    assert launch(function, 2, *arguments, deadline_s=LIMIT_S) == expected


def test_results_and_messages_of_classes_that_only_a_cell_knows() -> None:
    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

    def work(communicator: Communicator) -> Local:
        communicator.report(Local(communicator.rank + 10))
        return Local(communicator.rank)

    messages: list[tuple[int, int]] = []
    results = launch(work, 2, deadline_s=LIMIT_S, on_message=lambda rank, it: messages.append((rank, it.value)))
    assert [it.value for it in results] == [0, 1]
    assert sorted(messages) == [(0, 10), (1, 11)]


def backward(communicator: Communicator | None) -> float:
    weight = torch.ones(500, 500, requires_grad=True)
    (weight @ torch.ones(500, 500)).sum().backward()
    assert weight.grad is not None
    if communicator is not None:
        communicator.all_reduce(weight.grad)
    return weight.grad[0, 0].item()


def test_after_the_parent_ran_autograd_with_threads() -> None:
    """Children forked from this process would hang in backward."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert backward(None) == 500.0
        assert launch(backward, 2, deadline_s=LIMIT_S) == [1000.0, 1000.0]
        assert backward(None) == 500.0
        assert launch(backward, 2, deadline_s=LIMIT_S) == [1000.0, 1000.0]
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("n", [0, -1])
def test_at_least_one_process(n: int) -> None:
    with pytest.raises(ValueError, match=f"n = {n}: a whole number of processes is needed, at least one"):
        launch(add_up, n, 1.0)


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("nan"), float("inf"), 1e10])
def test_a_deadline_that_is_none_is_refused(deadline_s: float) -> None:
    with pytest.raises(ValueError, match=f"deadline_s = {deadline_s}: a deadline is > 0 and at most 2,000,000 s"):
        launch(add_up, 1, 1.0, deadline_s=deadline_s)


def test_the_longest_deadline_fits_into_what_waits_by_it() -> None:
    assert launch(add_up, 2, 1.0, deadline_s=2e6, signal_pipes=True)


def _generator() -> Any:
    yield 1


def _holder_of_a_lock() -> Callable[[Communicator], None]:
    lock = threading.Lock()

    def work_with_lock(communicator: Communicator) -> None:
        with lock:
            pass

    return work_with_lock


@pytest.mark.parametrize(
    "function, arguments, named, reason",
    [
        (_holder_of_a_lock(), (), "worker function work_with_lock", "cannot pickle '_thread.lock' object"),
        (add_up, (_generator(),), "argument _generator", "cannot pickle 'generator' object"),
        (
            add_up,
            (1.0, {"matrix": torch.ones(2, 2), "lock": threading.Lock()}),
            "argument {'matrix': tensor([[1., 1.], [1., 1.]]), 'lock': <unlocked _thread.lock object ",
            "cannot pickle '_thread.lock' object",
        ),
    ],
    ids=["lock", "generator", "lock in a dict"],
)
def test_what_cannot_be_sent_is_named_in_one_line(
    function: Callable[..., Any], arguments: tuple[Any, ...], named: str, reason: str
) -> None:
    with pytest.raises(NotPicklable) as raised:
        launch(function, 2, *arguments)
    line = str(raised.value)
    assert line.startswith(f"the {named}")
    assert f"cannot be sent to worker processes ({reason}): define what it uses at the top level" in line
    assert "\n" not in line


def setting_of_a_module_with_a_class_of_its_own(communicator: Communicator) -> bool:
    torch.backends.cudnn.deterministic = True
    return torch.backends.cudnn.deterministic


def test_a_function_may_name_any_module() -> None:
    """Those of torch.backends are objects of other classes than a module's, which pickle alone refuses."""
    assert launch(setting_of_a_module_with_a_class_of_its_own, 1, deadline_s=LIMIT_S) == [True]
    assert not torch.backends.cudnn.deterministic


def large_result(communicator: Communicator) -> tuple[torch.Tensor, list[dict[str, float]]]:
    history = [{"step": step, "loss": communicator.rank + 1 / (step + 1)} for step in range(10_000)]
    communicator.report("about to return")
    return torch.full((12_500_000,), float(communicator.rank)), history  # 50 MB


def test_large_results_and_a_parent_that_looks_late() -> None:
    """Neither does a worker wait for a parent that waits for the worker, nor is a result lost when its sender ends."""
    results = launch(large_result, 2, deadline_s=LIMIT_S, on_message=lambda rank, message: time.sleep(1.0))
    for rank, (tensor, history) in enumerate(results):
        assert tensor.shape == (12_500_000,) and bool((tensor == rank).all())
        assert len(history) == 10_000
        assert history[9999] == {"step": 9999, "loss": rank + 1 / 10_000}


def write_in_turn(communicator: Communicator) -> tuple[list[float], list[int], bool]:
    table, counts = communicator.shared["table"], communicator.shared["counts"]
    table[communicator.rank] += 10.0 * (communicator.rank + 1)
    communicator.barrier()
    seen = table.flatten().tolist()
    communicator.barrier()
    if communicator.rank == 0:
        counts.zero_()
    communicator.barrier()
    return seen, counts.tolist(), communicator.shared["empty"].shape == (0, 2)


def test_shared_tensors_are_one_memory() -> None:
    table, counts = torch.arange(6.0).view(2, 3).t(), torch.tensor([5, 6])
    shared = {"table": table, "counts": counts, "empty": torch.zeros(0, 2)}
    expected = [10.0, 13.0, 21.0, 24.0, 32.0, 35.0]  # rows 0 3, 1 4, 2 5, plus 10, 20 and 30
    assert launch(write_in_turn, 3, shared=shared, deadline_s=LIMIT_S) == [(expected, [0, 0], True)] * 3
    assert table.flatten().tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]  # the launcher's own are not touched
    assert counts.tolist() == [5, 6]


@pytest.mark.parametrize("threads", [1, 3, None])
def test_threads(threads: int | None) -> None:
    expected = threads or threads_per_worker(2)
    assert launch(lambda c: torch.get_num_threads(), 2, threads=threads, deadline_s=LIMIT_S) == [expected] * 2


def test_messages_come_in_order_and_before_the_results() -> None:
    def work(communicator: Communicator) -> str:
        for index in range(200):
            communicator.report((index, "x" * (index * 50)))
        return "done"

    messages: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    assert launch(work, 3, deadline_s=LIMIT_S, on_message=lambda rank, m: messages[rank].append(m)) == ["done"] * 3
    for rank in range(3):
        assert [index for index, _ in messages[rank]] == list(range(200))
        assert [len(text) for _, text in messages[rank]] == [50 * index for index in range(200)]


def test_messages_that_nobody_wants() -> None:
    assert launch(lambda c: c.report("x" * 100_000), 2, deadline_s=LIMIT_S) == [None, None]


def roles(communicator: Communicator) -> tuple[Any, ...]:
    return communicator.rank, communicator.server_count, communicator.worker_count, communicator.worker_index


def test_servers_and_workers() -> None:
    assert launch(roles, 3, server_count=1, deadline_s=LIMIT_S) == [(0, 1, 2, None), (1, 1, 2, 0), (2, 1, 2, 1)]


def slow_steps(communicator: Communicator) -> None:
    for step in range(1, 9):
        communicator.status.phase(COMPUTING)
        communicator.status.step(1, step, 64 * step)
        for _ in range(10):  # each wakes the launcher up
            time.sleep(0.01)
            communicator.report("another message")


def test_the_board_shows_progress_about_ten_times_a_second() -> None:
    seen: list[tuple[int, int]] = []

    def look(board: StatusBoard) -> None:
        status = board.read(1)
        seen.append((status.step, status.samples))

    start_s = time.monotonic()
    launch(slow_steps, 2, deadline_s=LIMIT_S, on_tick=look)
    assert seen == sorted(seen)
    assert set(seen) <= {(step, 64 * step) for step in range(9)}
    assert len(set(seen)) >= 4
    assert len(seen) <= (time.monotonic() - start_s) / launcher.TICK_S + 2


@pytest.fixture
def nothing_started(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has not started any other: multiprocessing's tracker of resources is started anew."""
    tracker: Any = multiprocessing.resource_tracker.ResourceTracker()
    for name in ("ensure_running", "getfd"):
        monkeypatch.setattr(multiprocessing.resource_tracker, name, getattr(tracker, name))
    yield
    tracker._stop()


@pytest.mark.usefixtures("nothing_started")
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_both_start_methods(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Where Ctrl-C is masked from the first instruction on, it cannot interrupt a worker's imports either."""
    monkeypatch.setattr(fork_server, "start_method", lambda: method)
    shared = {"offset": torch.tensor([100.0])}

    def work(communicator: Communicator) -> tuple[list[float], bool, bool]:
        total = communicator.all_reduce(torch.ones(2) * communicator.rank + communicator.shared["offset"]).tolist()
        masked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        return total, masked, signal.getsignal(signal.SIGINT) is signal.SIG_IGN

    assert launch(work, 2, shared=shared, deadline_s=LIMIT_S) == [([201.0, 201.0], True, True)] * 2
    assert multiprocessing.active_children() == []
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def load_data(communicator: Communicator) -> list[list[int]]:
    from torch.utils.data import DataLoader

    return [batch.tolist() for batch in DataLoader(range(5), batch_size=2, num_workers=1)]  # type: ignore[arg-type]


def test_a_worker_may_start_processes_of_its_own() -> None:
    assert launch(load_data, 1, deadline_s=LIMIT_S) == [[[0, 1], [2, 3], [4]]]


def test_a_thread_that_never_ends_does_not_hold_the_run_up() -> None:
    def work(communicator: Communicator) -> int:
        threading.Thread(target=time.sleep, args=(3600,)).start()
        return communicator.rank

    launch(work, 1, deadline_s=LIMIT_S)
    start_s = time.monotonic()
    assert launch(work, 2, deadline_s=LIMIT_S) == [0, 1]
    assert time.monotonic() - start_s < 5
    assert_nothing_runs()


def test_launch_from_a_thread() -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(launch(add_up, 2, 1.0, deadline_s=LIMIT_S)), daemon=True)
    thread.start()
    thread.join(30)
    assert results == [[3.0] * 3] * 2


# ---- errors of the caller's own ----


class OwnError(Exception):
    pass


def wait_for_ever(communicator: Communicator) -> None:
    communicator.report("begun")
    time.sleep(3600)


@pytest.mark.parametrize("where", ["on_message", "on_tick"])
def test_an_error_in_a_callback_ends_the_run(where: str) -> None:
    def fail(*arguments: Any) -> None:
        raise OwnError("mine")

    callback: dict[str, Any] = {where: fail}
    with pytest.raises(OwnError, match="mine"):
        launch(wait_for_ever, 2, deadline_s=LIMIT_S, **callback)
    assert_nothing_runs()


def test_a_start_that_fails_half_way_ends_those_that_were_started(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(add_up, 1, 1.0, deadline_s=LIMIT_S)
    started: list[Any] = []
    real_fork = forked.ForkServer.fork

    def third_fails(self: Any, target: Any, argument: Any, name: str, deadline_s: float) -> Any:
        if len(started) == 2:
            raise OSError(24, "Too many open files")
        started.append(name)
        return real_fork(self, target, argument, name, deadline_s)

    before = open_descriptors()
    monkeypatch.setattr(forked.ForkServer, "fork", third_fails)
    with pytest.raises(OSError, match="Too many open files"):
        launch(wait_for_ever, 4, deadline_s=LIMIT_S)
    assert started == ["torch_parallel rank 0", "torch_parallel rank 1"]
    assert_nothing_runs()
    assert open_descriptors() == before


def test_ctrl_c_in_the_middle_of_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has forked rank 1, whose number the launcher has not been told when the interrupt comes."""
    launch(add_up, 1, 1.0, deadline_s=LIMIT_S)
    real_read, reads = forked.read_number, []

    def interrupted_read(fd: int) -> int:
        reads.append(fd)
        if len(reads) == 2:
            end = time.monotonic() + 10
            while len(workers_alive()) < 2 and time.monotonic() < end:
                time.sleep(0.01)
            raise KeyboardInterrupt
        return real_read(fd)

    before = open_descriptors()
    monkeypatch.setattr(forked, "read_number", interrupted_read)
    try:
        launch(lambda communicator: time.sleep(3600), 3, deadline_s=LIMIT_S)
    except KeyboardInterrupt as interrupt:
        kept = interrupt  # as a notebook keeps the last one, with its frames
        assert_nothing_runs()
    assert kept is not None
    monkeypatch.undo()
    assert launch(add_up, 2, 1.0, deadline_s=LIMIT_S) == [[3.0] * 3] * 2
    del kept
    assert open_descriptors() <= before


def test_a_start_that_takes_longer_than_the_deadline_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first start waits until the fork server has imported torch."""
    real_start = fork_server.start_worker

    def slow_start(*arguments: Any) -> Any:
        time.sleep(0.5)
        return real_start(*arguments)

    launch(add_up, 1, 1.0, deadline_s=LIMIT_S)
    monkeypatch.setattr(fork_server, "start_worker", slow_start)
    monkeypatch.setattr(launcher, "GRACE_S", 0.2)
    assert launch(lambda communicator: communicator.rank, 3, deadline_s=1.0) == [0, 1, 2]


def interrupt_during(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Ctrl-C arrives when the run's cleaning up gets to `step`."""
    real = getattr(launcher.Run, step)

    def interrupted(self: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        real(self)

    monkeypatch.setattr(launcher.Run, step, interrupted)


def test_ctrl_c_while_a_good_run_is_cleaned_up_comes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(add_up, 1, 1.0, deadline_s=LIMIT_S)
    interrupt_during(monkeypatch, "_reap")
    before = open_descriptors()
    with pytest.raises(KeyboardInterrupt):
        launch(add_up, 2, 1.0, deadline_s=LIMIT_S)
    assert_nothing_runs()
    assert open_descriptors() == before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_while_the_first_is_cleaned_up_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(board: StatusBoard) -> None:
        raise KeyboardInterrupt("the first")

    interrupt_during(monkeypatch, "_reap")
    with pytest.raises(KeyboardInterrupt, match="the first"):
        launch(wait_for_ever, 2, deadline_s=LIMIT_S, on_tick=first)
    assert_nothing_runs()


# ---- what is left ----


@pytest.mark.exhaustive
def test_descriptors_and_processes_after_twenty_runs() -> None:
    def launch_and_count(number: int) -> tuple[int, int]:
        if number % 5 == 4:
            with pytest.raises(WorkerFailure):
                launch(lambda c: 1 // (c.rank - 1), 2, deadline_s=LIMIT_S)
        else:
            launch(add_up, 2, 1.0, deadline_s=LIMIT_S, signal_pipes=number % 2 == 0, shared={"x": torch.ones(9)})
        assert_nothing_runs()
        until_s = time.monotonic() + 5  # the server tells how a worker has ended, and then closes what it told it by
        while open_descriptors(fork_server_pid()) > of_server and time.monotonic() < until_s:
            time.sleep(0.01)
        return open_descriptors(), open_descriptors(fork_server_pid())

    launch(add_up, 1, 1.0, deadline_s=LIMIT_S)
    time.sleep(0.2)
    of_server = open_descriptors(fork_server_pid())
    first = launch_and_count(0)
    assert first[1] == of_server
    assert [launch_and_count(number) for number in range(20)] == [first] * 20


SCRIPT = """
import os, resource, sys
sys.path.insert(0, {root!r})
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
from torch_parallel import fork_server, launch
fork_server.PRELOAD[:] = ["torch_parallel.worker"]

def work(communicator):
    import torch
    for numel in range(1, 40):
        communicator.all_reduce(torch.ones(numel * 100))
    server_has_torch = "libtorch_cpu" in open(f"/proc/{{os.getppid()}}/maps").read()
    return communicator.all_reduce(torch.ones(2) * communicator.rank).tolist(), server_has_torch

for pipes in (False, True):
    print(launch(work, 8, deadline_s=60.0, signal_pipes=pipes) == [([28.0, 28.0], True)] * 8)
"""


@pytest.mark.exhaustive
def test_128_open_files_any_folder_and_a_long_temporary_one(tmp_path: Path) -> None:
    """8 workers; this package is found only through sys.path; the name of the temporary folder is no socket's."""
    script, temporary = tmp_path / "script.py", tmp_path / ("x" * 100)
    script.write_text(SCRIPT.format(root=str(Path(launcher.__file__).parent.parent)))
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90
    )
    assert (done.stdout, done.stderr) == ("True\nTrue\n", "")
    assert not [name for name in os.listdir(temporary) if not re.match("torchinductor_", name)]
