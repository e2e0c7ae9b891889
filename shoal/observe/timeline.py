"""What each worker and server did in some steps, as it was measured; the critical path of a step.

rank 0  F0─────── B0──── ··············· U
rank 1  F0────────── B0───── Z───────── ·U
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

from shoal.errors import BadInput
from shoal.observe import time_shares
from shoal.observe.time_shares import Arrivals, Interval, TimeShares
from shoal.runtime import trace
from shoal.runtime.trace import Process, Span, Trace

OTHER = "other"  # in no span: Python, copies; a server that has nothing to do
WORKER = "worker"
TRANSFER = "transfer"
SERVER = "server"
_BESIDE = (trace.EVALUATE, trace.CHECKPOINT)  # training: they have no share of it
_AROUND = (trace.LOAD, *_BESIDE)


class PathHop(NamedTuple):
    """A process on the critical path, and what it does there."""

    process: Process
    spans: list[Span]


class StepTime(NamedTuple):
    """From its first begin to its last end, on `last`."""

    start_ns: int
    end_ns: int
    last: Process


class KindTotal(NamedTuple):
    """All spans of a kind, on workers, beside their computation (transfers) or on servers."""

    where: str
    kind: str
    spans: int
    seconds: float
    sent_bytes: int
    share: float | None = None  # of the training of all workers, or of the time of all servers


def steps_of(spans: Iterable[Span]) -> dict[int, Interval]:
    """When a rank made each step, loading of its batch included.

    In a loop of the user's own, which has no spans of steps, one goes from batch to batch.
    """
    marks = sorted((s for s in spans if s.kind in trace.TRAINING), key=lambda s: s.start_ns)
    if not any(mark.kind == trace.STEP for mark in marks):
        return dict(enumerate(pairwise(mark.start_ns for mark in marks), 1))
    found: dict[int, Interval] = {}
    load_ns: int | None = None
    for mark in marks:
        if mark.kind == trace.STEP:
            word = mark.detail.removeprefix("step ")
            number = int(word) if word.isdecimal() and len(word) < 12 else len(found) + 1
            found[number] = (mark.start_ns if load_ns is None else load_ns, mark.end_ns)
        load_ns = mark.start_ns if mark.kind == trace.LOAD else None
    return found


def row_of(spans: Iterable[Span], window: Interval) -> list[Span]:
    """The time between two moments, divided: the innermost span of each, or OTHER.

    Of waits in waits it is the outermost.
    """
    found: list[Span] = []
    begun = [Span(OTHER, *window, "main")]
    now_ns = window[0]

    def go_to(moment_ns: int) -> None:
        nonlocal now_ns
        while now_ns < moment_ns:
            while begun[-1].end_ns <= now_ns:
                begun.pop()
            end_ns = min(begun[-1].end_ns, moment_ns)
            found.append(begun[-1]._replace(start_ns=now_ns, end_ns=end_ns))
            now_ns = end_ns

    for span in sorted(spans, key=lambda s: (s.start_ns, -s.end_ns)):
        is_inner_wait = begun[-1].kind == span.kind == trace.WAIT
        is_inner_wait = is_inner_wait and begun[-1].end_ns >= span.end_ns
        if span.end_ns > window[0] and span.start_ns < window[1] and not is_inner_wait:
            go_to(span.start_ns)
            begun.append(span)
    go_to(window[1])
    return found


def _of_row(process: Process, spans: Sequence[Span]) -> list[Span]:
    """What a rank's main thread does; what a server handles.

    A pull that waits at the server for an update is handled from the end of that on.
    """
    if isinstance(process, int):
        return [s for s in spans if s.track == "main" or s.kind in _AROUND]
    ends = sorted(s.end_ns for s in spans if s.kind == "update")
    found = []
    for span in spans:
        at = bisect_left(ends, span.end_ns) - 1
        is_late = span.kind == "pull" and at >= 0 and ends[at] > span.start_ns
        found.append(span._replace(start_ns=ends[at]) if is_late else span)
    return found


def _process_row(process: Process, spans: Sequence[Span], window: Interval) -> list[Span]:
    """In a loop of the user's own, what is in no span computes."""
    row = row_of(_of_row(process, spans), window)
    if isinstance(process, str) or not time_shares.is_own_loop(spans):
        return row
    return [span._replace(kind="computing") if span.kind == OTHER else span for span in row]


@dataclass(frozen=True)
class MeasuredTimeline:
    """Some steps of a trace, by number; all of a trace without steps."""

    trace: Trace
    steps: Mapping[int, StepTime]
    window: Interval
    counted: Interval | None = None  # by shares and kinds; None: all training

    @cached_property
    def rows(self) -> dict[Process, list[Span]]:
        given = self.trace.items()
        return {who: _process_row(who, spans, self.window) for who, spans in given}

    @cached_property
    def shares(self) -> dict[Process, TimeShares]:
        """Of each rank."""
        return time_shares.all_shares(self.trace, self.counted)

    @cached_property
    def kinds(self) -> list[KindTotal]:
        """Workers, transfers, servers; of each the longest first."""
        ranks = [who for who in self.trace if isinstance(who, int) and self.trace[who]]
        trained = {
            str(who): time_shares.training_of(self.trace[who], self.counted) for who in ranks
        }
        edges = list(chain.from_iterable(chain(*trained.values()))) or self.window
        whole = min(edges), max(edges)
        shown = Counter[tuple[str, str]]()
        taken_ns = shown.copy()
        sent = shown.copy()
        whole_ns = Counter[str]()
        for process, spans in self.trace.items():
            where = WORKER if isinstance(process, int) else SERVER
            within = [s for s in spans if whole[0] <= s.start_ns < whole[1]]
            beside = [s for s in within if s.track not in ("main", "steps")]
            beside = [s for s in beside if s.bytes or s.track != trace.ISSUED]
            counted = trained.get(str(process), [whole])
            whole_ns[where] += time_shares.length(counted)
            intervals = defaultdict[str, list[Interval]](list)
            for span in _process_row(process, spans, whole):
                intervals[span.kind].append((span.start_ns, span.end_ns))
            for kind, each in intervals.items():
                held = each if kind in _BESIDE else time_shares.intersection(each, counted)
                taken_ns[where, kind] += time_shares.length(held)
            for span in within if where == SERVER else beside:
                key = (SERVER if where == SERVER else TRANSFER, span.kind)
                sent[key] += span.bytes
                shown[key] += 1
                taken_ns[key] += 0 if where == SERVER else span.end_ns - span.start_ns
            for span in _of_row(process, within) if where == WORKER else ():
                shown[where, span.kind] += 1
                sent[where, span.kind] += span.bytes
        order = [WORKER, TRANSFER, SERVER]
        keys = sorted(taken_ns, key=lambda key: (order.index(key[0]), -taken_ns[key]))
        share_of = [k for k in keys if whole_ns[k[0]] and k[1] not in _BESIDE]
        shares = {k: taken_ns[k] / whole_ns[k[0]] for k in share_of}
        return [KindTotal(*k, shown[k], taken_ns[k] / 1e9, sent[k], shares.get(k)) for k in keys]

    def critical_path(self, number: int) -> list[PathHop]:
        """Back from the end of a step; where a process waited for a peer, over to that one."""
        start_ns, end_ns, process = self.steps[number]
        hops = []
        while end_ns > start_ns:
            known = self._late[process]
            at = bisect_left(known, end_ns, key=lambda late: late[0]) - 1
            since_ns, peer = known[at] if at >= 0 else (start_ns, process)
            since_ns = max(since_ns, start_ns)
            hops.append(PathHop(process, self._between(process, since_ns, end_ns)))
            process = peer
            end_ns = since_ns
        return hops[::-1]

    def _between(self, process: Process, start_ns: int, end_ns: int) -> list[Span]:
        row = self.rows[process]
        first = bisect_right(row, start_ns, key=lambda span: span.end_ns)
        last = bisect_left(row, end_ns, key=lambda span: span.start_ns)
        found = row[first:last]
        found[0] = found[0]._replace(start_ns=start_ns)
        found[-1] = found[-1]._replace(end_ns=end_ns)
        return found

    @cached_property
    def _late(self) -> Mapping[Process, list[tuple[int, Process]]]:
        """Until when each process waited for whom, in order; a pull is for the server's update."""
        arrivals = Arrivals(self.trace)
        found: dict[Process, list[tuple[int, Process]]] = {process: [] for process in self.trace}
        made: dict[str, tuple[int, Process]] = {}  # when and on which server, the last of them
        for process, spans in self.trace.items():
            for span in spans if isinstance(process, str) else ():
                if span.kind == "update" and span.peer is not None and span.peer in found:
                    found[process].append((span.start_ns, span.peer))
                    made[span.call] = max(made.get(span.call, (0, "")), (span.end_ns, process))
        for process, spans in self.trace.items():
            for span in (s for s in spans if s.kind == trace.WAIT):
                until_ns, peer = made.get(span.call, (0, process))
                if not span.start_ns < until_ns <= span.end_ns:
                    late = arrivals.last(process, span)
                    until_ns, peer = late[:2] if late else (0, process)
                if peer != process and peer in found:
                    found[process].append((until_ns, peer))
            found[process].sort(key=lambda late: late[0])
        return found


def _in_the_middle(steps: Mapping[int, Interval], spans: Iterable[Span]) -> list[int]:
    """Two steps, if there are such without evaluation or saving in between."""
    numbers = sorted(steps)
    middle = len(numbers) // 2
    breaks = sorted(s.start_ns for s in spans if s.kind in (trace.EVALUATE, trace.CHECKPOINT))
    for at in sorted(range(1, len(numbers)), key=lambda at: abs(at - middle)):
        one, other = numbers[at - 1 : at + 1]
        if bisect_left(breaks, steps[one][0]) == bisect_left(breaks, steps[other][1]):
            return [one, other]
    return numbers[max(0, middle - 1) : middle + 1]


def select(spans: Trace, first: int | None = None, last: int | None = None) -> MeasuredTimeline:
    """The steps from `first` to `last`; two from the middle of training where none are named."""
    by_rank = {rank: steps_of(known) for rank, known in spans.items() if isinstance(rank, int)}
    leading = next((steps for steps in by_rank.values() if steps), {})
    numbers = sorted(leading)
    shown = _in_the_middle(leading, chain(*spans.values()))
    if first is not None and last is not None:
        shown = [number for number in numbers if first <= number <= last]
        if not shown:
            there = f"steps {numbers[0]} to {numbers[-1]}" if numbers else "no steps"
            raise BadInput(f"there is no step from {first} to {last}: the trace has {there}")
    steps = {}
    for number in shown:
        begin_ns, end_ns = leading[number]
        every = [StepTime(*made[number], rank) for rank, made in by_rank.items() if number in made]
        # without lockstep it need not be in the same time
        at_once = [step for step in every if step.start_ns < end_ns and step.end_ns > begin_ns]
        latest = max(at_once, key=lambda step: step.end_ns)
        steps[number] = latest._replace(start_ns=min(step.start_ns for step in at_once))
    edges: Sequence[StepTime | Span] = list(steps.values()) or list(chain(*spans.values()))
    if not edges:
        raise BadInput("the trace has no spans")
    window = (min(edge.start_ns for edge in edges), max(edge.end_ns for edge in edges))
    return MeasuredTimeline(spans, steps, window, None if first is None else window)
