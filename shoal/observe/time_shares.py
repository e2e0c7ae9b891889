"""How the time was spent: shares of computing, communication and idling; a Chrome trace."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shoal.observe.trace import COMMUNICATE, COMPUTE, WAIT, Span, chrome_events

Interval = tuple[int, int]


@dataclass(frozen=True)
class TimeShares:
    """Fractions of one rank's time. `hidden` communication runs beside computing.

    computing + exposed + idle = 1
    """

    computing: float
    exposed: float
    idle: float
    hidden: float
    seconds: float


def time_shares(spans: Iterable[Span]) -> TimeShares:
    """Divide the time between the first and the last span of a rank."""
    spans = list(spans)
    if not spans:
        return TimeShares(0.0, 0.0, 0.0, 0.0, 0.0)
    return _divide(spans, min(s.start_ns for s in spans), max(s.end_ns for s in spans))


def _divide(spans: list[Span], start_ns: int, end_ns: int) -> TimeShares:
    total_ns = max(1, end_ns - start_ns)
    compute = union((s.start_ns, s.end_ns) for s in spans if s.kind in COMPUTE)
    wait = union((s.start_ns, s.end_ns) for s in spans if s.kind == WAIT)
    communicate = union((s.start_ns, s.end_ns) for s in spans if s.kind in COMMUNICATE)
    beside = intersection(communicate, compute)
    computing_ns = length(compute) - length(intersection(compute, wait))
    exposed_ns = length(wait)
    hidden_ns = length(beside) - length(intersection(beside, wait))
    return TimeShares(
        computing_ns / total_ns,
        exposed_ns / total_ns,
        1 - (computing_ns + exposed_ns) / total_ns,
        hidden_ns / total_ns,
        total_ns / 1e9,
    )


def time_shares_within(spans: Iterable[Span], start_ns: int, end_ns: int) -> TimeShares:
    """Divide the time between two moments."""
    inside = [
        s._replace(start_ns=max(s.start_ns, start_ns), end_ns=min(s.end_ns, end_ns))
        for s in spans
        if s.start_ns < end_ns and s.end_ns > start_ns
    ]
    return _divide(inside, start_ns, end_ns)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as sorted intervals that do not overlap."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def intersection(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """The points that lie in both; each list is sorted and without overlaps."""
    intervals = []
    i = 0
    j = 0
    while i < len(a) and j < len(b):
        start = max(a[i][0], b[j][0])
        end = min(a[i][1], b[j][1])
        if start < end:
            intervals.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return intervals


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
        shares = time_shares(spans)
        columns = (shares.computing, shares.exposed, shares.hidden, shares.idle)
        table.add_row(str(rank), f"{shares.seconds:.2f}", *(f"{x:.1%}" for x in columns))
    Console().print(table)
