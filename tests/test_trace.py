"""A trace is what Perfetto expects, field by field, and reads back as what was written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torch_parallel.trace import LANES, Event, lane_order, read_chrome_trace, write_chrome_trace

EVENTS = [
    Event(1, "reduce", "bucket 0", 100.25, 100.5),
    Event(0, "compute", "step 0", 100.0, 100.125),
    Event(1, "disk", "checkpoint", 101.0, 101.0),
    Event(0, "wait", "inner", 100.125, 100.1875),
    Event(0, "wait", "outer", 100.125, 100.25),
]


def test_the_file_field_by_field(tmp_path: Path) -> None:
    write_chrome_trace(EVENTS, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["displayTimeUnit"] == "ms"
    # threads: compute 1, wait 2, what overlaps with it 3, reduce 4, and the unusual one last
    assert trace["traceEvents"] == [
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "rank 0"}},
        {"name": "process_sort_index", "ph": "M", "pid": 1, "args": {"sort_index": 0}},
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": "compute"}},
        {"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": 1, "args": {"sort_index": 1}},
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": 2, "args": {"name": "wait"}},
        {"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": 2, "args": {"sort_index": 2}},
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": 3, "args": {"name": "wait (2)"}},
        {"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": 3, "args": {"sort_index": 3}},
        {"name": "process_name", "ph": "M", "pid": 2, "args": {"name": "rank 1"}},
        {"name": "process_sort_index", "ph": "M", "pid": 2, "args": {"sort_index": 1}},
        {"name": "thread_name", "ph": "M", "pid": 2, "tid": 4, "args": {"name": "reduce"}},
        {"name": "thread_sort_index", "ph": "M", "pid": 2, "tid": 4, "args": {"sort_index": 4}},
        {"name": "thread_name", "ph": "M", "pid": 2, "tid": 5, "args": {"name": "disk"}},
        {"name": "thread_sort_index", "ph": "M", "pid": 2, "tid": 5, "args": {"sort_index": 5}},
        {"name": "step 0", "cat": "compute", "ph": "X", "pid": 1, "tid": 1, "ts": 0, "dur": 125000},
        {"name": "outer", "cat": "wait", "ph": "X", "pid": 1, "tid": 2, "ts": 125000, "dur": 125000},
        {"name": "inner", "cat": "wait", "ph": "X", "pid": 1, "tid": 3, "ts": 125000, "dur": 62500},
        {"name": "bucket 0", "cat": "reduce", "ph": "X", "pid": 2, "tid": 4, "ts": 250000, "dur": 250000},
        {"name": "checkpoint", "cat": "disk", "ph": "X", "pid": 2, "tid": 5, "ts": 1000000, "dur": 0},
    ]


def test_reading_gives_the_events_from_the_first_one_on(tmp_path: Path) -> None:
    write_chrome_trace(EVENTS, tmp_path / "trace.json")
    assert read_chrome_trace(tmp_path / "trace.json") == [
        Event(0, "compute", "step 0", 0.0, 0.125),
        Event(0, "wait", "outer", 0.125, 0.25),
        Event(0, "wait", "inner", 0.125, 0.1875),
        Event(1, "reduce", "bucket 0", 0.25, 0.5),
        Event(1, "disk", "checkpoint", 1.0, 1.0),
    ]


def test_nanoseconds_survive_and_the_order_of_writing_does_not_matter(tmp_path: Path) -> None:
    events = [Event(0, "copy", f"chunk {k}", 5e5 + k * 1e-6, 5e5 + k * 1e-6 + 2.5e-7) for k in range(3)]
    write_chrome_trace(reversed(events), tmp_path / "trace.json")
    read = read_chrome_trace(tmp_path / "trace.json")
    assert [event.name for event in read] == ["chunk 0", "chunk 1", "chunk 2"]
    assert [event.start_s for event in read] == pytest.approx([0, 1e-6, 2e-6], abs=2e-9)
    assert [event.end_s - event.start_s for event in read] == pytest.approx([2.5e-7] * 3, abs=2e-9)


def test_no_events_are_an_empty_trace(tmp_path: Path) -> None:
    write_chrome_trace([], tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []
    assert read_chrome_trace(tmp_path / "trace.json") == []


def test_what_overlaps_in_a_lane_has_threads_of_its_own(tmp_path: Path) -> None:
    """Rank 0 is read by three at once, and the first thread is taken again as soon as it is free; rank 1 by one."""
    spans = [(0, 0, 4), (0, 1, 3), (0, 2, 5), (0, 3, 6), (0, 4, 5), (1, 0, 9)]
    events = [Event(rank, "send", str(k), float(start), float(end)) for k, (rank, start, end) in enumerate(spans)]
    write_chrome_trace([*events, Event(1, "update", "u", 0.0, 1.0)], tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    threads = {(each["pid"], each["tid"]): each["args"]["name"] for each in trace if each["name"] == "thread_name"}
    assert threads == {(1, 1): "send", (1, 2): "send (2)", (1, 3): "send (3)", (2, 1): "send", (2, 4): "update"}
    drawn = {each["name"]: (each["pid"], each["tid"]) for each in trace if each["ph"] == "X"}
    assert drawn == {"0": (1, 1), "1": (1, 2), "2": (1, 3), "3": (1, 2), "4": (1, 1), "5": (2, 1), "u": (2, 4)}
    assert {event.lane for event in read_chrome_trace(tmp_path / "trace.json")} == {"send", "update"}


@pytest.mark.parametrize("end_s", [0.5, float("nan")])
def test_an_event_that_ends_before_it_starts_is_refused(tmp_path: Path, end_s: float) -> None:
    with pytest.raises(ValueError, match="ends before it starts"):
        write_chrome_trace([Event(0, "wait", "backwards", 1.0, end_s)], tmp_path / "trace.json")
    assert not (tmp_path / "trace.json").exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"traceEvents": [{"ph": "X"}]}'])
def test_another_file_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ValueError, match=r"other\.json is no trace"):
        read_chrome_trace(tmp_path / "other.json")


def test_lanes_stand_in_one_order() -> None:
    lanes = ["zoo", "update", "compute", "disk", "send", "send"]
    assert lane_order(Event(0, lane, "", 0, 1) for lane in lanes) == ["compute", "send", "update", "disk", "zoo"]
    assert lane_order(Event(0, lane, "", 0, 1) for lane in reversed(LANES)) == list(LANES)
