"""Adds up how long something took: the host's time, or, where work is only enqueued, the time of the GPU's stream."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

MOST_OPEN = 512
"""Blocks on a GPU whose seconds are not read yet."""


class Stopwatch:
    """Seconds of all blocks it was `running` around. On a GPU they are read without waiting, until they are wanted."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._index = device.index
        self._total_s = 0.0
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._idle: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @property
    def total_s(self) -> float:
        """So far; on a GPU it waits for the last block's end."""
        self._close(0)
        return self._total_s

    def add(self, seconds: float) -> None:
        """What was measured in another way."""
        self._total_s += seconds

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around what is to be measured; on a GPU, of what it enqueues on the current stream."""
        if not self._on_gpu:
            start_s = time.perf_counter()
            yield
            self._total_s += time.perf_counter() - start_s
            return
        start, end = self._idle.pop() if self._idle else (_event(), _event())
        stream = torch.cuda.current_stream(self._index)  # each event would look for it by itself, and more slowly
        start.record(stream)
        yield
        end.record(stream)
        self._open.append((start, end))
        self._close(MOST_OPEN)

    def _close(self, leave: int) -> None:
        while len(self._open) > leave:
            start, end = self._open.popleft()
            end.synchronize()
            self._total_s += start.elapsed_time(end) / 1e3
            self._idle.append((start, end))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
