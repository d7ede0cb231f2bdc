"""What a GPU does during a few training steps, from torch's profiler: how much of the time, and on which streams."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
PARTS = ("busy", "compute", "beside", "hidden")
"""What `shares` tells."""
Interval = tuple[float, float]


@dataclass(frozen=True)
class Work:
    """A kernel or a copy: on which stream, and from when to when, in microseconds since the first one began."""

    stream: int
    name: str
    start_us: float
    end_us: float

    def row(self) -> dict[str, Any]:
        """For a table of thousands: templates of C++ have names of several hundred characters."""
        name = re.sub(r"^void |at::native::|\(anonymous namespace\)::", "", self.name)[:48]
        start_us, end_us = round(self.start_us, 1), round(self.end_us, 1)
        return {"stream": self.stream, "name": name, "start_us": start_us, "end_us": end_us}


def profiled(step: Callable[[], None], steps: int) -> list[Work]:
    """All work of this process's GPU in `steps` steps, in the order in which it began.

    One step before is not in it: ranks take differently long to begin to look, and wait for each other in that one.
    """
    with tempfile.TemporaryDirectory() as temporary:
        torch.cuda.synchronize()
        when = schedule(wait=0, warmup=1, active=steps, repeat=1)
        with profile(activities=[ProfilerActivity.CUDA], schedule=when) as profiler:
            for number in range(1 + steps):
                step()
                if number in (0, steps):
                    torch.cuda.synchronize()
                profiler.step()
        file = Path(temporary, "trace.json")
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    return work_of(events)


def work_of(events: Iterable[dict[str, Any]]) -> list[Work]:
    """What of a Chrome trace is the GPU's work."""
    found = [each for each in events if each.get("cat") in GPU_WORK and "dur" in each]
    found.sort(key=lambda each: float(each["ts"]))
    first_us = float(found[0]["ts"]) if found else 0.0
    return [
        Work(
            int(each["args"].get("stream", each.get("tid", 0))),
            str(each["name"]),
            float(each["ts"]) - first_us,
            float(each["ts"]) + float(each["dur"]) - first_us,
        )
        for each in found
    ]


def compute_stream(work: list[Work]) -> int:
    """The one that is busy for longest."""
    streams = {each.stream for each in work}
    return max(streams, key=lambda stream: length(union(_intervals(work, {stream}))))


def shares(work: list[Work]) -> dict[str, float]:
    """Parts of the time from the first work's begin to the last one's end.

    busy: any stream works; compute: the stream of forward and backward does; beside: another one does (exchange, and
    with overlap the updates); hidden: both do.
    """
    streams = {each.stream for each in work}
    compute = {compute_stream(work)}
    window_us = max(each.end_us for each in work)
    busy, computing, beside = (
        length(union(_intervals(work, which))) / window_us for which in (streams, compute, streams - compute)
    )
    return dict(zip(PARTS, (busy, computing, beside, computing + beside - busy), strict=True))


def _intervals(work: list[Work], streams: set[int]) -> list[Interval]:
    return [(each.start_us, each.end_us) for each in work if each.stream in streams]


def union(intervals: list[Interval]) -> list[Interval]:
    """The same points, in intervals that do not touch, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(intervals: list[Interval]) -> float:
    return sum(end - start for start, end in intervals)
