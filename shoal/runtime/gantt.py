"""Gantt charts: rows of bars along one axis of time, as lines of a terminal and as a picture.

time     0              5
stage 0  F0 F1 F2 ·  ·  B0─── B1─── B2───
stage 1  ·  F0 F1 F2 B0─── B1─── B2───
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from html import escape
from typing import NamedTuple

from rich.text import Text

from shoal.errors import BadInput
from shoal.runtime import svg

IDLE = "·"
_MOST_BARS = 20_000  # of a picture
FORWARD = ("forward", "bright_blue", "#0072b2")  # words, style in a terminal, hue of a picture
BACKWARD = ("backward", "green", "#009e73")
WEIGHT = ("backward for the weights", "yellow", "#e69f00")


class GanttBar(NamedTuple):
    """What is done in some time. `text` begins with a letter that alone says what it is."""

    start: float
    end: float
    text: str
    style: str
    hue: str
    title: str = ""  # the tooltip of a picture
    label: str = ""  # what stands in the box of a picture
    strength: float = 1.0
    is_pale: bool = False


@dataclass(frozen=True)
class Lane:
    """Bars that do not overlap; `notes` and the `hill` below them are in pictures alone."""

    name: str
    bars: Sequence[GanttBar]
    notes: Sequence[str] = ()
    hill: Sequence[tuple[float, float]] = ()  # moments, and heights of 0 to 1
    ground: str = "#fff"  # the hue of a picture where there is no bar


Cell = tuple[str, str]  # text and style


def rows_of_cells(
    lanes: Sequence[Lane], end: float, tick: Fraction, width: int, ground: str = IDLE
) -> list[list[Cell]]:
    """Columns of `width` characters for each tick; `ground` where there is no bar."""
    rows = [[(ground.ljust(width), "dim")] * _column(end, tick) for _ in lanes]
    for row, lane in zip(rows, lanes, strict=True):
        for bar in lane.bars:
            first = _column(bar.start, tick)
            last = _column(bar.end, tick)
            row[first:last] = _cells(bar, last - first, width)
    return rows


def _column(moment: float, tick: Fraction) -> int:
    """To the nearest, half a column rounds up: what is at least a tick long has a column."""
    return math.floor(Fraction(moment) / tick + Fraction(1, 2))


def _cells(bar: GanttBar, count: int, width: int) -> list[Cell]:
    room = count * width
    text = bar.text if len(bar.text) <= max(room - 1, 1) else bar.text[:1]
    if bar.text == IDLE:
        text = text.ljust(room, IDLE)
    elif count > 1:
        text = text.ljust(room - 1, "─")
    text = text.ljust(room)
    return [(text[at : at + width], bar.style) for at in range(0, room, width)]


def folded(
    names: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    tick: Fraction,
    wide: int,
    axis: str = "time",
) -> list[Text]:
    """The rows under an axis, as often as they take to fit lines of `wide` characters."""
    margin = max(map(len, [axis, *names])) + 2
    width = len(rows[0][0][0])
    marked = max(5, math.ceil(10 / width))  # columns between two numbers
    per_line = max(1, (wide - margin) // width)
    lines = []
    for first in range(0, len(rows[0]), per_line):
        shown = slice(first, first + per_line)
        line = axis.ljust(margin)
        for number in range(0, len(rows[0][shown]), marked):
            moment = f"{float((first + number) * tick):.4g}"
            if not number or margin + number * width + len(moment) <= wide:
                line = line.ljust(margin + number * width) + moment
        lines.append(Text(line, style="dim"))
        for name, row in zip(names, rows, strict=True):
            lines.append(Text.assemble((name.ljust(margin), "bold"), *row[shown]))
            lines[-1].rstrip()
    return lines


_MARGIN = 24  # pixels
_LEFT = 96
_RIGHT = 150
_TOP = 96
_BAND = 34
_HILL = 18
_GAP = 14
_NARROWEST = 560
_WIDEST = 6000
_STYLE = """
.title{font-size:20px;font-weight:700}.text{font-size:15px}.note{font-size:13px;fill:#5a6675}
.stage{font-size:14px;font-weight:700}.ground{stroke:#d5dbe2}.held{fill:#c9b6e0}
.one{font-size:12px;font-weight:600;text-anchor:middle;fill:#fff}.pale .one{fill:#1d2733}
.box{stroke:#fbfcfd;stroke-width:1.5}.thin .box{stroke:none}.axis{stroke:#9aa5b1}
"""
HILL = "#c9b6e0"
Key = tuple[str, str]  # the hue and the words of a legend's entry


@dataclass(frozen=True)
class Picture:
    """Lanes from moment 0 to `end`, `wanted` pixels wide if that is neither little nor much."""

    title: str
    words: str
    lanes: Sequence[Lane]
    end: float
    wanted: float
    legend: Sequence[Key]
    closing: str
    axis: str = "time"

    @property
    def _drawn(self) -> float:
        return min(max(self.wanted, _NARROWEST), _WIDEST)

    def _x(self, moment: float) -> float:
        return _LEFT + moment * self._drawn / self.end

    def svg(self) -> str:
        """The whole picture as text."""
        if sum(len(lane.bars) for lane in self.lanes) > _MOST_BARS:
            raise BadInput(f"{self.title} has more than {_MOST_BARS:,} bars, too many to draw")
        bottom = _TOP + len(self.lanes) * (_BAND + _HILL + _GAP)
        body = [
            svg.text(_MARGIN, 36, self.title, "title"),
            svg.text(_MARGIN, 64, self.words, "text"),
            *(self._lane(number, lane) for number, lane in enumerate(self.lanes)),
            self._axis(bottom + 2),
            self._legend(bottom + 44),
        ]
        size = (_LEFT + self._drawn + _RIGHT, bottom + 92)
        return svg.document(self.title, size, _STYLE, body)

    def _lane(self, number: int, lane: Lane) -> str:
        y = _TOP + number * (_BAND + _HILL + _GAP)
        right = self._x(self.end) + 12
        notes = zip((y + 22, y + _BAND + 14), lane.notes, strict=False)
        return "".join(
            [
                svg.text(_MARGIN, y + 22, lane.name, "stage"),
                svg.box((_LEFT, y), (self._drawn, _BAND), "ground", fill=lane.ground),
                *(self._bar(bar, y) for bar in lane.bars if bar.end > bar.start),
                self._hill(lane.hill, y + _BAND + _HILL),
                *(svg.text(right, at, words, "note") for at, words in notes),
            ]
        )

    def _bar(self, bar: GanttBar, y: float) -> str:
        left = self._x(bar.start)
        wide = self._x(bar.end) - left
        label = bar.label if len(bar.label) * 7 + 4 <= wide else ""
        strength = f"{bar.strength:.2f}"
        parts = (
            svg.element("title", escape(bar.title)),
            svg.box((left, y), (wide, _BAND), "box", rx=3, fill=bar.hue, fill_opacity=strength),
            svg.text(left + wide / 2, y + 22, label, "one") if label else "",
        )
        kinds = f"{'pale' if bar.is_pale else 'full'}{' thin' if wide < 3 else ''}"
        return svg.element("g", "".join(parts), class_=kinds)

    def _hill(self, points: Sequence[tuple[float, float]], y: float) -> str:
        steps = (f"H{self._x(at):.1f}V{y - high * (_HILL - 3):.1f}" for at, high in points)
        return svg.path(f"M{_LEFT} {y:.1f}{''.join(steps)}Z", "held")

    def _axis(self, y: float) -> str:
        least = 60 * self.end / self._drawn
        step = round_up(least)
        parts = [svg.path(f"M{_LEFT} {y}h{self._drawn:.1f}", "axis")]
        for moment in (step * number for number in range(int(self.end / step) + 1)):
            x = self._x(moment)
            parts.append(svg.path(f"M{x:.1f} {y}v6", "axis"))
            parts.append(svg.text(x, y + 20, f"{moment:g}", "note", text_anchor="middle"))
        return "".join([*parts, svg.text(_MARGIN, y + 20, self.axis, "note")])

    def _legend(self, y: float) -> str:
        x = float(_LEFT)
        parts = []
        for hue, words in self.legend:
            parts.append(svg.box((x, y), (14, 14), "ground", rx=3, fill=hue))
            parts.append(svg.text(x + 20, y + 12, words, "note"))
            x += 44 + 7.2 * len(words)
        return "".join([*parts, svg.text(_LEFT, y + 34, self.closing, "note")])


def round_up(least: float, digits: Iterable[float] = (1, 2, 5, 10)) -> float:
    """The next number that is one of `digits` times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * digit for digit in digits if power * digit >= least * (1 - 1e-9))
