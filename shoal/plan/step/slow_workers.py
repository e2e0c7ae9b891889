"""What workers that compute slower cost a step, and what is left of replicas that lost workers.

Workers of a stage wait for each other in every layer, so that a stage is as slow as its slowest
worker; a pipeline has the pace of its slowest stage.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from shoal.cluster import Noise
from shoal.errors import BadInput
from shoal.plan.step.collective_time import group_of
from shoal.plan.step.step_price import PipelineShape, ReplicaPrice, StagePrice
from shoal.plan.timeline import Times, simulate
from shoal.schedules.pipelines.catalog import build
from shoal.strategy.strategy import Layout

SlowWorkers = tuple[tuple[int, float], ...]  # ranks, and how many times slower each computes


@dataclass(frozen=True)
class Unevenness:
    """How much slower ranks compute: at random by `noise` and `seed`, or those that are named."""

    noise: Noise = field(default_factory=Noise)
    seed: int = 0
    slow: Mapping[int, float] = field(default_factory=dict)  # factor by rank

    def factor(self, rank: int, step: int) -> float:
        """Of a rank's computations in a step; equal questions have equal answers."""
        factor = self.slow.get(rank, 1.0)
        if self.noise == Noise():
            return factor
        drawn = random.Random(f"{self.seed} {rank} {step}")
        factor *= max(0.1, drawn.gauss(1.0, self.noise.jitter))
        if drawn.random() < self.noise.straggler_share:
            factor *= self.noise.straggler_slowdown
        return factor


_FOLLOWED = 4  # micro-batches for each stage; in the others the slowest stage is never idle


class SlowReplica(NamedTuple):
    price: ReplicaPrice
    factor: float  # of its slowest worker


def slow_replicas(
    replica: ReplicaPrice,
    layout: Layout,
    microbatches: int,
    shape: PipelineShape,
    slow: SlowWorkers,
    order: tuple[str, ...],
) -> list[SlowReplica]:
    """The replicas that have slow workers; parts are those of workers that are equally fast."""
    replicas: dict[int, dict[int, float]] = {}  # by replica and stage, times slower
    dp, pp = (group_of(layout, axis, order) for axis in ("dp", "pp"))
    for rank, factor in slow:
        factors = replicas.setdefault(rank // dp.stride % dp.size, {})
        stage = rank // pp.stride % pp.size
        factors[stage] = max(factor, factors.get(stage, 1.0))
    known: dict[tuple[tuple[int, float], ...], SlowReplica] = {}
    found = []
    for factors in replicas.values():
        alike = tuple(sorted(factors.items()))
        if alike not in known:
            priced = _with_stages(replica, microbatches, shape, factors)
            known[alike] = SlowReplica(priced, max(factors.values()))
        found.append(known[alike])
    return found


def _with_stages(
    replica: ReplicaPrice, microbatches: int, shape: PipelineShape, factors: Mapping[int, float]
) -> ReplicaPrice:
    stages = replica.stages
    each = [factors.get(stage, 1.0) for stage in range(len(stages.stage_s))]
    stage_s = tuple(
        seconds + (factor - 1) * computing_s
        for seconds, factor, computing_s in zip(
            stages.stage_s, each, stages.computing_s, strict=True
        )
    )
    more_s = microbatches * (max(stage_s) - stages.slowest_s)
    if len(each) > 1:
        followed = min(microbatches, _FOLLOWED * len(each))
        more_s *= 1 - followed / microbatches
        more_s += _followed_s(stages, stage_s, followed, shape)
        more_s -= _followed_s(stages, stages.stage_s, followed, shape)
    factor = each[stage_s.index(max(stage_s))]
    held = replace(stages, backward_s=factor * stages.backward_s)
    return replica._replace(stages=held, seconds=replica.seconds + more_s)


def _followed_s(
    stages: StagePrice, stage_s: tuple[float, ...], microbatches: int, shape: PipelineShape
) -> float:
    """Of a pipeline with these times of its stages, action by action."""
    forward = stages.others.forward_s / stages.slowest_s
    weight = stages.others.weight_s / stages.slowest_s
    times = Times(
        forward=[forward * seconds for seconds in stage_s],
        backward=[(1 - forward - weight) * seconds for seconds in stage_s],
        weight=[weight * seconds for seconds in stage_s],
        transfer=stages.transfer.seconds,
    )
    chunks = shape.chunks if shape.chunks > 1 else None
    return simulate(build(shape.schedule, len(stage_s), microbatches, chunks), times).makespan


def without(
    lost: Collection[int], layout: Layout, slow: SlowWorkers, order: tuple[str, ...]
) -> tuple[Layout, SlowWorkers]:
    """What is left where replicas of lost workers are missing; slow workers by their new ranks."""
    dp = group_of(layout, "dp", order)
    gone = {rank // dp.stride % dp.size for rank in lost}
    kept = {replica: number for number, replica in enumerate(sorted({*range(dp.size)} - gone))}
    if not kept:
        raise BadInput("no replica is left of those that lost workers belong to")
    moved = []
    for rank, factor in slow:
        outer, inner = divmod(rank, dp.stride)
        outer, replica = divmod(outer, dp.size)
        if replica in kept:
            moved.append(((outer * len(kept) + kept[replica]) * dp.stride + inner, factor))
    return layout._replace(replicas=len(kept)), tuple(moved)
