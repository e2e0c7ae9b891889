"""Simulates a pipeline: begin and end of every action, and the bubble, from its schedule alone.

A stage does its actions in their order, each as soon as the one before has ended and its input has
arrived. An input from another stage arrives `transfer` after the action that made it; sending and
receiving cost a stage no time of its own, and channels have room for everything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shoal.errors import BadInput
from shoal.schedules.pipelines import Action, ActionKind, Pipeline, virtual_index
from shoal.schedules.pipelines.proof import prove

Time = float | Sequence[float]


@dataclass(frozen=True)
class Times:
    """The time of one micro-batch, in any unit.

    A number is the time of every stage; its chunks take equal fractions of it. A list has a number
    for each stage, or for each virtual stage. `backward` is the gradient of the input alone and
    `weight` that of the weights; a full backward takes both.
    """

    forward: Time = 1.0
    backward: Time = 1.0
    weight: Time = 1.0
    transfer: float = 0.0

    def table(self, pipeline: Pipeline) -> dict[ActionKind, list[float]]:
        """The time of each kind of action, by virtual stage."""
        forward = _spread("forward", self.forward, pipeline)
        backward = _spread("backward", self.backward, pipeline)
        weight = _spread("weight", self.weight, pipeline)
        _check("transfer", self.transfer)
        full = [one + other for one, other in zip(backward, weight, strict=True)]
        return {
            ActionKind.FORWARD: forward,
            ActionKind.BACKWARD: full,
            ActionKind.INPUT: backward,
            ActionKind.WEIGHT: weight,
        }


def _spread(name: str, time: Time, pipeline: Pipeline) -> list[float]:
    stages = pipeline.stages
    chunks = pipeline.chunks
    given = list(time) if isinstance(time, Sequence) else [time] * stages
    for number in given:
        _check(name, number)
    if len(given) == stages:
        return [number / chunks for number in given] * chunks
    if len(given) == stages * chunks:
        return given
    wanted = f"{stages}" + (f" or {stages * chunks}" if chunks > 1 else "")
    raise BadInput(f"{name} has {len(given)} times, and {pipeline} needs {wanted}, or one for all")


def _check(name: str, number: float) -> None:
    if not (math.isfinite(number) and number >= 0):
        raise BadInput(f"{name} takes a time of 0 or more, not {number:g}")


class ActionSpan(NamedTuple):
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Begin and end of every action, by stage."""

    pipeline: Pipeline
    spans: tuple[tuple[ActionSpan, ...], ...]

    @cached_property
    def makespan(self) -> float:
        """From the first begin, 0, to the last end of all stages."""
        return max(spans[-1].end for spans in self.spans)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """How long each stage computes."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)

    @cached_property
    def lengths(self) -> tuple[float, ...]:
        """From each stage's first begin to its last end."""
        return tuple(spans[-1].end - spans[0].start for spans in self.spans)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """The fraction of each stage's length in which it does not compute."""
        return tuple(
            1 - work / length if length else 0.0
            for work, length in zip(self.work, self.lengths, strict=True)
        )

    @property
    def bubble(self) -> float:
        """1 - ideal / cost: the work of the busiest stage against the longest length of a stage.

        As the zero-bubble paper counts. Where stages begin and end one after the other, the next
        step can begin in time, which the makespan would count as lost.
        """
        return 1 - max(self.work) / max(self.lengths)

    @property
    def idle(self) -> float:
        """The fraction of all stages' time in which they do not compute, over the makespan."""
        return 1 - sum(self.work) / (self.makespan * len(self.work))


def simulate(pipeline: Pipeline, times: Times | None = None) -> Timeline:
    """Begin and end of every action; a schedule that hangs raises what `prove` raises."""
    times = times or Times()
    table = times.table(pipeline)
    if not any(map(sum, table.values())):
        raise BadInput("a pipeline in which nothing takes time has no timeline")
    spans: list[list[ActionSpan]] = [[] for _ in pipeline.actions]
    ends: dict[tuple[int, bool, int], float] = {}  # virtual stage, forward?, micro-batch
    done = -1
    while done != (done := sum(map(len, spans))):  # each stage goes on until it waits
        for stage, actions in enumerate(pipeline.actions):
            for action in actions[len(spans[stage]) :]:
                begin = spans[stage][-1].end if spans[stage] else 0.0
                is_forward = action.kind is ActionKind.FORWARD
                producer = pipeline.producer(stage, action)
                if producer is not None:
                    source = virtual_index(pipeline.stages, *producer)
                    made = ends.get((source, is_forward, action.microbatch))
                    if made is None:
                        break
                    begin = max(begin, made + (times.transfer if producer.stage != stage else 0.0))
                virtual = virtual_index(pipeline.stages, stage, action.chunk)
                end = begin + table[action.kind][virtual]
                spans[stage].append(ActionSpan(action, begin, end))
                if action.kind is not ActionKind.WEIGHT:
                    ends[virtual, is_forward, action.microbatch] = end
    if not all(pipeline.actions) or list(map(len, spans)) != list(map(len, pipeline.actions)):
        prove(pipeline)  # raises an error that names the fault
    return Timeline(pipeline, tuple(map(tuple, spans)))
