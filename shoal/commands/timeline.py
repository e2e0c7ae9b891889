"""`shoal timeline`: what workers and servers did in some steps, drawn."""

from __future__ import annotations

from dataclasses import asdict
from fractions import Fraction
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.table import Table

from shoal.cluster.units import show_bytes, show_seconds
from shoal.commands import options, output
from shoal.commands.options import argument, option
from shoal.errors import BadInput
from shoal.observe.time_shares import waits
from shoal.observe.timeline import OTHER, TRANSFER, MeasuredTimeline, select
from shoal.runtime import gantt, trace
from shoal.runtime.trace import Process, Span, name_of, open_trace

MOST_ROWS = 32  # in a terminal
MOST_PATHS = 4
_ROUND = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)
_TIED = "\u00a0"  # a space at which a line is not broken
_OTHER_HUE = "#eceff3"
KINDS = {  # a letter, its style in a terminal, the hue of a picture
    "forward": ("F", *gantt.FORWARD[1:]),
    "backward": ("B", *gantt.BACKWARD[1:]),
    "weight gradient": ("W", *gantt.WEIGHT[1:]),
    "update": ("U", "magenta", "#cc79a7"),
    "computing": ("c", *gantt.FORWARD[1:]),
    trace.WAIT: (gantt.IDLE, "dim", "#fff"),
    "send": ("S", "cyan", "#56b4e9"),
    "push": ("P", "cyan", "#d55e00"),
    "pull": ("p", "blue", "#8a6fc0"),
    trace.MIX: ("M", "yellow", "#a0522d"),
    trace.LOAD: ("L", "white", "#8a8d00"),
    trace.INJECTED: ("Z", "red", "#c1121f"),
    trace.EVALUATE: ("E", "white", "#7b5ea7"),
    trace.CHECKPOINT: ("C", "white", "#5d7a5d"),
}
_UNKNOWN = ("?", "white", "#b0b7c0")


def timeline(
    run: Path = argument("A trace of shoal run --trace, or a folder with one.", ...),
    steps: str | None = option(
        "The steps to show, as 20:23.", metavar="FIRST[:LAST]", show_default="two from the middle"
    ),
    svg: Path | None = option("Write a picture here."),
    as_json: options.Json = False,
) -> None:
    """Draw what each worker and server did: computing, transfers, waits.

    With who waited for whom, and the critical path of each step.
    """
    found = select(open_trace(run), *_first_and_last(steps))
    if svg is not None:
        output.write_text(svg, picture(found))
    if svg is not None and not as_json:
        output.show(None, [f"{_title(found)}: {svg}"], as_json=False)
        return
    output.show(document(found) if as_json else None, [] if as_json else parts(found), as_json)


def _first_and_last(steps: str | None) -> tuple[int, int] | tuple[None, None]:
    if steps is None:
        return None, None
    first, mark, last = steps.partition(":")
    words = (first, last) if mark else (first, first)
    if not all(word.isdecimal() and len(word) < 10 for word in words):
        raise BadInput(
            f"--steps takes a step as 20, or the first and the last as 20:23, not {steps!r}"
        )
    if int(words[0]) > int(words[1]):
        raise BadInput(f"--steps {steps} ends before it begins: give the first step first")
    return int(words[0]), int(words[1])


def parts(found: MeasuredTimeline) -> list[output.Part]:
    """The rows, the kinds of spans, who waited for whom, critical paths: for a terminal."""
    wide = output.wide_console().width
    unit, end, lanes = _lanes(found)
    names = [lane.name for lane in lanes[:MOST_ROWS]]
    room = max(1, wide - max(map(len, names)) - 2) * min(max(1, len(found.steps)), MOST_PATHS)
    tick = Fraction(gantt.round_up(end / room, _ROUND))
    rows = gantt.rows_of_cells(lanes[:MOST_ROWS], end, tick, 1, ground=" ")
    lines: list[output.Part] = [output.bold(_title(found))]
    lines += gantt.folded(names, rows, tick, wide, unit)
    if len(lanes) > MOST_ROWS:
        lines.append(f"and {len(lanes) - MOST_ROWS} more: --svg FILE draws all")
    shares = dict(list(found.shares.items())[:MOST_ROWS])
    lines += ["", *output.shares_of_time(shares, _counted(found)), "", _kinds_table(found), ""]
    for number in list(found.steps)[:MOST_PATHS]:
        lines += _path(found, number)
    if len(found.steps) > MOST_PATHS:
        lines.append(f"and of {len(found.steps) - MOST_PATHS} more steps: --json has all")
    return lines


def _counted(found: MeasuredTimeline) -> str:
    return "training" if found.counted is None else _title(found).partition(":")[0]


def _title(found: MeasuredTimeline) -> str:
    words = "all of the trace, which has no steps"
    if numbers := list(found.steps):
        words = f"step {numbers[0]}"
        words = words.replace("step", "steps") + f" to {numbers[-1]}" if numbers[1:] else words
    return f"{words}: {_seconds(*found.window)}"


def _seconds(start_ns: int, end_ns: int) -> str:
    return show_seconds((end_ns - start_ns) / 1e9)


def _lanes(found: MeasuredTimeline) -> tuple[str, float, list[gantt.Lane]]:
    """The unit of time, the last moment, and bars; the hill marks critical paths."""
    start_ns, end_ns = found.window
    scales = (("s", 1e9, 20e9), ("ms", 1e6, 2e5), ("µs", 1e3, 0))
    unit, unit_ns = next(each[:2] for each in scales if end_ns - start_ns >= each[2])
    hills: dict[Process, list[tuple[float, float]]] = {process: [] for process in found.rows}
    for process, spans in chain.from_iterable(map(found.critical_path, found.steps)):
        hills[process].append(((spans[0].start_ns - start_ns) / unit_ns, 0.4))
        hills[process].append(((spans[-1].end_ns - start_ns) / unit_ns, 0.0))
    lanes = []
    for process, row in found.rows.items():
        notes = []
        ground = "#fff"
        bars = [_bar(span, start_ns, unit_ns) for span in row if span.kind != OTHER]
        if share := found.shares.get(process):
            lost = "bubble" if share.bubble > share.waiting else "waiting"
            notes = [f"{name} {getattr(share, name):.1%}" for name in ("computing", lost)]
            ground = _OTHER_HUE
        lanes.append(gantt.Lane(name_of(process), bars, notes, hills[process], ground))
    return unit, max(1, end_ns - start_ns) / unit_ns, lanes


def _bar(span: Span, origin_ns: int, unit_ns: float) -> gantt.GanttBar:
    letter, style, hue = KINDS.get(span.kind, _UNKNOWN)
    number = "" if span.microbatch is None or span.kind == trace.WAIT else str(span.microbatch)
    title = f"{span.kind} {span.detail}: {_seconds(span.start_ns, span.end_ns)}"
    start = (span.start_ns - origin_ns) / unit_ns
    end = (span.end_ns - origin_ns) / unit_ns
    is_pale = span.kind == "weight gradient"
    return gantt.GanttBar(start, end, letter + number, style, hue, title, number, 1.0, is_pale)


def _kinds_table(found: MeasuredTimeline) -> Table:
    rows = []
    for where, kind, count, seconds, sent_bytes, share in found.kinds:
        letter = "" if where == TRANSFER or not count else KINDS.get(kind, _UNKNOWN)[0]
        percent = "" if share is None else f"{share:.1%}"
        told = (str(count or ""), show_seconds(seconds) if seconds else "", percent)
        rows.append([letter, kind, where, *told, show_bytes(sent_bytes) if sent_bytes else ""])
    heads = ["", "kind", "on", "spans", "in all", "of the time", "sent"]
    return output.plain_table(f"kinds of spans, in {_counted(found)}", heads, rows, left=3)


def _path(found: MeasuredTimeline, number: int) -> list[output.Part]:
    """Without what takes less than a hundredth of the step."""
    start_ns, end_ns, _ = found.steps[number]
    path = [(process, span) for process, spans in found.critical_path(number) for span in spans]
    long = [(p, s) for p, s in path if s.end_ns - s.start_ns >= (end_ns - start_ns) / 100]
    words = []
    for process, hop in groupby(long, key=itemgetter(0)):  # one again, if a short hop was between
        joined = []
        for name, alike in groupby((span for _, span in hop), key=_on_path):
            seconds = sum(span.end_ns - span.start_ns for span in alike) / 1e9
            joined.append(f"{name} {show_seconds(seconds)}".replace(" ", _TIED))
        words.append(f"{name_of(process).replace(' ', _TIED)}: {', '.join(joined)}")
    said = f"critical path of step {number}, {_seconds(start_ns, end_ns)}"
    return [said, str(output.wrapped("  " + " → ".join(words), 80)).replace(_TIED, " ")]


def _on_path(span: Span) -> str:
    """A wait there is one for a transfer, not for a peer."""
    is_action = span.kind in trace.COMPUTE and span.microbatch is not None
    return "exposed" if span.kind == trace.WAIT else span.detail if is_action else span.kind


def picture(found: MeasuredTimeline) -> str:
    unit, end, lanes = _lanes(found)
    used = {span.kind for row in found.rows.values() for span in row}
    legend = [(hue, kind) for kind, (_, _, hue) in KINDS.items() if kind in used]
    legend += [(_OTHER_HUE, OTHER), (gantt.HILL, "critical path")]
    words = "; ".join(waits(found.shares)) or "no rank waited for another"
    closing = "The number in a box is its micro-batch. White: a worker waits, a server is idle."
    return gantt.Picture(
        _title(found), words, lanes, end, 900.0 * max(1, len(found.steps)), legend, closing, unit
    ).svg()


def document(found: MeasuredTimeline) -> dict[str, Any]:
    """Moments are nanoseconds from the origin of the trace."""
    return {
        "steps": {
            number: step._asdict()
            | {
                "critical_path": [
                    {"process": name_of(process), "spans": [span._asdict() for span in spans]}
                    for process, spans in found.critical_path(number)
                ]
            }
            for number, step in found.steps.items()
        },
        "kinds": [total._asdict() for total in found.kinds],
        "shares": {name_of(rank): asdict(each) for rank, each in found.shares.items()},
        "rows": {
            name_of(process): [span._asdict() for span in row]
            for process, row in found.rows.items()
        },
    }
