"""The log of a board over several hosts: what is in it, and who appends.

    {"started": [2, 1]}                                    launcher: worker 2 was started again
    {"by": [2, 1], "run": 1, "document": {"ready": …}}     that process, in its first shoal.run
    {"exited": [2, 1]}                                     launcher: it has exited, or is silent

A launcher appends what becomes of processes, in the order in which it learns of it. What a process
appends after its exit was noted does not count: a host that is cut off cannot disturb the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from shoal.comm.board import Document, GroupMember
from shoal.comm.guarded_store.service import StoreService
from shoal.comm.guarded_store.session import AT_THE_END, StoreRequest

LOG = "board"


def entry_bytes(entry: Document) -> bytes:
    return json.dumps(entry).encode()


class ServedBoard:
    """The launcher's side: it serves the log and notes starts and exits."""

    def __init__(self, service: StoreService):
        self._service = service

    def note_start(self, member: GroupMember) -> None:
        self._append({"started": member})

    def note_exit(self, member: GroupMember) -> None:
        self._append({"exited": member})

    def _append(self, entry: Document) -> None:
        self._service.post(StoreRequest("append", [LOG], entry_bytes(entry), number=AT_THE_END))


class BoardLog:
    """A prefix of the log, as one process reads it, for one call of shoal.run."""

    def __init__(self, run_number: int):
        self._run_number = run_number
        self._take: Callable[[Document], None] = lambda document: None
        self._latest: dict[int, int] = {}  # worker: incarnation
        self._exited: set[GroupMember] = set()
        self.length = 0

    def hand_to(self, take: Callable[[Document], None]) -> None:
        """Documents that are read from now on are handed to `take`."""
        self._take = take

    def read(self, data: bytes) -> GroupMember | None:
        """The next entry; returns the process that has exited, where it says so."""
        self.length += 1
        entry = json.loads(data)
        if "started" in entry:
            worker, incarnation = entry["started"]
            self._latest[worker] = incarnation
        elif "exited" in entry:
            member = GroupMember(*entry["exited"])
            self._exited.add(member)
            return member
        elif entry["run"] == self._run_number and not self.has_exited(GroupMember(*entry["by"])):
            self._take(entry["document"])
        return None

    def has_exited(self, member: GroupMember) -> bool:
        return member in self._exited

    def is_absent(self, worker: int) -> bool:
        return GroupMember(worker, self._latest.get(worker, 0)) in self._exited

    def written(self, by: GroupMember, document: Document) -> bytes:
        """The entry of a document of this process."""
        return entry_bytes({"by": by, "run": self._run_number, "document": document})
