"""The board of workers on several hosts: a log that the launcher of the run serves.

    a thread      reads what is new as soon as it comes, and says which processes have exited
    this worker   takes what was read when it looks; appends where it has seen all of the log

A second connection appends. Both prove the key of the run. They break where the launcher is silent
for a few seconds; then this worker is lost, since the others go on without it.

    {"started": [2, 1]}                                    launcher: worker 2 was started again
    {"by": [2, 1], "run": 1, "document": {"ready": …}}     that process, in its first shoal.run
    {"exited": [2, 1]}                                     launcher: it has exited, or is silent

What a process appends after its exit was noted does not count: a host that is cut off cannot
disturb the others.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from shoal.comm.members.board import Board, Document, GroupMember
from shoal.comm.store.service import StoreService
from shoal.comm.store.session import AT_THE_END, SILENT_HOST_S, BadFrame, StoreRequest, connect
from shoal.errors import BadInput, PeerLost
from shoal.runtime.config import RunConfig
from shoal.runtime.files import document_of

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


_CONNECT_S = 60.0


class NetworkBoard(Board):
    """One process's view of the board at `address`, in one call of shoal.run."""

    def __init__(self, address: tuple[str, int], secret: bytes, me: GroupMember, run_number: int):
        self._me = me
        self._run_number = run_number
        self._latest: dict[int, int] = {}  # worker: incarnation
        self._exited: set[GroupMember] = set()
        self._length = 0  # of what was taken
        self._unread: queue.SimpleQueue[Document | None] = queue.SimpleQueue()  # None: broken
        self._is_broken = self._is_closed = False
        self._on_exit: Callable[[GroupMember], None] = lambda member: None
        self._appending = connect(address, secret, _CONNECT_S)
        self._reading = connect(address, secret, _CONNECT_S)
        for link in (self._appending, self._reading):
            link.notice_silence()
        self._reader = threading.Thread(target=self._read_all, name="shoal-board", daemon=True)
        self._reader.start()

    def has_exited(self, member: GroupMember) -> bool:
        return member in self._exited

    def is_absent(self, worker: int) -> bool:
        return GroupMember(worker, self._latest.get(worker, 0)) in self._exited

    def watch(self, on_exit: Callable[[GroupMember], None]) -> None:
        """A board that breaks counts as the exit of this very process."""
        self._on_exit = on_exit

    def close(self) -> None:
        self._is_closed = True
        self._reading.interrupt()
        self._reader.join()
        self._reading.close()
        self._appending.close()

    def look(self) -> None:
        while not self._unread.empty():
            self._take_next()
        self._check()

    def append(self, write: Callable[[], Document | None]) -> None:
        while True:
            self.look()
            document = write()
            if document is None:
                return
            before = self._length
            entry = {"by": self._me, "run": self._run_number, "document": document}
            has_appended = self._ask(before, entry_bytes(entry))
            while self._length <= before:  # its own entry, or those that came first
                self._take_next()
                self._check()
            if has_appended:
                return

    def has_grown(self) -> bool:
        return not self._unread.empty()

    def _take_next(self) -> None:
        entry = self._unread.get()
        self._length += 1
        if entry is None:
            self._is_broken = True
        elif "started" in entry:
            worker, incarnation = entry["started"]
            self._latest[worker] = incarnation
        elif "exited" in entry:
            self._exited.add(GroupMember(*entry["exited"]))
        elif entry["run"] == self._run_number and GroupMember(*entry["by"]) not in self._exited:
            self.take(entry["document"])

    def _ask(self, before: int, entry: bytes) -> bool:
        request = StoreRequest("append", [LOG], entry, number=before)
        try:
            return self._appending.ask(request, SILENT_HOST_S).number > 0
        except (OSError, BadFrame) as error:
            self._is_broken = True
            raise self._lost() from error

    def _check(self) -> None:
        if self._is_broken or self._me in self._exited:
            raise self._lost()

    def _lost(self) -> PeerLost:
        doing = "reaching the launcher, which serves the board"
        return PeerLost(self._me.worker, None, doing, SILENT_HOST_S)

    def _read_all(self) -> None:
        """In a thread: what is new, as soon as it comes."""
        length = 0
        with suppress(OSError, BadFrame):
            while True:
                reply = self._reading.ask(StoreRequest("read", [LOG], number=length), None)
                length = reply.number
                for entry in map(document_of, reply.values):
                    self._unread.put(entry)  # none that can be read: broken
                    if entry and "exited" in entry:
                        self._on_exit(GroupMember(*entry["exited"]))
        if not self._is_closed:
            self._unread.put(None)
            self._on_exit(self._me)


def open_board(config: RunConfig, me: GroupMember, run_number: int) -> NetworkBoard:
    """That of SHOAL_BOARD; BadInput where there is no key."""
    return NetworkBoard(*board_of(config), me, run_number)


def board_of(config: RunConfig) -> tuple[tuple[str, int], bytes]:
    """The address of the board, as the launcher gives it, and the key that it asks for."""
    host, _, port = (config.board or "").rpartition(":")
    secret = config.read_secret()
    if secret is None:
        raise BadInput("SHOAL_BOARD is set, and there is no key of the run (SHOAL_SECRET_FILE)")
    return (host.strip("[]"), int(port)), secret
