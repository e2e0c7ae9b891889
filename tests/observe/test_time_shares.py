"""Where the time went."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.table import Table

from shoal.commands.output import shares_of_time
from shoal.observe.time_shares import TimeShares, all_shares, time_shares
from shoal.runtime.trace import Span, Trace

quick = settings(deadline=None, max_examples=100)
interval = st.tuples(st.integers(0, 30), st.integers(0, 10)).map(lambda p: (p[0], p[0] + p[1]))
spans = st.lists(
    st.builds(
        lambda kind, run: Span(kind, run[0], run[1], "comm" if kind == "reduce" else "main", ""),
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
    wait = of("wait", "send")  # the main thread hands over the message
    talk = of("reduce")
    s = time_shares(spans)
    assert s.computing == pytest.approx(len(compute - wait) / whole)
    assert s.exposed == pytest.approx(len(wait) / whole)
    assert s.hidden == pytest.approx(len((compute & talk) - wait) / whole)
    assert s.computing + s.exposed + s.other == pytest.approx(1.0)


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
    assert (s.computing, s.exposed, s.other, s.injected) == pytest.approx((0.7, 0.1, 0.0, 0.2))
    assert s.seconds == 100e-9
    assert time_shares(spans).seconds == 110e-9, "loading a batch is part of training"
    assert time_shares(spans, between=(150, 1000)).seconds == 50e-9
    assert time_shares([]) == TimeShares()


def test_the_table_has_a_line_for_every_rank() -> None:
    table, *lines = shares_of_time(
        all_shares({0: [span("forward", 0, 50), span("wait", 50, 100)], 1: []})
    )
    assert isinstance(table, Table)
    cells = [list(column.cells) for column in table.columns]
    assert [column.header for column in table.columns] == [
        "rank",
        "seconds",
        "computing",
        "exposed",
    ]
    assert cells[0] == ["0", "1"] and cells[2:] == [["50.0%", "0.0%"]] * 2
    assert lines == []


def late(kind: str, start: int, end: int, call: str, **more: Any) -> Span:
    return Span(kind, start, end, more.pop("track", "main"), call=call, **more)


def test_a_wait_is_for_the_rank_that_comes_last_until_it_comes() -> None:
    """
    rank 0  [ forward 0-20 ][ wait 20-100                       ]
    rank 1  [ forward 0-30 ][ wait 30-100                       ]
    rank 2  [ injected 0-60       ][ forward 60-80 ][ wait 80-100 ]
    """
    call = "0,1,2 #1"
    begins = {0: 20, 1: 30, 2: 80}
    spans: Trace = {
        rank: [
            span("forward", 60 if rank == 2 else 0, begin),
            late("reduce", begin, 100, call, track="comm"),
            late("wait", begin, 100, call),
        ]
        for rank, begin in begins.items()
    }
    spans[2].append(span("injected", 0, 60))
    shares = all_shares(spans)
    assert shares[0].waited_for == {2: pytest.approx(0.6)}
    assert shares[1].waited_for == {2: pytest.approx(0.5)}
    assert shares[2].waited_for == {}
    assert [s.exposed for s in shares.values()] == pytest.approx([0.2, 0.2, 0.2])
    assert (shares[2].injected, shares[2].waiting) == pytest.approx((0.6, 0.0))


@pytest.mark.parametrize(("microbatch", "part"), [(None, "waiting"), (3, "bubble")])
def test_a_message_is_waited_for_until_it_is_sent(microbatch: int | None, part: str) -> None:
    """Inside the wait of a pipeline's action it is the bubble."""
    call = "1 to 0, tag 5 #1"
    spans: Trace = {
        0: [
            Span("wait", 0, 100, "main", "receive B3", microbatch),
            late("wait", 10, 90, call, peer=1),
        ],
        1: [late("send", 70, 70, call, track="issued"), span("forward", 0, 100)],
    }
    share = all_shares(spans)[0]
    assert getattr(share, part) == pytest.approx(0.6)
    assert share.exposed == pytest.approx(0.4) and share.waited_for == {1: pytest.approx(0.6)}


def test_a_pull_waits_for_the_worker_whose_push_completes_the_update() -> None:
    update = Span("update", 80, 90, "main", "version 4", None, 0, 1, "version 4")
    spans: Trace = {
        0: [late("wait", 0, 100, "version 4")],
        1: [late("wait", 80, 100, "version 4"), span("forward", 0, 80)],
        "server 0": [update],
    }
    shares = all_shares(spans)
    assert list(shares) == [0, 1]
    assert shares[0].waited_for == {1: pytest.approx(0.8)} and shares[1].waited_for == {}


def test_a_loop_of_the_users_own_computes_where_it_neither_loads_nor_waits() -> None:
    spans = [
        Span("load", 0, 10, "steps", ""),
        Span("wait", 60, 80, "main", ""),
        Span("load", 90, 100, "steps", ""),
    ]
    shares = time_shares(spans)
    assert (shares.computing, shares.exposed, shares.loading) == pytest.approx((0.6, 0.2, 0.2))
