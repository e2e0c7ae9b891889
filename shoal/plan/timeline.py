"""Simulates a pipeline: begin and end of every action, and the bubble, from its schedule alone.

A stage does its actions in their order, each as soon as the one before has ended and its input has
arrived. An input from another stage arrives `transfer` after the action that made it; sending and
receiving cost a stage no time of its own, and channels have room for everything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from shoal.errors import BadInput
from shoal.runtime import gantt as gantts
from shoal.schedules.pipelines import Action, ActionKind, Pipeline, virtual_index
from shoal.schedules.pipelines.proof import PipelineProof, prove

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


MOST_STAGES = 64
MOST_TICKS = 1500
_FINEST = Fraction(1, 4)  # of the shortest action; where that does not fit, columns are rounded
_SHORTEST = 21  # pixels of an action in a picture
KINDS = {
    ActionKind.FORWARD: gantts.FORWARD,
    ActionKind.BACKWARD: gantts.BACKWARD,
    ActionKind.INPUT: ("backward for the input", *gantts.BACKWARD[1:]),
    ActionKind.WEIGHT: gantts.WEIGHT,
}


def draw(timeline: Timeline, proof: PipelineProof, console: Console) -> None:
    """Print the chart, folded to the width of the console, and what the schedule costs."""
    tick = _tick(timeline)
    names = [f"stage {stage}" for stage in range(timeline.pipeline.stages)]
    console.print(Text(str(timeline.pipeline), style="bold"))
    for line in gantts.folded(names, _rows(timeline, tick), tick, console.width):
        console.print(line, soft_wrap=True)
    console.print(_legend(timeline, tick), end="\n\n")
    console.print("\n".join(summary(timeline, proof)), soft_wrap=True)


def summary(timeline: Timeline, proof: PipelineProof) -> list[str]:
    """What it costs, in words and numbers; lists run from stage 0 on."""
    split = any(proof.peak_waiting)
    chunks = timeline.pipeline.chunks
    held = f"at most {_listed(proof.peak_live)} micro-batches"
    held += f" of one chunk of {chunks}" if chunks > 1 else ""
    held += f", of which {_listed(proof.peak_waiting)} only wait for W" if split else ""
    order = "every F before its I before its W" if split else "every F before its B"
    room = f"{proof.capacity} message{'' if proof.capacity == 1 else 's'}"
    return [
        f"time     {timeline.makespan:.6g}",
        f"bubble   {timeline.bubble:.2%} of the longest stage, from its first action to its last",
        f"idle     {timeline.idle:.2%} of all stages, from the first action of all to the last",
        f"holds    {held}",
        f"proven   {order}, each once",
        f"         never hangs with room for {room} from a stage to another",
    ]


def _listed(numbers: tuple[int, ...]) -> str:
    """`4`, or `4 3 2 1` from stage 0 on."""
    return " ".join(map(str, numbers if len(set(numbers)) > 1 else numbers[:1]))


def _legend(timeline: Timeline, tick: Fraction) -> Text:
    kinds = {span.action.kind for spans in timeline.spans for span in spans}
    known = [(kind.value, *KINDS[kind]) for kind in ActionKind if kind in kinds]
    parts = [Text.assemble((letter, style), f" {words}") for letter, words, style, _ in known]
    if timeline.pipeline.chunks > 1:
        parts.append(Text("F3.1 micro-batch 3 on chunk 1"))
    parts.append(Text("· idle"))
    starts = [Fraction(span.start) / tick for spans in timeline.spans for span in spans]
    if any(abs(start - round(start)) > 0.001 for start in starts):
        parts.append(Text(f"rounded to columns of {float(tick):.4g}"))
    return Text("   ").join(parts)


def _tick(timeline: Timeline) -> Fraction:
    """The time of one column: one that all actions are whole multiples of, or the shortest."""
    if timeline.pipeline.stages > MOST_STAGES:
        raise BadInput(
            f"a drawing of {timeline.pipeline.stages} stages is unreadable: "
            f"ask for {MOST_STAGES} or fewer, or for --json"
        )
    shortest = _shortest(timeline)
    moments = {moment for spans in timeline.spans for s in spans for moment in (s.start, s.end)}
    exact = [Fraction(moment / shortest).limit_denominator(60) for moment in moments if moment > 0]
    common = Fraction(
        math.gcd(*(one.numerator for one in exact)), math.lcm(*(one.denominator for one in exact))
    )
    tick = Fraction(shortest) * (common if common >= _FINEST else 1)
    makespan = Fraction(timeline.makespan)
    if makespan / tick > MOST_TICKS:
        raise BadInput(
            f"{timeline.pipeline} is {math.ceil(makespan / tick)} columns long, too long to draw: "
            "ask for fewer micro-batches or times that differ less, or for --svg or --json"
        )
    return tick


def _shortest(timeline: Timeline) -> float:
    return min(s.end - s.start for spans in timeline.spans for s in spans if s.end > s.start)


def _rows(timeline: Timeline, tick: Fraction) -> list[list[gantts.Cell]]:
    width = 1 + max(len(str(span.action)) for spans in timeline.spans for span in spans)
    lanes = [gantts.Lane("", _bars(timeline, spans)) for spans in timeline.spans]
    return gantts.rows_of_cells(lanes, timeline.makespan, tick, width)


def _bars(timeline: Timeline, spans: tuple[ActionSpan, ...]) -> list[gantts.GanttBar]:
    """Later chunks are paler."""
    found = []
    for action, start, end in spans:
        strength = 1 - 0.65 * action.chunk / max(1, timeline.pipeline.chunks - 1)
        is_pale = strength < 0.7 or action.kind is ActionKind.WEIGHT
        title = f"{action}: {start:.6g} to {end:.6g}"
        _, style, hue = KINDS[action.kind]
        found.append(
            gantts.GanttBar(
                start,
                end,
                str(action),
                style,
                hue,
                title,
                str(action.microbatch),
                strength,
                is_pale,
            )
        )
    return found


def gantt_svg(timeline: Timeline, proof: PipelineProof) -> str:
    """The whole picture as text."""
    costs = f"time {timeline.makespan:.6g}, bubble {timeline.bubble:.1%} of the longest stage, "
    costs += f"idle {timeline.idle:.1%} of all"
    kinds = {span.action.kind for spans in timeline.spans for span in spans}
    used = [kind for kind in ActionKind if kind in kinds]
    legend = [(KINDS[kind][2], f"{kind.value} {KINDS[kind][0]}") for kind in used]
    legend += [("#fff", "idle"), (gantts.HILL, "activations held")]
    words = "The number in a box is its micro-batch."
    if timeline.pipeline.chunks > 1:
        words += f" Each stage has {timeline.pipeline.chunks} chunks; later ones are paler."
    lanes = [_lane(timeline, proof, stage) for stage in range(timeline.pipeline.stages)]
    wanted = timeline.makespan / _shortest(timeline) * _SHORTEST
    return gantts.Picture(
        str(timeline.pipeline), costs, lanes, timeline.makespan, wanted, legend, words
    ).svg()


def _lane(timeline: Timeline, proof: PipelineProof, stage: int) -> gantts.Lane:
    """With a hill: how many sets of activations live, on the same scale for all stages."""
    spans = timeline.spans[stage]
    idle = 1 - timeline.work[stage] / timeline.makespan
    notes = (f"idle {idle:.1%}", f"holds {proof.peak_live[stage]} at most")
    hill = []
    live = 0
    for span in spans:
        if span.action.kind is not ActionKind.INPUT:
            begins = span.action.kind is ActionKind.FORWARD
            live += 1 if begins else -1
            hill.append((span.start if begins else span.end, live / max(proof.peak_live)))
    return gantts.Lane(f"stage {stage}", _bars(timeline, spans), notes, hill)
