"""The closed forms of bubbles against the timeline, action by action."""

from __future__ import annotations

import io
import itertools
from itertools import pairwise
from typing import NamedTuple
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from benchmarks.docs import gantt
from shoal.errors import BadInput
from shoal.plan.step.step_price import (
    StageTimes,
    bubble_s,
    by_device,
    deal_evenly,
    deal_layers,
    in_flight,
)
from shoal.plan.timeline import Times, draw, gantt_svg, simulate
from shoal.schedules.pipelines import Action, ActionKind, Pipeline
from shoal.schedules.pipelines.catalog import CATALOG, build
from shoal.schedules.pipelines.proof import Deadlock, prove
from tests.products import few_or_all

SCHEDULES = ("1f1b", "zb-h1", "zb-h2")


class Row(NamedTuple):
    """Table 5 and 9 of the zero-bubble paper: milliseconds, and the bubbles of SCHEDULES."""

    model: str
    stages: int
    microbatches: int
    times: Times  # forward, backward, weight, transfer
    bubbles: tuple[str, ...]

    @classmethod
    def of(cls, line: str) -> Row:
        model, stages, microbatches, *numbers = line.split()
        times = Times(*map(float, numbers[:4]))
        return cls(model, int(stages), int(microbatches), times, tuple(numbers[4:]))


ROWS = [*map(Row.of, """\
1.5B  8  24  18.522 18.086 9.337  0.601  0.2431 0.1585 0.1083
1.5B  8  32  18.513 18.086 9.331  0.626  0.1985 0.1242 0.0837
1.5B  8  64  18.546 18.097 9.321  0.762  0.1240 0.0674 0.0444
6.2B  8  24  29.718 29.444 19.927 0.527  0.2347 0.1323 0.0698
6.2B  8  32  29.802 29.428 19.530 0.577  0.1898 0.1045 0.0559
6.2B  8  64  29.935 29.621 19.388 0.535  0.1091 0.0554 0.0294
14.6B 16 48  11.347 11.248 8.132  0.377  0.2552 0.1397 0.0672
14.6B 16 64  11.307 11.254 8.101  0.379  0.2082 0.1088 0.0516
14.6B 16 128 11.325 11.308 8.109  0.378  0.1251 0.0576 0.0266
28.3B 32 96  10.419 10.207 7.715  0.408  0.2646 0.1421 0.0641
28.3B 32 128 10.408 10.204 7.703  0.408  0.2168 0.1106 0.0490
28.3B 32 256 10.402 10.248 7.698  0.460  0.1352 0.0594 0.0257
""".splitlines())]  # fmt: skip


F, B, W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.model}-{row.microbatches}")
def test_the_printed_bubble_rates_come_out_to_four_decimals(row: Row) -> None:
    for name, bubble in zip(SCHEDULES, row.bubbles, strict=True):
        found = simulate(build(name, row.stages, row.microbatches), row.times).bubble
        assert f"{found:.4f}" == bubble, name


def test_two_stages_with_a_transfer_are_this() -> None:
    timeline = simulate(build("1f1b", 2, 2), Times(1.0, 2.0, 1.0, transfer=0.5))
    starts = [[(str(span.action), span.start) for span in spans] for spans in timeline.spans]
    assert starts == [
        [("F0", 0.0), ("F1", 1.0), ("B0", 6.0), ("B1", 10.0)],
        [("F0", 1.5), ("B0", 2.5), ("F1", 5.5), ("B1", 6.5)],
    ]
    assert timeline.makespan == 13.0 and timeline.work == (8.0, 8.0)
    assert timeline.lengths == (13.0, 8.0) and timeline.bubbles == pytest.approx((5 / 13, 0.0))
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
    st.sampled_from(list(CATALOG)),
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
    by_stage, by_chunk = ([2, 4], [1, 2, 1, 2])
    looped = build("bfs", 2, 2, 2)
    assert simulate(looped, Times(by_stage)) == simulate(looped, Times(by_chunk))
    alone = simulate(build("bfs", 1, 2, 2), Times(transfer=5))
    assert alone.makespan == 6  # what a stage hands to itself takes no transfer
    with pytest.raises(BadInput, match=r"weight has 3 times, and bfs .* needs 2 or 4, or one"):
        simulate(build("bfs", 2, 2, 2), Times(weight=[1, 2, 3]))


def test_what_has_no_timeline_is_refused() -> None:
    for wrong in (-1.0, float("nan"), float("inf")):
        for times, name in ((Times(forward=wrong), "forward"), (Times(transfer=wrong), "transfer")):
            with pytest.raises(BadInput, match=f"{name} takes a time of 0 or more"):
                simulate(build("1f1b", 2, 2), times)
    with pytest.raises(BadInput, match="nothing takes time"):
        simulate(build("1f1b", 2, 2), Times(0, 0, 0))
    orders = ([(F, 0), (B, 0), (F, 1), (B, 1)], [(F, 0), (F, 1), (B, 0), (B, 1)])
    with pytest.raises(Deadlock):
        simulate(Pipeline("mine", 2, 1, [[Action(*one) for one in order] for order in orders]))


LOOPED = [("interleaved", 2), ("interleaved", 3), ("bfs", 2)]
ALL = [*((name, 1) for name in ("gpipe", *SCHEDULES, "inter-op")), *LOOPED]
KERNELS = [(1.0, 1.0, 1.0), (1.0, 1.2, 0.6), (1.0, 0.9, 1.1), (1.0, 2.0, 1.0), (1.0, 1.0, 0.3)]


@pytest.mark.parametrize(("name", "chunks"), ALL)
@pytest.mark.parametrize("kernels", few_or_all(KERNELS[1:2], KERNELS))
def test_closed_forms_are_the_timeline(
    name: str, chunks: int, kernels: tuple[float, float, float]
) -> None:
    stages = few_or_all([2, 5], list(range(2, 9)))
    microbatches = few_or_all([1, 2, 4, 5, 7, 10], list(range(1, 17)))
    forward, _, weight = kernels
    stage = sum(kernels)
    for p, m in itertools.product(stages, microbatches):
        times = StageTimes((p - 1) * stage, (p - 1) * weight, forward, weight)
        longest = max(simulate(build(name, p, m, chunks), Times(*kernels)).lengths)
        priced = m * stage + bubble_s(name, p, m, chunks, times)
        assert priced == pytest.approx(longest, rel=0.02), (p, m)


def test_layers_are_dealt_so_that_the_largest_stage_is_the_smallest() -> None:
    assert deal_layers([8], [1.0], 4) == [(2,), (2,), (2,), (2,)]
    # a heavy head gets fewer layers beside it
    assert deal_layers([1, 10, 1], [0.0, 1.0, 2.0], 3) == [(1, 4, 0), (0, 4, 0), (0, 2, 1)]
    assert deal_layers([1] * 4, [5.0, 1.0, 1.0, 5.0], 2) == [(1, 1, 0, 0), (0, 0, 1, 1)]


def test_even_stages_leave_ends_where_they_are() -> None:
    assert deal_evenly([1, 6, 1], 3) == [(1, 2, 0), (0, 2, 0), (0, 2, 1)]
    assert by_device(deal_evenly([1, 4, 1], 4), 2) == [(1, 2, 0), (0, 2, 1)]


@pytest.mark.parametrize(("name", "chunks"), ALL)
def test_micro_batches_in_flight_are_those_of_the_schedule(name: str, chunks: int) -> None:
    for stages, microbatches in ((4, 4), (4, 12), (8, 16)):
        proof = prove(build(name, stages, microbatches, chunks))
        live = [kept * chunks for kept in in_flight(name, stages, microbatches, chunks)]
        assert live == list(proof.peak_live), (stages, microbatches)


def shown(name: str, stages: int, microbatches: int, times: Times, width: int = 120) -> str:
    pipeline = build(name, stages, microbatches)
    out = io.StringIO()
    draw(simulate(pipeline, times), prove(pipeline), Console(file=out, width=width))
    return out.getvalue()


def test_a_transfer_and_unequal_times_have_their_columns() -> None:
    assert gantt(simulate(build("1f1b", 2, 2), Times(2, 2, 1, transfer=1))) == (
        "F0─── F1─── ·  ·  ·  ·  ·  B0────── ·  ·  B1──────\n"
        "·  ·  ·  F0─── B0────── F1─── B1────── ·  ·  ·  ·"
    )


def test_what_does_not_fit_into_columns_is_rounded_and_says_so() -> None:
    text = shown("1f1b", 2, 3, Times(1.013, 0.987, 1.1))
    assert "rounded to columns of 1.013" in text
    assert "rounded" not in shown("1f1b", 2, 3, Times(1e-6, 2e-6, 3e-6, 1e-6))


def test_the_bands_of_a_narrow_console_join_to_the_whole_chart() -> None:
    lines = shown("1f1b", 2, 6, Times(), width=40).splitlines()
    assert max(len(line) for line in lines[: lines.index("")]) <= 40
    for stage, whole in enumerate(gantt(simulate(build("1f1b", 2, 6))).splitlines()):
        bands = [line[9:] for line in lines if line.startswith(f"stage {stage}")]
        assert "".join(band.ljust(30) for band in bands).rstrip() == whole


def test_the_costs_stand_below() -> None:
    text = shown("zb-h1", 4, 8, Times())
    assert "time     27\nbubble   11.11% of the longest stage" in text
    assert "holds    at most 4 micro-batches, of which 1 2 3 4 only wait for W" in text
    assert "every F before its I before its W, each once" in text


def test_what_is_unreadable_is_refused() -> None:
    with pytest.raises(BadInput, match="65 stages is unreadable"):
        gantt(simulate(build("gpipe", 65, 1)))
    with pytest.raises(BadInput, match="columns long, too long to draw"):
        gantt(simulate(build("gpipe", 2, 2), Times(forward=1e-6)))
    with pytest.raises(BadInput, match="too many to draw"):
        picture("gpipe", 64, 200)


SVG = "{http://www.w3.org/2000/svg}"


def picture(name: str, stages: int, microbatches: int, times: Times | None = None) -> str:
    pipeline = build(name, stages, microbatches)
    return gantt_svg(simulate(pipeline, times), prove(pipeline))


def boxes(text: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(text).findall(f".//{SVG}rect[@class='box']")


@pytest.mark.parametrize("name", list(CATALOG))
def test_every_action_has_a_box_that_says_what_it_is(name: str) -> None:
    text = picture(name, 4, 8)
    pipeline = build(name, 4, 8)
    assert len(boxes(text)) == prove(pipeline).actions
    titles = [t.text or "" for t in ElementTree.fromstring(text).iter(f"{SVG}title")][1:]
    told = [title.split(":")[0] for title in titles]
    assert told == [str(action) for actions in pipeline.actions for action in actions]


def test_boxes_are_to_the_scale_of_time() -> None:
    drawn = boxes(picture("1f1b", 2, 2, Times(1, 1, 2)))
    wide, lefts = ([float(box.get(name, 0)) for box in drawn] for name in ("width", "x"))
    assert wide[2] == pytest.approx(3 * wide[0], abs=0.2)
    assert lefts[4] - lefts[0] == pytest.approx(wide[0], abs=0.2)  # stage 1 begins after F0
    assert len(boxes(picture("zb-h1", 2, 3, Times(weight=0)))) == 2 * 3 * 2  # none for W
