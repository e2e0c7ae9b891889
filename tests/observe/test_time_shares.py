"""Where the time went."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.observe.time_shares import (
    Interval,
    TimeShares,
    intersection,
    length,
    print_shares,
    time_shares,
    time_shares_within,
    union,
    write_chrome,
)
from shoal.runtime.trace import Span

quick = settings(deadline=None, max_examples=100)
interval = st.tuples(st.integers(0, 30), st.integers(0, 10)).map(lambda p: (p[0], p[0] + p[1]))
intervals = st.lists(interval, max_size=8)
spans = st.lists(
    st.builds(
        lambda kind, run: Span(kind, run[0], run[1], "main", ""),
        st.sampled_from(["forward", "backward", "update", "reduce", "send", "wait", "other"]),
        interval,
    ),
    min_size=1,
    max_size=10,
)


def points(runs: list[Interval]) -> set[int]:
    """The unit steps that intervals cover, one by one."""
    return {point for start, end in runs for point in range(start, end)}


def span(kind: str, start: int, end: int) -> Span:
    return Span(kind, start, end, "comm" if kind == "reduce" else "main", "")


@quick
@given(intervals)
def test_a_union_covers_the_same_points_without_overlaps_and_in_order(runs: list[Interval]) -> None:
    merged = union(runs)
    assert points(merged) == points(runs)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(merged))
    assert length(merged) == len(points(runs))


@quick
@given(intervals, intervals)
def test_common_points_lie_in_both(a: list[Interval], b: list[Interval]) -> None:
    found = intersection(union(a), union(b))
    assert points(found) == points(a) & points(b)
    assert length(found) == len(points(found)), "no overlaps"
    assert found == intersection(union(b), union(a))


@quick
@given(spans)
def test_shares_are_those_of_counting_point_by_point(spans: list[Span]) -> None:
    def of(*kinds: str) -> set[int]:
        return points([(s.start_ns, s.end_ns) for s in spans if s.kind in kinds])

    whole = max(1, max(s.end_ns for s in spans) - min(s.start_ns for s in spans))
    compute = of("forward", "backward", "update")
    wait = of("wait")
    talk = of("reduce", "send")
    s = time_shares(spans)
    assert s.computing == pytest.approx(len(compute - wait) / whole)
    assert s.exposed == pytest.approx(len(wait) / whole)
    assert s.hidden == pytest.approx(len((compute & talk) - wait) / whole)
    assert s.computing + s.exposed + s.idle == pytest.approx(1.0)


def test_waiting_inside_backward_is_exposed_and_no_computing() -> None:
    s = time_shares([span("backward", 0, 100), span("wait", 40, 60), span("reduce", 30, 60)])
    assert s == TimeShares(0.8, 0.2, 0.0, 0.1, 100e-9)


def test_shares_are_of_training_steps_only() -> None:
    """
    main   wait (start-up)   forward  backward  injected  wait     forward (evaluate)
    steps                    step..............................
           0                 100      130       170       190  200 300         1000
    """
    spans = [
        span("wait", 0, 100),
        Span("load", 90, 100, "steps", ""),
        Span("step", 100, 200, "steps", ""),
        span("forward", 100, 130),
        span("backward", 130, 170),
        span("injected", 170, 190),
        span("wait", 190, 200),
        span("forward", 300, 1000),
    ]
    s = time_shares([one for one in spans if one.kind != "load"])
    assert (s.computing, s.exposed, s.idle, s.injected) == pytest.approx((0.7, 0.1, 0.0, 0.2))
    assert s.seconds == 100e-9
    assert time_shares(spans).seconds == 110e-9, "loading a batch is part of training"
    assert time_shares_within(spans, 150, 1000).seconds == 50e-9
    assert time_shares([]) == TimeShares(0.0, 0.0, 0.0, 0.0, 0.0)


def test_the_chrome_trace_is_a_file_of_json(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    write_chrome({0: [span("forward", 0, 30)], 1: [span("wait", 0, 30)]}, file)
    events = json.loads(file.read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1}


def test_the_table_has_a_line_for_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    print_shares({0: [span("forward", 0, 50), span("wait", 50, 100)], 1: []})
    out = capsys.readouterr().out
    assert "where the time went" in out
    assert out.count("50.0%") == 2
    assert "100.0%" not in out
