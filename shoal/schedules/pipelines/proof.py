"""Proves a pipeline's schedule: every action once, in order, and no deadlock.

Each stage by itself: every micro-batch goes forward on every chunk exactly once and then backward,
either whole (F, B) or split (F, I, W), and there are no other actions.

All stages together: they are run against each other with channels that hold few messages. A stage
receives its input when it begins an action, not before. After an action it sends the result to its
consumer, and continues once at most `capacity` messages of that channel are not received; 0 is a
send that waits for its receiver. Each ordered pair of stages has one channel, for activations and
gradients of all chunks. Messages are received by name, so they may overtake each other. A larger
capacity never causes a deadlock, and the order in which stages run makes no difference, so one run
decides.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.errors import CheckFailed
from shoal.schedules.pipelines import Action, ActionKind, Pipeline, VirtualStage

UNLIMITED = 1 << 60


class ScheduleWrong(CheckFailed):
    """A stage has an action twice, too early, or not at all."""


class Wait(NamedTuple):
    """A stage that is blocked: `sending` its result, or else waiting for its input."""

    stage: int
    action: Action
    peer: int
    sending: bool

    def __str__(self) -> str:
        if self.sending:
            return f"stage {self.stage} after {self.action} waits for stage {self.peer} to take it"
        return f"stage {self.stage} before {self.action} waits for stage {self.peer}"


class Deadlock(CheckFailed):
    """Stages that wait for each other in a cycle: each of `cycle` for the stage of the next."""

    def __init__(self, pipeline: Pipeline, capacity: int, cycle: tuple[Wait, ...]):
        self.cycle = cycle
        room = "" if capacity >= UNLIMITED else f" with room for {capacity} messages in a channel"
        super().__init__(f"{pipeline} hangs{room}: {', '.join(map(str, cycle))}")


@dataclass(frozen=True)
class PipelineProof:
    """What was proven.

    `capacity` is the smallest capacity of channels without a deadlock. `peak_live` is, for every
    stage, the largest number of pairs (micro-batch, chunk) between their forward and the end of
    their backward (B, or W if it is split). `peak_waiting` counts those that only lack their W.
    """

    actions: int
    capacity: int
    peak_live: tuple[int, ...]
    peak_waiting: tuple[int, ...]


def prove(pipeline: Pipeline) -> PipelineProof:
    """Raise `ScheduleWrong` or `Deadlock` unless it is right."""
    for stage in range(pipeline.stages):
        _check_stage(pipeline, stage)
    peaks = [_peaks(actions) for actions in pipeline.actions]
    return PipelineProof(
        sum(map(len, pipeline.actions)),
        capacity_needed(pipeline),
        tuple(live for live, _ in peaks),
        tuple(waiting for _, waiting in peaks),
    )


def capacity_needed(pipeline: Pipeline) -> int:
    """The smallest capacity of channels without a deadlock, for stages that are right alone."""
    run_blocking(pipeline, UNLIMITED)
    capacity = 0
    while True:
        try:
            run_blocking(pipeline, capacity)
        except Deadlock:
            capacity += 1
        else:
            return capacity


_BEFORE = {
    ActionKind.BACKWARD: ActionKind.FORWARD,
    ActionKind.INPUT: ActionKind.FORWARD,
    ActionKind.WEIGHT: ActionKind.INPUT,
}
_OTHER = {ActionKind.BACKWARD: ActionKind.INPUT, ActionKind.INPUT: ActionKind.BACKWARD}


def _check_stage(pipeline: Pipeline, stage: int) -> None:
    done: set[Action] = set()
    for action in pipeline.actions[stage]:
        wrong = _what_is_wrong(pipeline, action, done)
        if wrong:
            raise ScheduleWrong(f"{pipeline} is wrong: stage {stage} {wrong}")
        done.add(action)
    for chunk, microbatch in itertools.product(
        range(pipeline.chunks), range(pipeline.microbatches)
    ):
        split = Action(ActionKind.INPUT, microbatch, chunk) in done
        for kind in (ActionKind.FORWARD, ActionKind.WEIGHT if split else ActionKind.BACKWARD):
            if Action(kind, microbatch, chunk) not in done:
                lacks = f"never does {Action(kind, microbatch, chunk)}"
                raise ScheduleWrong(f"{pipeline} is wrong: stage {stage} {lacks}")


def _what_is_wrong(pipeline: Pipeline, action: Action, done: set[Action]) -> str | None:
    kind, microbatch, chunk = action
    if not (0 <= microbatch < pipeline.microbatches and 0 <= chunk < pipeline.chunks):
        return (
            f"does {action}, and there are {pipeline.microbatches} micro-batches "
            f"and {pipeline.chunks} chunks"
        )
    if action in done:
        return f"does {action} twice"
    before = _BEFORE.get(kind)
    other = _OTHER.get(kind)
    if before and Action(before, microbatch, chunk) not in done:
        return f"does {action} before {Action(before, microbatch, chunk)}"
    if other and Action(other, microbatch, chunk) in done:
        return f"does {Action(other, microbatch, chunk)} and {action}: whole or split, not both"
    return None


def _peaks(actions: Sequence[Action]) -> tuple[int, int]:
    live = waiting = peak_live = peak_waiting = 0
    for kind, _, _ in actions:
        live += (kind is ActionKind.FORWARD) - (kind in (ActionKind.BACKWARD, ActionKind.WEIGHT))
        waiting += (kind is ActionKind.INPUT) - (kind is ActionKind.WEIGHT)
        peak_live = max(peak_live, live)
        peak_waiting = max(peak_waiting, waiting)
    return peak_live, peak_waiting


# by source and target; a message is named by virtual stage, direction and micro-batch
Channels = defaultdict[tuple[int, int], set[tuple[VirtualStage, bool, int]]]


def run_blocking(pipeline: Pipeline, capacity: int) -> None:
    """Run all stages, each right by itself, against each other; `Deadlock` where they hang."""
    channels: Channels = defaultdict(set)
    running = [_run(pipeline, stage, channels, capacity) for stage in range(pipeline.stages)]
    waits: dict[int, Wait | None] = {}
    ready = deque(range(pipeline.stages))
    while ready:
        stage = ready.popleft()
        wait = next(running[stage], None)
        if stage in waits and waits[stage] == wait:
            continue
        waits[stage] = wait  # it has advanced, which only those that wait for it can notice
        ready.extend(other for other, its in waits.items() if its and its.peer == stage)
    blocked = {stage: wait for stage, wait in waits.items() if wait is not None}
    if blocked:
        path: list[int] = []
        stage = next(iter(blocked))
        while stage not in path:  # none has finished: it would have received and sent everything
            path.append(stage)
            stage = blocked[stage].peer
        cycle = tuple(blocked[one] for one in path[path.index(stage) :])
        raise Deadlock(pipeline, capacity, cycle)


def _run(pipeline: Pipeline, stage: int, channels: Channels, capacity: int) -> Iterator[Wait]:
    """The actions of a stage; yields what it waits for while it cannot go on."""
    for action in pipeline.actions[stage]:
        is_forward = action.kind is ActionKind.FORWARD
        producer = pipeline.producer(stage, action)
        if producer is not None:
            channel = channels[producer.stage, stage]
            message = (VirtualStage(stage, action.chunk), is_forward, action.microbatch)
            while message not in channel:
                yield Wait(stage, action, producer.stage, False)
            channel.remove(message)
        consumer = pipeline.consumer(stage, action)
        if consumer is not None:
            channel = channels[stage, consumer.stage]
            channel.add((consumer, is_forward, action.microbatch))
            while consumer.stage != stage and len(channel) > capacity:
                yield Wait(stage, action, consumer.stage, True)
