"""Layers dealt to stages, and the micro-batches that stages keep."""

from __future__ import annotations

import pytest

from shoal.plan.step.stages import by_device, deal_evenly, deal_layers, in_flight
from shoal.schedules.pipelines.catalog import build
from shoal.schedules.pipelines.proof import prove


def test_equal_layers_are_dealt_evenly() -> None:
    assert deal_layers([8], [1.0], 4) == [(2,), (2,), (2,), (2,)]


def test_a_heavy_head_gets_fewer_layers_beside_it() -> None:
    assert deal_layers([1, 10, 1], [0.0, 1.0, 2.0], 3) == [(1, 4, 0), (0, 4, 0), (0, 2, 1)]


def test_unequal_layers_have_the_smallest_largest_stage() -> None:
    stages = deal_layers([1, 1, 1, 1], [5.0, 1.0, 1.0, 5.0], 2)
    assert stages == [(1, 1, 0, 0), (0, 0, 1, 1)]


def test_even_stages_leave_ends_where_they_are() -> None:
    assert deal_evenly([1, 6, 1], 3) == [(1, 2, 0), (0, 2, 0), (0, 2, 1)]
    assert by_device(deal_evenly([1, 4, 1], 4), 2) == [(1, 2, 0), (0, 2, 1)]


@pytest.mark.parametrize("microbatches", [4, 12])
@pytest.mark.parametrize(
    ("name", "chunks"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zb-h2", 1)],
)
def test_micro_batches_in_flight_are_those_of_the_schedule(
    name: str, chunks: int, microbatches: int
) -> None:
    proof = prove(build(name, 4, microbatches, chunks))
    live = [kept * chunks for kept in in_flight(name, 4, microbatches, chunks)]
    assert live == list(proof.peak_live)
