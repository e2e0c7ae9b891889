"""Spans of time of each rank, on one clock. Every layer may record them.

A span is on a track. The track "main" is the thread that computes: its spans do not overlap, and
the time that they do not cover is idle. Other tracks, such as "comm", hold transfers that run
beside it; "steps" tells which time is training. Without a trace the tracer is `OFF`, whose spans
cost next to nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from shoal.errors import BadInput
from shoal.runtime.run_dir import RunDir, read

T = TypeVar("T")
COMPUTE = ("forward", "backward", "update")
COMMUNICATE = ("reduce", "send", "receive", "push", "pull")
WAIT = "wait"
ISSUED = "issued"  # a track: the moments at which messages were handed over
INJECTED = "injected"  # the sleep of --slow
STEP = "step"
LOAD = "load"  # the next batch
_MAX_BYTES = 1 << 30  # of a rank's spans
TRAINING = (STEP, LOAD)  # on the track "steps": not start-up, evaluation, checkpoints


class Span(NamedTuple):
    """What a rank did from one moment to another."""

    kind: str
    start_ns: int
    end_ns: int
    track: str
    detail: str


class SentBytes:
    """What the calls of `group.counted(sent)` make this rank send, in `total` bytes.

    A call counts as the schedule that sends the least: an all-reduce of V bytes 2V(p-1)/p, as a
    ring does; an all-gather the piece for each of the other ranks. How the executor carries it
    out (a tree of more bytes and fewer rounds, shared memory) does not change the count, unless
    the algorithm of an all-reduce has been named: then it is what that one sends.
    """

    def __init__(self) -> None:
        self.total = 0

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What is sent in the block is not counted."""
        before = self.total
        yield
        self.total = before


class Tracer:
    """Where spans go. This one records nothing."""

    enabled = False
    origin_ns = 0  # the moment that spans count from
    sent = SentBytes()  # by calls of groups whose spans are recorded
    _nothing: AbstractContextManager[None] = nullcontext()

    def span(self, kind: str, detail: str = "") -> AbstractContextManager[None]:
        return self._nothing

    def add(self, kind: str, start_ns: int, end_ns: int, track: str, detail: str = "") -> None:
        return None


OFF = Tracer()


def traced_items(tracer: Tracer, kind: str, track: str, items: Iterator[T]) -> Iterator[T]:
    """The items, with a span for the time that each one takes to come."""
    return _with_spans(tracer, kind, track, items) if tracer.enabled else items


def _with_spans(tracer: Tracer, kind: str, track: str, items: Iterator[T]) -> Iterator[T]:
    start_ns = time.monotonic_ns()
    for item in items:
        tracer.add(kind, start_ns, time.monotonic_ns(), track)
        yield item
        start_ns = time.monotonic_ns()


class Recorder(Tracer):
    """Keeps the spans of one rank in memory until `write`.

    `origin_ns` is time zero of all ranks. On one host it is rank 0's reading of the monotonic
    clock, which processes share; between hosts each rank reads its clock after the same barrier.
    """

    enabled = True

    def __init__(self, rank: int, origin_ns: int):
        self.rank = rank
        self.origin_ns = origin_ns
        self.spans: list[Span] = []
        self.sent = SentBytes()

    @contextmanager
    def span(self, kind: str, detail: str = "") -> Iterator[None]:
        start_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self.add(kind, start_ns, time.monotonic_ns(), "main", detail)

    def add(self, kind: str, start_ns: int, end_ns: int, track: str, detail: str = "") -> None:
        # list.append is atomic, so hooks on other threads need no lock here
        self.spans.append(
            Span(kind, start_ns - self.origin_ns, end_ns - self.origin_ns, track, detail)
        )

    def write(self, folder: Path) -> None:
        """Write this rank's spans to `folder`, for `read_spans`."""
        rows = [list(span) for span in self.spans]
        text = json.dumps({"rank": self.rank, "spans": rows})
        RunDir(folder).spans(self.rank).write_text(text)


def read_spans(folder: Path) -> dict[int, list[Span]]:
    """The spans of each rank in `folder`, by rank."""
    spans_by_rank: dict[int, list[Span]] = {}
    for path in RunDir(folder).all_spans():
        if (document := read(path, _MAX_BYTES)) is None:
            raise BadInput(f"{path} has no trace, or more than {_MAX_BYTES >> 20} MiB of it")
        spans_by_rank[int(document["rank"])] = [Span(*row) for row in document["spans"]]
    return dict(sorted(spans_by_rank.items()))


def chrome_events(spans_by_rank: dict[int, list[Span]]) -> list[dict[str, Any]]:
    """Events of the Chrome trace format: one process per rank, one thread per track, µs."""
    events: list[dict[str, Any]] = []
    for rank, spans in spans_by_rank.items():
        tracks = sorted({span.track for span in spans}, key=lambda track: (track != "main", track))
        events.append(_named("process_name", rank, 0, f"rank {rank}"))
        events += [_named("thread_name", rank, i, track) for i, track in enumerate(tracks)]
        for span in spans:
            events.append(
                {
                    "name": span.kind,
                    "cat": span.track,
                    "ph": "X",
                    "pid": rank,
                    "tid": tracks.index(span.track),
                    "ts": span.start_ns / 1e3,
                    "dur": (span.end_ns - span.start_ns) / 1e3,
                    "args": {"detail": span.detail},
                }
            )
    return events


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
