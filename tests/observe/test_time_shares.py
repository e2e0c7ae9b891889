"""Where the time went."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.observe.time_shares import TimeShares, print_shares, time_shares, time_shares_within
from shoal.runtime.trace import Span

quick = settings(deadline=None, max_examples=100)
interval = st.tuples(st.integers(0, 30), st.integers(0, 10)).map(lambda p: (p[0], p[0] + p[1]))
spans = st.lists(
    st.builds(
        lambda kind, run: Span(kind, run[0], run[1], "main", ""),
        st.sampled_from(["forward", "backward", "update", "reduce", "send", "wait", "other"]),
        interval,
    ),
    min_size=1,
    max_size=10,
)


def span(kind: str, start: int, end: int) -> Span:
    return Span(kind, start, end, "comm" if kind == "reduce" else "main", "")


@quick
@given(spans)
def test_shares_are_those_of_counting_point_by_point(spans: list[Span]) -> None:
    def of(*kinds: str) -> set[int]:
        return {p for s in spans if s.kind in kinds for p in range(s.start_ns, s.end_ns)}

    whole = max(1, max(s.end_ns for s in spans) - min(s.start_ns for s in spans))
    compute = of("forward", "backward", "update")
    wait = of("wait")
    talk = of("reduce", "send")
    s = time_shares(spans)
    assert s.computing == pytest.approx(len(compute - wait) / whole)
    assert s.exposed == pytest.approx(len(wait) / whole)
    assert s.hidden == pytest.approx(len((compute & talk) - wait) / whole)
    assert s.computing + s.exposed + s.idle == pytest.approx(1.0)


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


def test_the_table_has_a_line_for_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    print_shares({0: [span("forward", 0, 50), span("wait", 50, 100)], 1: []})
    out = capsys.readouterr().out
    assert "where the time went" in out
    assert out.count("50.0%") == 2
    assert "100.0%" not in out


def test_a_loop_of_the_users_own_computes_where_it_neither_loads_nor_waits() -> None:
    spans = [
        Span("load", 0, 10, "steps", ""),
        Span("wait", 60, 80, "main", ""),
        Span("load", 90, 100, "steps", ""),
    ]
    shares = time_shares(spans)
    assert (shares.computing, shares.exposed, shares.idle) == pytest.approx((0.6, 0.2, 0.2))
