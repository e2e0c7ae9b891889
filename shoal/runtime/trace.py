"""Spans of time of each process, on one clock. Every layer may record them.

A span is on a track. The track "main" is the thread that computes: its spans do not overlap, but
for waits inside of waits, and the time that they do not cover is idle. Other tracks, such as
"comm", hold transfers that run beside it; "steps" tells which time is training, and which is
evaluation and saving. Without a trace the tracer is `OFF`, whose spans cost next to nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from shoal.errors import BadInput
from shoal.runtime import clock
from shoal.runtime.decoders import convert
from shoal.runtime.files import write_atomically
from shoal.runtime.run_dir import RunDir, read

T = TypeVar("T")
Process = int | str  # a rank, or the name of a server
COMPUTE = ("forward", "backward", "weight gradient", "update")
MIX = "mix"  # replicas average, with the waits in it
COMMUNICATE = ("reduce", "gather", "send", "receive", "push", "pull", MIX)
WAIT = "wait"
ISSUED = "issued"  # a track: the moments at which messages were handed over
INJECTED = "injected"  # the sleep of --slow
STEP = "step"
LOAD = "load"  # the next batch
EVALUATE = "evaluate"
CHECKPOINT = "checkpoint"
_MAX_BYTES = 1 << 30  # of the spans of a process
TRAINING = (STEP, LOAD)  # on the track "steps": not start-up, evaluation, checkpoints


class Span(NamedTuple):
    """What a process did from one moment to another.

    `call` is the same text for all ranks that take part in a collective, for both ends of a
    message, and for a pull and the update that it waits for. `peer` sends, receives, or, at a
    server, has made the update complete. `bytes` are those that this process sends.
    """

    kind: str
    start_ns: int
    end_ns: int
    track: str
    detail: str = ""
    microbatch: int | None = None
    bytes: int = 0
    peer: Process | None = None
    call: str = ""


Trace = dict[Process, list[Span]]


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

    def span(
        self, kind: str, detail: object = "", microbatch: int | None = None, track: str = "main"
    ) -> AbstractContextManager[dict[str, Any] | None]:
        """What is put into the dict that it yields are further fields of the span.

        `detail` becomes text where it is recorded.
        """
        return self._nothing

    def add(self, *span: Any) -> None:
        """The fields of a `Span`, on the monotonic clock; the last ones may be left out."""


OFF = Tracer()


def traced_items(tracer: Tracer, kind: str, track: str, items: Iterator[T]) -> Iterator[T]:
    """The items, with a span for the time that each one takes to come."""
    return _with_spans(tracer, kind, track, items) if tracer.enabled else items


def _with_spans(tracer: Tracer, kind: str, track: str, items: Iterator[T]) -> Iterator[T]:
    start_ns = clock.monotonic_ns()
    for item in items:
        tracer.add(kind, start_ns, clock.monotonic_ns(), track)
        yield item
        start_ns = clock.monotonic_ns()


class Recorder(Tracer):
    """Keeps the spans of one process in memory until `write`.

    `origin_ns` is time zero of all processes, on this one's monotonic clock; processes of one host
    share it. A server does not know it, and counts from 0: `read_spans` takes it from a rank of
    the same `host`.
    """

    enabled = True

    def __init__(self, process: Process, origin_ns: int, host: str = ""):
        self.process = process
        self.origin_ns = origin_ns
        self.host = host
        self.spans: list[Span] = []
        self.sent = SentBytes()

    @contextmanager
    def span(
        self, kind: str, detail: object = "", microbatch: int | None = None, track: str = "main"
    ) -> Iterator[dict[str, Any]]:
        more: dict[str, Any] = {}
        start_ns = clock.monotonic_ns()
        try:
            yield more
        finally:
            self.spans.append(
                Span(kind, start_ns, clock.monotonic_ns(), track, str(detail), microbatch, **more)
            )

    def add(self, *span: Any) -> None:
        # list.append is atomic, so hooks on other threads need no lock here
        self.spans.append(Span(*span))

    def write(self, folder: Path) -> None:
        """Write the spans of this process to `folder`, for `read_spans`."""
        name = str(self.process).replace(" ", "-")
        written = _Written(self.process, self.host, self.origin_ns, self.spans)
        write_atomically(RunDir(folder).spans(name), msgspec.json.encode(written))


class _Written(msgspec.Struct):
    """The file of one process; spans are on its own clock."""

    process: Process
    host: str
    origin_ns: int
    spans: list[Span]


def read_spans(folder: Path) -> Trace:
    """The spans of each process in `folder`, on one clock: ranks first, then servers.

    A server on a host without workers is left out: its clock cannot be related to theirs.
    """
    found: list[_Written] = []
    for path in RunDir(folder).all_spans():
        if (document := read(path, _MAX_BYTES)) is None:
            raise BadInput(f"{path} has no trace, or more than {_MAX_BYTES >> 20} MiB of it")
        found.append(convert(document, _Written))
    origins = {each.host: each.origin_ns for each in found if isinstance(each.process, int)}
    spans: Trace = {}
    for each in sorted(found, key=_place):
        origin_ns = each.origin_ns if isinstance(each.process, int) else origins.get(each.host)
        if origin_ns is not None:
            spans[each.process] = [
                s._replace(start_ns=s.start_ns - origin_ns, end_ns=s.end_ns - origin_ns)
                for s in each.spans
            ]
    return spans


def _place(written: _Written) -> tuple[bool, list[int]]:
    """Ranks, then servers, each by their numbers."""
    numbers = re.findall(r"\d+", str(written.process))
    return isinstance(written.process, str), [int(number) for number in numbers]


def name_of(process: Process) -> str:
    return f"rank {process}" if isinstance(process, int) else process


def server_name(index: int, copy: int | None = None) -> str:
    """Of a server; of one of the copies of a shard."""
    return f"server {index}" if copy is None else f"shard {index} copy {copy}"


def chrome_events(spans_by_process: Trace) -> list[dict[str, Any]]:
    """Events of the Chrome trace format: a process each, one thread per track, µs."""
    events: list[dict[str, Any]] = []
    for pid, (process, spans) in enumerate(spans_by_process.items()):
        tracks = sorted({span.track for span in spans}, key=lambda track: (track != "main", track))
        events.append(_named("process_name", pid, 0, name_of(process)))
        events += [_named("thread_name", pid, i, track) for i, track in enumerate(tracks)]
        numbers = {track: i for i, track in enumerate(tracks)}
        for span in spans:
            given = zip(_ARGS, span[4:], strict=True)
            args = {name: value for name, value in given if value != Span._field_defaults[name]}
            events.append(
                {
                    "name": span.kind,
                    "cat": span.track,
                    "ph": "X",
                    "pid": pid,
                    "tid": numbers[span.track],
                    "ts": span.start_ns / 1e3,
                    "dur": (span.end_ns - span.start_ns) / 1e3,
                    "args": args,
                }
            )
    return events


_ARGS = Span._fields[4:]


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def from_chrome(file: Path) -> Trace:
    """What `chrome_events` has made of spans, from a file of them."""
    wrong = f"{file} is no trace of shoal run --trace"
    document = read(file, _MAX_BYTES)
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise BadInput(wrong)
    names: dict[Any, Process] = {}
    spans: Trace = {}
    try:
        for event in document["traceEvents"]:
            if event["name"] == "process_name":
                name = event["args"]["name"]
                is_rank = name.startswith("rank ")
                names[event["pid"]] = int(name.removeprefix("rank ")) if is_rank else name
                spans[names[event["pid"]]] = []
            elif event["ph"] == "X":
                start_ns, length_ns = (round(event[key] * 1e3) for key in ("ts", "dur"))
                given = {key: event["args"][key] for key in _ARGS if key in event["args"]}
                spans[names[event["pid"]]].append(
                    convert(
                        Span(event["name"], start_ns, start_ns + length_ns, event["cat"], **given),
                        Span,
                    )
                )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise BadInput(wrong) from error
    return spans


def open_trace(path: Path) -> Trace:
    """The trace in a file, or in a folder: its trace.json, or the spans of each process."""
    if path.is_dir() and RunDir(path).all_spans():
        return read_spans(path)
    file = path / "trace.json" if path.is_dir() else path
    if not file.is_file():
        raise BadInput(f"there is no trace at {path}: shoal run --trace FILE writes one")
    return from_chrome(file)
