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

from shoal.comm.members.board import Document, GroupMember
from shoal.comm.store.link import StoreLink, connect
from shoal.comm.store.service import StoreService
from shoal.comm.store.session import AT_THE_END, SILENT_HOST_S, BadFrame, StoreRequest
from shoal.errors import BadInput, PeerLost
from shoal.runtime.config import RunConfig

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


_CONNECT_S = 60.0


class NetworkBoard:
    """One process's view of the board at `address`. It is its own `Records`."""

    def __init__(self, address: tuple[str, int], secret: bytes, me: GroupMember, run_number: int):
        self._me = me
        self._log = BoardLog(run_number)
        self._unread: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # None: it has broken
        self._is_broken = self._is_closed = False
        self._on_exit: Callable[[GroupMember], None] = lambda member: None
        self._appending = self._connect(address, secret)
        self._reading = self._connect(address, secret)
        self._reader = threading.Thread(target=self._read_all, name="shoal-board", daemon=True)

    def _connect(self, address: tuple[str, int], secret: bytes) -> StoreLink:
        link = connect(address, secret, _CONNECT_S)
        link.notice_silence()
        return link

    # ------------------------------------------------------------------ Board

    def records(self, take: Callable[[Document], None]) -> NetworkBoard:
        self._log.hand_to(take)
        self._reader.start()
        return self

    def has_exited(self, member: GroupMember) -> bool:
        return self._log.has_exited(member)

    def is_absent(self, worker: int) -> bool:
        return self._log.is_absent(worker)

    def watch(self, on_exit: Callable[[GroupMember], None]) -> None:
        """A board that breaks counts as the exit of this very process."""
        self._on_exit = on_exit

    def close(self) -> None:
        self._is_closed = True
        self._reading.interrupt()
        if self._reader.ident is not None:
            self._reader.join()
        self._reading.close()
        self._appending.close()

    # ------------------------------------------------------------------ Records

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
            before = self._log.length
            has_appended = self._ask(before, self._log.written(self._me, document))
            while self._log.length <= before:  # its own entry, or those that came first
                self._take_next()
                self._check()
            if has_appended:
                return

    def has_grown(self) -> bool:
        return not self._unread.empty()

    def _take_next(self) -> None:
        data = self._unread.get()
        if data is None:
            self._is_broken = True
        else:
            self._log.read(data)

    def _ask(self, before: int, entry: bytes) -> bool:
        request = StoreRequest("append", [LOG], entry, number=before)
        try:
            return self._appending.ask(request, SILENT_HOST_S).number > 0
        except (OSError, BadFrame) as error:
            self._is_broken = True
            raise self._lost() from error

    def _check(self) -> None:
        if self._is_broken or self._log.has_exited(self._me):
            raise self._lost()

    def _lost(self) -> PeerLost:
        return PeerLost(
            self._me.worker, None, "reaching the launcher, which serves the board", SILENT_HOST_S
        )

    # ------------------------------------------------------------------ the thread

    def _read_all(self) -> None:
        seen = BoardLog(-1)  # of exits alone
        with suppress(OSError, BadFrame):
            while True:
                reply = self._reading.ask(StoreRequest("read", [LOG], number=seen.length), None)
                if reply.refusal:
                    raise BadFrame(reply.refusal)
                for data in reply.values:
                    exited = seen.read(data)
                    self._unread.put(data)
                    if exited is not None:
                        self._on_exit(exited)
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
