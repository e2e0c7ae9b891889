"""One step of one replica: compute, communication inside the replica, and the pipeline's bubble.

Layers are dealt to virtual stages so that their times are as equal as whole layers allow. The time
of a pipeline is a closed form of its slowest stage; `timeline.simulate` gives the same for every
schedule, action by action.

    1f1b, gpipe     m * slowest + (rest of one micro-batch's way through all stages)
    interleaved     the same, where the way is 1/chunks as long
    zb-*            the bubble of 1f1b less the weights' part of backward
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.cluster.cluster import Cluster
from shoal.plan.collective_time import CollectiveTime, Network
from shoal.plan.kernel_time import KernelModel, KernelTime
from shoal.plan.prediction import Part
from shoal.plan.rank_order import IN_SHOALS_ORDER, RankGroup, RankOrder
from shoal.plan.workload import LayerCost, Message, Split, Workload
from shoal.strategy.strategy import Layout


@dataclass(frozen=True)
class LayerTime:
    """One layer, one micro-batch: seconds by activity, and what bounds them."""

    forward: KernelTime
    backward: KernelTime  # of inputs and weights
    weight_s: float  # the part of backward that makes weight gradients
    recompute: KernelTime
    messages_s: dict[str, float]  # by axis
    message_bounds: dict[str, str]

    @property
    def seconds(self) -> float:
        computing = self.forward.seconds + self.backward.seconds + self.recompute.seconds
        return computing + sum(self.messages_s.values())


@dataclass(frozen=True)
class ReplicaPrice:
    """What a step costs before replicas agree."""

    parts: tuple[Part, ...]
    backward_s: float  # of the last micro-batch: gradients can be sent meanwhile
    parameters: float  # on the fullest device
    seconds: float


class ReplicaPricer:
    """Prices replicas of one workload on one cluster; remembers the times of layers."""

    def __init__(self, workload: Workload, cluster: Cluster, order: RankOrder = IN_SHOALS_ORDER):
        self.workload = workload
        self.cluster = cluster
        self.order = order
        self.network = Network(cluster)
        self._kernels = KernelModel(cluster.device, workload.precision.compute)
        self._times: dict[tuple[int, Split, tuple[RankGroup, ...]], LayerTime] = {}

    def price(
        self, layout: Layout, split: Split, microbatches: int, pipeline: PipelineShape
    ) -> ReplicaPrice:
        times = [self.layer_time(run, split, layout) for run in range(len(self.workload.runs))]
        stages = deal_layers([run.count for run in self.workload.runs], times, layout.pp)
        transfer = self._transfer(split, layout)
        return _assemble(self, split, times, stages, microbatches, pipeline, transfer)

    def layer_time(self, run: int, split: Split, layout: Layout) -> LayerTime:
        groups = tuple(self.order.group(layout, axis) for axis in ("tp", "cp", "ep"))
        key = (run, split, groups)
        if key not in self._times:
            self._times[key] = self._layer_time(
                run, split, dict(zip(_SPLIT_AXES, groups, strict=True))
            )
        return self._times[key]

    def _layer_time(self, run: int, split: Split, groups: dict[str, RankGroup]) -> LayerTime:
        cost = self.workload.cost(run, split)
        messages_s: dict[str, float] = {}
        bounds: dict[str, str] = {}
        for message in _messages(cost, split):
            took = self.network.collective(message.kind, groups[message.axis], message.bytes)
            messages_s[message.axis] = messages_s.get(message.axis, 0.0) + took.seconds
            bounds[message.axis] = took.bound
        return LayerTime(
            self._kernels.time(cost.forward),
            self._kernels.time((*cost.backward_input, *cost.backward_weight), backward=True),
            self._kernels.time(cost.backward_weight, backward=True).seconds,
            self._kernels.time(cost.recompute),
            messages_s,
            bounds,
        )

    def _transfer(self, split: Split, layout: Layout) -> CollectiveTime:
        """One activation to the next stage; the widest of all cuts."""
        if layout.pp == 1:
            return CollectiveTime(0.0, "")
        runs = range(max(1, len(self.workload.runs) - 1))
        widest = max(self.workload.cost(run, split).output_bytes for run in runs)
        return self.network.send(self.order.group(layout, "pp"), widest)


_SPLIT_AXES = ("tp", "cp", "ep")


@dataclass(frozen=True)
class PipelineShape:
    schedule: str = "1f1b"
    chunks: int = 1


def _messages(cost: LayerCost, split: Split) -> tuple[Message, ...]:
    """Forward's messages come a second time where the forward is computed again in full."""
    again = cost.forward_messages if split.recompute == "full" and cost.recompute else ()
    return (*cost.forward_messages, *cost.backward_messages, *again)


def deal_layers(counts: Sequence[int], times: Sequence[LayerTime], stages: int) -> list[list[int]]:
    """Contiguous layers for every stage, each filled up to the even share of what is left."""
    left_s = sum(n * time.seconds for n, time in zip(counts, times, strict=True))
    dealt = []
    waiting = list(counts)
    for stage in range(stages):
        target = left_s / (stages - stage)
        taken, took_s = _take(waiting, times, target, last=stage == stages - 1)
        left_s -= took_s
        dealt.append(taken)
    return dealt


def _take(
    waiting: list[int], times: Sequence[LayerTime], target_s: float, last: bool
) -> tuple[list[int], float]:
    taken = [0] * len(waiting)
    took_s = 0.0
    for run, time in enumerate(times):
        room = waiting[run] if last else int((target_s - took_s) / max(time.seconds, 1e-12) + 0.5)
        number = max(0, min(waiting[run], room))
        taken[run] = number
        waiting[run] -= number
        took_s += number * time.seconds
        if waiting[run]:
            break
    return taken, took_s


def _stage_seconds(stage: Sequence[int], times: Sequence[LayerTime]) -> float:
    return sum(n * time.seconds for n, time in zip(stage, times, strict=True))


def _assemble(
    pricer: ReplicaPricer,
    split: Split,
    times: Sequence[LayerTime],
    stages: Sequence[Sequence[int]],
    microbatches: int,
    pipeline: PipelineShape,
    transfer: CollectiveTime,
) -> ReplicaPrice:
    seconds = [_stage_seconds(stage, times) for stage in stages]
    slowest = max(range(len(stages)), key=seconds.__getitem__)
    busy_s = microbatches * seconds[slowest]
    parts = _busy_parts(times, stages[slowest], microbatches)
    if len(stages) > 1:
        weight_s = sum(n * t.weight_s for n, t in zip(stages[slowest], times, strict=True))
        bubble_s = _bubble(seconds, slowest, weight_s, pipeline)
        sends = 2 * (microbatches + len(stages) - 1) * pipeline.chunks
        parts.append(Part("bubble", bubble_s, "pipeline"))
        parts.append(Part("pp", sends * transfer.seconds, transfer.bound))
        busy_s += bubble_s + sends * transfer.seconds
    backward = [n * t.backward.seconds for n, t in zip(stages[slowest], times, strict=True)]
    sizes = [pricer.workload.cost(run, split).parameters for run in range(len(times))]
    held = [sum(n * size for n, size in zip(stage, sizes, strict=True)) for stage in stages]
    return ReplicaPrice(tuple(parts), sum(backward), max(held), busy_s)


def _bubble(
    seconds: Sequence[float], slowest: int, weight_s: float, pipeline: PipelineShape
) -> float:
    others = sum(seconds) - seconds[slowest]
    if pipeline.schedule.startswith("zb"):
        others = max(0.0, others - (len(seconds) - 1) * 2 * weight_s)
    return others / pipeline.chunks


def _busy_parts(times: Sequence[LayerTime], stage: Sequence[int], microbatches: int) -> list[Part]:
    parts = []
    for name in ("forward", "backward", "recompute"):
        spent: list[KernelTime] = [getattr(time, name) for time in times]
        weights = [n * microbatches for n in stage]
        by_bound = KernelTime(
            *(sum(w * s[i] for w, s in zip(weights, spent, strict=True)) for i in range(3))
        )
        if by_bound.seconds:
            parts.append(Part(name, by_bound.seconds, by_bound.bound))
    for axis in ("tp", "cp", "ep"):
        total = sum(
            n * microbatches * time.messages_s.get(axis, 0.0)
            for n, time in zip(stage, times, strict=True)
        )
        if total:
            bound = next(t.message_bounds[axis] for t in times if axis in t.message_bounds)
            parts.append(Part(axis, total, bound))
    return parts
