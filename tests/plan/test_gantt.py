from __future__ import annotations

import io
from xml.etree import ElementTree

import pytest
from rich.console import Console

from shoal.errors import BadInput
from shoal.plan.gantt import draw, gantt, gantt_svg
from shoal.plan.timeline import Times, simulate
from shoal.schedules.pipelines.catalog import build, schedules
from shoal.schedules.pipelines.proof import prove


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


@pytest.mark.parametrize("name", schedules())
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
