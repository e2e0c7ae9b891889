"""Walk a pipeline's schedule, and see that it does everything once, in order, and never hangs.

Of each stage: every micro-batch goes forward on every chunk exactly once and then backward, either
whole (F, B) or split (F, I, W); nothing else is done.

Of all stages together: they are run against each other with channels that hold few messages. A
stage takes its input when it begins an action, not before. After an action it puts the result into
the channel to its taker, and goes on once at most `capacity` messages in that channel are not yet
taken; with 0 that is a send that waits for its receiver. There is one channel for each ordered
pair of stages, for activations and gradients of all chunks, and a message is taken by its name, so
it may overtake. More room never makes a schedule hang that did not, and who is served first makes
no difference, so one run decides.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from shoal.errors import CheckFailed
from shoal.schedules.pipelines.actions import Action, Kind, Pipeline, Place, virtual_stage

UNLIMITED = 1 << 60


class ScheduleWrong(CheckFailed):
    """A stage does something twice, too early, or not at all."""

    def __init__(self, pipeline: Pipeline, stage: int, what: str):
        self.stage = stage
        self.what = what
        super().__init__(f"{pipeline} is wrong: stage {stage} {what}")


class Wait(NamedTuple):
    """A stage that cannot go on. `giving`: its result is not taken; else its input is not there."""

    stage: int
    action: Action
    peer: int
    giving: bool

    def __str__(self) -> str:
        if self.giving:
            return f"stage {self.stage} after {self.action} waits for stage {self.peer} to take it"
        return f"stage {self.stage} before {self.action} waits for stage {self.peer}"


class Deadlock(CheckFailed):
    """Stages that wait for each other in a circle: each of `cycle` for the next one's stage."""

    def __init__(self, pipeline: Pipeline, capacity: int, cycle: tuple[Wait, ...]):
        self.capacity = capacity
        self.cycle = cycle
        room = "" if capacity >= UNLIMITED else f" with room for {capacity} messages in a channel"
        super().__init__(f"{pipeline} hangs{room}: {', '.join(map(str, cycle))}")


@dataclass(frozen=True)
class PipelineProof:
    """What was shown.

    `capacity` is the least room in a channel with which it does not hang. `peak_live` counts, for
    every stage, the most pairs of micro-batch and chunk that are forward but not wholly backward
    (B, or W where it is split) at one time; `peak_waiting` those of them that only lack their W.
    """

    actions: int
    capacity: int
    peak_live: tuple[int, ...]
    peak_waiting: tuple[int, ...]


def prove(pipeline: Pipeline, capacity: int | None = None) -> PipelineProof:
    """Raise `ScheduleWrong` or `Deadlock` unless it is right, with so much room if that is told."""
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
    """The least room in every channel with which a schedule, right in each stage, does not hang."""
    run_blocking(pipeline, UNLIMITED)
    capacity = 0
    while True:
        try:
            run_blocking(pipeline, capacity)
        except Deadlock:
            capacity += 1
        else:
            return capacity


_BEFORE = {Kind.BACKWARD: Kind.FORWARD, Kind.INPUT: Kind.FORWARD, Kind.WEIGHT: Kind.INPUT}
_OTHER = {Kind.BACKWARD: Kind.INPUT, Kind.INPUT: Kind.BACKWARD}


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
    split = Action(Kind.INPUT, microbatch, chunk) in done
    needed = (Kind.FORWARD, Kind.WEIGHT if split else Kind.BACKWARD)
    missing = (Action(kind, microbatch, chunk) for kind in needed)
    return next((action for action in missing if action not in done), None)


def _peaks(actions: tuple[Action, ...]) -> tuple[int, int]:
    live = waiting = peak_live = peak_waiting = 0
    for kind, _, _ in actions:
        live += (kind is Kind.FORWARD) - (kind in (Kind.BACKWARD, Kind.WEIGHT))
        waiting += (kind is Kind.INPUT) - (kind is Kind.WEIGHT)
        peak_live = max(peak_live, live)
        peak_waiting = max(peak_waiting, waiting)
    return peak_live, peak_waiting


class _Message(NamedTuple):
    """For whom: the virtual stage that takes it; forward or backward, of which micro-batch."""

    taker: int
    is_forward: bool
    microbatch: int


def run_blocking(pipeline: Pipeline, capacity: int) -> None:
    """Run all stages against each other; raise `Deadlock` where they hang.

    Each stage by itself has to be right, as `prove` sees to.
    """
    _Run(pipeline, capacity).finish()


class _Run:
    def __init__(self, pipeline: Pipeline, capacity: int):
        self.pipeline = pipeline
        self.capacity = capacity
        self.next = [0] * pipeline.stages
        self.is_giving = [False] * pipeline.stages  # the result of the action is out, not taken
        self.channels: dict[tuple[int, int], set[_Message]] = {}

    def finish(self) -> None:
        ready = deque(range(self.pipeline.stages))
        while ready:
            ready.extend(self._advance(ready.popleft()))
        for stage in range(self.pipeline.stages):
            if self._wait_of(stage) is not None:
                raise Deadlock(self.pipeline, self.capacity, self._cycle(stage))

    def _advance(self, stage: int) -> set[int]:
        """As far as the stage can go; which others may go on because of it."""
        stirred: set[int] = set()
        while self.next[stage] < len(self.pipeline.actions[stage]):
            action = self.pipeline.actions[stage][self.next[stage]]
            if not self.is_giving[stage]:
                giver = self.pipeline.giver(stage, action)
                if giver is not None:
                    channel = self._channel(giver.stage, stage)
                    message = self._message(Place(stage, action.chunk), action)
                    if message not in channel:
                        return stirred
                    channel.remove(message)
                    stirred.add(giver.stage)
                self.is_giving[stage] = True
                taker = self.pipeline.taker(stage, action)
                if taker is not None:
                    self._channel(stage, taker.stage).add(self._message(taker, action))
                    stirred.add(taker.stage)
            if not self._is_given(stage, action):
                return stirred
            self.is_giving[stage] = False
            self.next[stage] += 1
        return stirred

    def _channel(self, source: int, target: int) -> set[_Message]:
        return self.channels.setdefault((source, target), set())

    def _message(self, taker: Place, action: Action) -> _Message:
        virtual = virtual_stage(self.pipeline.stages, *taker)
        return _Message(virtual, action.kind is Kind.FORWARD, action.microbatch)

    def _is_given(self, stage: int, action: Action) -> bool:
        taker = self.pipeline.taker(stage, action)
        if taker is None or taker.stage == stage:  # what a stage gives itself stays where it is
            return True
        return len(self._channel(stage, taker.stage)) <= self.capacity

    def _wait_of(self, stage: int) -> Wait | None:
        """What a stage waits for, now that nobody can go on; None: it is through."""
        if self.next[stage] == len(self.pipeline.actions[stage]):
            return None
        action = self.pipeline.actions[stage][self.next[stage]]
        giving = self.is_giving[stage]
        peer = (self.pipeline.taker if giving else self.pipeline.giver)(stage, action)
        assert peer is not None  # only messages are waited for
        return Wait(stage, action, peer.stage, giving)

    def _cycle(self, stage: int) -> tuple[Wait, ...]:
        """Follow who waits for whom until a stage comes again.

        No way ends at a stage that is through: it has taken and given everything there is.
        """
        path: list[Wait] = []
        while stage not in [wait.stage for wait in path]:
            wait = self._wait_of(stage)
            assert wait is not None
            path.append(wait)
            stage = wait.peer
        first = [wait.stage for wait in path].index(stage)
        return tuple(path[first:])
