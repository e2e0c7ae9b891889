"""Steps as they were measured: rows, and the critical path."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import BadInput
from shoal.observe.time_shares import all_shares
from shoal.observe.timeline import KindTotal, MeasuredTimeline, row_of, select, steps_of
from shoal.runtime.trace import Process, Span, Trace

MS = 1_000_000


def main(kind: str, start: int, end: int, call: str = "", microbatch: int | None = None) -> Span:
    detail = "" if microbatch is None else f"{kind[0].upper()}{microbatch}"
    return Span(kind, start * MS, end * MS, "main", detail, microbatch, call=call)


def step(number: int, start: int, end: int) -> Span:
    return Span("step", start * MS, end * MS, "steps", f"step {number}")


def reduce(start: int, end: int, call: str, num_bytes: int = 0) -> Span:
    return Span("reduce", start * MS, end * MS, "comm", "", None, num_bytes, None, call)


def _name(span: Span) -> str:
    return span.detail if span.kind in ("forward", "backward") and span.detail else span.kind


def path(timeline: MeasuredTimeline, number: int) -> list[tuple[Process, dict[str, int]]]:
    """By hop, the ms of each span."""
    return [
        (process, {_name(span): (span.end_ns - span.start_ns) // MS for span in spans})
        for process, spans in timeline.critical_path(number)
    ]


# rank 0  [F0 0-20][B0 20-40][ wait 40-100                  ][U 100-110]
# rank 1  [F0 0-25     ][B0 25-50][ sleep 50-90 ][ wait 90-98 ]  [U 100-105]
STRAGGLER: Trace = {
    0: [
        step(1, 0, 110),
        main("forward", 0, 20, microbatch=0),
        main("backward", 20, 40, microbatch=0),
        reduce(40, 98, "#1", 64),
        main("wait", 40, 100, "#1"),
        main("update", 100, 110),
    ],
    1: [
        step(1, 0, 105),
        main("forward", 0, 25, microbatch=0),
        main("backward", 25, 50, microbatch=0),
        main("injected", 50, 90),
        reduce(90, 98, "#1", 64),
        main("wait", 90, 98, "#1"),
        main("update", 100, 105),
    ],
}
# rank 0  [F0 0-10][F1 10-20][ wait 20-45     ][B0 45-65]     the bubble is [20, 40)
# rank 1  [ wait 0-12][F0 12-22][B0 22-42]
PIPELINE: Trace = {
    0: [
        step(1, 0, 65),
        main("forward", 0, 10, microbatch=0),
        Span("send", 11 * MS, 11 * MS, "issued", "", None, 8, 1, "0 to 1"),
        main("forward", 10, 20, microbatch=1),
        Span("wait", 20 * MS, 45 * MS, "main", "receive B0", 0),
        main("wait", 21, 44, "1 to 0"),
        main("backward", 45, 65, microbatch=0),
    ],
    1: [
        step(1, 0, 50),
        main("wait", 0, 12, "0 to 1"),
        main("forward", 12, 22, microbatch=0),
        main("backward", 22, 42, microbatch=0),
        Span("send", 40 * MS, 40 * MS, "issued", "", None, 8, 0, "1 to 0"),
    ],
}
# rank 1 pushes last, at 30; the server's update, 32-50, is what rank 0 waits for
SERVER: Trace = {
    0: [step(1, 0, 60), main("forward", 0, 10), main("wait", 10, 60, "version 1")],
    1: [step(1, 0, 58), main("forward", 0, 30), main("wait", 30, 58, "version 1")],
    "server 0": [
        Span("push", 30 * MS, 31 * MS, "push rank 1"),
        Span("update", 32 * MS, 50 * MS, "main", "version 1", None, 0, 1, "version 1"),
        Span("pull", 11 * MS, 55 * MS, "pull rank 0", "PULL", None, 40),
    ],
}
# rank 1 sends at 50 and rank 0 at once back: of rank 0 there is too little to be named
BRIEF: Trace = {
    0: [
        step(1, 0, 99),
        main("forward", 0, 10),
        main("wait", 10, 51, "1 to 0"),
        Span("send", 51 * MS, 51 * MS, "issued", "", None, 8, 1, "0 to 1"),
        main("other", 51, 99),
    ],
    1: [
        step(1, 0, 100),
        main("forward", 0, 50),
        Span("send", 50 * MS + MS // 2, 50 * MS + MS // 2, "issued", "", None, 8, 0, "1 to 0"),
        main("wait", 50, 52, "0 to 1"),
        main("backward", 52, 100),
    ],
}
HIDDEN: Trace = {
    rank: [
        step(1, 0, 50),
        main("backward", 0, 40),
        reduce(rank * 5, 30, "#1"),
        main("wait", 40, 41, "#1"),
    ]
    for rank in (0, 1)
}


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        (
            STRAGGLER,
            [
                (1, {"F0": 25, "B0": 25, "injected": 40}),
                (0, {"wait": 10, "update": 10}),
            ],
        ),
        (
            PIPELINE,
            [
                (0, {"F0": 10, "F1": 1}),
                (1, {"wait": 1, "F0": 10, "B0": 18}),
                (0, {"wait": 5, "B0": 20}),
            ],
        ),
        (
            SERVER,
            [
                (1, {"forward": 30, "wait": 2}),
                ("server 0", {"update": 18}),
                (0, {"wait": 10}),
            ],
        ),
        (HIDDEN, [(0, {"backward": 40, "wait": 1, "other": 9})]),
    ],
    ids=["straggler", "pipeline", "server", "hidden"],
)
def test_the_critical_path_goes_over_to_whom_was_waited_for(
    spans: Trace, expected: list[tuple[Process, dict[str, int]]]
) -> None:
    timeline = select(spans)
    assert path(timeline, 1) == expected
    spans_on_it = [span for hop in timeline.critical_path(1) for span in hop.spans]
    assert all(one.end_ns == other.start_ns for one, other in pairwise(spans_on_it))


def test_kinds_count_innermost_spans_once_and_bytes_where_they_begin() -> None:
    totals = {(each.where, each.kind): each for each in select(STRAGGLER).kinds}
    assert totals["worker", "wait"] == KindTotal("worker", "wait", 2, 0.068, 0, 68 / 215)
    assert totals["worker", "injected"].seconds == pytest.approx(0.040)
    assert totals["transfer", "reduce"] == KindTotal("transfer", "reduce", 2, 0.066, 128)
    assert totals["worker", "other"].seconds == pytest.approx(0.002)  # rank 1: 98-100
    served = {each.kind: each for each in select(SERVER).kinds if each.where == "server"}
    assert served["pull"] == KindTotal("server", "pull", 1, 0.005, 40, 5 / 60)  # from the update on


@pytest.mark.parametrize("steps", [(), (6, 7)], ids=["training", "steps"])
def test_kinds_divide_the_same_time_as_the_shares_of_ranks(steps: tuple[int, ...]) -> None:
    def spans(late: int) -> list[Span]:
        start = main("forward", 0, 90 + late)  # before the first step
        ends = range(100, 1300, 100)
        work = [
            span
            for end in ends
            for span in (
                main("forward", end, end + 20 + late),
                main("wait", end + 20 + late, end + 60, f"#{end}"),
                reduce(end + 20 + late, end + 60, f"#{end}"),
                main("update", end + 60, end + 70),
            )
        ]
        test = Span("evaluate", 580 * MS, 599 * MS, "steps")
        return [start, test, *work, *(step(n, at, at + 75) for n, at in enumerate(ends, 1))]

    found = select({0: spans(0), 1: spans(15)}, *steps)
    assert steps or found.shares == all_shares(found.trace)  # what `shoal run --trace` prints
    ranks = found.shares.values()
    trained_s = sum(each.seconds for each in ranks)
    kinds = {each.kind: each for each in found.kinds if each.where == "worker"}
    for names, parts in (
        (["forward", "update"], ["computing"]),
        (["wait"], ["exposed", "waiting"]),
        (["other"], ["other"]),
    ):
        lost_s = sum(getattr(each, part) * each.seconds for each in ranks for part in parts)
        assert sum(kinds[name].share or 0 for name in names) == pytest.approx(lost_s / trained_s)
        assert sum(kinds[name].seconds for name in names) == pytest.approx(lost_s)
    if not steps:
        assert kinds["evaluate"].share is None
        assert kinds["evaluate"].seconds == pytest.approx(0.038)


def test_of_waits_in_waits_the_outermost_is_drawn() -> None:
    row = select(PIPELINE).rows[0]
    assert [s.detail for s in row if s.kind == "wait"] == ["receive B0"]


moments = st.tuples(st.integers(0, 30), st.integers(0, 12)).map(lambda m: (m[0], m[0] + m[1]))


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.sampled_from(["forward", "wait"]), moments), max_size=9), moments)
def test_a_row_covers_what_spans_cover_and_nothing_twice(
    given_spans: list[tuple[str, tuple[int, int]]], window: tuple[int, int]
) -> None:
    row = row_of([Span(kind, a, b, "main") for kind, (a, b) in given_spans], window)
    moments = [moment for span in row for moment in range(span.start_ns, span.end_ns)]
    assert moments == list(range(*window))
    busy = {p for s in row if s.kind != "other" for p in range(s.start_ns, s.end_ns)}
    covered = {p for _, (a, b) in given_spans for p in range(a, b) if window[0] <= p < window[1]}
    assert busy == covered


def test_steps_have_their_numbers_and_the_loading_of_their_batch() -> None:
    loads = [Span("load", at * MS, (at + 2) * MS, "steps") for at in (8, 28, 48)]
    steps = [step(5, 10, 20), step(6, 30, 40)]
    assert steps_of([*loads[:2], *steps]) == {5: (8 * MS, 20 * MS), 6: (28 * MS, 40 * MS)}
    assert steps_of(loads) == {1: (8 * MS, 28 * MS), 2: (28 * MS, 48 * MS)}  # a loop of one's own
    assert steps_of([]) == {}


def many(rank: int, count: int = 12, length: int = 10) -> list[Span]:
    return [step(n, n * length, (n + 1) * length - 1) for n in range(1, count + 1)]


@pytest.mark.parametrize(
    ("given_steps", "numbers", "window"),
    [
        ((None, None), [6, 7], (60, 79)),
        ((3, 3), [3], (30, 39)),
        ((11, 99), [11, 12], (110, 129)),
    ],
)
def test_steps_are_chosen_by_number_or_from_the_middle(
    given_steps: tuple[int | None, int | None], numbers: list[int], window: tuple[int, int]
) -> None:
    found = select({0: many(0), 1: many(1)}, *given_steps)
    assert list(found.steps) == numbers
    assert found.window == (window[0] * MS, window[1] * MS)


@pytest.mark.parametrize(
    ("evaluated", "numbers"), [([69], [5, 6]), ([59, 69], [7, 8]), (range(20, 130, 10), [6, 7])]
)
def test_evaluation_is_not_between_the_steps_in_the_middle(
    evaluated: Iterable[int], numbers: list[int]
) -> None:
    tests = [Span("evaluate", at * MS, at * MS, "steps") for at in evaluated]
    assert list(select({0: many(0), 1: [*many(1), *tests]}).steps) == numbers


def test_without_lockstep_the_time_is_that_of_the_lowest_rank() -> None:
    found = select({0: many(0), 1: many(1, length=40)}, 6, 7)
    assert found.window == (60 * MS, 79 * MS)


def test_what_is_not_there_is_refused_and_a_trace_without_steps_is_shown_whole() -> None:
    with pytest.raises(BadInput, match="no step from 20 to 23: the trace has steps 1 to 12"):
        select({0: many(0)}, 20, 23)
    with pytest.raises(BadInput, match="the trace has no steps"):
        select({0: [main("forward", 0, 5)]}, 1, 1)
    with pytest.raises(BadInput, match="no spans"):
        select({0: []})
    assert select({0: [main("forward", 2, 5)]}).window == (2 * MS, 5 * MS)


def test_what_is_in_no_span_of_an_own_loop_computes() -> None:
    spans = [main("load", at, at + 1) for at in (0, 10, 20)]
    assert path(select({0: spans}), 1) == [(0, {"load": 1, "computing": 9})]
    with_step = [main("load", 0, 1), step(1, 1, 10), main("forward", 1, 9)]
    assert path(select({0: with_step}), 1) == [(0, {"load": 1, "forward": 8, "other": 1})]
