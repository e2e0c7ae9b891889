"""The output of workers: read by one thread, forwarded in complete lines.

A chunk of up to 64 KiB is read, split at its last newline, decoded, prefixed and written in
one call, so the cost is per chunk and not per line.
"""

from __future__ import annotations

import os
import selectors
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import IO, Any

from shoal.errors import BadInput
from shoal.runtime.files import document_of
from shoal.runtime.wording import say

Log = Callable[[bytes], None]  # complete lines


def no_log(lines: bytes) -> None:
    """Without --logs."""


class LogFiles(ExitStack):
    """rank-0.log, server-1.log, launcher.log …: made at the start, written line by line.

    A disk that is full ends the files, and not the run.
    """

    def __init__(self, folder: Path | None, appends: bool = False):
        """Files of an earlier run in the folder are replaced, unless this one continues it."""
        super().__init__()
        self._mode = "ab" if appends else "wb"
        self._folder = folder
        self._files: dict[str, IO[bytes]] = {}
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                why = f"cannot make the folder {folder}: {error.strerror}"
                raise BadInput(f"--logs: {why}") from error

    def of(self, role: str, number: int | None = None) -> Log:
        """Where the lines of one process go, also when it is started again."""
        if self._folder is None:
            return no_log
        name = role if number is None else f"{role}-{number}"
        if name not in self._files:
            path = self._folder / f"{name}.log"
            try:
                self._files[name] = self.enter_context(path.open(self._mode, buffering=0))
            except OSError as error:
                raise BadInput(f"--logs: cannot write {path}: {error.strerror}") from error
        return lambda lines: self._write(name, lines)

    def _write(self, name: str, lines: bytes) -> None:
        file = self._files[name]
        if file.closed:
            return
        try:
            file.write(lines)
        except OSError as error:
            file.close()
            say(f"{name}.log ends here: {error.strerror}; the run goes on")


Write = Callable[[str, bool], None]  # complete lines, each with its newline; is it stderr?
OnProgress = Callable[[dict[str, Any]], None]

_CHUNK_BYTES = 64 * 1024
_LINE_BYTES = 1024 * 1024  # a longer line is forwarded in pieces
_TAIL_LINES = 100
_LEFTOVER_CHUNKS = 16  # a pipe holds one chunk; an enlarged pipe holds up to 16


def discard_lines(text: str, is_stderr: bool) -> None:
    """A `Write` that shows nothing."""


def print_lines(text: str, is_stderr: bool) -> None:
    """Write the output of workers to stdout and stderr."""
    stream = sys.stderr if is_stderr else sys.stdout
    try:
        stream.write(text)
    except UnicodeEncodeError:  # a terminal that is not UTF-8
        encoding = stream.encoding
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


class LineForwarder:
    """One output stream of one worker."""

    def __init__(self, write: Write, prefix: str, is_stderr: bool, log: Log = no_log):
        self._write = write
        self._prefix = prefix
        self._is_stderr = is_stderr
        self._log = log
        self._partial = b""
        self._tail: deque[bytes] = deque(maxlen=_TAIL_LINES)

    def feed(self, data: bytes) -> None:
        lines, newline, self._partial = (self._partial + data).rpartition(b"\n")
        if newline:
            self._forward(lines)
        if len(self._partial) > _LINE_BYTES:
            self.close()

    def close(self) -> None:
        """A last line without a newline gets one."""
        if self._partial:
            self._forward(self._partial)
            self._partial = b""

    def tail(self) -> str:
        """The last 100 lines."""
        return _decode(b"\n".join(self._tail))

    def _forward(self, lines: bytes) -> None:
        self._tail.extend(lines.rsplit(b"\n", _TAIL_LINES)[-_TAIL_LINES:])
        self._log(lines + b"\n")
        text = _decode(lines)
        if self._prefix:
            text = self._prefix + text.replace("\n", "\n" + self._prefix)
        self._write(text + "\n", self._is_stderr)


Streams = tuple[LineForwarder, LineForwarder]  # stdout, stderr


def progress_lines(on_progress: OnProgress) -> LineForwarder:
    """The progress that a worker sends: one JSON object a line; other lines are ignored."""

    def take(text: str, is_stderr: bool) -> None:
        for line in text.splitlines():
            if (record := document_of(line)) is not None:
                on_progress(record)

    return LineForwarder(take, "", False)


class OutputSink:
    """Calls what takes output. The first error is handed on, and the rest is discarded."""

    def __init__(self, on_error: Callable[[Exception], None]):
        self._on_error = on_error
        self._handling = threading.Lock()
        self._has_failed = False
        self.is_used = threading.Event()

    def call(self, act: Callable[[], None]) -> None:
        self.is_used.set()
        with self._handling:
            if self._has_failed:
                return
            try:
                act()
            except Exception as error:
                self._has_failed = True
                self._on_error(error)


class OutputPump(AbstractContextManager["OutputPump"]):
    """A thread that copies bytes from pipes to sinks until the block ends.

    When a sink raises, `on_error` is called once, and the rest is read and discarded: a worker
    must not block on a pipe that is full.
    """

    def __init__(self, on_error: Callable[[Exception], None]):
        self.sink = OutputSink(on_error)
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._thread: threading.Thread | None = None

    def __exit__(self, *_: object) -> None:
        """Forward what the pipes still hold, and close them."""
        os.close(self._wake_write)
        if self._thread is None:
            self._finish()
        else:
            self._thread.join(timeout=5.0)  # it is late only when a sink blocks

    def add(self, pipe: int, sink: LineForwarder) -> None:
        """Copy from this pipe, which the pump closes; call it before `start`."""
        os.set_blocking(pipe, False)
        self._selector.register(pipe, selectors.EVENT_READ, sink)

    def connect(self, pipes: tuple[int, int], streams: Streams) -> LineForwarder:
        """The output of a process; returns its stderr."""
        for pipe, stream in zip(pipes, streams, strict=True):
            self.add(pipe, stream)
        return streams[1]

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="shoal-output", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        awake = True
        while awake:
            for key, _ in self._selector.select():
                if key.data is None:
                    awake = False
                else:
                    self._copy(key.fd, key.data)
        self._finish()

    def _finish(self) -> None:
        self._selector.unregister(self._wake_read)
        os.close(self._wake_read)
        for key in list(self._selector.get_map().values()):
            for _ in range(_LEFTOVER_CHUNKS):
                if not self._copy(key.fd, key.data):
                    break
            if key.fd in self._selector.get_map():
                self._end(key.fd, key.data)
        self._selector.close()

    def _copy(self, pipe: int, sink: LineForwarder) -> bool:
        """Copy one chunk; False when there is none, now or ever."""
        try:
            data = os.read(pipe, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if data:
            self.sink.call(lambda: sink.feed(data))
        else:
            self._end(pipe, sink)
        return bool(data)

    def _end(self, pipe: int, sink: LineForwarder) -> None:
        self._selector.unregister(pipe)
        os.close(pipe)
        self.sink.call(sink.close)

    def progress_pipe(self, on_progress: OnProgress | None) -> int | None:
        """A worker's end, for the worker to take; None where progress is not shown."""
        if on_progress is None:
            return None
        pipe, worker_end = os.pipe()
        self.add(pipe, progress_lines(on_progress))
        return worker_end


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")
