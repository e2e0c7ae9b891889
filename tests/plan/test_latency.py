"""What latency costs on many workers: reductions to owners, and the words for it."""

from __future__ import annotations

import pytest

from shoal.cluster.presets import load_cluster
from shoal.plan.predict import PlanSettings, Predictor
from shoal.plan.prediction import Part
from shoal.plan.step.collective_time import RankGroup, collective_time
from shoal.plan.workloads.model_presets import transformer_named
from shoal.strategy.strategy import parse

WORKERS = 1024
CLUSTER = load_cluster("dgx-h100").of_size(WORKERS)


def gradients(strategy: str, workers: int = WORKERS) -> Part:
    return part_of("gradients", strategy, workers)


def part_of(name: str, strategy: str, workers: int = WORKERS) -> Part:
    predictor = Predictor(transformer_named("llama-2-7b"), CLUSTER.of_size(workers))
    prediction = predictor.predict(parse(strategy), workers, PlanSettings(workers, microbatch=1))
    return next(part for part in prediction.parts if part.name == name)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_reduction_to_owners_costs_no_more_than_the_sum_that_contains_it(stage: int) -> None:
    assert gradients(f"zero({stage})").seconds <= 1.1 * gradients("ddp").seconds


def test_gradients_under_zero_do_not_grow_with_the_square_of_replicas() -> None:
    few = gradients("zero(3)", 128).seconds
    assert gradients("zero(3)", WORKERS).seconds < 8 * few + 0.05


@pytest.mark.parametrize("kind", ["all_reduce", "reduce", "all_gather"])
def test_small_messages_are_bound_by_their_latency_and_large_ones_by_a_link(kind: str) -> None:
    group = RankGroup(WORKERS, 1)
    small = collective_time(CLUSTER, kind, group, 1024)
    large = collective_time(CLUSTER, kind, group, 1e11)
    assert small.bound == f"latency of {small.messages} messages a call"
    assert "GB/s" in large.bound
    assert large.messages == 0


def test_a_reduction_goes_up_trees_over_nodes() -> None:
    group = RankGroup(WORKERS, 1)
    reduced = collective_time(CLUSTER, "reduce", group, 1024)
    assert reduced.messages == 7 + 7  # ranks of a node, and log2 of 128 nodes
    both_ways = collective_time(CLUSTER, "all_reduce", group, 1024)
    assert both_ways.seconds == pytest.approx(2 * reduced.seconds)


def test_every_layer_that_zero_3_gathers_has_its_own_latency() -> None:
    assert part_of("weights", "zero(3)").bound.startswith("latency of 127 messages")
    assert "GB/s" in part_of("weights", "zero(2)").bound  # all of them in one
