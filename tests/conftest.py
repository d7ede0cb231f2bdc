"""What all tests share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import cloudpickle
import pytest


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
