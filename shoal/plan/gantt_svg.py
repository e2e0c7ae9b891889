"""A Gantt chart of a pipeline as SVG: a band for each stage, a box for each action, to scale.

Under each band is what the stage holds: the number of micro-batches (of a chunk) that are forward
and not yet backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from shoal.errors import BadInput
from shoal.plan.gantt import NAMES
from shoal.plan.timeline import ActionSpan, Timeline
from shoal.runtime import svg
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
    name = str(timeline.pipeline)
    body = [
        svg.text(_MARGIN, 36, name, "title"),
        svg.text(_MARGIN, 64, _costs(timeline), "text"),
        *(_stage(sheet, timeline, proof, stage) for stage in range(timeline.pipeline.stages)),
        _axis(sheet, timeline),
        _legend(sheet, timeline),
    ]
    return svg.document(name, (sheet.width, sheet.height), _STYLE, body)


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
    hue = _HUES[action.kind]
    parts = (
        svg.element("title", f"{action}: {span.start:.6g} to {span.end:.6g}"),
        svg.box((left, y), (wide, _BAND), "box", rx=3, fill=hue, fill_opacity=f"{strength:.2f}"),
        svg.text(left + wide / 2, y + 22, label, "one"),
    )
    return svg.element("g", "".join(parts), class_="pale" if pale else "full")


def _held(sheet: _Sheet, spans: tuple[ActionSpan, ...], most: int, y: float) -> str:
    """A hill: how many sets of activations live, on the same scale for all stages."""
    points = [f"M{_LEFT} {y:.1f}"]
    high = (_HELD - 3) / most
    for moment, count in _live(spans):
        points.append(f"H{sheet.x(moment):.1f}V{y - count * high:.1f}")
    return svg.path(f"{''.join(points)}Z", "held")


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
    parts = [svg.path(f"M{_LEFT} {y}h{sheet.drawn:.1f}", "axis")]
    for moment in (step * number for number in range(int(timeline.makespan / step) + 1)):
        x = sheet.x(moment)
        parts.append(svg.path(f"M{x:.1f} {y}v6", "axis"))
        parts.append(svg.text(x, y + 20, f"{moment:g}", "note", text_anchor="middle"))
    return "".join([*parts, svg.text(_MARGIN, y + 20, "time", "note")])


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
        parts.append(svg.box((x, y), (14, 14), rx=3, fill=hue))
        parts.append(svg.text(x + 20, y + 12, words, "note"))
        x += 44 + 7.2 * len(words)
    words = "The number in a box is its micro-batch."
    if timeline.pipeline.chunks > 1:
        words += f" Each stage has {timeline.pipeline.chunks} chunks; later ones are paler."
    return "".join([*parts, svg.text(_LEFT, y + 34, words, "note")])
