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

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from shoal.errors import CheckFailed
from shoal.schedules.pipelines.actions import (
    Action,
    ActionKind,
    Pipeline,
    VirtualStage,
    virtual_index,
)

UNLIMITED = 1 << 60


class ScheduleWrong(CheckFailed):
    """A stage has an action twice, too early, or not at all."""

    def __init__(self, pipeline: Pipeline, stage: int, what: str):
        self.stage = stage
        self.what = what
        super().__init__(f"{pipeline} is wrong: stage {stage} {what}")


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
        self.capacity = capacity
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


def prove(pipeline: Pipeline, capacity: int | None = None) -> PipelineProof:
    """Raise `ScheduleWrong` or `Deadlock` unless it is right, with this capacity if it is given."""
    for stage in range(pipeline.stages):
        _check_stage(pipeline, stage)
    if capacity is not None:
        run_blocking(pipeline, capacity)
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
            raise ScheduleWrong(pipeline, stage, wrong)
        done.add(action)
    for chunk in range(pipeline.chunks):
        for microbatch in range(pipeline.microbatches):
            lacking = _lacking(microbatch, chunk, done)
            if lacking is not None:
                raise ScheduleWrong(pipeline, stage, f"never does {lacking}")


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


def _lacking(microbatch: int, chunk: int, done: set[Action]) -> Action | None:
    """The action that is missing for this micro-batch, if one is."""
    split = Action(ActionKind.INPUT, microbatch, chunk) in done
    needed = (ActionKind.FORWARD, ActionKind.WEIGHT if split else ActionKind.BACKWARD)
    missing = (Action(kind, microbatch, chunk) for kind in needed)
    return next((action for action in missing if action not in done), None)


def _peaks(actions: tuple[Action, ...]) -> tuple[int, int]:
    live = waiting = peak_live = peak_waiting = 0
    for kind, _, _ in actions:
        live += (kind is ActionKind.FORWARD) - (kind in (ActionKind.BACKWARD, ActionKind.WEIGHT))
        waiting += (kind is ActionKind.INPUT) - (kind is ActionKind.WEIGHT)
        peak_live = max(peak_live, live)
        peak_waiting = max(peak_waiting, waiting)
    return peak_live, peak_waiting


class _Message(NamedTuple):
    """The virtual stage that receives it, the direction, and the micro-batch."""

    consumer: int
    is_forward: bool
    microbatch: int


def run_blocking(pipeline: Pipeline, capacity: int) -> None:
    """Run all stages against each other; raise `Deadlock` where they hang.

    Each stage by itself must be right, which `prove` checks first.
    """
    _Run(pipeline, capacity).finish()


class _Run:
    def __init__(self, pipeline: Pipeline, capacity: int):
        self.pipeline = pipeline
        self.capacity = capacity
        self.next = [0] * pipeline.stages
        self.is_sending = [False] * pipeline.stages  # the result is sent and not received
        self.channels: dict[tuple[int, int], set[_Message]] = {}

    def finish(self) -> None:
        ready = deque(range(self.pipeline.stages))
        while ready:
            ready.extend(self._advance(ready.popleft()))
        for stage in range(self.pipeline.stages):
            if self._wait_of(stage) is not None:
                raise Deadlock(self.pipeline, self.capacity, self._cycle(stage))

    def _advance(self, stage: int) -> set[int]:
        """Run a stage until it blocks; the stages that may be unblocked by it."""
        unblocked: set[int] = set()
        while self.next[stage] < len(self.pipeline.actions[stage]):
            action = self.pipeline.actions[stage][self.next[stage]]
            if not self.is_sending[stage]:
                if not self._receive(stage, action, unblocked):
                    return unblocked
                self._send(stage, action, unblocked)
            if not self._is_received(stage, action):
                return unblocked
            self.is_sending[stage] = False
            self.next[stage] += 1
        return unblocked

    def _receive(self, stage: int, action: Action, unblocked: set[int]) -> bool:
        """Receive the input of an action; False if it is not there yet."""
        producer = self.pipeline.producer(stage, action)
        if producer is None:
            return True
        channel = self._channel(producer.stage, stage)
        message = self._message(VirtualStage(stage, action.chunk), action)
        if message not in channel:
            return False
        channel.remove(message)
        unblocked.add(producer.stage)
        return True

    def _send(self, stage: int, action: Action, unblocked: set[int]) -> None:
        self.is_sending[stage] = True
        consumer = self.pipeline.consumer(stage, action)
        if consumer is not None:
            self._channel(stage, consumer.stage).add(self._message(consumer, action))
            unblocked.add(consumer.stage)

    def _channel(self, source: int, target: int) -> set[_Message]:
        return self.channels.setdefault((source, target), set())

    def _message(self, consumer: VirtualStage, action: Action) -> _Message:
        virtual = virtual_index(self.pipeline.stages, *consumer)
        return _Message(virtual, action.kind is ActionKind.FORWARD, action.microbatch)

    def _is_received(self, stage: int, action: Action) -> bool:
        consumer = self.pipeline.consumer(stage, action)
        if consumer is None or consumer.stage == stage:  # a stage sends itself nothing
            return True
        return len(self._channel(stage, consumer.stage)) <= self.capacity

    def _wait_of(self, stage: int) -> Wait | None:
        """What a stage waits for when no stage can advance; None if it has finished."""
        if self.next[stage] == len(self.pipeline.actions[stage]):
            return None
        action = self.pipeline.actions[stage][self.next[stage]]
        is_sending = self.is_sending[stage]
        peer = (self.pipeline.consumer if is_sending else self.pipeline.producer)(stage, action)
        assert peer is not None  # a stage waits for messages only
        return Wait(stage, action, peer.stage, is_sending)

    def _cycle(self, stage: int) -> tuple[Wait, ...]:
        """Follow the waits until a stage comes again.

        No path ends at a stage that has finished: it has received and sent everything.
        """
        path: list[Wait] = []
        while stage not in [wait.stage for wait in path]:
            wait = self._wait_of(stage)
            assert wait is not None
            path.append(wait)
            stage = wait.peer
        first = [wait.stage for wait in path].index(stage)
        return tuple(path[first:])
