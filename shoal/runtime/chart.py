"""Charts: lines as SVG, bars in the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shoal.runtime import svg

HUES = ["#0072b2", "#e69f00", "#009e73", "#cc4778", "#56b4e9", "#d55e00", "#7b5ea7", "#8a8d00"]
Points = Sequence[tuple[float, float]]
Show = Callable[[float], str]
_LEFT, _TOP, _WIDE, _HIGH, _NAMES = 90, 64, 560, 340, 170  # pixels
_MOST_MARKS = 14
_STYLE = """.axis{stroke:#9aa5b1;fill:none}.grid{stroke:#e3e8ed;fill:none}
.line{stroke-width:2.5;fill:none}"""


@dataclass(frozen=True)
class Axis:
    """What is along it, how a value is written, and whether each step is a factor."""

    name: str
    show: Show = "{:g}".format
    is_log: bool = False

    def marks(self, low: float, high: float) -> list[float]:
        if self.is_log:
            base = 10.0 if high / low > 100 else 2.0
            first, last = math.floor(math.log(low, base)), math.ceil(math.log(high, base))
            return [base**power for power in range(first, max(last, first + 1) + 1)]
        step = 10 ** math.floor(math.log10(high or 1.0))
        step *= 1 if high / step > 5 else 0.5 if high / step > 2 else 0.2
        return [number * step for number in range(math.ceil(high / step - 1e-9) + 1)]

    def place(self, value: float, marks: Sequence[float]) -> float:
        """From 0 at the first mark to 1 at the last one."""
        scale = math.log if self.is_log else float
        first, last = scale(marks[0]), scale(marks[-1])
        return (scale(value) - first) / (last - first)


def line_chart(title: str, across: Axis, up: Axis, series: Mapping[str, Points]) -> str:
    """A line for each series; the name stands at its end. A name that begins with ~ is dashed."""
    points = [point for line in series.values() for point in line]
    xs, ys = zip(*points, strict=True)
    columns, rows = across.marks(min(xs), max(xs)), up.marks(min(ys), max(ys))
    if 1 < len(set(xs)) <= _MOST_MARKS:  # then each has a mark
        columns = sorted(set(xs) | ({0.0} if not across.is_log else set()))

    def at(x: float, y: float) -> tuple[float, float]:
        right, above = across.place(x, columns), up.place(y, rows)
        return _LEFT + _WIDE * right, _TOP + _HIGH * (1 - above)

    body = [svg.text(24, 34, title, "title"), svg.text(24, _TOP - 14, up.name, "note")]
    for mark in rows:
        x, y = at(columns[0], mark)
        body.append(svg.path(f"M{x:.1f} {y:.1f}h{_WIDE}", "grid"))
        body.append(svg.text(x - 8, y + 4, up.show(mark), "note", text_anchor="end"))
    for mark in columns:
        x, y = at(mark, rows[0])
        body.append(svg.path(f"M{x:.1f} {y:.1f}v6", "axis"))
        body.append(svg.text(x, y + 22, across.show(mark), "note", text_anchor="middle"))
    body.append(svg.text(_LEFT + _WIDE / 2, _TOP + _HIGH + 46, across.name, "note"))
    ends = _spread({name: at(*line[-1])[1] for name, line in series.items()})
    for number, (name, line) in enumerate(series.items()):
        hue = HUES[number % len(HUES)]
        places = [at(*point) for point in line]
        d = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        dashes = "7 5" if name.startswith("~") or number >= len(HUES) else None
        body.append(svg.path(d, "line", stroke=hue, stroke_dasharray=dashes))
        body += [svg.element("circle", cx=x, cy=y, r=3.5, fill=hue) for x, y in places]
        where = (_LEFT + _WIDE + 24, ends[name] + 4)
        body.append(svg.path(f"M{places[-1][0]:.1f} {places[-1][1]:.1f}L{where[0] - 4} "
                             f"{ends[name]:.1f}", "axis", stroke_dasharray="2 3"))  # fmt: skip
        body.append(svg.text(*where, name.removeprefix("~"), style=f"font-size:13px;fill:{hue}"))
    size = (_LEFT + _WIDE + _NAMES, _TOP + _HIGH + 66)
    return svg.document(title, size, svg.WORDS + _STYLE, body, "#fff")


def _spread(wanted: Mapping[str, float], least: float = 16.0) -> dict[str, float]:
    """Heights of names that do not cover each other, near to where they are wanted."""
    found: dict[str, float] = {}
    low = _TOP - 8.0
    for number, (name, y) in enumerate(sorted(wanted.items(), key=lambda pair: pair[1])):
        last = _TOP + _HIGH + 30.0 - least * (len(wanted) - number - 1)
        found[name] = low = max(low, min(y, last))
        low += least
    return found


def bars(
    values: Mapping[str, float], show: Show, wide: int = 40, is_log: bool = False
) -> list[str]:
    """A line for each value, as long as it, or its logarithm, is large: `ring  ▇▇▇▇ 17.6 ms`."""
    lengths = [math.log(max(1.0, v)) if is_log else v for v in values.values()]
    most = max(lengths, default=0.0) or 1.0
    name_wide = max(map(len, values), default=0)
    return [
        f"{name:>{name_wide}}  {'▇' * max(1, round(wide * length / most))} {show(value)}"
        for (name, value), length in zip(values.items(), lengths, strict=True)
    ]
