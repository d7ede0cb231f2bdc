"""Who did what, and when: the events of a run, as a file that browsers draw.

`write_chrome_trace` makes the JSON of chrome://tracing. Drop it into https://ui.perfetto.dev: each rank is a process
with a thread for each lane, and more of them for what happens at the same time in one lane. `analysis/timeline.py`
draws the same events for print.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_parallel.files import our_own, path_of, utf8

LANES = ("compute", "send", "wait", "reduce", "copy", "update", "evaluate")
"""The usual lanes, from top to bottom. Others are allowed, and come after them in the order of the alphabet."""


@dataclass(frozen=True, slots=True)
class Event:
    """`rank` did `name` from `start_s` to `end_s`, of one clock for all ranks, such as `time.perf_counter` of a node.

    Lanes keep apart what is different in kind, or happens at the same time.
    """

    rank: int
    lane: str
    name: str
    start_s: float
    end_s: float


def lane_order(events: Iterable[Event]) -> list[str]:
    """The lanes that occur, from top to bottom."""
    lanes = {event.lane for event in events}
    return [lane for lane in LANES if lane in lanes] + sorted(lanes - set(LANES))


def write_chrome_trace(events: Iterable[Event], path: str | Path) -> None:
    """Writes events as Chrome trace JSON, an event a line, with times in microseconds from the first event.

    Raises `ValueError` for an event that ends before it starts, OutputError where the file cannot be written.
    """
    # of events that start together the longest comes first
    events = sorted(events, key=lambda event: (event.start_s, -event.end_s, event.rank, event.lane, event.name))
    for event in events:
        if not event.start_s <= event.end_s:
            raise ValueError(f"{event} ends before it starts")
    threads = _threads(events)
    names = {(event.rank, *thread) for event, thread in zip(events, threads, strict=True)}
    rows = [thread for lane in lane_order(events) for thread in sorted({each for each in threads if each[0] == lane})]
    lines = [json.dumps(line) for line in [*_names(names, rows), *_spans(events, [*map(rows.index, threads)])]]
    head, tail = '{"displayTimeUnit": "ms", "traceEvents": [', "]}"
    with our_own():
        path_of(path).write_bytes(utf8("\n".join([head, ",\n".join(lines), tail, ""])))


def _process(rank: int) -> int:
    return rank + 1  # Perfetto takes process 0 for the kernel's idle process


def _threads(events: list[Event]) -> list[tuple[str, int]]:
    """Lane and number, from 1, of a thread for each event, in which it overlaps no other: viewers draw a thread as a
    stack of calls, and get wrong what overlaps in it."""
    ends_s: dict[tuple[int, str], list[float]] = {}  # of the last event of each thread of a rank's lane
    threads = []
    for event in events:
        ends = ends_s.setdefault((event.rank, event.lane), [])
        free = next((index for index, end_s in enumerate(ends) if end_s <= event.start_s), len(ends))
        ends[free : free + 1] = [event.end_s]
        threads.append((event.lane, free + 1))
    return threads


def _names(names: set[tuple[int, str, int]], rows: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """Metadata events: what the processes and threads are called, and in which order they stand."""
    lines = []
    for rank in sorted({rank for rank, _, _ in names}):
        process: dict[str, Any] = {"ph": "M", "pid": _process(rank)}
        lines.append({"name": "process_name", **process, "args": {"name": f"rank {rank}"}})
        lines.append({"name": "process_sort_index", **process, "args": {"sort_index": rank}})
        for number, (lane, index) in enumerate(rows, start=1):
            if (rank, lane, index) in names:
                thread = {**process, "tid": number}
                name = lane if index == 1 else f"{lane} ({index})"
                lines.append({"name": "thread_name", **thread, "args": {"name": name}})
                lines.append({"name": "thread_sort_index", **thread, "args": {"sort_index": number}})
    return lines


def _spans(events: list[Event], rows: list[int]) -> list[dict[str, Any]]:
    """The events themselves: "X", those with start and length."""
    return [
        {
            "name": event.name,
            "cat": event.lane,
            "ph": "X",
            "pid": _process(event.rank),
            "tid": row + 1,
            "ts": round((event.start_s - events[0].start_s) * 1e6, 3),
            "dur": round((event.end_s - event.start_s) * 1e6, 3),
        }
        for event, row in zip(events, rows, strict=True)
    ]


def read_chrome_trace(path: str | Path) -> list[Event]:
    """The events of a file of `write_chrome_trace`, in the order of their start; the first one starts at 0 s.

    Raises `ValueError` for a file that is something else.
    """
    try:
        trace = json.loads(path_of(path).read_text(encoding="utf-8"))
        return [
            Event(span["pid"] - 1, span["cat"], span["name"], span["ts"] / 1e6, (span["ts"] + span["dur"]) / 1e6)
            for span in trace["traceEvents"]
            if span["ph"] == "X"
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no trace written by write_chrome_trace: {error!r}") from None
