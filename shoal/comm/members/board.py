"""What workers of a run know of each other: documents in one order, and who has exited.

    one host        lines of a file in the run directory           `FileBoard`, here
    several hosts   a log that the launcher of the run serves      `NetworkBoard`

Documents and exits are consistent: what a process has appended is final where it has exited.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from shoal.errors import CheckpointError
from shoal.runtime.files import document_of, locked
from shoal.runtime.run_dir import RunDir

T = TypeVar("T")
Document = dict[str, Any]  # JSON
Key = tuple[int, int]  # a step, and the number of a call among those of that step
_CHUNK_BYTES = 1 << 20


class GroupMember(NamedTuple):
    """A process of a worker: the first one has the incarnation 0."""

    worker: int
    incarnation: int


class Board:
    """One worker's view of a run. `take` is called with every document, in their order."""

    take: Callable[[Document], None]  # set by the reader of the record

    def look(self) -> None:
        """Take what the others have appended."""
        raise NotImplementedError

    def append(self, write: Callable[[], Document | None]) -> None:
        """Append what `write` returns, if anything, and take it like the others.

        `write` has seen all documents before its own: it is called again where others came first.
        """
        raise NotImplementedError

    def has_grown(self) -> bool:
        """Whether there is something to look at; cheap enough for every step."""
        raise NotImplementedError

    def has_exited(self, member: GroupMember) -> bool:
        raise NotImplementedError

    def is_absent(self, worker: int) -> bool:
        """Whether no process of this worker runs."""
        raise NotImplementedError

    def watch(self, on_exit: Callable[[GroupMember], None]) -> None:
        """From now on `on_exit` is called, from a thread, where connections do not show an exit."""

    def close(self) -> None:
        pass


class FileBoard(Board):
    """For workers that see one run directory. Groups of shared memory notice exits themselves."""

    def __init__(self, file: Path, run_dir: RunDir | None = None):
        """Without `run_dir` it does not know of exits."""
        self._file = file
        self._run_dir = run_dir
        self._read_bytes = 0

    def look(self) -> None:
        if self.has_grown():
            with self._locked():
                pass

    def append(self, write: Callable[[], Document | None]) -> None:
        """Meanwhile no process reads or appends, so `write` is called once."""
        with self._locked() as handle:
            document = write()
            if document is not None:
                line = b"\n" + json.dumps(document).encode() + b"\n"
                os.pwrite(handle, line, self._read_bytes)
                self._read(handle)

    def has_grown(self) -> bool:
        try:
            return os.stat(self._file).st_size > self._read_bytes
        except FileNotFoundError:
            return False

    def has_exited(self, member: GroupMember) -> bool:
        return self._run_dir is not None and self._run_dir.has_ended(*member)

    def is_absent(self, worker: int) -> bool:
        return self._run_dir is not None and self._run_dir.has_exited(worker)

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """The file, while no other process has it; all documents are taken."""
        with locked(self._file) as handle:
            self._read(handle)
            yield handle

    def _read(self, handle: int) -> None:
        """A process that was killed may have left a part of a line."""
        text = b""
        while chunk := os.pread(handle, _CHUNK_BYTES, self._read_bytes + len(text)):
            text += chunk
        self._read_bytes += len(text)
        for line in text.splitlines():
            if (document := document_of(line)) is not None:
                self.take(document)


class CallResults:
    """What calls of all workers returned; the owner of `board` hands their documents to `take`."""

    def __init__(self, board: Board):
        self._board = board
        self._results: dict[Key, Document] = {}
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

    def take(self, document: Document) -> None:
        self._results[document["at"][0], document["at"][1]] = document

    def _conclude(self, key: Key, document: Document) -> None:
        self._board.append(lambda: None if key in self._results else {"at": key, **document})
