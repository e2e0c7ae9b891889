"""In one order of its messages no pipeline hangs, even if a send waits for its receiver."""

from __future__ import annotations

import pytest

from shoal.schedules.pipelines.catalog import CATALOG, build
from shoal.schedules.pipelines.message_order import message_for, message_from, message_order


def test_1f1b_of_two_stages() -> None:
    found = message_order(build("1f1b", 2, 3))
    said = [f"{'F' if m.is_forward else 'B'}{m.microbatch}" for m in found]
    assert said == ["F0", "F1", "B0", "F2", "B1", "B2"]


@pytest.mark.parametrize("name", CATALOG)
def test_a_message_comes_after_all_that_its_stage_received_for_it(name: str) -> None:
    for stages, microbatches in ((2, 3), (3, 8), (4, 6)):
        pipeline = build(name, stages, microbatches)
        number = {message: n for n, message in enumerate(message_order(pipeline))}
        for stage, actions in enumerate(pipeline.actions):
            latest = -1
            for action in actions:
                if pipeline.producer(stage, action) is not None:
                    latest = max(latest, number[message_for(stage, action)])
                message = message_from(pipeline, stage, action)
                if message is not None:
                    assert number[message] > latest
                    latest = number[message]
