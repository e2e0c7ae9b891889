"""Charts: lines as SVG and in the terminal; bars in the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise

from shoal.runtime import svg

HUES = ["#0072b2", "#e69f00", "#009e73", "#cc4778", "#56b4e9", "#d55e00", "#7b5ea7", "#8a8d00"]
Points = Sequence[tuple[float, float]]
Show = Callable[[float], str]
_LEFT = 90  # pixels
_TOP = 64
_WIDE = 560
_HIGH = 340
_NAMES = 170
_MOST_MARKS = 14
_TEXT_WIDE = 58
_TEXT_HIGH = 14
_TEXT_MARKS = ("●○", "■□", "▲△", "◆◇")
_STYLE = """.axis{stroke:#9aa5b1;fill:none}.grid{stroke:#e3e8ed;fill:none}
.line{stroke-width:2.5;fill:none}"""


@dataclass(frozen=True)
class Axis:
    """What is along it, how a value is written, and whether each step is a factor."""

    name: str
    show: Show = "{:g}".format
    is_log: bool = False
    base: float | None = None  # of a logarithm; None: 10 where values are far apart, else 2

    def marks(self, low: float, high: float) -> list[float]:
        if self.is_log:
            base = self.base or (10.0 if high / low > 100 else 2.0)
            first = math.floor(math.log(low, base))
            last = math.ceil(math.log(high, base))
            return [base**power for power in range(first, max(last, first + 1) + 1)]
        step = 10 ** math.floor(math.log10(high or 1.0))
        step *= 1 if high / step > 5 else 0.5 if high / step > 2 else 0.2
        return [number * step for number in range(math.ceil(high / step - 1e-9) + 1)]

    def place(self, value: float, marks: Sequence[float]) -> float:
        """From 0 at the first mark to 1 at the last one."""
        scale = math.log if self.is_log else float
        first = scale(marks[0])
        last = scale(marks[-1])
        return (scale(value) - first) / (last - first)


def line_chart(title: str, across: Axis, up: Axis, series: Mapping[str, Points]) -> str:
    """A line for each series; the name stands at its end.

    A name that begins with ~ is dashed, in the colour of that without it.
    """
    columns, rows = _marks(across, up, series)
    hues = {name: n for n, name in enumerate(dict.fromkeys(map(_plain, series)))}

    def at(x: float, y: float) -> tuple[float, float]:
        right = across.place(x, columns)
        above = up.place(y, rows)
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
    for name, line in series.items():
        number = hues[_plain(name)]
        hue = HUES[number % len(HUES)]
        places = [at(*point) for point in line]
        d = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        dashes = "7 5" if name.startswith("~") or number >= len(HUES) else None
        body.append(svg.path(d, "line", stroke=hue, stroke_dasharray=dashes))
        body += [svg.element("circle", cx=x, cy=y, r=3.5, fill=hue) for x, y in places]
        where = (_LEFT + _WIDE + 24, ends[name] + 4)
        body.append(svg.path(f"M{places[-1][0]:.1f} {places[-1][1]:.1f}L{where[0] - 4} "
                             f"{ends[name]:.1f}", "axis", stroke_dasharray="2 3"))  # fmt: skip
        body.append(svg.text(*where, _shown(name, series), style=f"font-size:13px;fill:{hue}"))
    size = (_LEFT + _WIDE + _NAMES, _TOP + _HIGH + 66)
    return svg.document(title, size, svg.WORDS + _STYLE, body, "#fff")


def _plain(name: str) -> str:
    return name.removeprefix("~")


def _shown(name: str, series: Mapping[str, Points]) -> str:
    """A dashed line beside that of the same name is its prediction."""
    return (
        f"{_plain(name)}, predicted" if name[0] == "~" and _plain(name) in series else _plain(name)
    )


def _marks(across: Axis, up: Axis, series: Mapping[str, Points]) -> tuple[list[float], list[float]]:
    """Of the axis across, one for each value where these are few, and of that upwards."""
    xs, ys = zip(*(point for line in series.values() for point in line), strict=True)
    columns = across.marks(min(xs), max(xs))
    if 1 < len(set(xs)) <= _MOST_MARKS:
        columns = sorted(set(xs) | ({0.0} if not across.is_log else set()))
    return columns, up.marks(min(ys), max(ys))


def text_chart(across: Axis, up: Axis, series: Mapping[str, Points]) -> list[str]:
    """A mark for each point, hollow for ~, and dots from point to point of the last series."""
    columns, rows = _marks(across, up, series)
    wide = _TEXT_WIDE
    high = max(_TEXT_HIGH, len(rows) - 1)
    grid = [[" "] * (wide + 1) for _ in range(high + 1)]

    def at(x: float, y: float) -> tuple[int, int]:
        return high - round(high * up.place(y, rows)), round(wide * across.place(x, columns))

    *others, (last, dotted) = series.items()
    places = [at(*point) for point in dotted]
    for (y, x), (end_y, end_x) in pairwise(places):
        for column in range(x, end_x + 1):
            grid[round(y + (end_y - y) * (column - x) / max(1, end_x - x))][column] = "·"
    shapes = dict(zip(dict.fromkeys(map(_plain, series)), cycle(_TEXT_MARKS), strict=False))
    marks = {name: shapes[_plain(name)][name[0] == "~"] for name, _ in others}
    for name, line in reversed(others):
        for y, x in (at(*point) for point in line):
            grid[y][x] = marks[name]
    labels = {at(columns[0], mark)[0]: up.show(mark) for mark in rows}
    edge = max(map(len, labels.values()))
    lines = [f"{labels.get(n, ''):>{edge}} │{''.join(row)}".rstrip() for n, row in enumerate(grid)]
    below = ""
    for mark in columns:
        word = across.show(mark)
        start = at(mark, rows[0])[1]
        if not below or start > len(below):
            below = f"{below:<{start}}{word}"
    legend = [f"{mark} {_shown(name, series)}" for name, mark in marks.items()]
    indent = " " * (edge + 2)
    said = "   ".join([*legend, f"· {_plain(last)}"])
    lines += [f"{' ' * edge} └{'─' * wide}", f"{indent}{below} {across.name}"]
    return [f"{indent}{up.name}", *lines, f"{indent}{said}"]


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
