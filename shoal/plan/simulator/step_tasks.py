"""The tasks of training steps: what each rank computes and sends, and what it waits for."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shoal.cluster import Noise
from shoal.errors import BadInput
from shoal.plan.simulator.messages import Longs
from shoal.plan.simulator.symmetry import Classes, Symmetry
from shoal.plan.simulator.task_graph import Collectives, Servers, Task, TaskGraph
from shoal.plan.step.collective_time import SHOAL_ORDER, axis_sizes
from shoal.plan.sync_price import Agreeing
from shoal.schedules.collectives import Collective
from shoal.schedules.collectives.catalog import build as build_collective
from shoal.schedules.mixing import edges_for
from shoal.schedules.pipelines import Action, ActionKind, Pipeline, VirtualStage
from shoal.schedules.pipelines.catalog import build
from shoal.strategy.strategy import Layout

MOST_RANKS = 4096  # of most schedules; they have a chunk for each rank
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
    ranks: Longs
    classes: list[int]  # of these ranks
    gradient_bytes: float
    parameter_bytes: float


class LaidOut(NamedTuple):
    """A step: classes of ranks, their computations, and the last task of each class behind it."""

    ranks: Classes
    mains: list[list[int]]
    ranks_then: Classes
    ends: list[int]

    def mains_of(self, rank: int) -> list[int]:
        return self.mains[int(self.ranks.of[rank])]

    def end_of(self, rank: int) -> int:
        return self.ends[int(self.ranks_then.of[rank])]


class StepTasks:
    """Adds the tasks of one step after the other to a graph; one for each class of ranks."""

    def __init__(
        self, work: StepWork, how: Agreeing, ranks: Longs, uneven: Unevenness, alike: Symmetry
    ):
        alike.begin()
        self.graph = TaskGraph()
        self.steps: list[LaidOut] = []
        self._work = work
        self._how = how
        self._grid = ranks
        self._uneven = uneven
        self._alike = alike
        self._pipeline = work.pipeline
        self._buckets = max(1, min(how.buckets, MOST_BUCKETS))
        groups = ranks.reshape(len(ranks), -1)
        group, factor = np.full(alike.devices, -1), np.ones(alike.devices)
        group[groups] = np.arange(groups.shape[1])
        factor[list(uneven.slow)] = list(uneven.slow.values())
        self._stage_of = group * work.stages // groups.shape[1]
        self.ranks = alike.ranks(np.sort(ranks.ravel()), group, factor)
        if how.way == "servers":
            self._servers = Servers(self.graph, how, alike, self.ranks)
            self.ranks = self._servers.ranks
        is_alone = groups.shape[1] == 1
        self._collectives = Collectives(self.graph, alike, how.node_devices, is_alone)
        self._ready: list[list[int]] = [[] for _ in range(len(self.ranks))]

    def add_step(self, step: int) -> None:
        ranks = self.ranks
        self._mains: list[list[int]] = [[] for _ in self._ready]
        # of each class of ranks, the first and the last task of each action
        self._acts: list[dict[Action, tuple[int, int]]] = [{} for _ in self._ready]
        waits = self._servers.before(step) if self._how.way == "servers" else []
        for number, rank in enumerate(ranks.firsts.tolist()):
            self._add_actions(number, rank, step, [*self._ready[number], *waits])
        self._add_sends()
        none = (0.0,) * self._work.stages
        gradients = self._work.gradient_bytes or none
        parameters = self._work.parameter_bytes or none
        groups = [
            _Group(step, members, np.unique(ranks.of[members]).tolist(), *sizes)
            for stage, sizes in enumerate(zip(gradients, parameters, strict=True))
            for members in self._grid[:, stage, :].T
        ]
        if self._how.way == "zero" and self._how.stage == 3:
            for group in groups:
                self._gather_weights(group)
        for group in groups:
            self._agree(group)
        if self._how.way == "gossip":
            for group in groups:
                self._gossip(group)
        ends = [tasks[0] for tasks in self._ready]
        self.steps.append(LaidOut(ranks, self._mains, self.ranks, ends))

    def _add_actions(self, number: int, rank: int, step: int, before: Sequence[int]) -> None:
        factor = self._uneven.factor(rank, step)
        stage = int(self._stage_of[rank])
        actions = self._pipeline.actions[stage]
        ends = (ActionKind.BACKWARD, ActionKind.WEIGHT)
        last = next(action for action in reversed(actions) if action.kind in ends)
        for action in actions:
            parts = self._buckets if action == last and self._how.is_overlapped else 1
            seconds = self._seconds(stage, action) * factor / parts
            kind = "forward" if action.kind is ActionKind.FORWARD else "backward"
            task = Task(rank, kind, detail=str(action), seconds=seconds, lane=rank)
            first = len(self.graph.tasks)
            for _ in range(parts):
                before = [self.graph.add(task, before)]
                self._mains[number] += before
            self._acts[number][action] = (first, before[0])

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

    def _add_sends(self) -> None:
        """What a stage gets from another one; a stage sends when its action has ended."""
        for stage, actions in enumerate(self._pipeline.actions):
            for action in actions:
                producer = self._pipeline.producer(stage, action)
                if producer is not None and producer.stage != stage:
                    self._send(producer, stage, action)

    def _send(self, producer: VirtualStage, stage: int, action: Action) -> None:
        src, dst = (self._grid[:, one, :].ravel() for one in (producer.stage, stage))
        key, move = ("sends", producer.stage, stage), (src, dst, np.ones(src.size))
        found = self._alike.known(
            (key, len(self.steps)),
            lambda: self._alike.round(0, key, move, self.ranks, "pair"),
            lasting=False,
        )
        sent = Task(0, "send", "comm", str(action), num_bytes=self._work.boundary_bytes)
        made = action._replace(chunk=producer.chunk)
        for flow in found.flows:
            sender, receiver = flow.waits
            source = self.graph.add(sent.of(flow), [self._acts[sender][made][1]])
            self.graph.link(source, self._acts[receiver][action][0])

    def _gather_weights(self, group: _Group) -> None:
        """zero(3): weights are gathered for every forward and backward, one of them ahead."""
        uses = [
            [ends for act, ends in self._acts[one].items() if act.kind is not ActionKind.WEIGHT]
            for one in group.classes
        ]
        done = [task for one in group.classes for task in self._ready[one]]
        for number, now in enumerate(zip(*uses, strict=True)):
            after = list(done)
            if number >= 2:
                after += [ends[number - 2][1] for ends in uses]
            done = [self._sum(group, group.parameter_bytes, after, trips=1)]
            for first, _ in now:
                self.graph.link(done[0], first)

    def _agree(self, group: _Group) -> None:
        way = self._how.way
        if way == "servers":
            self._serve(group)
        elif way in ("all_reduce", "zero") and len(group.ranks) > 1:
            self._reduce(group)
        else:
            for one in group.classes:
                self._ready[one] = [self._update(one, group.step, ())]
            if way == "average" and (group.step + 1) % self._how.every == 0:
                after = [self._ready[one][0] for one in group.classes]
                done = self._sum(group, group.parameter_bytes, after)  # local SGD: of the weights
                for one in group.classes:
                    self._ready[one] = [done]

    def _gossip(self, group: _Group) -> None:
        """Weights go to the neighbors in a graph; each rank waits for those it hears."""
        ranks = group.ranks
        if len(ranks) == 1:
            return
        steps = edges_for(self._how.graph, len(ranks))
        turn = group.step % len(steps)
        src, dst = (ranks[end] for end in steps[turn])
        key, move = ("gossip", int(ranks[0]), turn), (src, dst, np.ones(src.size))
        mixed = self._alike.round(0, key, move, self.ranks, "sender")
        sent = Task(0, "send", "comm", num_bytes=group.parameter_bytes)
        tasks = [self.graph.add(sent.of(flow), self._ready[flow.waits[0]]) for flow in mixed.flows]
        if self._how.is_async:
            return
        self._ready = [self._ready[before] for before in mixed.before]
        for number, flows in mixed.arrived:
            come = (tasks[flow] for flow in flows)
            self._ready[number] = [self.graph.join([*self._ready[number], *come])]
        self.ranks = mixed.classes

    def _gradients(self, number: int) -> list[int]:
        """The tasks after which each bucket can be sent."""
        tasks = self._mains[number]
        return tasks[-self._buckets :] if self._how.is_overlapped else tasks[-1:] * self._buckets

    def _update(self, number: int, step: int, after: Sequence[int]) -> int:
        rank = int(self.ranks.firsts[number])
        seconds = self._work.update_s * self._uneven.factor(rank, step)
        update = Task(rank, "update", seconds=seconds, lane=rank)
        task = self.graph.add(update, [*after, self._mains[number][-1]])
        self._mains[number].append(task)
        return task

    def _reduce(self, group: _Group) -> None:
        """Buckets one after the other; zero reduce-scatters, and gathers weights at the end."""
        is_zero = self._how.way == "zero"
        pieces = [self._gradients(one) for one in group.classes]
        size = group.gradient_bytes / self._buckets
        done: list[int] = []
        for ready in zip(*pieces, strict=True):
            done = [self._sum(group, size, [*done, *ready], trips=1 if is_zero else 2)]
        updates = [self._update(one, group.step, done) for one in group.classes]
        if is_zero and self._how.stage < 3:
            gathered = self._sum(group, group.parameter_bytes, updates, trips=1)
            updates = [gathered] * len(updates)
        for one, task in zip(group.classes, updates, strict=True):
            self._ready[one] = [task]

    def _sum(self, group: _Group, num_bytes: float, after: Sequence[int], trips: int = 2) -> int:
        """An all-reduce over a group, or half of one."""
        algorithm = self._how.algorithm
        if trips == 1 or algorithm in ("auto", "ring", "hierarchical"):
            return self._collectives.by_levels(group.ranks, num_bytes, after, trips)
        if algorithm == "trees":
            return self._collectives.trees(group.ranks, num_bytes, after)
        schedule = self._alike.known(algorithm, lambda: _schedule(algorithm, len(group.ranks)))
        return self._collectives.in_rounds(schedule, group.ranks, num_bytes, after)

    def _serve(self, group: _Group) -> None:
        size = group.gradient_bytes / self._buckets
        pushed = [
            [n for piece in self._gradients(one) for n in self._servers.push(one, size, piece)]
            for one in group.classes
        ]
        pulled = self._servers.pull(group.step, group.classes, pushed, group.parameter_bytes)
        for one, task in zip(group.classes, pulled, strict=True):
            self._ready[one] = [self.graph.join([task, self._mains[one][-1]])]


def _schedule(algorithm: str, ranks: int) -> Collective:
    if ranks > MOST_RANKS and algorithm != "tree":
        raise BadInput(
            f"{algorithm} over {ranks} ranks has too many messages to simulate: beyond "
            f"{MOST_RANKS} ranks there are auto, ring, hierarchical and tree"
        )
    return build_collective("all_reduce", algorithm, ranks)
