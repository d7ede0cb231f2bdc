"""Workers see their caller as it is now, and the caller stays as it was; who calls need not be the main process."""

from __future__ import annotations

import locale
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from fork_servers import fork_server_pid

from torch_parallel import Dataset, RunConfig, train
from torch_parallel.communicator import Communicator
from torch_parallel.launcher import launch

ROOT = Path(__file__).parent.parent
LIMIT_S = 20.0


def script(folder: Path, text: str, *flags: str, **environment: str) -> str:
    """What a script in a folder of its own prints. It finds this package by PYTHONPATH, as it were installed."""
    (folder / "script.py").write_text(textwrap.dedent(text))
    done = subprocess.run(
        [sys.executable, *flags, "script.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == ""
    assert done.returncode == 0
    return done.stdout


# ---- what workers see ----


def seen(communicator: Communicator) -> dict[str, Any]:
    import warnings as its_warnings

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    umask = os.umask(0)
    return {
        "environment": {name: value for name, value in os.environ.items() if name.startswith("OF_A_TEST")},
        "folder": os.getcwd(),
        "path": sys.path[0],
        "arguments": sys.argv[1:],
        "umask": umask,
        "limit": limit,
        "processors": os.sched_getaffinity(0),
        "filter": any(each[:3:2] == ("ignore", OwnWarning) for each in its_warnings.filters),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "recursion limit": sys.getrecursionlimit(),
        "numpy": numpy.geterr()["over"],
        "dtype": torch.ones(1).dtype,
        "device": torch.ones(1).device.type,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
    }


class OwnWarning(UserWarning):
    pass


@pytest.fixture
def as_before(monkeypatch: pytest.MonkeyPatch, started: None) -> Any:
    """Puts back what the test changes in this process."""
    umask, limits = os.umask(0o22), resource.getrlimit(resource.RLIMIT_NOFILE)
    os.umask(umask)
    processors, errors, depth = os.sched_getaffinity(0), numpy.geterr(), sys.getrecursionlimit()
    with warnings.catch_warnings():
        yield
    os.umask(umask)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    os.sched_setaffinity(0, processors)
    numpy.seterr(**errors)
    sys.setrecursionlimit(depth)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = False
    torch.autograd.set_detect_anomaly(False)
    torch.backends.mha.set_fastpath_enabled(True)


def test_workers_see_the_caller_as_it_is_now(as_before: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = launch(seen, 1, deadline_s=LIMIT_S)[0]
    assert (before["environment"], before["dtype"], before["device"]) == ({}, torch.float32, "cpu")
    server = fork_server_pid()
    limit = before["limit"] - 7
    monkeypatch.setenv("OF_A_TEST", "a value")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "argv", ["script", "--flag"])
    os.umask(0o27)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    os.sched_setaffinity(0, {max(before["processors"])})
    warnings.simplefilter("ignore", OwnWarning)
    numpy.seterr(over="raise")
    sys.setrecursionlimit(3456)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = True
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    torch.backends.mha.set_fastpath_enabled(False)
    expected = {
        "environment": {"OF_A_TEST": "a value"},
        "folder": str(tmp_path),
        "path": str(tmp_path / "modules"),
        "arguments": ["--flag"],
        "umask": 0o27,
        "limit": limit,
        "processors": {max(before["processors"])},
        "filter": True,
        "start method": multiprocessing.get_start_method(allow_none=True),
        "recursion limit": 3456,
        "numpy": "raise",
        "dtype": torch.float64,
        "device": "meta",
        "deterministic": True,
        "warn only": True,
        "precision": "medium",
        "cudnn": (True, True),
        "anomaly": (True, False),
        "fast path": False,
    }
    assert launch(seen, 2, deadline_s=LIMIT_S) == [expected] * 2
    assert fork_server_pid() == server  # it has read nothing of all that


def test_an_environment_variable_that_is_gone_is_gone_in_workers_too(
    started: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_A_TEST", "first")
    assert launch(lambda c: os.environ.get("OF_A_TEST"), 1) == ["first"]
    monkeypatch.delenv("OF_A_TEST")
    assert launch(lambda c: os.environ.get("OF_A_TEST"), 1) == [None]


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "LC_TIME", "FX_PATCH_GETITEM"])
@pytest.mark.exhaustive
def test_another_server_comes_where_its_start_has_read_what_changed(
    started: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Two may be read by C libraries, the last is by Python code of torch."""
    before = fork_server_pid()
    monkeypatch.setenv(name, "1")
    assert launch(lambda c: os.environ[name], 2, deadline_s=LIMIT_S) == ["1", "1"]
    assert fork_server_pid() != before
    assert not Path(f"/proc/{before}").exists()


@pytest.mark.exhaustive
def test_a_server_that_is_replaced_lives_as_long_as_its_workers(
    started: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another thread's run goes on."""
    go_on = tmp_path / "go on"

    def wait(communicator: Communicator) -> int:
        communicator.report("begun")
        while not communicator.all_reduce(torch.tensor(float(go_on.exists()))):
            pass
        return os.getppid()

    begun = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(launch, wait, 2, deadline_s=LIMIT_S, on_message=lambda rank, message: begun.set())
        assert begun.wait(LIMIT_S)
        before = fork_server_pid()
        monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
        assert before not in launch(lambda c: os.getppid(), 1, deadline_s=LIMIT_S)
        go_on.touch()
        assert run.result(LIMIT_S) == [before, before]
    assert not Path(f"/proc/{before}").exists()


def test_output_goes_where_the_callers_goes_now(started: None, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """Not where it went when the server was started."""
    with open(tmp_path / "out", "w") as file:
        usual = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            launch(lambda c: print("rank", c.rank, flush=True), 1, deadline_s=LIMIT_S)
        finally:
            os.dup2(usual, 1)
            os.close(usual)
    launch(lambda c: print("again", file=sys.stderr), 1, deadline_s=LIMIT_S)
    assert (tmp_path / "out").read_text() == "rank 0\n"
    assert capfd.readouterr() == ("", "again\n")


@pytest.mark.exhaustive
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_standard_files_that_are_closed(tmp_path: Path, closed: str) -> None:
    """Their numbers then stand for others, in which nothing may be printed."""
    text = """
    def work(communicator):
        import torch
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.write("into nothing\\n")  # in one piece: two processes write there
            stream.flush()
        return communicator.all_reduce(torch.ones(2)).tolist()

    if __name__ == "__main__":
        with open("result", "w") as file:
            file.write(str(launch(work, 2, deadline_s=30, signal_pipes=True)))
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(CALLER) + textwrap.dedent(text))
    command = ["bash", "-c", f'"{sys.executable}" script.py {closed}']
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, (tmp_path / "result").read_text()) == (0, "[[2.0, 2.0], [2.0, 2.0]]")
    assert done.stdout == ("" if ">&-" in closed.replace("2>&-", "") else "into nothing\n" * 2)
    assert done.stderr == ("" if "2>&-" in closed else "into nothing\n" * 2)


def test_collectives_under_the_callers_defaults(as_before: None) -> None:
    """What the package makes for itself has its own types and devices."""

    def work(communicator: Communicator) -> list[Any]:
        mine = torch.full((3,), communicator.rank + 1, dtype=torch.float32, device="cpu")
        everybody = communicator.all_gather(mine.clone())
        return [
            communicator.all_reduce(mine.clone()).tolist(),
            everybody.tolist(),
            communicator.gather({"rank": communicator.rank}),
        ]

    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    shared = {"offset": torch.ones(2, dtype=torch.float32, device="cpu")}
    first, second = launch(work, 2, shared=shared, deadline_s=LIMIT_S)
    assert first == [[3.0] * 3, [[1.0] * 3, [2.0] * 3], [{"rank": 0}, {"rank": 1}]]
    assert second == [*first[:2], None]


def make_model() -> torch.nn.Module:
    """It says itself of which type and where it is."""
    layers = [torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)]
    model = torch.nn.Sequential(*(layer.to_empty(device="cpu").float() for layer in layers))
    for number, values in enumerate(model.state_dict().values(), start=1):
        values.copy_(torch.arange(1, values.numel() + 1, device="cpu").view(values.shape) / (7 * number))
    return model


@pytest.mark.exhaustive
def test_training_under_the_callers_defaults_gives_the_same(as_before: None, tmp_path: Path) -> None:
    """And starts no CUDA."""
    inputs = torch.linspace(-1, 1, 120).view(20, 6)
    targets = torch.arange(20) % 3
    data = Dataset("own", inputs, targets, inputs, targets, 3, (0.0,), (1.0,), "made up")
    config = RunConfig(n_gpus=2, device="cpu", batch_size=8, epochs=2, lr=0.1, results_dir=str(tmp_path))
    weights = []
    for changed in (False, True):
        if changed:
            torch.set_default_dtype(torch.float64)
            torch.set_default_device("meta")
        weights.append(train(config, make_model=make_model, dataset=data, verbose=False).weights)
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not torch.cuda.is_initialized()


# ---- the caller stays as it was ----


def state_of_this_process() -> dict[str, Any]:
    return {
        "start method": multiprocessing.get_start_method(allow_none=True),
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "python": random.getstate(),
        "numpy": str(numpy.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "cuda": torch.cuda.is_initialized(),
        "environment": dict(os.environ),
        "filters": list(warnings.filters),
        "folder": os.getcwd(),
        "path": list(sys.path),
        "modules": {name: id(module) for name, module in sys.modules.items() if name in ("__main__", __name__)},
        "locale": locale.setlocale(locale.LC_ALL, None),
        "threads": torch.get_num_threads(),
        "script": dict(vars(sys.modules["__main__"])),
    }


@pytest.mark.parametrize("blocked", [set(), {signal.SIGUSR1}, {signal.SIGINT}])
def test_launch_leaves_its_caller_as_it_was(started: None, blocked: set[signal.Signals]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        before = state_of_this_process()
        launch(lambda c: (random.random(), torch.rand(1), numpy.random.rand()), 2, deadline_s=LIMIT_S)
        assert state_of_this_process() == before
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)


@pytest.mark.exhaustive
def test_multiprocessing_is_left_to_the_caller(tmp_path: Path) -> None:
    """Its start method, its fork server, what that preloads, which has computed here, and its children's signals."""
    (tmp_path / "computes.py").write_text("import torch\na = torch.rand(600, 600)\na @ a\n")
    text = """
        import multiprocessing, multiprocessing.forkserver, signal, sys
        import torch
        from torch_parallel import fork_server, launch
        fork_server.PRELOAD[:] = ["torch_parallel.worker"]

        def child():
            masked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
            print("masked" if masked else "not masked", "computes" in sys.modules, flush=True)

        def product(communicator):
            return float((torch.ones(600, 600) @ torch.ones(600, 600))[0, 0])

        if __name__ == "__main__":
            launch(product, 1, deadline_s=20)
            multiprocessing.set_start_method("forkserver")
            multiprocessing.set_forkserver_preload(["computes"])
            process = multiprocessing.Process(target=child)
            process.start()
            process.join()
            print(launch(product, 2, deadline_s=20), process.exitcode)
            print(multiprocessing.forkserver._forkserver._preload_modules)
    """
    printed = script(tmp_path, text, PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert printed == "not masked True\n[600.0, 600.0] 0\n['computes']\n"


# ---- who calls ----

CALLER = """
    import multiprocessing, os, sys
    from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
    from torch_parallel import WorkerFailure, fork_server, launch
    fork_server.PRELOAD[:] = ["torch_parallel.worker"]

    class Mine:
        def __init__(self, rank):
            self.rank = rank

    def work(communicator):
        return Mine(communicator.rank), os.getppid()

    def call(number=0):
        results = launch(work, 2, deadline_s=30)
        assert all(type(mine) is Mine for mine, _ in results)
        servers = {server for _, server in results}
        assert servers == {fork_server.pid()}
        return [mine.rank for mine, _ in results], *servers

    def fail(number=0):
        launch(lambda communicator: 1 // communicator.rank, 2, deadline_s=30)

    def told():
        print(call()[0], flush=True)

"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_child_of_each_start_method_may_launch(tmp_path: Path, method: str) -> None:
    """After its parent has, which goes on launching; each has a server of its own. So may a daemonic child."""
    text = f"""
    if __name__ == "__main__":
        _, server = call()
        context = multiprocessing.get_context("{method}")
        for daemon in (False, True):
            process = context.Process(target=told, daemon=daemon)
            process.start()
            process.join()
            assert process.exitcode == 0
        with context.Pool(2) as pool:
            both = pool.map(call, range(2), chunksize=1)
        assert [ranks for ranks, _ in both] == [[0, 1]] * 2 and server not in {{server for _, server in both}}
        assert call() == ([0, 1], server)
    """
    assert script(tmp_path, CALLER + text) == "[0, 1]\n[0, 1]\n"


@pytest.mark.exhaustive
def test_a_child_forked_after_its_parent_computed_may_launch(tmp_path: Path) -> None:
    """torch's threads are the parent's: what is large must be copied without them."""
    text = """
    import torch
    large = torch.ones(3_000_000)

    def total(communicator):
        return float(communicator.shared["large"].sum())

    def child():
        print(launch(total, 2, shared={"large": large}, deadline_s=30), torch.get_num_threads(), flush=True)

    if __name__ == "__main__":
        torch.set_num_threads(2)
        weight = torch.ones(800, 800, requires_grad=True)
        (weight @ weight).sum().backward()
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(60)
        print(process.exitcode)
        process.kill()
    """
    assert script(tmp_path, CALLER + text) == "[3000000.0, 3000000.0] 2\n0\n"


@pytest.mark.exhaustive
def test_executors_may_launch_and_show_the_failure(tmp_path: Path) -> None:
    text = """
    if __name__ == "__main__":
        with ThreadPoolExecutor(4) as pool:
            print({*map(str, pool.map(call, range(8)))} == {str(([0, 1], fork_server.pid()))})
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            error = pool.submit(fail).exception()
        print(type(error) is WorkerFailure, error.rank, str(error).splitlines()[0])
    """
    failure = "True 0 rank 0 failed: ZeroDivisionError: integer division or modulo by zero"
    assert script(tmp_path, CALLER + text) == f"True\n{failure}\n"


@pytest.mark.exhaustive
def test_a_child_forked_in_the_middle_of_a_run_does_not_hold_it(started: None, tmp_path: Path) -> None:
    """It has copies of all that the launcher has open, and must not keep workers alive when the launcher is killed."""
    text = """
    import time
    def forked(rank, message):
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        print(message, flush=True)
        os.kill(os.getpid(), 9)

    def sleep(communicator):
        communicator.report(f"{os.getpid()} {os.getppid()}")
        time.sleep(30)

    if __name__ == "__main__":
        launch(sleep, 1, on_message=forked)
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(CALLER) + textwrap.dedent(text))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    pids = process.stdout.readline().split()
    try:
        assert len(pids) == 2 and process.wait(LIMIT_S) == -9
        assert_gone(*map(int, pids))
    finally:
        process.stdout.close()


def assert_gone(*pids: int, limit_s: float = 2.0) -> None:
    import time

    end = time.monotonic() + limit_s
    while any(map(is_alive, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    assert [pid for pid in pids if is_alive(pid)] == []


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# ---- what ranks draw ----


def draws(communicator: Communicator) -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def test_generators_differ_by_rank_and_launch(started: None) -> None:
    drawn: list[Any] = [draw for _ in range(2) for draw in launch(draws, 3, deadline_s=LIMIT_S)]
    for kind in range(3):
        assert len({draw[kind] for draw in drawn}) == 6


def test_with_a_seed_each_launch_draws_the_same(started: None) -> None:
    first, again, other = (launch(draws, 2, seed=seed, deadline_s=LIMIT_S) for seed in (5, 5, 6))
    assert first == again
    assert len({*first, *other}) == 4


@pytest.mark.exhaustive
def test_a_program_that_seeds_torch_draws_the_same_when_it_runs_again(tmp_path: Path) -> None:
    text = """
    import random, numpy, torch
    def draws(communicator):
        return random.random(), numpy.random.rand(), float(torch.rand(()))
    if __name__ == "__main__":
        torch.manual_seed(int(os.environ["SEED"]))
        print([launch(draws, 2) for _ in range(2)])
    """
    one, same, other = (script(tmp_path, CALLER + text, **env) for env in ({"SEED": "4"}, {"SEED": "4"}, {"SEED": "3"}))
    assert one == same != other
