"""A Gantt chart of a pipeline as SVG: a band for each stage, a box for each action, to scale.

Under each band is what the stage holds: the number of micro-batches (of a chunk) that are forward
and not yet backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from shoal.errors import BadInput
from shoal.plan.gantt import NAMES
from shoal.plan.timeline import ActionSpan, Timeline
from shoal.schedules.pipelines.actions import ActionKind
from shoal.schedules.pipelines.proof import PipelineProof

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
_HUES = {
    ActionKind.FORWARD: "#0072b2",
    ActionKind.BACKWARD: "#009e73",
    ActionKind.INPUT: "#009e73",
    ActionKind.WEIGHT: "#e69f00",
}
_STYLE = """
text{font-family:system-ui,'DejaVu Sans',sans-serif;fill:#1d2733}
.title{font-size:20px;font-weight:700}.text{font-size:15px}.note{font-size:13px;fill:#5a6675}
.stage{font-size:14px;font-weight:700}.idle{fill:#eceff3}.held{fill:#c9b6e0}
.one{font-size:12px;font-weight:600;text-anchor:middle;fill:#fff}.pale .one{fill:#1d2733}
.box{stroke:#fbfcfd;stroke-width:1.5}.axis{stroke:#9aa5b1}
"""


class _Sheet:
    """Where everything is, in pixels."""

    def __init__(self, timeline: Timeline):
        shortest = min(
            s.end - s.start for spans in timeline.spans for s in spans if s.end > s.start
        )
        wanted = timeline.makespan / shortest * _SHORTEST
        self.drawn = min(max(wanted, _NARROWEST), _WIDEST)
        self.per_time = self.drawn / timeline.makespan
        self.width = _LEFT + self.drawn + _RIGHT
        self.bottom = _TOP + timeline.pipeline.stages * (_BAND + _HELD + _GAP)
        self.height = self.bottom + 92

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
    name = escape(str(timeline.pipeline))
    body = [
        f'<text class="title" x="{_MARGIN}" y="36">{name}</text>',
        f'<text class="text" x="{_MARGIN}" y="64">{_costs(timeline)}</text>',
        *(_stage(sheet, timeline, proof, stage) for stage in range(timeline.pipeline.stages)),
        _axis(sheet, timeline),
        _legend(sheet, timeline),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {sheet.width:.0f} '
        f'{sheet.height:.0f}" width="{sheet.width:.0f}" height="{sheet.height:.0f}" role="img" '
        f'style="max-width:100%;height:auto"><title>{name}</title><style>{_STYLE}</style>'
        f'<rect width="100%" height="100%" fill="#fbfcfd"/>{"".join(body)}</svg>\n'
    )


def _costs(timeline: Timeline) -> str:
    return (
        f"time {timeline.makespan:.6g}, bubble {timeline.bubble:.1%} of the longest stage, "
        f"idle {timeline.idle:.1%} of all"
    )


def _stage(sheet: _Sheet, timeline: Timeline, proof: PipelineProof, stage: int) -> str:
    y = sheet.y(stage)
    spans = timeline.spans[stage]
    peak = proof.peak_live[stage]
    right = sheet.x(timeline.makespan) + 12
    idle = 1 - timeline.work[stage] / timeline.makespan
    return (
        f'<text class="stage" x="{_MARGIN}" y="{y + 22:.1f}">stage {stage}</text>'
        f'<rect class="idle" x="{_LEFT}" y="{y:.1f}" width="{sheet.drawn:.1f}" height="{_BAND}"/>'
        + "".join(_box(sheet, timeline, span, y) for span in spans if span.end > span.start)
        + _held(sheet, spans, max(proof.peak_live), y + _BAND + _HELD)
        + f'<text class="note" x="{right:.1f}" y="{y + 22:.1f}">idle {idle:.1%}</text>'
        f'<text class="note" x="{right:.1f}" y="{y + _BAND + 14:.1f}">holds {peak} at most</text>'
    )


def _box(sheet: _Sheet, timeline: Timeline, span: ActionSpan, y: float) -> str:
    """Later chunks are paler. The tooltip of a box names its action."""
    action = span.action
    wide = (span.end - span.start) * sheet.per_time
    strength = 1 - 0.65 * action.chunk / max(1, timeline.pipeline.chunks - 1)
    pale = strength < 0.7 or action.kind is ActionKind.WEIGHT
    label = f"{action.microbatch}" if len(str(action.microbatch)) * 7 + 4 <= wide else ""
    tooltip = f"{action}: {span.start:.6g} to {span.end:.6g}"
    return (
        f'<g class="{"pale" if pale else "full"}"><title>{tooltip}</title>'
        f'<rect class="box" x="{sheet.x(span.start):.1f}" y="{y:.1f}" width="{wide:.1f}" '
        f'height="{_BAND}" rx="3" fill="{_HUES[action.kind]}" fill-opacity="{strength:.2f}"/>'
        f'<text class="one" x="{sheet.x(span.start) + wide / 2:.1f}" y="{y + 22:.1f}">{label}'
        "</text></g>"
    )


def _held(sheet: _Sheet, spans: tuple[ActionSpan, ...], most: int, y: float) -> str:
    """A hill: how many sets of activations live, on the same scale for all stages."""
    points = [f"M{_LEFT} {y:.1f}"]
    high = (_HELD - 3) / most
    for moment, count in _live(spans):
        points.append(f"H{sheet.x(moment):.1f}V{y - count * high:.1f}")
    return f'<path class="held" d="{"".join(points)}Z"/>'


def _live(spans: tuple[ActionSpan, ...]) -> Iterator[tuple[float, int]]:
    """After each change: when, and how many live."""
    live = 0
    for span in spans:
        if span.action.kind is ActionKind.FORWARD:
            live += 1
            yield span.start, live
        elif span.action.kind is not ActionKind.INPUT:
            live -= 1
            yield span.end, live


def _axis(sheet: _Sheet, timeline: Timeline) -> str:
    y = sheet.bottom + 2
    step = _round_step(60 / sheet.per_time)
    marks = [
        f'<path class="axis" d="M{sheet.x(moment):.1f} {y}v6"/>'
        f'<text class="note" text-anchor="middle" x="{sheet.x(moment):.1f}" y="{y + 20}">'
        f"{moment:g}</text>"
        for moment in (step * number for number in range(int(timeline.makespan / step) + 1))
    ]
    line = f'<path class="axis" d="M{_LEFT} {y}h{sheet.drawn:.1f}"/>'
    return f'{line}{"".join(marks)}<text class="note" x="{_MARGIN}" y="{y + 20}">time</text>'


def _round_step(least: float) -> float:
    """1, 2 or 5 times a power of ten, and at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least)


def _legend(sheet: _Sheet, timeline: Timeline) -> str:
    kinds = {span.action.kind for spans in timeline.spans for span in spans}
    entries = [(_HUES[kind], f"{kind.value} {NAMES[kind]}") for kind in ActionKind if kind in kinds]
    entries += [("#eceff3", "idle"), ("#c9b6e0", "activations held")]
    x = float(_LEFT)
    y = sheet.bottom + 44
    parts = []
    for hue, words in entries:
        parts.append(
            f'<rect x="{x}" y="{y}" width="14" height="14" rx="3" fill="{hue}"/>'
            f'<text class="note" x="{x + 20}" y="{y + 12}">{words}</text>'
        )
        x += 44 + 7.2 * len(words)
    words = "The number in a box is its micro-batch."
    if timeline.pipeline.chunks > 1:
        words += f" Each stage has {timeline.pipeline.chunks} chunks; later ones are paler."
    return f'{"".join(parts)}<text class="note" x="{_LEFT}" y="{y + 34}">{words}</text>'
