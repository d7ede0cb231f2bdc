"""What all tests share."""

from __future__ import annotations

import os
import random
import signal
import zlib
from collections.abc import Iterator

import cloudpickle
import pytest

from torch_parallel import fork_server, launch

ONE_IN = 8
"""Of the tests that are marked exhaustive so many times fewer are run, if they are not asked for."""


@pytest.fixture(autouse=True, scope="module")
def send_this_module_by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    """Worker processes cannot import a test module: what it defines is sent to them by value."""
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture(autouse=True, scope="module")
def ordinary_signals() -> Iterator[None]:
    """As in a terminal, also where the tests run in the background, which ignores them."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def handlers() -> Iterator[None]:
    """`run_command` sets signal handlers, as the last thing that a process does with them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def light_server() -> Iterator[None]:
    """Servers that are started anew in a module's tests need not be ready for training; what comes after them needs one
    that is, or each of its workers would import what training takes, for two seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server, "PRELOAD", ["torch_parallel.worker"])
        yield
    fork_server.kill()


@pytest.fixture
def started(light_server: None) -> None:
    """Torch's import in the fork server is not part of what is timed."""
    launch(lambda communicator: None, 1, deadline_s=20.0)


PART_SEED = "TORCH_PARALLEL_TEST_PART"


def pytest_configure(config: pytest.Config) -> None:
    """In the environment, so that all processes of one run choose the same part."""
    os.environ.setdefault(PART_SEED, str(config.getoption("part")))


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        os.environ.pop(PART_SEED, None)


def pytest_report_header(config: pytest.Config) -> str:
    if config.getoption("exhaustive"):
        return "exhaustive tests: all"
    return f"exhaustive tests: one in {ONE_IN}, --part {os.environ[PART_SEED]}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the tests that are marked exhaustive a part is run, another one each time, but one case of each function
    that has more than two in any run. What is named by "::" is run."""
    if config.getoption("exhaustive") or any("::" in each for each in config.args):
        return
    by_function: dict[str, list[tuple[int, str]]] = {}
    for item in items:
        if item.get_closest_marker("exhaustive"):
            drawn = zlib.crc32(f"{os.environ[PART_SEED]} {item.nodeid}".encode())
            by_function.setdefault(item.nodeid.partition("[")[0], []).append((drawn, item.nodeid))
    left_out = {
        name for drawn in by_function.values() for number, name in sorted(drawn)[len(drawn) > 2 :] if number % ONE_IN
    }
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run all tests that are marked exhaustive")
    parser.addoption(
        "--part", type=int, default=random.SystemRandom().randrange(10**6), help="which part of them is run else"
    )
    parser.addoption("--trials", type=int, default=20, help="random models that are tried")
    parser.addoption(
        "--first_trial", type=int, default=random.SystemRandom().randrange(10**6), help="number of the first"
    )
