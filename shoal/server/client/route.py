"""Where the requests of a worker go: to one server, or to the copies of a shard (`chain_route`).

There is one connection per channel: control, push, pull and rows. Small messages do not wait
behind large ones. A TCP connection that breaks is opened again. A Unix socket breaks only when a
process ends, so it is not reopened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from shoal.errors import PeerLost, RunOver, ShoalError
from shoal.runtime import clock
from shoal.runtime.config import RunConfig
from shoal.runtime.trace import server_name
from shoal.runtime.waits import Backoff
from shoal.server.messages import SetUp
from shoal.server.protocol import (
    MAX_META_BYTES,
    Channel,
    ErrorReply,
    FrameKind,
    Header,
    Moved,
    decode,
)
from shoal.server.protocol.connection import Closed, Connection
from shoal.server.protocol.handshake import RECONNECT_S, dial

START_TIMEOUT_S = 120.0  # a server process may still be starting, on a busy host
RETRY_S = 0.02


@dataclass(frozen=True)
class Request:
    """One frame to a server, and where the payload of its answer goes.

    `into=None` accepts an answer of any length. A request without an answer is acknowledged by
    the answer to a later request of the same channel. `descriptor` is an open file that goes with
    it (Unix sockets).
    """

    kind: FrameKind
    meta: bytes = b""
    payload: tuple[memoryview, ...] = ()
    into: tuple[memoryview, ...] | None = ()
    sequence: int = 0
    argument: int = 0
    is_answered: bool = True
    descriptor: int | None = None


class Reply(NamedTuple):
    """The answer to a request. `payload` is empty if the request had a place for it."""

    meta: bytes
    payload: bytearray


class Broken(PeerLost):
    """A connection ended before a request was answered; another try may mend it."""


class MovedAway(Broken):
    """This server is not the one to ask, and nothing of the request has had an effect on it."""

    def __init__(self, rank: int, doing: str, moved: Moved, reason: str):
        super().__init__(rank, None, f"{doing} ({reason})")
        self.moved = moved


@dataclass(frozen=True)
class Caller:
    """A worker as servers know it; `rank_of` turns the number of a worker into its rank."""

    secret: bytes
    header: Header
    rank_of: Callable[[int], int]
    config: RunConfig


class Route:
    """To one server without copies. Former connections stay known: their bytes count."""

    copies = 1

    def __init__(self, caller: Caller, index: int, address: str):
        self.caller = caller
        self.rank = caller.rank_of(caller.header.worker)
        self.index = index
        self.address = address
        self.whom = server_name(index)
        self.epoch = 0  # the latest of the chain that is known
        self.is_unix = address.startswith("unix:")
        self.current: dict[Channel, Connection] = {}
        self.former: list[Connection] = []
        self.failure: PeerLost | None = None  # why there is no other try
        self.is_closing = False

    def server(self, channel: Channel) -> str:
        """The process that a channel leads to, by its name in a trace."""
        return server_name(self.index)

    def join(self, spec: bytes, descriptor: int | None) -> SetUp | None:
        """Open the control channel; the answer to SETUP, where that was part of it."""
        self.open("control")
        return None

    def open(self, channel: Channel) -> None:
        """The first connection of a channel; servers may still be starting."""
        self.put(channel, self.connect(channel, START_TIMEOUT_S))

    def aim(self, channel: Channel, request: Request) -> None:
        """A request will be sent."""

    def answered(self, channel: Channel, request: Request, began_s: float) -> None:
        """It was."""

    def reconnect(self, channel: Channel, broken: Broken) -> None:
        """Raises if the server does not answer, or has given this worker up."""
        self.check_retry(broken)
        if self.is_unix:
            raise broken
        try:
            connection = self.connect(channel, RECONNECT_S)
        except (ShoalError, OSError) as error:
            reason = error.__cause__ or error
            doing = f"{broken.doing}; reconnecting failed ({reason})"
            raise self.fail(PeerLost(self.rank, None, doing)) from broken
        self.put(channel, connection)

    def connect(self, channel: Channel, timeout_s: float) -> Connection:
        start_s = clock.monotonic()
        ended = Backoff(RETRY_S, 1.0)  # by a server that greets many others
        while True:
            try:
                connection = self.dial(self.address, channel, timeout_s)
                connection.sock.settimeout(None)
                return connection
            except (FileNotFoundError, ConnectionError, TimeoutError) as error:
                is_final = isinstance(error, Closed) and self.is_unix
                after_s = round(clock.monotonic() - start_s, 1)
                run_dir = self.caller.config.run_dir
                is_again = self.caller.config.incarnation > 0
                # started again too late: a server may end with the worker it is in
                if is_again and run_dir is not None and run_dir.finished_ranks():
                    raise RunOver(self.rank) from error
                if is_final or after_s > timeout_s or self.is_closing:
                    doing = f"connecting to {self.whom} at {self.address} ({error})"
                    raise PeerLost(self.rank, None, doing, after_s) from error
                if isinstance(error, Closed):
                    ended()
                else:
                    clock.sleep(RETRY_S)

    def other_stats(self) -> list[bytes]:
        """The final counters of the other copies, as far as they answer."""
        return []

    def interruptions_s(self) -> list[float]:
        """How long it got no service, around each change of the chain."""
        return []

    def close(self) -> None:
        """End the waits of other threads."""
        self.is_closing = True
        for connection in self.current.values():
            connection.abort()

    # ------------------------------------------------------------------ connections

    def dial(self, address: str, channel: Channel, timeout_s: float) -> Connection:
        """A connection whose socket still has the timeout."""
        caller = self.caller
        return dial(address, caller.secret, channel, caller.header, caller.config.tls, timeout_s)

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

    # ------------------------------------------------------------------ frames

    def header_of(self, request: Request) -> Header:
        return self.caller.header._replace(
            kind=request.kind,
            sequence=request.sequence,
            argument=request.argument,
            epoch=self.epoch,
        )

    def send(self, connection: Connection, request: Request) -> None:
        header = self.header_of(request)
        connection.send(header, request.meta, *request.payload, descriptor=request.descriptor)

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
                raise PeerLost(self.rank, self.caller.rank_of(error.lost), doing)
            if error.is_loss:
                raise PeerLost(self.rank, None, f"{doing} ({error.reason})")
            raise ShoalError(f"rank {self.rank}, {doing}: {error.reason}")

    def doing(self, kind: FrameKind) -> str:
        return f"{kind.name} to {self.whom}"
