"""How the time was spent: shares of computing, communication and idling; a Chrome trace.

The time is that of training: steps, and loading their batches. Start-up, evaluation and
checkpoints are in the trace and not in the shares.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.runtime import trace

Interval = tuple[int, int]


@dataclass(frozen=True)
class TimeShares:
    """Fractions of one rank's time in training. `hidden` communication runs beside computing.

    computing + exposed + idle + injected = 1; `injected` is the sleep of --slow
    """

    computing: float
    exposed: float
    idle: float
    hidden: float
    seconds: float
    injected: float = 0.0


def time_shares(spans: Sequence[trace.Span]) -> TimeShares:
    """Divide the time of a rank's training; without steps, that from the first to the last span."""
    if not spans:
        return TimeShares(0.0, 0.0, 0.0, 0.0, 0.0)
    start_ns = min(s.start_ns for s in spans)
    return time_shares_within(spans, start_ns, max(s.end_ns for s in spans))


def time_shares_within(spans: Sequence[trace.Span], start_ns: int, end_ns: int) -> TimeShares:
    """Divide the time of training between two moments.

    A loop of the user's own, which loads batches and has no spans for its steps, computes where it
    neither loads nor waits.
    """
    window = [(start_ns, end_ns)]
    kinds = {span.kind for span in spans}
    is_own_loop = trace.LOAD in kinds and trace.STEP not in kinds
    within = window if is_own_loop else _of(spans, trace.TRAINING, window) or window
    total_ns = max(1, length(within))
    compute = _of(spans, trace.COMPUTE, within)
    if is_own_loop:
        compute = _between(_of(spans, (trace.LOAD, trace.INJECTED), within), start_ns, end_ns)
    wait = _of(spans, (trace.WAIT,), within)
    beside = intersection(_of(spans, trace.COMMUNICATE, within), compute)
    computing_ns = length(compute) - length(intersection(compute, wait))
    exposed_ns = length(wait)
    injected_ns = length(_of(spans, (trace.INJECTED,), within))
    hidden_ns = length(beside) - length(intersection(beside, wait))
    return TimeShares(
        computing_ns / total_ns,
        exposed_ns / total_ns,
        1 - (computing_ns + exposed_ns + injected_ns) / total_ns,
        hidden_ns / total_ns,
        total_ns / 1e9,
        injected_ns / total_ns,
    )


def _of(
    spans: Sequence[trace.Span], kinds: Collection[str], within: list[Interval]
) -> list[Interval]:
    """When there was a span of these kinds, inside the given intervals."""
    return intersection(union((s.start_ns, s.end_ns) for s in spans if s.kind in kinds), within)


def _between(intervals: list[Interval], start: int, end: int) -> list[Interval]:
    """The points from `start` to `end` that lie in none of the intervals, which are sorted."""
    ends = [start, *(stop for _, stop in intervals)]
    starts = [*(begin for begin, _ in intervals), end]
    return [(a, b) for a, b in zip(ends, starts, strict=True) if a < b]


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
    i = j = 0
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


def write_chrome(spans_by_rank: dict[int, list[trace.Span]], file: Path) -> str:
    """A sentence that says where it is."""
    file.write_text(json.dumps({"traceEvents": trace.chrome_events(spans_by_rank)}))
    return f"trace: {file} (open it in chrome://tracing or ui.perfetto.dev)"


def print_shares(spans_by_rank: dict[int, list[trace.Span]]) -> None:
    from rich.console import Console
    from rich.table import Table

    shares_by_rank = {rank: time_shares(spans) for rank, spans in spans_by_rank.items()}
    is_slowed = any(shares.injected for shares in shares_by_rank.values())
    table = Table(title="where the time went, in training")
    columns = ["rank", "seconds", "computing", "communication exposed", "hidden", "idle"]
    for column in [*columns, "injected"] if is_slowed else columns:
        table.add_column(column, justify="right")
    for rank, shares in shares_by_rank.items():
        parts = [shares.computing, shares.exposed, shares.hidden, shares.idle, shares.injected]
        shown = [f"{part:.1%}" for part in parts[: len(table.columns) - 2]]
        table.add_row(str(rank), f"{shares.seconds:.2f}", *shown)
    Console().print(table)
