"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import cloudpickle
import pytest


@pytest.fixture(autouse=True, scope="module")
def send_this_module_by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    """Worker processes cannot import a test module: what it defines is sent to them by value."""
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)
