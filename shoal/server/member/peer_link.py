"""The connection from this copy to another one of its shard: made again when it breaks.

Messages to the other go over it; its messages come over the connection that it has made.
"""

from __future__ import annotations

import queue
import select
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.errors import ShoalError
from shoal.runtime import clock
from shoal.runtime.acceptor import notice_silence
from shoal.runtime.config import TlsConfig
from shoal.runtime.trace import Tracer, server_name
from shoal.server.chain.messages import ChainMessage
from shoal.server.member.operations import encode_message
from shoal.server.protocol import FrameKind, Header
from shoal.server.protocol.connection import Closed, Connection
from shoal.server.protocol.handshake import dial

if TYPE_CHECKING:
    from shoal.server.member.core import ChainCore

SILENT_COPY_S = 3.0  # a host that acknowledges nothing for so long is not connected
_RETRY_S = 0.03
_CONNECT_S = 2.0
_MAX_ANSWER_BYTES = 8192
_SMALL_BYTES = 32 << 10  # a payload that is sent by the thread that posts it


@dataclass(eq=False, repr=False)
class PeerLink:
    """Two threads: one connects and notices the end, one sends what would make others wait."""

    _owner: ChainCore
    peer: int
    _address: Callable[[], str | None]
    _secret: bytes
    _header: Header  # which copy this is, for the handshake
    _tls: TlsConfig

    def __post_init__(self) -> None:
        self._plain = self._header._replace(kind=FrameKind.CHAIN)
        self._closed = clock.Event()
        self._connection: Connection | None = None
        self._down_since_s = clock.monotonic()
        self._messages: queue.SimpleQueue[tuple[Connection, Posted] | None]
        self._messages = clock.Queue()
        self._posted = 0  # to the queue
        self._taken = 0  # from it, and sent
        self._name = server_name(self._owner.place.shard, self.peer)
        name = f"shoal-chain-{self.peer}"
        self._threads = [
            clock.Thread(target=target, name=name, daemon=True)
            for target in (self._dial, self._send)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def post(self, message: ChainMessage | Call) -> None:
        """Send it if there is a connection, a small one at once; `link_up` repairs what is lost."""
        connection = self._connection
        if connection is None:
            return
        posted: Posted | None = message
        if self._posted == self._taken and not callable(message):
            posted = self._send_now(connection, message)
        if posted is not None:
            self._posted += 1
            self._messages.put((connection, posted))

    def _send_now(self, connection: Connection, message: ChainMessage) -> Posted | None:
        """What is left for the thread: the message, or the rest of its frame."""
        meta, views = encode_message(message)
        if sum(view.nbytes for view in views) > _SMALL_BYTES:
            return message
        try:
            with self._traced(connection):
                rest = connection.send_now(self._plain, meta, *views)
        except (Closed, OSError):
            connection.abort()
            return None
        return message if rest is None else rest if rest.nbytes else None

    def reconnect(self) -> None:
        """Break the connection, if there is one: what waits to be sent is dropped."""
        connection = self._connection
        if connection is not None:
            connection.abort()

    @property
    def down_s(self) -> float:
        """For how long there has been no connection."""
        return 0.0 if self._connection is not None else clock.monotonic() - self._down_since_s

    def close(self) -> None:
        self._closed.set()
        self._messages.put(None)
        self.reconnect()

    def join(self, timeout_s: float) -> None:
        for thread in self._threads:
            thread.join(timeout_s)

    def _dial(self) -> None:
        while not self._closed.is_set():
            connection = self._connect()
            if connection is not None:
                self._connection = connection
                if self._closed.is_set():
                    connection.abort()
                self._owner.link_up(self.peer)
                self._await_end(connection)
                self._down_since_s = clock.monotonic()
                self._connection = None
                connection.close()
                self._owner.link_lost(self.peer)
            self._closed.wait(_RETRY_S)

    def _connect(self) -> Connection | None:
        address = self._address()
        if address is None:
            return None
        connection = None
        try:
            connection = dial(address, self._secret, "chain", self._header, self._tls, _CONNECT_S)
            connection.sock.settimeout(None)
            notice_silence(connection.sock, SILENT_COPY_S)
        except (OSError, ShoalError):
            if connection is not None:
                connection.close()
            return None
        return connection

    def _await_end(self, connection: Connection) -> None:
        """Nothing comes but the end. In recv it would be woken by every frame that is taken."""
        with suppress(ValueError):  # a virtual connection has no descriptor
            poll = select.poll()
            poll.register(connection.sock, select.POLLIN)
            poll.poll()
        with suppress(OSError, ShoalError):
            connection.receive(_MAX_ANSWER_BYTES)

    def _send(self) -> None:
        while (item := self._messages.get()) is not None:
            connection, posted = item
            try:
                if connection is self._connection:
                    with self._traced(connection):
                        self._send_posted(connection, posted)
            except (Closed, OSError):
                connection.abort()
            self._taken += 1

    def _traced(self, connection: Connection) -> AbstractContextManager[None]:
        tracer = self._owner.host.tracer
        return self._span(connection, tracer) if tracer.enabled else nullcontext()

    @contextmanager
    def _span(self, connection: Connection, tracer: Tracer) -> Iterator[None]:
        start_ns = clock.monotonic_ns()
        before_bytes = connection.sent_bytes
        yield
        tracer.add(
            "send",
            start_ns,
            clock.monotonic_ns(),
            f"chain {self._name}",
            "",
            None,
            connection.sent_bytes - before_bytes,
            self._name,
        )

    def _send_posted(self, connection: Connection, posted: Posted) -> None:
        if isinstance(posted, memoryview):
            connection.send_rest(posted)
        elif callable(posted):
            posted(connection, self._header)
        else:
            meta, views = encode_message(posted)
            connection.send(self._plain, meta, *views)


Call = Callable[[Connection, Header], None]  # sends frames by itself
Posted = ChainMessage | Call | memoryview  # the rest of a frame
