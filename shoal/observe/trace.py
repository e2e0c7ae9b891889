"""Spans of time per rank, on one clock. At the ground of the house: everybody may record one.

A span belongs to a lane. The lane "main" is the thread that computes: its spans do not overlap,
and what they leave uncovered is idle. The lane "comm" holds transfers that run beside it.
Tracing is off unless asked for; `OFF.span(...)` then hands out one shared empty context.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol

COMPUTE = ("forward", "backward", "update")
COMMUNICATE = ("reduce", "send", "receive", "push", "pull")
WAIT = "wait"


class Span(NamedTuple):
    kind: str
    start_ns: int
    end_ns: int
    lane: str
    detail: str


class Tracer(Protocol):
    """Where spans go."""

    @property
    def enabled(self) -> bool: ...
    @property
    def origin_ns(self) -> int: ...  # the moment that spans count from
    def span(self, kind: str, detail: str = "") -> AbstractContextManager[None]: ...
    def add(self, kind: str, start_ns: int, end_ns: int, lane: str, detail: str = "") -> None: ...


class Off:
    """The tracer that records nothing and costs next to nothing."""

    enabled = False
    origin_ns = 0
    _nothing: AbstractContextManager[None] = nullcontext()

    def span(self, kind: str, detail: str = "") -> AbstractContextManager[None]:
        return self._nothing

    def add(self, kind: str, start_ns: int, end_ns: int, lane: str, detail: str = "") -> None:
        return None


OFF = Off()


class Recorder:
    """Keeps the spans of one rank in memory until `write`.

    `origin_ns` is the moment that all ranks call zero. On one host it is rank 0's reading of the
    monotonic clock, which processes share; between hosts each rank reads its own clock when it
    leaves the same barrier.
    """

    enabled = True

    def __init__(self, rank: int, origin_ns: int):
        self.rank = rank
        self.origin_ns = origin_ns
        self.spans: list[Span] = []

    @contextmanager
    def span(self, kind: str, detail: str = "") -> Iterator[None]:
        start_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self.add(kind, start_ns, time.monotonic_ns(), "main", detail)

    def add(self, kind: str, start_ns: int, end_ns: int, lane: str, detail: str = "") -> None:
        # list.append is atomic, so hooks on other threads need no lock here
        self.spans.append(
            Span(kind, start_ns - self.origin_ns, end_ns - self.origin_ns, lane, detail)
        )

    def write(self, folder: Path) -> None:
        """Leave this rank's spans in `folder`, for `merge` to collect."""
        rows = [list(span) for span in self.spans]
        path = folder / f"spans-{self.rank}.json"
        path.write_text(json.dumps({"rank": self.rank, "spans": rows}))


def read(folder: Path) -> dict[int, list[Span]]:
    """The spans that each rank left in `folder`, by rank."""
    found: dict[int, list[Span]] = {}
    for path in folder.glob("spans-*.json"):
        document = json.loads(path.read_text())
        found[int(document["rank"])] = [Span(*row) for row in document["spans"]]
    return dict(sorted(found.items()))


def chrome_events(spans_by_rank: dict[int, list[Span]]) -> list[dict[str, Any]]:
    """Events of the Chrome trace format: a process a rank, a thread a lane, times in µs."""
    events: list[dict[str, Any]] = []
    for rank, spans in spans_by_rank.items():
        lanes = sorted({span.lane for span in spans}, key=lambda lane: (lane != "main", lane))
        events.append(_named("process_name", rank, 0, f"rank {rank}"))
        events += [_named("thread_name", rank, i, lane) for i, lane in enumerate(lanes)]
        for span in spans:
            events.append(
                {
                    "name": span.kind,
                    "cat": span.lane,
                    "ph": "X",
                    "pid": rank,
                    "tid": lanes.index(span.lane),
                    "ts": span.start_ns / 1e3,
                    "dur": (span.end_ns - span.start_ns) / 1e3,
                    "args": {"detail": span.detail},
                }
            )
    return events


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
