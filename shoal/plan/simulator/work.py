"""What is simulated: the work of one step, which ranks do it, and how replicas agree."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from shoal.cluster.cluster import Noise
from shoal.plan.simulator.flows import Longs
from shoal.plan.step.rank_order import SHOAL_ORDER, axis_sizes
from shoal.schedules.pipelines.actions import Pipeline
from shoal.schedules.pipelines.catalog import build
from shoal.strategy.strategy import Layout

MOST_BUCKETS = 16  # of gradients in a simulated step; smaller ones are sent together


@dataclass(frozen=True)
class StepWork:
    """A step of one replica. Times are of one micro-batch, by stage; a device has one stage.

    `backward_s` is the whole backward, of which `weight_s` makes the gradients of the weights.
    What is sent inside a stage (tp, cp, ep) is part of its times.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weight_s: tuple[float, ...] = ()
    microbatches: int = 1
    schedule: str = "1f1b"
    chunks: int | None = None
    boundary_bytes: float = 0.0  # one activation between two stages, and its gradient
    gradient_bytes: tuple[float, ...] = ()  # of a device, by stage
    parameter_bytes: tuple[float, ...] = ()
    update_s: float = 0.0

    @property
    def stages(self) -> int:
        return len(self.forward_s)

    @property
    def pipeline(self) -> Pipeline:
        return build(self.schedule, self.stages, self.microbatches, self.chunks)


@dataclass(frozen=True)
class Agreeing:
    """How replicas agree, as the simulator knows it; see `synchronization.py`."""

    way: str = "none"  # none, all_reduce, zero, servers, gossip, average
    buckets: int = 1
    is_overlapped: bool = True  # with backward
    stage: int = 1  # of zero
    servers: tuple[int, ...] = ()  # the device that each server runs on
    apply_s: float = 0.0  # a server's time for one update of its shard
    is_async: bool = False
    quorum: int | None = None
    staleness: int | None = None
    every: int = 1  # steps between two averages
    graph: str = "ring"
    node_devices: int = 1  # groups that have several ranks in a node agree inside it first
    algorithm: str = "auto"  # another one: an all-reduce by the rounds of its schedule


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


def rank_grid(layout: Layout, axes: tuple[str, ...] = SHOAL_ORDER) -> Longs:
    """The ranks by replica, stage, and place inside the stage (tp, cp and ep together)."""
    sizes = axis_sizes(layout)
    outermost_first = axes[::-1]
    ranks = np.arange(int(np.prod([sizes[axis] for axis in axes])))
    ranks = ranks.reshape([sizes[axis] for axis in outermost_first])
    inner = [outermost_first.index(axis) for axis in outermost_first if axis not in ("dp", "pp")]
    turned = ranks.transpose([outermost_first.index("dp"), outermost_first.index("pp"), *inner])
    return turned.reshape(sizes["dp"], sizes["pp"], -1).astype(np.int64)
