"""What workers that compute slower cost a step in which all wait for each other.

Workers of a stage wait for each other in every layer, so that a stage is as slow as its slowest
worker; a pipeline has the pace of its slowest stage, and replicas wait for the slowest of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from shoal.plan.step.collective_time import group_of
from shoal.plan.step.step_price import PipelineShape, ReplicaPrice, bubble_s
from shoal.strategy.strategy import Layout

SlowWorkers = tuple[tuple[int, float], ...]  # ranks, and how many times slower each computes


def slowed(
    replica: ReplicaPrice,
    layout: Layout,
    microbatches: int,
    shape: PipelineShape,
    slow: SlowWorkers,
    order: tuple[str, ...],
) -> ReplicaPrice:
    """The replica that takes longest; its parts are those of workers that are equally fast."""
    replicas: dict[int, dict[int, float]] = {}  # by replica and stage, times slower
    dp, pp = (group_of(layout, axis, order) for axis in ("dp", "pp"))
    for rank, factor in slow:
        factors = replicas.setdefault(rank // dp.stride % dp.size, {})
        stage = rank // pp.stride % pp.size
        factors[stage] = max(factor, factors.get(stage, 1.0))
    found = [_with_stages(replica, microbatches, shape, one) for one in replicas.values()]
    return max([replica, *found], key=lambda one: one.seconds)


def _with_stages(
    replica: ReplicaPrice, microbatches: int, shape: PipelineShape, factors: Mapping[int, float]
) -> ReplicaPrice:
    stages = replica.stages
    each = [factors.get(stage, 1.0) for stage in range(len(stages.stage_s))]
    stage_s = [
        seconds + (factor - 1) * computing_s
        for seconds, factor, computing_s in zip(
            stages.stage_s, each, stages.computing_s, strict=True
        )
    ]
    slowest = stage_s.index(max(stage_s))
    factor = each[slowest]
    others_s = sum(stage_s) - stage_s[slowest]
    longer = others_s / stages.others.others_s if stages.others.others_s else 1.0
    others = stages.others._replace(
        others_s=others_s,
        others_weight_s=longer * stages.others.others_weight_s,
        forward_s=factor * stages.others.forward_s,
        weight_s=factor * stages.others.weight_s,
    )
    more_s = microbatches * (stage_s[slowest] - stages.slowest_s)
    if len(each) > 1:
        idle_s = partial(bubble_s, shape.schedule, len(each), microbatches, shape.chunks)
        more_s += idle_s(others) - idle_s(stages.others)
    held = replace(stages, backward_s=factor * stages.backward_s)
    return replica._replace(stages=held, seconds=replica.seconds + more_s)
