"""Where the time went: shares of computing, communication and idling, and a Chrome trace."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shoal.observe.trace import COMMUNICATE, COMPUTE, WAIT, Span, chrome_events

Interval = tuple[int, int]


@dataclass(frozen=True)
class Shares:
    """Parts of one rank's time, of 1. `hidden` runs beside computing, so it is no part of the sum.

    computing + exposed + idle = 1
    """

    computing: float
    exposed: float
    idle: float
    hidden: float
    seconds: float


def shares(spans: Iterable[Span]) -> Shares:
    """Divide the time between the first and the last span of a rank."""
    spans = list(spans)
    if not spans:
        return Shares(0.0, 0.0, 0.0, 0.0, 0.0)
    return _divide(spans, min(s.start_ns for s in spans), max(s.end_ns for s in spans))


def _divide(spans: list[Span], start: int, end: int) -> Shares:
    whole = max(1, end - start)
    compute = union((s.start_ns, s.end_ns) for s in spans if s.kind in COMPUTE)
    wait = union((s.start_ns, s.end_ns) for s in spans if s.kind == WAIT)
    talk = union((s.start_ns, s.end_ns) for s in spans if s.kind in COMMUNICATE)
    computing = length(compute) - length(common(compute, wait))
    exposed = length(wait)
    hidden = length(common(talk, compute)) - length(common(common(talk, compute), wait))
    return Shares(
        computing / whole,
        exposed / whole,
        1 - (computing + exposed) / whole,
        hidden / whole,
        whole / 1e9,
    )


def shares_within(spans: Iterable[Span], start_ns: int, end_ns: int) -> Shares:
    """Divide the time between two moments."""
    inside = [
        s._replace(start_ns=max(s.start_ns, start_ns), end_ns=min(s.end_ns, end_ns))
        for s in spans
        if s.start_ns < end_ns and s.end_ns > start_ns
    ]
    return _divide(inside, start_ns, end_ns)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as intervals that do not overlap, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def common(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """The points that lie in both; each list without overlaps and in order."""
    found = []
    i = 0
    j = 0
    while i < len(a) and j < len(b):
        start = max(a[i][0], b[j][0])
        end = min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in intervals)


def write_chrome(spans_by_rank: dict[int, list[Span]], file: Path) -> None:
    file.write_text(json.dumps({"traceEvents": chrome_events(spans_by_rank)}))


def print_shares(spans_by_rank: dict[int, list[Span]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="where the time went")
    for column in ("rank", "seconds", "computing", "communication exposed", "hidden", "idle"):
        table.add_column(column, justify="right")
    for rank, spans in spans_by_rank.items():
        s = shares(spans)
        percents = [f"{x:.1%}" for x in (s.computing, s.exposed, s.hidden, s.idle)]
        table.add_row(str(rank), f"{s.seconds:.2f}", *percents)
    Console().print(table)
