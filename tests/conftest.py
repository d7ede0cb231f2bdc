"""What all tests share."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator

import cloudpickle
import pytest

from torch_parallel import fork_server, launch


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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--trials", type=int, default=20, help="random models that are tried")
    parser.addoption(
        "--first_trial", type=int, default=random.SystemRandom().randrange(10**6), help="number of the first"
    )
