"""Where the channels of a worker lead: to one server, or to the copies of a shard (`chain_route`).

There is one connection per channel: control, push, pull and rows. Small messages do not wait
behind large ones. A TCP connection that breaks is opened again. A Unix socket breaks only when a
process ends, so it is not reopened.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from shoal.errors import PeerLost, RunOver, ShoalError
from shoal.protocol.connection import Closed, Connection
from shoal.protocol.endpoint import PLAIN
from shoal.protocol.frames import MAX_META_BYTES, FrameKind, Header, decode
from shoal.protocol.handshake import RECONNECT_S, dial
from shoal.protocol.hello import Channel, ErrorReply
from shoal.runtime.config import TlsConfig
from shoal.server.client.request import Broken, MovedAway, Request
from shoal.server.messages import SetUp

START_TIMEOUT_S = 120.0  # a server process may still be starting, on a busy host
RETRY_S = 0.02


@dataclass
class Dialer:
    """Makes the connections of one worker to one server, or to the copies of one shard.

    `rank_of` turns the number of a worker, as servers count them, into its rank.
    """

    index: int
    whom: str  # the server or the shard, in words
    secret: bytes
    header: Header
    rank_of: Callable[[int], int]
    tls: TlsConfig = PLAIN
    rank: int = field(init=False)

    def __post_init__(self) -> None:
        self.rank = self.rank_of(self.header.worker)

    def dial(self, address: str, channel: Channel, timeout_s: float) -> Connection:
        """A connection whose socket still has the timeout."""
        return dial(address, self.secret, channel, self.header, self.tls, timeout_s)

    def receive(self, connection: Connection, kind: FrameKind) -> tuple[Header, bytes]:
        """The header of an answer to a request of this kind; raises what the server says."""
        header, meta = connection.receive(MAX_META_BYTES)
        self.check_answer(header, meta, kind)
        return header, meta

    def check_answer(self, header: Header, meta: bytes, kind: FrameKind) -> None:
        """Raises what the server says."""
        if header.kind is FrameKind.ERROR:
            error = decode(meta, ErrorReply)
            doing = self.doing(kind)
            if error.moved is not None:
                raise MovedAway(self.rank, doing, error.moved, error.reason)
            if error.lost is not None:
                raise PeerLost(self.rank, self.rank_of(error.lost), doing)
            if error.is_loss:
                raise PeerLost(self.rank, None, f"{doing} ({error.reason})")
            raise ShoalError(f"rank {self.rank}, {doing}: {error.reason}")

    def doing(self, kind: FrameKind) -> str:
        return f"{kind.name} to {self.whom}"


class ChannelConnections:
    """The connection of each channel. Former ones stay known: their bytes count."""

    def __init__(self) -> None:
        self.current: dict[Channel, Connection] = {}
        self.former: list[Connection] = []
        self.failure: PeerLost | None = None  # why there is no other try
        self.is_closing = False

    def put(self, channel: Channel, connection: Connection) -> None:
        before = self.current.get(channel)
        self.current[channel] = connection
        if before is not None:
            self.former.append(before)
            before.close()
        if self.is_closing:
            connection.abort()

    def all(self) -> list[Connection]:
        return [*self.current.values(), *self.former]

    def check_retry(self, broken: Broken) -> None:
        """Raise where another connection would not help."""
        if self.failure is not None or self.is_closing:
            raise self.failure or broken

    def fail(self, failure: PeerLost) -> PeerLost:
        """What is to be raised, now and for every later request."""
        self.failure = self.failure or failure
        return self.failure


class Route(Protocol):
    """Which connection serves a channel."""

    connections: ChannelConnections

    @property
    def address(self) -> str: ...
    @property
    def copies(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def is_unix(self) -> bool: ...
    def join(self, spec: bytes, descriptor: int | None) -> SetUp | None:
        """Open the control channel; the answer to SETUP, where that was part of it."""

    def open(self, channel: Channel) -> None: ...
    def aim(self, channel: Channel, request: Request) -> None: ...
    def reconnect(self, channel: Channel, broken: Broken) -> None: ...
    def answered(self, channel: Channel, request: Request, began_s: float) -> None: ...
    def other_stats(self) -> list[bytes]: ...
    def interruptions_s(self) -> list[float]: ...
    def close(self) -> None: ...


class DirectRoute:
    """To one server without copies."""

    copies = 1
    epoch = 0

    def __init__(self, dialer: Dialer, address: str, is_over: Callable[[], bool]):
        """`is_over` tells whether a server that is not there has ended, and will not start."""
        self.address = address
        self.is_unix = address.startswith("unix:")
        self.connections = ChannelConnections()
        self._dialer = dialer
        self._is_over = is_over

    def join(self, spec: bytes, descriptor: int | None) -> SetUp | None:
        self.open("control")
        return None

    def open(self, channel: Channel) -> None:
        self.connections.put(channel, self.connect(channel, START_TIMEOUT_S))

    def aim(self, channel: Channel, request: Request) -> None:
        return None

    def answered(self, channel: Channel, request: Request, began_s: float) -> None:
        return None

    def reconnect(self, channel: Channel, broken: Broken) -> None:
        """Raises if the server does not answer, or has given this worker up."""
        self.connections.check_retry(broken)
        if self.is_unix:
            raise broken
        try:
            connection = self.connect(channel, RECONNECT_S)
        except (ShoalError, OSError) as error:
            reason = error.__cause__ or error
            doing = f"{broken.doing}; reconnecting failed ({reason})"
            raise self.connections.fail(PeerLost(self._dialer.rank, None, doing)) from broken
        self.connections.put(channel, connection)

    def connect(self, channel: Channel, timeout_s: float) -> Connection:
        start_s = time.monotonic()
        dialer = self._dialer
        while True:
            try:
                connection = dialer.dial(self.address, channel, timeout_s)
                connection.sock.settimeout(None)
                return connection
            except (FileNotFoundError, ConnectionError, TimeoutError) as error:
                is_final = isinstance(error, Closed) and self.is_unix
                after_s = round(time.monotonic() - start_s, 1)
                if self._is_over():
                    raise RunOver(dialer.rank) from error
                if is_final or after_s > timeout_s or self.connections.is_closing:
                    doing = f"connecting to {dialer.whom} at {self.address} ({error})"
                    raise PeerLost(dialer.rank, None, doing, after_s) from error
            time.sleep(RETRY_S)

    def other_stats(self) -> list[bytes]:
        return []

    def interruptions_s(self) -> list[float]:
        return []

    def close(self) -> None:
        return None
