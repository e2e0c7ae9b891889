from __future__ import annotations

from xml.etree import ElementTree

import pytest

from shoal.errors import BadInput
from shoal.plan.gantt import gantt_svg
from shoal.plan.timeline import Times, simulate
from shoal.schedules.pipelines.catalog import build, schedules
from shoal.schedules.pipelines.proof import prove

SVG = "{http://www.w3.org/2000/svg}"


def picture(name: str, stages: int, microbatches: int, times: Times | None = None) -> str:
    pipeline = build(name, stages, microbatches)
    return gantt_svg(simulate(pipeline, times), prove(pipeline))


def boxes(text: str) -> list[ElementTree.Element]:
    return [r for r in ElementTree.fromstring(text).iter(f"{SVG}rect") if r.get("class") == "box"]


@pytest.mark.parametrize("name", schedules())
def test_every_action_has_a_box_that_says_what_it_is(name: str) -> None:
    text = picture(name, 4, 8)
    pipeline = build(name, 4, 8)
    assert len(boxes(text)) == prove(pipeline).actions
    titles = [t.text or "" for t in ElementTree.fromstring(text).iter(f"{SVG}title")][1:]
    told = [title.split(":")[0] for title in titles]
    assert told == [str(action) for actions in pipeline.actions for action in actions]


def test_boxes_are_to_the_scale_of_time() -> None:
    text = picture("1f1b", 2, 2, Times(1, 1, 2))
    wide = [float(box.get("width", 0)) for box in boxes(text)]
    assert wide[2] == pytest.approx(3 * wide[0], abs=0.2)
    lefts = [float(box.get("x", 0)) for box in boxes(text)]
    assert lefts[4] - lefts[0] == pytest.approx(wide[0], abs=0.2)  # stage 1 begins after F0


def test_it_says_what_it_costs() -> None:
    words = " ".join(ElementTree.fromstring(picture("1f1b", 4, 8)).itertext())
    assert "1f1b of 4 stages and 8 micro-batches" in words
    assert "time 33, bubble 27.3% of the longest stage" in words
    assert "holds 4 at most" in words and "holds 1 at most" in words


def test_actions_that_take_no_time_have_no_box() -> None:
    assert len(boxes(picture("zb-h1", 2, 3, Times(weight=0)))) == 2 * 3 * 2


def test_too_large_a_picture_is_refused() -> None:
    with pytest.raises(BadInput, match="too many to draw"):
        picture("gpipe", 64, 200)
