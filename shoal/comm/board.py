"""What workers of an elastic run know of each other: documents in one order, and who has exited.

    one host        lines of a file in the run directory           `RunDirBoard`, here
    several hosts   a log that the launcher of the run serves      `NetworkBoard`

Documents and exits are consistent: what a process has appended is final where it has exited.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from shoal.comm.record_file import RecordFile
from shoal.runtime.run_dir import RunDir

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
