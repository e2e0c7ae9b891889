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
from shoal.runtime import svg
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
_Cell = tuple[str, str]  # text and style
KINDS = {  # words, the style of the terminal, and the color of a picture
    ActionKind.FORWARD: ("forward", "bright_blue", "#0072b2"),
    ActionKind.BACKWARD: ("backward", "green", "#009e73"),
    ActionKind.INPUT: ("backward for the input", "green", "#009e73"),
    ActionKind.WEIGHT: ("backward for the weights", "yellow", "#e69f00"),
}


def gantt(timeline: Timeline) -> str:
    """The plain lines, one for each stage, of any length; · is the bubble.

    stage 0  F0 F1 F2 ·  ·  B0─── B1─── B2───
    stage 1  ·  F0 F1 F2 B0─── B1─── B2───
    """
    rows = _rows(timeline, _tick(timeline))
    return "\n".join("".join(text for text, _ in row).rstrip() for row in rows)


def draw(timeline: Timeline, proof: PipelineProof, console: Console) -> None:
    """Print the chart, folded to the width of the console, and what the schedule costs."""
    tick = _tick(timeline)
    rows = _rows(timeline, tick)
    names = [f"stage {stage}" for stage in range(len(rows))]
    margin = max(map(len, names)) + 2
    width = len(rows[0][0][0])
    per_line = max(1, (console.width - margin) // width)
    console.print(Text(str(timeline.pipeline), style="bold"))
    for first in range(0, len(rows[0]), per_line):
        shown = slice(first, first + per_line)
        axis = "time".ljust(margin)  # and the time at every fifth column
        for number in range(0, len(rows[0][shown]), 5):
            axis = axis.ljust(margin + number * width) + f"{float((first + number) * tick):.4g}"
        console.print(Text(axis, style="dim"), soft_wrap=True)
        for name, row in zip(names, rows, strict=True):
            line = Text.assemble((name.ljust(margin), "bold"), *row[shown])
            line.rstrip()
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
        f"proven   {order}, each once; never hangs with room for {room} from a stage to another",
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


def _rows(timeline: Timeline, tick: Fraction) -> list[list[_Cell]]:
    width = 1 + max(len(str(span.action)) for spans in timeline.spans for span in spans)
    columns = _column(timeline.makespan, tick)
    rows = [[("·".ljust(width), "dim")] * columns for _ in timeline.spans]
    for row, spans in zip(rows, timeline.spans, strict=True):
        for span in spans:
            first = _column(span.start, tick)
            last = _column(span.end, tick)
            row[first:last] = _cells(span, last - first, width)
    return rows


def _column(moment: float, tick: Fraction) -> int:
    """To the nearest, half a column rounds up: what is at least a tick long has a column."""
    return math.floor(Fraction(moment) / tick + Fraction(1, 2))


def _cells(span: ActionSpan, count: int, width: int) -> list[_Cell]:
    if not count:
        return []
    text = str(span.action).ljust(count * width - 1, "─") if count > 1 else str(span.action)
    text = text.ljust(count * width)
    style = KINDS[span.action.kind][1]
    return [(text[at : at + width], style) for at in range(0, count * width, width)]


MOST_ACTIONS = 20_000
_MARGIN = 24
_LEFT = 96
_RIGHT = 150
_TOP = 96
_BAND = 34
_HELD = 18
_GAP = 14
_SHORTEST = 21
_NARROWEST = 560
_WIDEST = 6000  # pixels: of an action, of the drawing
_STYLE = """
.title{font-size:20px;font-weight:700}.text{font-size:15px}.note{font-size:13px;fill:#5a6675}
.stage{font-size:14px;font-weight:700}.idle{fill:#eceff3}.held{fill:#c9b6e0}
.one{font-size:12px;font-weight:600;text-anchor:middle;fill:#fff}.pale .one{fill:#1d2733}
.box{stroke:#fbfcfd;stroke-width:1.5}.axis{stroke:#9aa5b1}
"""


class _Sheet:
    """Where everything is, in pixels."""

    def __init__(self, timeline: Timeline):
        wanted = timeline.makespan / _shortest(timeline) * _SHORTEST
        self.drawn = min(max(wanted, _NARROWEST), _WIDEST)
        self.per_time = self.drawn / timeline.makespan
        self.bottom = self.y(timeline.pipeline.stages)

    def x(self, moment: float) -> float:
        return _LEFT + moment * self.per_time

    def y(self, stage: int) -> float:
        return _TOP + stage * (_BAND + _HELD + _GAP)


def gantt_svg(timeline: Timeline, proof: PipelineProof) -> str:
    """The whole picture as text."""
    if proof.actions > MOST_ACTIONS:
        raise BadInput(
            f"{timeline.pipeline} has {proof.actions} actions, too many to draw: "
            "ask for fewer stages or micro-batches"
        )
    sheet = _Sheet(timeline)
    name = str(timeline.pipeline)
    costs = f"time {timeline.makespan:.6g}, bubble {timeline.bubble:.1%} of the longest stage, "
    costs += f"idle {timeline.idle:.1%} of all"
    body = [
        svg.text(_MARGIN, 36, name, "title"),
        svg.text(_MARGIN, 64, costs, "text"),
        *(_stage(sheet, timeline, proof, stage) for stage in range(timeline.pipeline.stages)),
        _drawn_axis(sheet, timeline),
        _drawn_legend(sheet, timeline),
    ]
    return svg.document(name, (_LEFT + sheet.drawn + _RIGHT, sheet.bottom + 92), _STYLE, body)


def _stage(sheet: _Sheet, timeline: Timeline, proof: PipelineProof, stage: int) -> str:
    y = sheet.y(stage)
    spans = timeline.spans[stage]
    peak = proof.peak_live[stage]
    right = sheet.x(timeline.makespan) + 12
    idle = 1 - timeline.work[stage] / timeline.makespan
    return "".join(
        [
            svg.text(_MARGIN, y + 22, f"stage {stage}", "stage"),
            svg.box((_LEFT, y), (sheet.drawn, _BAND), "idle"),
            *(_box(sheet, timeline, span, y) for span in spans if span.end > span.start),
            _held(sheet, spans, max(proof.peak_live), y + _BAND + _HELD),
            svg.text(right, y + 22, f"idle {idle:.1%}", "note"),
            svg.text(right, y + _BAND + 14, f"holds {peak} at most", "note"),
        ]
    )


def _box(sheet: _Sheet, timeline: Timeline, span: ActionSpan, y: float) -> str:
    """Later chunks are paler. The tooltip of a box names its action."""
    action = span.action
    wide = (span.end - span.start) * sheet.per_time
    strength = 1 - 0.65 * action.chunk / max(1, timeline.pipeline.chunks - 1)
    pale = strength < 0.7 or action.kind is ActionKind.WEIGHT
    label = f"{action.microbatch}" if len(str(action.microbatch)) * 7 + 4 <= wide else ""
    left = sheet.x(span.start)
    hue = KINDS[action.kind][2]
    parts = (
        svg.element("title", f"{action}: {span.start:.6g} to {span.end:.6g}"),
        svg.box((left, y), (wide, _BAND), "box", rx=3, fill=hue, fill_opacity=f"{strength:.2f}"),
        svg.text(left + wide / 2, y + 22, label, "one"),
    )
    return svg.element("g", "".join(parts), class_="pale" if pale else "full")


def _held(sheet: _Sheet, spans: tuple[ActionSpan, ...], most: int, y: float) -> str:
    """A hill: how many sets of activations live, on the same scale for all stages."""
    points = [f"M{_LEFT} {y:.1f}"]
    live = 0
    for span in spans:
        if span.action.kind is not ActionKind.INPUT:
            begins = span.action.kind is ActionKind.FORWARD
            live += 1 if begins else -1
            moment = sheet.x(span.start if begins else span.end)
            points.append(f"H{moment:.1f}V{y - live * (_HELD - 3) / most:.1f}")
    return svg.path(f"{''.join(points)}Z", "held")


def _drawn_axis(sheet: _Sheet, timeline: Timeline) -> str:
    y = sheet.bottom + 2
    least = 60 / sheet.per_time  # a step is 1, 2 or 5 times a power of ten, and at least this
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least)
    parts = [svg.path(f"M{_LEFT} {y}h{sheet.drawn:.1f}", "axis")]
    for moment in (step * number for number in range(int(timeline.makespan / step) + 1)):
        x = sheet.x(moment)
        parts.append(svg.path(f"M{x:.1f} {y}v6", "axis"))
        parts.append(svg.text(x, y + 20, f"{moment:g}", "note", text_anchor="middle"))
    return "".join([*parts, svg.text(_MARGIN, y + 20, "time", "note")])


def _drawn_legend(sheet: _Sheet, timeline: Timeline) -> str:
    kinds = {span.action.kind for spans in timeline.spans for span in spans}
    used = [kind for kind in ActionKind if kind in kinds]
    entries = [(KINDS[kind][2], f"{kind.value} {KINDS[kind][0]}") for kind in used]
    entries += [("#eceff3", "idle"), ("#c9b6e0", "activations held")]
    x = float(_LEFT)
    y = sheet.bottom + 44
    parts = []
    for hue, words in entries:
        parts.append(svg.box((x, y), (14, 14), rx=3, fill=hue))
        parts.append(svg.text(x + 20, y + 12, words, "note"))
        x += 44 + 7.2 * len(words)
    words = "The number in a box is its micro-batch."
    if timeline.pipeline.chunks > 1:
        words += f" Each stage has {timeline.pipeline.chunks} chunks; later ones are paler."
    return "".join([*parts, svg.text(_LEFT, y + 34, words, "note")])
