"""Spans of time per rank, on one clock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.errors import BadInput
from shoal.runtime import trace
from shoal.runtime.run_dir import RunDir
from shoal.runtime.trace import OFF, Recorder, Span, chrome_events


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that shows 1000, 2000, 3000, … ns."""
    readings = iter(range(1000, 1_000_000, 1000))
    monkeypatch.setattr(trace.clock, "monotonic_ns", lambda: next(readings))


@pytest.mark.usefixtures("ticks")
def test_spans_inside_each_other_end_from_the_inside_also_in_an_error() -> None:
    recorder = Recorder(0, origin_ns=500)
    with pytest.raises(KeyError), recorder.span("backward", "micro-batch"), recorder.span("wait"):
        raise KeyError
    assert recorder.spans == [
        Span("wait", 2000, 3000, "main"),
        Span("backward", 1000, 4000, "main", "micro-batch"),
    ]


def test_off_records_nothing_and_hands_out_one_context() -> None:
    assert not OFF.enabled and Recorder(0, 0).enabled
    assert OFF.span("forward") is OFF.span("backward", "detail")
    with OFF.span("forward"), OFF.span("wait"):
        OFF.add("reduce", 0, 1, "comm")


def test_spans_are_read_back_on_one_clock_ranks_before_servers(tmp_path: Path) -> None:
    """Servers count from the origin of ranks on their host; without any they are left out."""
    hosts = {10: "b", 2: "a", 0: "a", "server 10": "b", "server 2": "b", "server 0": "lost"}
    origins = {"a": 100, "b": 5000}
    for process, host in hosts.items():
        recorder = Recorder(process, origins[host] if isinstance(process, int) else 0, host)
        start = origins.get(host, 0)
        recorder.add("forward", start, start + 5, "main", "µ-batch", 3, 8, 0, "0,2 #1")
        recorder.write(tmp_path)
    (tmp_path / "other.json").write_text("not a trace")
    span = Span("forward", 0, 5, "main", "µ-batch", 3, 8, 0, "0,2 #1")
    known = [0, 2, 10, "server 2", "server 10"]
    assert trace.read_spans(tmp_path) == {process: [span] for process in known}
    assert list(trace.read_spans(tmp_path)) == known
    assert trace.read_spans(tmp_path / "empty") == {}


def test_a_chrome_trace_gives_back_the_spans(tmp_path: Path) -> None:
    spans: trace.Trace = {
        3: [Span("wait", 1_000, 2_500, "main", "pull", None, 0, "server 0", "version 2")],
        "server 0": [Span("update", 0, 1_000, "main", "", 1, 7, 3)],
    }
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": chrome_events(spans)}))
    assert trace.from_chrome(file) == spans


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[1]",
        '{"traceEvents": 1}',
        '{"traceEvents": [1]}',
        '{"traceEvents": [{"name": "process_name", "pid": 0, "args": {"name": 5}}]}',
        '{"traceEvents": [{"ph": "X", "name": "a", "pid": 9, "ts": 1, "dur": 1, "cat": ""}]}',
    ],
)
def test_a_file_that_is_no_chrome_trace_of_a_run_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(BadInput, match="is no trace of shoal run"):
        trace.from_chrome(tmp_path / "t.json")


def test_a_rank_is_a_process_and_a_lane_a_thread_of_the_chrome_trace() -> None:
    spans = [
        Span("reduce", 2_000, 5_000, "comm", "8 bytes"),
        Span("forward", 0, 1_500, "main", "micro-batch"),
    ]
    events = chrome_events({3: spans})
    assert [(e["name"], e["tid"], e["args"]["name"]) for e in events if e["ph"] == "M"] == [
        ("process_name", 0, "rank 3"),
        ("thread_name", 0, "main"),
        ("thread_name", 1, "comm"),
    ]
    shared = {"ph": "X", "pid": 0}
    assert [e for e in events if e["ph"] == "X"] == [
        {"name": name, "cat": lane, "tid": tid, "ts": ts, "dur": dur, "args": detail} | shared
        for name, lane, tid, ts, dur, detail in (
            ("reduce", "comm", 1, 2.0, 3.0, {"detail": "8 bytes"}),
            ("forward", "main", 0, 0.0, 1.5, {"detail": "micro-batch"}),
        )
    ]


@pytest.mark.parametrize("text", ["", "[" * 100_000, "[1]", "\xff"])
def test_a_file_that_is_no_trace_is_named(tmp_path: Path, text: str) -> None:
    RunDir(tmp_path).spans(0).write_text(text, "latin-1")
    with pytest.raises(BadInput, match="has no trace"):
        trace.read_spans(tmp_path)
