from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import BadInput
from shoal.plan.timeline import ActionSpan, Times, simulate
from shoal.schedules.pipelines.actions import Action, ActionKind, Pipeline
from shoal.schedules.pipelines.catalog import build, schedules
from shoal.schedules.pipelines.proof import Deadlock
from tests.plan.zero_bubble import ROWS, Row

F = ActionKind.FORWARD
B = ActionKind.BACKWARD
W = ActionKind.WEIGHT


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.model}-{row.microbatches}")
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2"])
def test_the_printed_bubble_rates_come_out_to_four_decimals(name: str, row: Row) -> None:
    times = Times(row.forward, row.backward, row.weight, row.transfer)
    found = simulate(build(name, row.stages, row.microbatches), times).bubble
    assert f"{found:.4f}" == row.bubbles[name]


def test_two_stages_with_a_transfer_are_this() -> None:
    timeline = simulate(build("1f1b", 2, 2), Times(1.0, 2.0, 1.0, transfer=0.5))
    assert timeline.spans == (
        (
            ActionSpan(Action(F, 0), 0.0, 1.0),
            ActionSpan(Action(F, 1), 1.0, 2.0),
            ActionSpan(Action(B, 0), 6.0, 9.0),
            ActionSpan(Action(B, 1), 10.0, 13.0),
        ),
        (
            ActionSpan(Action(F, 0), 1.5, 2.5),
            ActionSpan(Action(B, 0), 2.5, 5.5),
            ActionSpan(Action(F, 1), 5.5, 6.5),
            ActionSpan(Action(B, 1), 6.5, 9.5),
        ),
    )
    assert timeline.makespan == 13.0 and timeline.work == (8.0, 8.0)
    assert timeline.lengths == (13.0, 8.0)
    assert timeline.bubbles == pytest.approx((5 / 13, 0.0))
    assert timeline.bubble == timeline.idle == pytest.approx(5 / 13)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 9), st.integers(1, 24))
def test_bubbles_of_equal_stages_are_the_known_ones(p: int, m: int) -> None:
    def bubble(name: str, chunks: int | None = None) -> float:
        return simulate(build(name, p, m, chunks)).bubble

    assert bubble("inter-op") == pytest.approx((p - 1) / p)
    assert bubble("gpipe") == bubble("1f1b") == pytest.approx((p - 1) / (m + p - 1))
    if m >= p:
        assert bubble("zb-h1") == pytest.approx((p - 1) / (3 * m + p - 1))
        assert bubble("bfs", 3) == pytest.approx((p - 1) / (3 * m + p - 1))
    if m % p == 0:
        assert bubble("interleaved", 3) == pytest.approx((p - 1) / (3 * m + p - 1))
    if m >= 2 * p - 1:
        assert bubble("zb-h2") == pytest.approx(0)


times = st.floats(0.01, 10)


@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from(schedules()),
    st.integers(1, 6),
    st.integers(1, 10),
    st.tuples(times, times, times, st.floats(0, 3)),
)
def test_nothing_overlaps_and_nothing_comes_before_its_input(
    name: str, p: int, m: int, taken: tuple[float, float, float, float]
) -> None:
    pipeline = build(name, p, m)
    timeline = simulate(pipeline, Times(*taken))
    ends = {
        (stage, span.action.chunk, span.action.kind is F, span.action.microbatch): span.end
        for stage, spans in enumerate(timeline.spans)
        for span in spans
        if span.action.kind is not W
    }
    for stage, spans in enumerate(timeline.spans):
        assert [span.action for span in spans] == list(pipeline.actions[stage])
        assert all(one.end <= other.start for one, other in pairwise(spans))
        for span in spans:
            producer = pipeline.producer(stage, span.action)
            if producer is not None:
                end = ends[(*producer, span.action.kind is F, span.action.microbatch)]
                assert span.start >= end + (taken[3] if producer.stage != stage else 0)
    assert sum(timeline.work) == pytest.approx(p * m * sum(taken[:3]))
    assert -1e-9 <= timeline.bubble <= timeline.idle + 1e-9 <= 1


def test_times_may_differ_by_stage_and_by_chunk() -> None:
    slow = simulate(build("gpipe", 3, 4), Times(forward=[1, 5, 1]))
    assert slow.work == (12, 28, 12) and max(slow.work) == slow.work[1]
    by_stage = simulate(build("bfs", 2, 2, 2), Times(forward=[2, 4]))
    by_chunk = simulate(build("bfs", 2, 2, 2), Times(forward=[1, 2, 1, 2]))
    assert by_stage == by_chunk
    with pytest.raises(BadInput, match=r"weight has 3 times, and bfs .* needs 2 or 4, or one"):
        simulate(build("bfs", 2, 2, 2), Times(weight=[1, 2, 3]))


def test_what_a_stage_hands_to_itself_takes_no_transfer() -> None:
    assert simulate(build("bfs", 1, 2, 2), Times(transfer=5)).makespan == 6


def test_times_that_are_none_are_refused() -> None:
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(BadInput, match="takes a time of 0 or more"):
            simulate(build("1f1b", 2, 2), Times(forward=wrong))
        with pytest.raises(BadInput, match="transfer takes a time of 0 or more"):
            simulate(build("1f1b", 2, 2), Times(transfer=wrong))
    with pytest.raises(BadInput, match="nothing takes time"):
        simulate(build("1f1b", 2, 2), Times(0, 0, 0))


def test_a_schedule_that_hangs_is_refused() -> None:
    hangs = [[Action(F, 0), Action(B, 0), Action(F, 1), Action(B, 1)],
             [Action(F, 0), Action(F, 1), Action(B, 0), Action(B, 1)]]  # fmt: skip
    with pytest.raises(Deadlock):
        simulate(Pipeline("mine", 2, 1, hangs))
