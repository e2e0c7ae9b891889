"""One step of one replica: compute, communication inside the replica, and the pipeline's bubble.

The time of a pipeline is that of its slowest stage and of its `bubble`; `timeline.simulate` gives
the same for every schedule, action by action.

A stage sends an activation or its gradient after every forward and backward, and waits for it.

How long the slowest stage of a pipeline waits: closed forms of `timeline.simulate`.

gpipe, 1f1b        one micro-batch's way through the other stages
interleaved, bfs   1/chunks of it, where there is a micro-batch for every stage
zb-h1, zb-h2       the way without the weights' part W of backward. Later micro-batches fill it
                   with W or forward F, the shorter, up to p - 1 or 2(p - 1) of them:
                   (p-1)(F + B) - min(m - 1, p - 1) min(F, W)
inter-op           every micro-batch's way through the other stages

Layers come as runs of equal ones. A stage is how many layers it has of every run; with `chunks` a
device has that many virtual stages, dealt round: device i has stages i, i + p, i + 2p, …
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul
from typing import NamedTuple

from shoal.cluster import Cluster
from shoal.plan.prediction import Part
from shoal.plan.step.collective_time import (
    SHOAL_ORDER,
    CollectiveTime,
    Network,
    RankGroup,
    group_of,
)
from shoal.plan.step.layer_time import MESSAGE_AXES, AxisGroups, KernelTime, LayerClock, LayerTable
from shoal.plan.workloads import Split, Workload
from shoal.strategy.strategy import Layout

Stage = tuple[int, ...]  # layers of each run


def deal_layers(counts: Sequence[int], weights: Sequence[float], stages: int) -> list[Stage]:
    """Contiguous layers for every stage, so that the largest weight of a stage is the smallest."""
    even = _deal_shares(counts, weights, stages)
    largest = max(weight_of(stage, weights) for stage in even)
    better = _fill(counts, weights, stages, largest * (1 - 1e-6))
    if better is None:
        return even
    return _fill(counts, weights, stages, _smallest_limit(counts, weights, stages)) or better


def deal_evenly(counts: Sequence[int], stages: int) -> list[Stage]:
    """The longest run in equal parts; the first stage has what is before it, the last the rest."""
    longest = max(range(len(counts)), key=lambda run: (counts[run], -run))
    dealt = []
    for stage in range(stages):
        share, more = divmod(counts[longest], stages)
        own = [0] * len(counts)
        own[longest] = share + (stage < more)
        if stage == 0:
            own[:longest] = counts[:longest]
        if stage == stages - 1:
            own[longest + 1 :] = counts[longest + 1 :]
        dealt.append(tuple(own))
    return dealt


def by_device(virtual: Sequence[Stage], devices: int) -> list[Stage]:
    """The layers of each device's virtual stages together."""
    if len(virtual) == devices:
        return list(virtual)
    return [
        tuple(map(sum, zip(*virtual[device::devices], strict=True))) for device in range(devices)
    ]


def weight_of(stage: Stage, weights: Sequence[float]) -> float:
    return sum([number * weight for number, weight in zip(stage, weights, strict=True) if number])


def weights_of(stages: Sequence[Stage], weights: Sequence[float]) -> list[float]:
    """Of every stage; most stages have the same layers."""
    known = {stage: weight_of(stage, weights) for stage in set(stages)}
    return list(map(known.__getitem__, stages))


@lru_cache(maxsize=10_000)
def in_flight(schedule: str, stages: int, microbatches: int, chunks: int) -> tuple[float, ...]:
    """The most micro-batches that every stage keeps activations of; parts of one are chunks."""
    if schedule == "1f1b":
        return tuple(float(min(microbatches, stages - stage)) for stage in range(stages))
    most = {"zb-h1": stages, "zb-h2": 2 * stages - 1, "inter-op": 1}
    if schedule in most:
        return (float(min(microbatches, most[schedule])),) * stages
    if schedule == "interleaved":
        peaks = [(stages - stage - 1) * 2 + (chunks - 1) * stages + 1 for stage in range(stages)]
        return tuple(min(microbatches * chunks, peak) / chunks for peak in peaks)
    return (float(microbatches),) * stages  # gpipe, bfs, and what is not known


def _deal_shares(counts: Sequence[int], weights: Sequence[float], stages: int) -> list[Stage]:
    """Each stage is filled up to the even share of what is left."""
    left = weight_of(tuple(counts), weights)
    waiting = list(counts)
    dealt = []
    for stage in range(stages):
        share = left / (stages - stage)
        taken = _take(waiting, weights, share, 0.5, last=stage == stages - 1)
        left -= weight_of(taken, weights)
        dealt.append(taken)
    return dealt


def _take(
    waiting: list[int], weights: Sequence[float], room: float, rounding: float, last: bool = False
) -> Stage:
    """Take layers from the front of those that wait, as many as there is room for."""
    taken = [0] * len(waiting)
    for run, weight in enumerate(weights):
        if not waiting[run]:
            continue
        number = waiting[run] if last or not weight else int(room / weight + rounding)
        number = max(0, min(waiting[run], number))
        taken[run] = number
        waiting[run] -= number
        room -= number * weight
        if waiting[run]:
            break
    return tuple(taken)


def _fill(
    counts: Sequence[int], weights: Sequence[float], stages: int, limit: float
) -> list[Stage] | None:
    """Stages filled up to a limit, from the front; None where layers are left over."""
    waiting = list(counts)
    dealt = [_take(waiting, weights, limit, 1e-9) for _ in range(stages)]
    return None if any(waiting) else dealt


def _smallest_limit(counts: Sequence[int], weights: Sequence[float], stages: int) -> float:
    total = weight_of(tuple(counts), weights)
    low = total / stages
    high = low + max(weights)
    for _ in range(30):
        middle = (low + high) / 2
        if _fill(counts, weights, stages, middle) is None:
            low = middle
        else:
            high = middle
    return high


class StageTimes(NamedTuple):
    """Of one micro-batch."""

    others_s: float  # all of it in the stages but the slowest, together
    others_weight_s: float  # the part of that that makes gradients of weights
    forward_s: float  # in the slowest stage
    weight_s: float


def bubble_s(
    schedule: str, stages: int, microbatches: int, chunks: int, times: StageTimes
) -> float:
    if schedule == "inter-op":
        return microbatches * times.others_s
    if schedule.startswith("zb"):
        most = (1 if schedule == "zb-h1" else 2) * (stages - 1)
        filled = min(microbatches - 1, most) * min(times.forward_s, times.weight_s)
        return max(0.0, times.others_s - times.others_weight_s - filled)
    missing = max(0, stages - microbatches) / (stages - 1)  # stages without a micro-batch
    return times.others_s * (missing + (1 - missing) / chunks)


class PipelineShape(NamedTuple):
    schedule: str = "1f1b"
    chunks: int = 1
    balance: str = "measured"  # stages of equal seconds; "weights": parameters, "even": layers
    scatter_sends: bool = False  # each rank of tp sends a part of the activation, then they gather
    adds: bool = True  # kernels add gradients of a micro-batch to those of the ones before
    hides_sends: bool = False  # a stage computes on while it sends and receives


@dataclass(frozen=True)
class StagePrice:
    """A split dealt to stages: what does not depend on the number of micro-batches."""

    stage_s: tuple[float, ...]
    computing_s: tuple[float, ...]  # of these, without messages
    slowest_s: float
    others: StageTimes
    parts: tuple[Part, ...]  # of the slowest stage, one micro-batch
    backward_s: float  # of the last micro-batch: gradients can be sent meanwhile
    parameters: float  # on the fullest device
    layer_parameters: float  # of the largest layer on the device
    fullest: Stage  # layers of each run on the device with the most parameters
    adjacent_parameters: float  # of two layers, one after the other
    largest_tensor: float  # numbers
    activation_bytes: tuple[float, ...]  # of each stage, one micro-batch
    passing_bytes: float  # of one layer, while it is computed again or its backward runs
    transfer: CollectiveTime
    tied: CollectiveTime  # the sum of gradients that the first and the last stage share
    token_sums: tuple[Part, ...]  # of gradients over workers that have other tokens
    meetings: int  # calls of one micro-batch in which the workers of a stage wait for each other
    adding_s: float  # of the gradients of one micro-batch to those of the ones before
    lone_s: float  # of messages of the first and the last pass, which no other micro-batch hides


class ReplicaPrice(NamedTuple):
    """What a step costs before replicas agree."""

    stages: StagePrice
    parts: tuple[Part, ...]
    seconds: float
    activation_bytes: float  # of the stage that keeps most


class ReplicaPricer:
    """Prices replicas of one workload on one cluster; remembers the times of layers."""

    def __init__(self, workload: Workload, cluster: Cluster, order: tuple[str, ...] = SHOAL_ORDER):
        self.workload = workload
        self.cluster = cluster
        self.order = order
        self.peak_flops = cluster.device.flops_of(workload.precision.compute)
        self.network = Network(cluster)
        self._counts = [run.count for run in workload.runs]
        self._clock = LayerClock(workload, self.network)
        self._groups: dict[Layout, tuple[AxisGroups, RankGroup]] = {}
        self._virtual: dict[tuple[tuple[float, ...], int], list[Stage]] = {}
        self._dealt: dict[tuple[Split, AxisGroups, RankGroup, int, str, bool], StagePrice] = {}

    def price(
        self, layout: Layout, split: Split, microbatches: int, pipeline: PipelineShape
    ) -> ReplicaPrice:
        inside, pp = self._groups_of(layout)
        key = (split, inside, pp, *pipeline[1:4])
        if key not in self._dealt:
            table = self._clock.table(split, inside)
            self._dealt[key] = self._deal(table, inside, pp, pipeline)
        if self.cluster.device.synchronous:  # no product of a CPU adds
            pipeline = pipeline._replace(adds=True)
        return _assemble(self._dealt[key], pp.size, microbatches, pipeline)

    def dealt(
        self, layout: Layout, split: Split, pipeline: PipelineShape
    ) -> tuple[LayerTable, list[Stage]]:
        """The layers' times, and how many of each run are on every stage."""
        inside, pp = self._groups_of(layout)
        table = self._clock.table(split, inside)
        return table, self._stages(table, pp.size, pipeline)

    def _groups_of(self, layout: Layout) -> tuple[AxisGroups, RankGroup]:
        if layout not in self._groups:
            tp, cp, ep, pp = (group_of(layout, axis, self.order) for axis in (*MESSAGE_AXES, "pp"))
            self._groups[layout] = ((tp, cp, ep), pp)
        return self._groups[layout]

    def _deal(
        self, table: LayerTable, groups: AxisGroups, pp: RankGroup, pipeline: PipelineShape
    ) -> StagePrice:
        stages = self._stages(table, pp.size, pipeline)
        seconds = weights_of(stages, table.seconds)
        slowest = seconds.index(max(seconds))
        weights_s = weights_of(stages, [time.weight_s for time in table.times])
        last_shares = pp.size > 1 and weight_of(stages[-1], table.shared_parameters)
        held = weights_of(stages, table.parameters)
        held[-1] += last_shares
        fullest = held.index(max(held))
        tied = CollectiveTime(0.0, "")
        if last_shares:
            inside = pp.stride * pp.size <= self.cluster.node.devices
            ends = RankGroup(2, pp.stride * (1 if inside else pp.size - 1))
            num_bytes = last_shares * self.workload.precision.gradient_bytes
            tied = self.network.collective("all_reduce", ends, num_bytes)
        computing = [time.seconds - sum(m.seconds for m in time.messages) for time in table.times]
        return StagePrice(
            stage_s=tuple(seconds),
            computing_s=tuple(weights_of(stages, computing)),
            slowest_s=seconds[slowest],
            others=StageTimes(
                others_s=sum(seconds) - seconds[slowest],
                others_weight_s=sum(weights_s) - weights_s[slowest],
                forward_s=weight_of(stages[slowest], [t.forward.seconds for t in table.times]),
                weight_s=weights_s[slowest],
            ),
            parts=tuple(_busy_parts(table, stages[slowest])),
            backward_s=sum(
                n * (t.backward.seconds + t.recompute.seconds - t.hiding_s)
                for n, t in zip(stages[slowest], table.times, strict=True)
            ),
            parameters=max(held),
            layer_parameters=max(table.parameters),
            fullest=stages[fullest],
            adjacent_parameters=_adjacent(table, stages[fullest]),
            largest_tensor=table.largest_tensor,
            activation_bytes=tuple(weights_of(stages, table.activation_bytes)),
            passing_bytes=table.passing_bytes,
            transfer=self._transfer(table, groups[0], pp, pipeline.scatter_sends),
            tied=tied,
            token_sums=tuple(self._token_sums(table, groups, stages[fullest])),
            meetings=sum(n * t.meetings for n, t in zip(stages[slowest], table.times, strict=True)),
            adding_s=self._adding_s(table, stages[slowest]),
            lone_s=weight_of(stages[slowest], [time.lone_s for time in table.times]),
        )

    def _adding_s(self, table: LayerTable, stage: Stage) -> float:
        """Two passes that read and one that writes, unless the product of a GPU adds.

        Backward of a profile adds, too, and its pace has that in proportion to kernels: what is
        missing is that of kernels which are shorter with fewer rows, those bound by compute.
        """
        device = self.cluster.device
        precision = self.workload.precision
        backward = [time.backward for time in table.times]
        compute_s = weight_of(stage, [spent.compute_s for spent in backward])
        all_s = weight_of(stage, [spent.seconds for spent in backward])
        missing = 1.0 if device.backward_pace == 1 else compute_s / max(1e-12, all_s)
        width = precision.parameter_bytes + 2 * precision.gradient_bytes
        moved = weight_of(stage, table.parameters) * width
        return missing * device.pass_s(moved)

    def _token_sums(self, table: LayerTable, inside: AxisGroups, stage: Stage) -> Iterator[Part]:
        """Workers of cp and ep sum the gradients of what they all hold, before replicas agree."""
        copies = weight_of(stage, table.parameters)
        experts = weight_of(stage, table.expert_parameters)
        width = self.workload.precision.gradient_bytes
        for axis, group, own in (("cp", inside[1], 0.0), ("ep", inside[2], experts)):
            if group.size > 1:
                took = self.network.collective("all_reduce", group, (copies - own) * width)
                yield Part(f"{axis} gradients", took.seconds, took.bound)

    def _stages(self, table: LayerTable, stages: int, pipeline: PipelineShape) -> list[Stage]:
        if stages == 1:
            return [tuple(self._counts)]
        virtual = stages * pipeline.chunks
        if pipeline.balance == "even":
            return by_device(deal_evenly(self._counts, virtual), stages)
        weights = table.parameters if pipeline.balance == "weights" else table.seconds
        key = (weights, virtual)
        if key not in self._virtual:
            self._virtual[key] = deal_layers(self._counts, weights, virtual)
        return by_device(self._virtual[key], stages)

    def _transfer(
        self, table: LayerTable, tp: RankGroup, pp: RankGroup, scatter: bool
    ) -> CollectiveTime:
        """One activation to the next stage, the widest of all cuts; both hosts wait for it."""
        if pp.size == 1:
            return CollectiveTime(0.0, "")
        widest = max(table.output_bytes[:-1] or table.output_bytes)
        sent = self.network.send(pp, widest / tp.size if scatter else widest)
        gathered_s = self.network.collective("all_gather", tp, widest).seconds if scatter else 0.0
        return CollectiveTime(sent.seconds + gathered_s + self.cluster.device.wait_s, sent.bound)


def _assemble(
    stages: StagePrice, count: int, microbatches: int, pipeline: PipelineShape
) -> ReplicaPrice:
    parts = [Part(name, microbatches * s, bound) for name, s, bound in stages.parts]
    if stages.lone_s:
        parts = [p._replace(seconds=p.seconds + stages.lone_s * (p.name == "ep")) for p in parts]
    busy_s = microbatches * stages.slowest_s + stages.lone_s
    if count > 1:
        sent_s = first_s = stages.transfer.seconds
        if pipeline.hides_sends:  # behind a pass of a chunk
            sent_s = max(0.0, sent_s - stages.slowest_s / (2 * pipeline.chunks))
        sends_s = 2 * (microbatches * pipeline.chunks * sent_s + (count - 1) * first_s)
        idle_s = bubble_s(pipeline.schedule, count, microbatches, pipeline.chunks, stages.others)
        waits = (
            Part("bubble", idle_s, "pipeline"),
            Part("pp", sends_s, stages.transfer.bound),
            Part("tied weights", stages.tied.seconds, stages.tied.bound),
        )
        parts += [part for part in waits if part.seconds]
        busy_s += sum(part.seconds for part in waits)
    adding_s = stages.adding_s if pipeline.adds else 0.0
    added = Part("accumulate", (microbatches - 1) * adding_s, "memory")
    more = (*stages.token_sums, *((added,) if added.seconds else ()))
    parts += more
    busy_s += sum(part.seconds for part in more)
    kept = in_flight(pipeline.schedule, count, microbatches, pipeline.chunks)
    most = max(map(mul, kept, stages.activation_bytes))
    return ReplicaPrice(stages, tuple(parts), busy_s, most)


def _adjacent(table: LayerTable, stage: Sequence[int]) -> float:
    """The most parameters of two layers of a stage, one of which follows the other."""
    layers = [
        parameters
        for number, parameters in zip(stage, table.parameters, strict=True)
        for _ in range(min(2, number))
    ]
    return max(map(sum, itertools.pairwise([0.0, *layers, 0.0])))


def _busy_parts(table: LayerTable, stage: Stage) -> list[Part]:
    parts = []
    for name in ("forward", "backward", "recompute"):
        spent: list[KernelTime] = [getattr(time, name) for time in table.times]
        by_bound = KernelTime(*(weight_of(stage, kind) for kind in zip(*spent, strict=True)))
        if by_bound.seconds:
            parts.append(Part(name, by_bound.seconds, by_bound.bound))
    for index, axis in enumerate(MESSAGE_AXES):
        times = [time.messages[index] for time in table.times]
        total = sum(n * time.seconds for n, time in zip(stage, times, strict=True))
        if total or (axis == "ep" and any(time.lone_s for time in table.times)):
            parts.append(Part(axis, total, next(time.bound for time in times if time.bound)))
    return parts
