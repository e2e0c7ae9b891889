"""Documents that processes append to one file under a lock; each of them reads what is new.

A document is a line of JSON. A line that a killed process left incomplete is not read.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_CHUNK_BYTES = 1 << 20


class RecordFile:
    """`take` is called with every document, those of this process included, in their order."""

    def __init__(self, file: Path, take: Callable[[dict[str, Any]], None]):
        self._file = file
        self._take = take
        self._read_bytes = 0

    def look(self) -> None:
        """Take what other processes have appended."""
        with self._locked():
            pass

    def append(self, write: Callable[[], dict[str, Any] | None]) -> None:
        """Append what `write` returns, if anything. Meanwhile no process reads or appends.

        `write` is called once, when all documents are taken.
        """
        with self._locked() as handle:
            document = write()
            if document is None:
                return
            line = b"\n" + json.dumps(document).encode() + b"\n"
            os.pwrite(handle, line, self._read_bytes)
            self._read_bytes += len(line)
            self._take_line(line)

    def has_grown(self) -> bool:
        """Whether there is something that was not read; one system call."""
        try:
            return os.stat(self._file).st_size > self._read_bytes
        except FileNotFoundError:
            return False

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """The file, while no other process has it; all documents are taken."""
        handle = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            self._read(handle)
            yield handle
        finally:
            os.close(handle)  # and with it the lock

    def _read(self, handle: int) -> None:
        text = b""
        while chunk := os.pread(handle, _CHUNK_BYTES, self._read_bytes + len(text)):
            text += chunk
        self._read_bytes += len(text)
        for line in text.splitlines():
            self._take_line(line)

    def _take_line(self, line: bytes) -> None:
        try:
            document = json.loads(line)
        except ValueError:
            return
        if isinstance(document, dict):
            self._take(document)
