"""The other members of a chain, as a worker keeps in touch with them.

Each has mapped the worker's memory, from which a head reads pushes. While an answer of the head
takes long, they are asked whether there is a new epoch: a head that was stopped, or cut off, keeps
its connections open, and would be waited for. From time to time they are asked anyway: a worker
that waits for other workers greets a new head, too, which may have to know where it is.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from shoal.errors import ShoalError
from shoal.protocol.connection import Connection
from shoal.protocol.hello import Channel
from shoal.server.client.route import MovedAway

if TYPE_CHECKING:
    from shoal.server.client.chain_route import ChainRoute

PROBE_S = 0.25
_IDLE_PROBE_S = 1.0
_ATTACH_S = 0.5
_JOIN_S = 5.0


class ChainWatch:
    """A thread, and one idle connection to each member but the head."""

    def __init__(self, chain: ChainRoute):
        self._chain = chain
        self._attached: dict[int, Connection] = {}
        self._detached: list[Connection] = []  # closed at the end: a thread may read from them
        self._attaching = [threading.Lock() for _ in range(chain.view.copies)]
        self._since_s: dict[Channel, float] = {}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        name = f"shoal-ps-watch-{self._chain.index}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        for connection in list(self._attached.values()):
            connection.abort()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
        for connection in [*self._attached.values(), *self._detached]:
            connection.close()

    def begin(self, channel: Channel) -> None:
        """From now on an answer is waited for."""
        self._since_s[channel] = time.monotonic()

    def end(self, channel: Channel) -> None:
        self._since_s.pop(channel, None)

    # ------------------------------------------------------------------ members

    def attach(self, copy: int, timeout_s: float) -> None:
        """Let a member know this worker and its memory; raises if it does not answer."""
        with self._attaching[copy]:
            if copy not in self._attached:
                self._attached[copy] = self._chain.set_up(copy, timeout_s)

    def ask(self, copy: int, timeout_s: float) -> None:
        """MovedAway if a copy is in another epoch than this worker; raises if it is silent."""
        self.attach(copy, timeout_s)
        try:
            with self._attaching[copy]:
                connection = self._attached.get(copy)
                if connection is not None:
                    self._chain.probe(connection, timeout_s)
        except MovedAway:
            raise
        except (OSError, ShoalError):
            self.detach(copy)
            raise

    def attach_members(self, timeout_s: float) -> None:
        """Those that can be reached; the others are tried again later."""
        view = self._chain.view
        for copy in view.members:
            if copy == view.head or copy in self._attached or self._over.is_set():
                continue
            try:
                self.attach(copy, timeout_s)
            except MovedAway as moved:
                self._chain.learn(moved.moved)
            except (OSError, ShoalError):
                continue

    def final_stats(self, timeout_s: float) -> list[bytes]:
        """The counters of each member but the head, when all workers have left."""
        found = []
        for copy, connection in list(self._attached.items()):
            with self._attaching[copy], suppress(OSError, ShoalError):
                found.append(self._chain.probe(connection, timeout_s, is_final=True))
        return found

    def detach(self, copy: int) -> None:
        """It is the head now, or was lost."""
        connection = self._attached.pop(copy, None)
        if connection is not None:
            connection.abort()
            self._detached.append(connection)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        probed_s = time.monotonic()
        while not self._over.wait(PROBE_S):
            self.attach_members(_ATTACH_S)
            now_s = time.monotonic()
            since_s = min(list(self._since_s.values()), default=now_s)
            if now_s - since_s > PROBE_S or now_s - probed_s > _IDLE_PROBE_S:
                self._probe()
                probed_s = time.monotonic()
            with suppress(OSError, ShoalError):
                self._chain.greet_head()

    def _probe(self) -> None:
        """Ask whether there is a newer epoch, until one says so."""
        for copy in list(self._attached):
            try:
                self.ask(copy, _ATTACH_S)
            except MovedAway as moved:
                if self._chain.learn(moved.moved):
                    return
            except (OSError, ShoalError):
                continue
