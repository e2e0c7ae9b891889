"""What workers of an elastic run know of each other: documents in one order, and who has exited.

    one host        lines of a file in the run directory           `RunDirBoard`, here
    several hosts   a log that the launcher of the run serves      `NetworkBoard`

Documents and exits are consistent: what a process has appended is final where it has exited.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from shoal.errors import CheckpointError
from shoal.runtime.run_dir import RunDir

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


Document = dict[str, Any]  # JSON


class GroupMember(NamedTuple):
    """A process of a worker: the first one has the incarnation 0."""

    worker: int
    incarnation: int


class Records(Protocol):
    """Documents that workers append. Each of them is handed to its reader once, in one order."""

    def look(self) -> None:
        """Hand over what the others have appended."""
        ...

    def append(self, write: Callable[[], Document | None]) -> None:
        """Append what `write` returns, if anything, and hand it over like the others.

        `write` has seen all documents before its own: it is called again where others came first.
        """
        ...

    def has_grown(self) -> bool:
        """Whether there is something to look at; cheap enough for every step."""
        ...


class Board(Protocol):
    """One worker's view of an elastic run."""

    def records(self, take: Callable[[Document], None]) -> Records:
        """`take` is called with every document, those of this process included."""
        ...

    def has_exited(self, member: GroupMember) -> bool: ...

    def is_absent(self, worker: int) -> bool:
        """Whether no process of this worker runs."""
        ...

    def watch(self, on_exit: Callable[[GroupMember], None]) -> None:
        """From now on `on_exit` is called, from a thread, where connections do not show an exit."""
        ...

    def close(self) -> None: ...


class RunDirBoard:
    """For workers that see one run directory. Groups of shared memory notice exits themselves."""

    def __init__(self, run_dir: RunDir, run_number: int):
        self._run_dir = run_dir
        self._run_number = run_number

    def records(self, take: Callable[[Document], None]) -> Records:
        return RecordFile(self._run_dir.members(self._run_number), take)

    def has_exited(self, member: GroupMember) -> bool:
        return self._run_dir.has_ended(*member)

    def is_absent(self, worker: int) -> bool:
        return self._run_dir.has_exited(worker)

    def watch(self, on_exit: Callable[[GroupMember], None]) -> None:
        pass

    def close(self) -> None:
        pass


T = TypeVar("T")
Key = tuple[int, int]  # a step, and the number of a call among those of that step


class CallResults:
    """The owner of `records` hands the documents of results to `take`."""

    def __init__(self, records: Records):
        self._records = records
        self._results: dict[Key, dict[str, Any]] = {}
        self._last_key: Key | None = None

    def next_key(self, steps: int) -> Key:
        """That of the call which this worker makes now, after so many steps."""
        last = self._last_key
        self._last_key = (steps, last[1] + 1 if last is not None and last[0] == steps else 0)
        return self._last_key

    def __contains__(self, key: Key) -> bool:
        return key in self._results

    def share(self, key: Key, act: Callable[[], T]) -> T:
        """What `act` returns, which has to be JSON; it is the result for the others."""
        try:
            result = act()
        except CheckpointError as error:
            self._conclude(key, {"error": str(error)})
            raise
        self._conclude(key, {"result": result})
        return result

    def get(self, key: Key) -> Any:
        """What the call returned to those who took part, or the error that it raised."""
        document = self._results[key]
        if "error" in document:
            raise CheckpointError(str(document["error"]))
        return document["result"]

    def take(self, document: dict[str, Any]) -> None:
        """A result that was read."""
        self._results[document["at"][0], document["at"][1]] = document

    def _conclude(self, key: Key, document: dict[str, Any]) -> None:
        self._records.append(lambda: None if key in self._results else {"at": key, **document})
