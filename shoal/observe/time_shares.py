"""How the time of training was spent, in one vocabulary; a Chrome trace.

    computing    forward, backward, update
    exposed      communication that computing waits for; `hidden` runs beside computing
    waiting      for a peer that has not come to a collective, sent its message or pushed
    bubble       the same for the activations and gradients of a pipeline
    loading      the next batch
    injected     the sleep of --slow
    other        the rest: Python, copies, cutting of batches

The time is that of steps, and of loading their batches. Start-up, evaluation and checkpoints are
in the trace and in no share.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from shoal.runtime import trace
from shoal.runtime.trace import Process, Span, Trace, name_of

Interval = tuple[int, int]


@dataclass(frozen=True)
class TimeShares:
    """Fractions of one process's time in training; `hidden` is part of `computing`.

    computing + exposed + waiting + bubble + loading + injected + other = 1
    """

    seconds: float = 0.0
    computing: float = 0.0
    hidden: float = 0.0
    exposed: float = 0.0
    waiting: float = 0.0
    bubble: float = 0.0
    loading: float = 0.0
    injected: float = 0.0
    other: float = 0.0
    waited_for: Mapping[Process, float] = field(default_factory=dict)  # waiting and bubble, by peer

    @property
    def communication(self) -> float:
        """What the other processes cost this one."""
        return self.exposed + self.waiting + self.bubble


class Lateness(NamedTuple):
    """Until when somebody waits for whom; `is_bubble`: inside one replica's pipeline."""

    until_ns: int
    peer: Process
    is_bubble: bool


class Arrivals:
    """Who came last to what processes do together, and when."""

    def __init__(self, spans_by_process: Trace):
        self._last: dict[str, list[tuple[int, Process]]] = defaultdict(list)
        self._is_message: set[str] = set()
        self._pipelined: dict[Process, list[Span]] = {}
        for process, spans in spans_by_process.items():
            self._pipelined[process] = sorted(
                (s for s in spans if s.kind == trace.WAIT and s.microbatch is not None),
                key=lambda span: span.start_ns,
            )
            for span in spans:
                if not span.call:
                    continue
                if span.track == trace.ISSUED and span.kind == "send":
                    self._is_message.add(span.call)
                    self._last[span.call].append((span.start_ns, process))
                elif span.track == "comm" and span.kind != "send":
                    self._last[span.call].append((span.start_ns, process))
                elif span.kind == "update" and span.peer is not None:  # a push made it complete
                    self._last[span.call].append((span.start_ns, span.peer))

    def last(self, process: Process, wait: Span) -> Lateness | None:
        """Whom this wait of a process was for; None where no other was late."""
        come = [each for each in self._last.get(wait.call, ()) if each[0] <= wait.end_ns]
        if not come:
            return None
        until_ns, peer = max(come, key=lambda each: each[0])
        if peer == process or until_ns <= wait.start_ns:
            return None
        return Lateness(until_ns, peer, self._is_in_pipeline(process, wait))

    def _is_in_pipeline(self, process: Process, wait: Span) -> bool:
        around = self._pipelined[process]
        at = bisect_right(around, wait.start_ns, key=lambda span: span.start_ns) - 1
        return at >= 0 and wait.end_ns <= around[at].end_ns


def all_shares(given: Trace, between: Interval | None = None) -> dict[Process, TimeShares]:
    """Of each rank, in all of its training or that between two moments; servers have none."""
    arrivals = Arrivals(given)
    return {
        process: time_shares(spans, process, arrivals, between)
        for process, spans in given.items()
        if isinstance(process, int)
    }


def time_shares(
    spans: Sequence[Span],
    process: Process = 0,
    arrivals: Arrivals | None = None,
    between: Interval | None = None,
) -> TimeShares:
    """Divide the time of a rank's training, all of it or that between two moments.

    In a loop of the user's own, computing is where it neither loads nor waits.
    """
    if not spans:
        return TimeShares()
    arrivals = arrivals or Arrivals({process: list(spans)})
    within = training_of(spans, between)
    injected = _of(spans, (trace.INJECTED,), within)
    on_main = [s for s in spans if s.track == "main"]  # messages that it hands over itself
    held_up = [*_of(spans, (trace.WAIT,), within), *_of(on_main, trace.COMMUNICATE, within)]
    wait = without(union(held_up), injected)
    loading = without(_of(spans, (trace.LOAD,), within), union([*wait, *injected]))
    compute = _of(spans, trace.COMPUTE, within)
    if is_own_loop(spans):
        compute = without(within, loading)
    compute = without(compute, union([*wait, *injected]))
    late: dict[tuple[Process, bool], list[Interval]] = defaultdict(list)
    for span in spans:
        if span.kind == trace.WAIT and (found := arrivals.last(process, span)) is not None:
            late[found.peer, found.is_bubble].append((span.start_ns, found.until_ns))
    total_ns = max(1, length(within))
    waited_for: Counter[Process] = Counter()
    lost_ns = {False: 0, True: 0}  # waiting, bubble
    taken: list[Interval] = []
    for (peer, is_bubble), intervals in late.items():
        alone = without(intersection(union(intervals), wait), taken)
        taken = union([*taken, *alone])
        waited_for[peer] += length(alone)
        lost_ns[is_bubble] += length(alone)
    parts = {
        "computing": length(compute),
        "exposed": length(wait) - length(taken),
        "waiting": lost_ns[False],
        "bubble": lost_ns[True],
        "loading": length(without(loading, compute)),
        "injected": length(injected),
    }
    hidden_ns = length(intersection(_of(spans, trace.COMMUNICATE, within), compute))
    return TimeShares(
        seconds=total_ns / 1e9,
        hidden=hidden_ns / total_ns,
        other=1 - sum(parts.values()) / total_ns,
        waited_for={peer: ns / total_ns for peer, ns in waited_for.items() if ns},
        **{name: part_ns / total_ns for name, part_ns in parts.items()},
    )


def is_own_loop(spans: Iterable[Span]) -> bool:
    """It loads batches, and has no spans for its steps."""
    kinds = {span.kind for span in spans}
    return trace.LOAD in kinds and trace.STEP not in kinds


def training_of(spans: Sequence[Span], between: Interval | None = None) -> list[Interval]:
    """When a rank trained; without steps from its first span to its last."""
    window = [between or (min(s.start_ns for s in spans), max(s.end_ns for s in spans))]
    return window if is_own_loop(spans) else _of(spans, trace.TRAINING, window) or window


def _of(spans: Sequence[Span], kinds: Collection[str], within: list[Interval]) -> list[Interval]:
    """When there was a span of these kinds, inside the given intervals."""
    return intersection(union((s.start_ns, s.end_ns) for s in spans if s.kind in kinds), within)


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


def without(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """The points of `a` that are not in `b`; each list is sorted and without overlaps."""
    if not a:
        return []
    ends = [a[0][0], *(stop for _, stop in b)]
    starts = [*(begin for begin, _ in b), max(a[-1][1], ends[-1])]
    return intersection(a, [(s, e) for s, e in zip(ends, starts, strict=True) if s < e])


def length(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in intervals)


def write_chrome(spans_by_process: Trace, file: Path) -> str:
    """A sentence that says where it is."""
    file.write_text(json.dumps({"traceEvents": trace.chrome_events(spans_by_process)}))
    return f"trace: {file} (open it in chrome://tracing or ui.perfetto.dev)"


_PARTS = ("computing", "hidden", "exposed", "waiting", "bubble", "loading", "injected", "other")


def shown_parts(shares: Iterable[TimeShares]) -> list[str]:
    """The names of the parts that are more than nothing on some rank."""
    known = list(shares)
    return [name for name in _PARTS if any(getattr(each, name) >= 5e-4 for each in known)]


def waits(shares: Mapping[Process, TimeShares]) -> list[str]:
    """A line for each rank that waited: for whom, and which share of its time."""
    lines = []
    for process, each in shares.items():
        peers = sorted(each.waited_for.items(), key=lambda item: -item[1])
        words = [f"{name_of(peer)} {share:.1%}" for peer, share in peers if share >= 5e-4]
        if words:
            lines.append(f"{name_of(process)} waited for {', '.join(words)}")
    return lines
