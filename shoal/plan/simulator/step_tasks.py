"""The tasks of training steps: what each rank computes and sends, and what it waits for."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shoal.cluster import Noise
from shoal.plan.simulator.messages import Longs
from shoal.plan.simulator.task_graph import Servers, Task, TaskGraph, by_levels, gossip, in_rounds
from shoal.plan.step.collective_time import SHOAL_ORDER, axis_sizes
from shoal.plan.sync_price import Agreeing
from shoal.schedules.collectives.catalog import build as build_collective
from shoal.schedules.pipelines import Action, ActionKind, Pipeline
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


@dataclass(frozen=True)
class _Group:
    """The ranks that hold the same part of the model, one of each replica, in one step."""

    step: int
    ranks: list[int]
    gradient_bytes: float
    parameter_bytes: float


class StepTasks:
    """Adds the tasks of one step after the other to a graph."""

    def __init__(self, work: StepWork, agreeing: Agreeing, ranks: Longs, uneven: Unevenness):
        self.graph = TaskGraph()
        self.ends: list[dict[int, int]] = []  # by step: the last task of each rank
        self.mains: list[dict[int, list[int]]] = []  # by step: computations of each rank
        self._work = work
        self._how = agreeing
        self._ranks = ranks
        self._uneven = uneven
        self._pipeline = work.pipeline
        self._buckets = max(1, min(agreeing.buckets, MOST_BUCKETS))
        self._servers = Servers(self.graph, agreeing, int(ranks.max()) + 1)
        self._ready: dict[int, list[int]] = {int(rank): [] for rank in ranks.ravel()}
        self._firsts: dict[int, list[tuple[Action, int, int]]] = {}  # first and last task

    def add_step(self, step: int) -> None:
        self.mains.append({rank: [] for rank in self._ready})
        waits = self._servers.before(step)
        for replica in self._ranks:
            for column in replica.T.tolist():
                for stage, rank in enumerate(column):
                    self._add_actions(rank, stage, step, [*self._ready[rank], *waits])
                self._add_sends(column)
        none = (0.0,) * self._work.stages
        gradients = self._work.gradient_bytes or none
        parameters = self._work.parameter_bytes or none
        groups = [
            _Group(step, members, gradients[stage], parameters[stage])
            for stage in range(self._work.stages)
            for members in self._ranks[:, stage, :].T.tolist()
        ]
        if self._how.way == "zero" and self._how.stage == 3:
            for group in groups:
                self._gather_weights(group)
        for group in groups:
            self._agree(group)
        self.ends.append({rank: tasks[0] for rank, tasks in self._ready.items()})

    def _add_actions(self, rank: int, stage: int, step: int, before: Sequence[int]) -> None:
        factor = self._uneven.factor(rank, step)
        actions = self._pipeline.actions[stage]
        ends = (ActionKind.BACKWARD, ActionKind.WEIGHT)
        last = next(action for action in reversed(actions) if action.kind in ends)
        self._firsts[rank] = []
        for action in actions:
            parts = self._buckets if action == last and self._how.is_overlapped else 1
            seconds = self._seconds(stage, action) * factor / parts
            kind = "forward" if action.kind is ActionKind.FORWARD else "backward"
            task = Task(rank, kind, detail=str(action), seconds=seconds, lane=rank)
            first = len(self.graph.tasks)
            for _ in range(parts):
                before = [self.graph.add(task, before)]
                self.mains[-1][rank] += before
            self._firsts[rank].append((action, first, before[0]))

    def _seconds(self, stage: int, action: Action) -> float:
        work = self._work
        weight_s = work.weight_s[stage] if work.weight_s else work.backward_s[stage] / 2
        seconds = {
            ActionKind.FORWARD: work.forward_s[stage],
            ActionKind.BACKWARD: work.backward_s[stage],
            ActionKind.INPUT: work.backward_s[stage] - weight_s,
            ActionKind.WEIGHT: weight_s,
        }[action.kind]
        return seconds / self._pipeline.chunks

    def _add_sends(self, column: Sequence[int]) -> None:
        """What a stage gets from another one; a stage sends when its action has ended."""
        made = {
            (stage, action.chunk, action.kind is ActionKind.FORWARD, action.microbatch): last
            for stage, rank in enumerate(column)
            for action, _, last in self._firsts[rank]
            if action.kind is not ActionKind.WEIGHT
        }
        for stage, rank in enumerate(column):
            for action, first, _ in self._firsts[rank]:
                producer = self._pipeline.producer(stage, action)
                if producer is None:
                    continue
                is_forward = action.kind is ActionKind.FORWARD
                source = made[(*producer, is_forward, action.microbatch)]
                src, size = column[producer.stage], self._work.boundary_bytes
                sent = Task(src, "send", "comm", str(action), src=src, dst=rank, num_bytes=size)
                self.graph.link(self.graph.add(sent, [source]), first)

    def _gather_weights(self, group: _Group) -> None:
        """zero(3): weights are gathered for every forward and backward, one of them ahead."""
        uses = [
            [one for one in self._firsts[rank] if one[0].kind is not ActionKind.WEIGHT]
            for rank in group.ranks
        ]
        done = [task for rank in group.ranks for task in self._ready[rank]]
        for number, now in enumerate(zip(*uses, strict=True)):
            after = list(done)
            if number >= 2:
                after += [one[number - 2][2] for one in uses]
            done = [self._sum(group, group.parameter_bytes, after, trips=1)]
            for _, first, _ in now:
                self.graph.link(done[0], first)

    def _agree(self, group: _Group) -> None:
        way = self._how.way
        if way == "servers":
            self._serve(group)
        elif way in ("all_reduce", "zero") and len(group.ranks) > 1:
            self._reduce(group)
        else:
            for rank in group.ranks:
                self._ready[rank] = [self._update(rank, group.step, ())]
            after = [self._ready[rank][0] for rank in group.ranks]
            size = group.parameter_bytes
            if way == "gossip" and len(group.ranks) > 1:
                mixed = gossip(self.graph, group.ranks, size, after, self._how.graph, group.step)
                if not self._how.is_async:
                    self._ready |= {rank: [n] for rank, n in zip(group.ranks, mixed, strict=True)}
            elif way == "average" and (group.step + 1) % self._how.every == 0:
                done = self._sum(group, size, after)  # local SGD: of the weights
                self._ready |= {rank: [done] for rank in group.ranks}

    def _gradients(self, rank: int) -> list[int]:
        """The tasks after which each bucket can be sent."""
        tasks = self.mains[-1][rank]
        return tasks[-self._buckets :] if self._how.is_overlapped else tasks[-1:] * self._buckets

    def _update(self, rank: int, step: int, after: Sequence[int]) -> int:
        seconds = self._work.update_s * self._uneven.factor(rank, step)
        update = Task(rank, "update", seconds=seconds, lane=rank)
        task = self.graph.add(update, [*after, self.mains[-1][rank][-1]])
        self.mains[-1][rank].append(task)
        return task

    def _reduce(self, group: _Group) -> None:
        """Buckets one after the other; zero reduce-scatters, and gathers weights at the end."""
        is_zero = self._how.way == "zero"
        pieces = [self._gradients(rank) for rank in group.ranks]
        size = group.gradient_bytes / self._buckets
        done: list[int] = []
        for ready in zip(*pieces, strict=True):
            done = [self._sum(group, size, [*done, *ready], trips=1 if is_zero else 2)]
        updates = [self._update(rank, group.step, done) for rank in group.ranks]
        if is_zero and self._how.stage < 3:
            gathered = self._sum(group, group.parameter_bytes, updates, trips=1)
            updates = [gathered] * len(updates)
        self._ready |= {rank: [task] for rank, task in zip(group.ranks, updates, strict=True)}

    def _sum(self, group: _Group, num_bytes: float, after: Sequence[int], trips: int = 2) -> int:
        """An all-reduce over a group, or half of one."""
        graph, ranks, algorithm = self.graph, group.ranks, self._how.algorithm
        if trips == 1 or algorithm in ("auto", "ring", "hierarchical"):
            return by_levels(graph, ranks, num_bytes, after, self._how.node_devices, trips)
        schedule = build_collective("all_reduce", algorithm, len(ranks))
        return in_rounds(graph, schedule, ranks, num_bytes, graph.join(after))

    def _serve(self, group: _Group) -> None:
        size = group.gradient_bytes / self._buckets
        pushed = [
            [n for piece in self._gradients(rank) for n in self._servers.push(rank, size, piece)]
            for rank in group.ranks
        ]
        pulled = self._servers.pull(group.step, group.ranks, pushed, group.parameter_bytes)
        for rank, task in zip(group.ranks, pulled, strict=True):
            self._ready[rank] = [self.graph.join([task, self.mains[-1][rank][-1]])]
