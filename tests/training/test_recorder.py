"""What a step's time went on, from messages given by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from torch_parallel.training.recorder import StepRecorder
from torch_parallel.transport.base import Transfer


@pytest.mark.parametrize(
    ("enqueues", "waited_for_s"),
    [
        (False, [0.0, 0.5, 4.0]),  # the transport's own count, of which the messages' waits are a part
        (True, [0.0, 0.75, 4.0]),  # of a stream it counts what the host waits for: the messages' waits come on top
    ],
)
def test_for_whom_a_rank_waited(enqueues: bool, waited_for_s: list[float]) -> None:
    transport: Any = SimpleNamespace(observer=None, waited_s=[1.0, 2.0, 3.0], enqueues=enqueues)
    strategy: Any = SimpleNamespace(transport=transport, update_clock=SimpleNamespace(total_s=10.0))
    communicator: Any = SimpleNamespace(rank=0, is_server=False)
    recorder = StepRecorder(communicator, strategy)

    def message(source: int, wait_start_s: float, start_s: float, end_s: float, add: bool) -> None:
        transport.observer(Transfer(source, 0, 8, "gradients", 0, wait_start_s, start_s, end_s, add))

    message(1, 0.0, 0.25, 1.25, add=True)
    transport.waited_s[1] += 0.5
    transport.waited_s[2] += 4.0
    strategy.update_clock.total_s += 3.0
    recorder.end(epoch=1, step=1)
    recorder.begin()
    recorder.end(epoch=1, step=2)
    first, second = recorder.take()
    assert first.waited_for_s == waited_for_s and first.wait_s == sum(waited_for_s)
    assert (first.reduce_s, first.move_s, first.update_s) == (1.0, 0.0, 3.0)
    assert second.waited_for_s == [0.0, 0.0, 0.0]
