"""The closed forms of bubbles against the timeline, action by action."""

from __future__ import annotations

import itertools

import pytest

from shoal.cluster.presets import load_cluster
from shoal.plan.predict import PlanSettings, Predictor
from shoal.plan.step.step_price import StageTimes, bubble_s
from shoal.plan.timeline import Times, simulate
from shoal.plan.workloads.model_presets import transformer_named
from shoal.schedules.pipelines.catalog import build
from shoal.strategy.strategy import parse
from tests.products import few_or_all

LOOPED = [("interleaved", 2), ("interleaved", 3), ("bfs", 2)]
ALL = [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("zb-h2", 1), ("inter-op", 1), *LOOPED]
KERNELS = [(1.0, 1.0, 1.0), (1.0, 1.2, 0.6), (1.0, 0.9, 1.1), (1.0, 2.0, 1.0), (1.0, 1.0, 0.3)]


def longest(name: str, chunks: int, p: int, m: int, kernels: tuple[float, float, float]) -> float:
    return max(simulate(build(name, p, m, chunks), Times(*kernels)).lengths)


def priced(name: str, chunks: int, p: int, m: int, kernels: tuple[float, float, float]) -> float:
    forward, _, weight = kernels
    stage = sum(kernels)
    times = StageTimes((p - 1) * stage, (p - 1) * weight, forward, weight)
    return m * stage + bubble_s(name, p, m, chunks, times)


@pytest.mark.parametrize(("name", "chunks"), ALL)
@pytest.mark.parametrize("kernels", few_or_all(KERNELS[1:2], KERNELS))
def test_closed_forms_are_the_timeline(
    name: str, chunks: int, kernels: tuple[float, float, float]
) -> None:
    stages = few_or_all([2, 5], list(range(2, 9)))
    microbatches = few_or_all([1, 2, 4, 5, 7, 10], list(range(1, 17)))
    for p, m in itertools.product(stages, microbatches):
        found = priced(name, chunks, p, m, kernels)
        assert found == pytest.approx(longest(name, chunks, p, m, kernels), rel=0.02), (p, m)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-h2"])
def test_one_micro_batch_is_in_one_stage_at_a_time(schedule: str) -> None:
    text = f'pp(8, schedule="{schedule}", microbatches=1)'
    model = transformer_named("layers=16,hidden=1024,heads=16,vocab=5120,sequence=1024")
    parts = Predictor(model, load_cluster("dgx-a100")).predict(parse(text), 8, PlanSettings(8))
    seconds = {part.name: part.seconds for part in parts.parts}
    assert seconds["bubble"] > 4 * seconds["forward"] + 2 * seconds["backward"]
