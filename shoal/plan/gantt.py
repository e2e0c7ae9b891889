"""A Gantt chart of a pipeline in the terminal: a line for each stage, a column for each moment.

stage 0  F0 F1 F2 ·  ·  B0─── B1─── B2───
stage 1  ·  F0 F1 F2 B0─── B1─── B2───       (· is the bubble)
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import reduce
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from shoal.errors import BadInput
from shoal.plan.timeline import ActionSpan, Timeline
from shoal.schedules.pipelines.actions import ActionKind
from shoal.schedules.pipelines.proof import PipelineProof

MOST_STAGES = 64
MOST_TICKS = 1500
_FINEST = Fraction(1, 4)  # of the shortest action; where that does not fit, columns are rounded
STYLES = {
    ActionKind.FORWARD: "bright_blue",
    ActionKind.BACKWARD: "green",
    ActionKind.INPUT: "green",
    ActionKind.WEIGHT: "yellow",
}
NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT: "backward for the input",
    ActionKind.WEIGHT: "backward for the weights",
}


class _Cell(NamedTuple):
    text: str
    style: str


def gantt(timeline: Timeline) -> str:
    """The plain lines, one for each stage, of any length."""
    rows = _rows(timeline, _tick(timeline))
    return "\n".join("".join(cell.text for cell in row).rstrip() for row in rows)


def draw(timeline: Timeline, proof: PipelineProof, console: Console) -> None:
    """Print the chart, folded to the width of the console, and what the schedule costs."""
    tick = _tick(timeline)
    rows = _rows(timeline, tick)
    names = [f"stage {stage}" for stage in range(len(rows))]
    margin = max(map(len, names)) + 2
    per_line = max(1, (console.width - margin) // len(rows[0][0].text))
    console.print(Text(str(timeline.pipeline), style="bold"))
    for first in range(0, len(rows[0]), per_line):
        shown = slice(first, first + per_line)
        console.print(_axis(rows[0][shown], first, tick, margin), soft_wrap=True)
        for name, row in zip(names, rows, strict=True):
            cells = [(cell.text, cell.style) for cell in row[shown]]
            line = Text.assemble((name.ljust(margin), "bold"), *cells)
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
    parts = [Text.assemble((k.value, STYLES[k]), f" {NAMES[k]}") for k in ActionKind if k in kinds]
    if timeline.pipeline.chunks > 1:
        parts.append(Text("F3.1 micro-batch 3 on chunk 1"))
    parts.append(Text("· idle"))
    starts = [Fraction(span.start) / tick for spans in timeline.spans for span in spans]
    if any(abs(start - round(start)) > 0.001 for start in starts):
        parts.append(Text(f"rounded to columns of {float(tick):.4g}"))
    return Text("   ").join(parts)


def _axis(cells: list[_Cell], first: int, tick: Fraction, margin: int) -> Text:
    """The time at every fifth column."""
    width = len(cells[0].text)
    line = ""
    for number in range(0, len(cells), 5):
        line = line.ljust(number * width) + f"{float((first + number) * tick):.4g}"
    return Text("time".ljust(margin) + line, style="dim")


def _tick(timeline: Timeline) -> Fraction:
    """The time of one column: one that all actions are whole multiples of, or the shortest."""
    if timeline.pipeline.stages > MOST_STAGES:
        raise BadInput(
            f"a drawing of {timeline.pipeline.stages} stages is unreadable: "
            f"ask for {MOST_STAGES} or fewer, or for --json"
        )
    shortest = min(s.end - s.start for spans in timeline.spans for s in spans if s.end > s.start)
    moments = {moment for spans in timeline.spans for s in spans for moment in (s.start, s.end)}
    exact = [Fraction(moment / shortest).limit_denominator(60) for moment in moments if moment > 0]
    common = reduce(_common, exact)
    tick = Fraction(shortest) * (common if common >= _FINEST else 1)
    makespan = Fraction(timeline.makespan)
    if makespan / tick > MOST_TICKS:
        raise BadInput(
            f"{timeline.pipeline} is {math.ceil(makespan / tick)} columns long, too long to draw: "
            "ask for fewer micro-batches or times that differ less, or for --svg or --json"
        )
    return tick


def _common(one: Fraction, other: Fraction) -> Fraction:
    """The greatest common divisor."""
    return Fraction(
        math.gcd(one.numerator * other.denominator, other.numerator * one.denominator),
        one.denominator * other.denominator,
    )


def _rows(timeline: Timeline, tick: Fraction) -> list[list[_Cell]]:
    width = 1 + max(len(str(span.action)) for spans in timeline.spans for span in spans)
    columns = _column(timeline.makespan, tick)
    rows = [[_Cell("·".ljust(width), "dim")] * columns for _ in timeline.spans]
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
    style = STYLES[span.action.kind]
    return [_Cell(text[at : at + width], style) for at in range(0, count * width, width)]
