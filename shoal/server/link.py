"""The connections of one worker to one server.

There is one connection per channel: control, push, pull and rows. Small messages do not wait
behind large ones. Requests of one channel are carried out in order: in the background (`post`),
or at once by the caller (`call`).

A TCP connection that breaks is opened again, and requests that were not acknowledged are sent
again. The server numbers pushes and skips those that it already has. A Unix socket breaks only
when a process ends, so it is not reopened.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from shoal.comm.work_queue import WorkQueue
from shoal.errors import PeerLost, RunOver, ShoalError
from shoal.observe.trace import OFF, Tracer
from shoal.runtime.config import TlsConfig
from shoal.runtime.waits import waiting
from shoal.server.broken import Broken, MovedAway
from shoal.server.posted import PostedRequest
from shoal.server.protocol.connection import Closed, Connection, pack_frame
from shoal.server.protocol.endpoint import CONNECT_S, PLAIN, connect
from shoal.server.protocol.frames import MAX_META_BYTES, FrameKind, Header, decode
from shoal.server.protocol.handshake import RECONNECT_S, authenticate
from shoal.server.protocol.hello import Channel, ErrorReply
from shoal.server.protocol.messages import SetUp
from shoal.server.request import Reply, Request

START_TIMEOUT_S = 120.0  # a server process may still be starting, on a busy host
RETRY_S = 0.02
CLOSE_TIMEOUT_S = 5.0
PATIENCE = 1.5  # times the limit of the run
MAX_RECONNECTS = 100  # while one request is carried out

_SPANS: dict[Channel, str] = {"control": "send", "push": "push", "pull": "pull", "rows": "pull"}


IsOver = Callable[[], bool]


def never() -> bool:
    return False


@dataclass
class _OpenChannel:
    connection: Connection
    queue: WorkQueue
    unacknowledged: list[Request] = field(default_factory=list)
    replica: int = 0  # that it leads to, where servers have replicas
    generation: int = 0  # how often a head had been found when it was connected


class ServerLink:
    """All channels from one worker to one server."""

    def __init__(
        self,
        index: int,
        address: str,
        secret: bytes,
        header: Header,
        rank_of: Callable[[int], int],
        tracer: Tracer = OFF,
        tls: TlsConfig = PLAIN,
        is_over: IsOver = never,
    ):
        """`rank_of` turns the number of a worker, as servers count them, into its rank.

        `is_over` tells of a server that is not there whether it has ended, and will not start.
        """
        self.index = index
        self.address = address
        self.rank = rank_of(header.worker)
        self.shares_memory = False
        self._secret = secret
        self._header = header
        self._rank_of = rank_of
        self._tracer = tracer
        self._tls = tls
        self._is_over = is_over
        self._channels: dict[Channel, _OpenChannel] = {}
        self._replaced: list[Connection] = []
        self._failure: PeerLost | None = None
        self.is_closing = False
        self._begin()

    def _begin(self) -> None:
        self.open("control")

    def join(self, spec: bytes, descriptor: int | None) -> SetUp:
        """Describe the model; `descriptor` is memory to share with a server of this host."""
        if descriptor is not None and self.is_unix:
            self.shares_memory = True
            reply = self.pass_descriptor(FrameKind.SETUP, spec, descriptor)
        else:
            reply = self.call("control", Request(FrameKind.SETUP, spec))
        set_up = decode(reply.meta, SetUp)
        if not set_up.is_over:
            self.open("push")
            self.open("pull")
        return set_up

    def open(self, channel: Channel) -> None:
        self._add_channel(channel, self._connect(channel, START_TIMEOUT_S))

    def _add_channel(self, channel: Channel, connection: Connection) -> None:
        queue = WorkQueue(f"shoal-ps-{channel}-{self.index}")
        self._channels[channel] = _OpenChannel(connection, queue)

    @property
    def is_unix(self) -> bool:
        return self.connection("control").is_unix

    @property
    def num_replicas(self) -> int:
        return 1

    @property
    def has_replicas(self) -> bool:
        return False

    @property
    def has_inbox(self) -> bool:
        """Whether what is pulled is in shared memory; else it comes with the answer."""
        return self.shares_memory

    @property
    def shares_rows(self) -> bool:
        """Whether the server can write pulled rows into memory of the worker."""
        return self.is_unix

    def other_stats(self) -> list[bytes]:
        """The final counters of the other replicas of the server, as far as they answer."""
        return []

    def interruptions_s(self) -> list[float]:
        """How long it got no service, around each change of the server's replicas."""
        return []

    @property
    def _lends(self) -> bool:
        """Whether a caller may use the socket of a connection by itself."""
        return True

    @property
    def _resends(self) -> bool:
        """Whether requests without an answer may have to be sent again."""
        return not self.is_unix

    @property
    def sent_bytes(self) -> int:
        return sum(connection.sent_bytes for connection in self._all_connections())

    @property
    def received_bytes(self) -> int:
        return sum(connection.received_bytes for connection in self._all_connections())

    def connection(self, channel: Channel) -> Connection:
        return self._channels[channel].connection

    def post(self, channel: Channel, request: Request) -> PostedRequest:
        """Carry out a request in the background, after those posted before it."""
        queue = self._channels[channel].queue
        posted = PostedRequest(queue, self, channel, request)
        queue.submit(posted)
        return posted

    def take(self, channel: Channel) -> Connection | None:
        """The connection for the caller alone, until `give_back`; None if it cannot be had."""
        taken = self._channels[channel]
        connection = taken.connection
        is_usable = connection.is_whole or connection.is_unix  # another one takes its place
        is_lent = self._lends and connection.is_plain and is_usable
        return connection if is_lent and taken.queue.try_take() else None

    def give_back(self, channel: Channel) -> None:
        self._channels[channel].queue.give_back()

    def send_ahead(self, channel: Channel, request: Request) -> bool:
        """Send a request whose answer is read later; False where it may have to be sent again."""
        if self._resends:
            return False
        self._send(channel, request)
        return True

    def call(self, channel: Channel, request: Request, was_sent: bool = False) -> Reply:
        """Carry out a request now, or what is left of one that was sent."""
        perform = self._answer_to if was_sent else self._call
        if not self._tracer.enabled:
            return perform(channel, request)
        start_ns = time.monotonic_ns()
        try:
            return perform(channel, request)
        finally:
            track = f"{channel} server {self.index}"
            end_ns = time.monotonic_ns()
            self._tracer.add(_SPANS[channel], start_ns, end_ns, track, request.kind.name)

    def _call(self, channel: Channel, request: Request) -> Reply:
        """Reconnect and resend if the connection breaks."""
        unacknowledged = self._channels[channel].unacknowledged
        to_send = [request]
        for attempts_left in reversed(range(MAX_RECONNECTS)):
            try:
                reply = [self._exchange(channel, each) for each in to_send][-1]
                break
            except Broken as broken:
                if not attempts_left:
                    raise
                self._reconnect(channel, broken)
                to_send = [*unacknowledged, request]
        if request.is_answered:
            unacknowledged.clear()
        elif self._resends:
            unacknowledged.append(request)
        return reply

    def pass_descriptor(self, kind: FrameKind, meta: bytes, descriptor: int) -> Reply:
        """Send an open file over the Unix socket; returns when the server has taken it."""
        header = self._header._replace(kind=kind)
        try:
            self.connection("control").send_descriptor(header, meta, descriptor)
            return self._receive("control", Request(kind))
        except Closed as error:
            raise self.broken(kind, error) from error

    def close(self) -> None:
        self.is_closing = True
        channels = list(self._channels.values())
        for channel in channels:
            channel.connection.abort()
        for channel in channels:
            channel.queue.close(CLOSE_TIMEOUT_S)
        for channel in channels:
            channel.connection.close()

    # ------------------------------------------------------------------ one request

    def _exchange(self, channel: Channel, request: Request) -> Reply:
        with self._waiting(channel, request):
            return self._sent_and_answered(channel, request)

    def _sent_and_answered(self, channel: Channel, request: Request) -> Reply:
        self._send(channel, request)
        if not request.is_answered:
            return Reply(b"", bytearray())
        return self._answered(channel, request)

    def _answer_to(self, channel: Channel, request: Request) -> Reply:
        with self._waiting(channel, request):
            return self._answered(channel, request)

    def _answered(self, channel: Channel, request: Request) -> Reply:
        try:
            return self._receive(channel, request)
        except Closed as error:
            raise self.broken(request.kind, error) from error

    def _waiting(self, channel: Channel, request: Request) -> waiting:
        """The server says which worker it waits for itself, so this side is more patient."""

        def give_up(seconds: float) -> None:
            self.give_up(self.connection(channel), request.kind, seconds)

        whom = f"server {self.index}"
        return waiting(f"rank {self.rank}", whom, request.kind.name, give_up, PATIENCE)

    def give_up(self, connection: Connection, kind: FrameKind, seconds: float) -> None:
        doing = f"{self._doing(kind)} (no answer)"
        self._failure = self._failure or PeerLost(self.rank, None, doing, round(seconds, 1))
        connection.break_off(TimeoutError(f"no answer in {seconds:.1f} s"))

    def head_of(self, request: Request) -> bytes:
        """Header and metadata of a request, for one who has taken the connection."""
        return pack_frame(self._header_of(request), request.meta, request.payload)

    def _header_of(self, request: Request) -> Header:
        return self._header._replace(
            kind=request.kind,
            sequence=request.sequence,
            argument=request.argument,
            epoch=self._epoch,
        )

    def _send(self, channel: Channel, request: Request) -> None:
        header = self._header_of(request)
        try:
            if request.descriptor is None:
                self.connection(channel).send(header, request.meta, *request.payload)
            else:
                self.connection(channel).send_descriptor(header, request.meta, request.descriptor)
        except Closed as error:
            with suppress(Closed):  # the server may have sent the reason
                self._receive_header(channel, request.kind)
            raise self.broken(request.kind, error) from error

    def _receive(self, channel: Channel, request: Request) -> Reply:
        header, meta = self._receive_header(channel, request.kind)
        payload = bytearray()
        views = request.into
        if views is None:
            payload = bytearray(header.payload_bytes)
            views = (memoryview(payload),)
        expected_bytes = sum(view.nbytes for view in views)
        if header.payload_bytes != expected_bytes:
            error = self.wrong_size(request.kind, expected_bytes, header)
            raise self.connection(channel).break_off(error)
        for view in views:
            self.connection(channel).read_into(view)
        return Reply(meta, payload)

    def wrong_size(self, kind: FrameKind, expected_bytes: int, header: Header) -> ShoalError:
        return ShoalError(
            f"rank {self.rank}: expected {expected_bytes} bytes in the answer of server "
            f"{self.index} to {kind.name}, got {header.payload_bytes}"
        )

    def _receive_header(self, channel: Channel, kind: FrameKind) -> tuple[Header, bytes]:
        return self._receive_from(self.connection(channel), kind)

    def _receive_from(self, connection: Connection, kind: FrameKind) -> tuple[Header, bytes]:
        """The header of an answer to a request of this kind; raises what the server says."""
        header, meta = connection.receive(MAX_META_BYTES)
        self.check_answer(header, meta, kind)
        return header, meta

    def check_answer(self, header: Header, meta: bytes, kind: FrameKind) -> None:
        """Raises what the server says."""
        if header.kind is FrameKind.ERROR:
            error = decode(meta, ErrorReply)
            doing = self._doing(kind)
            if error.moved is not None:
                raise MovedAway(self.rank, doing, error.moved, error.reason)
            if error.lost is not None:
                raise PeerLost(self.rank, self._rank_of(error.lost), doing)
            if error.is_loss:
                raise PeerLost(self.rank, None, f"{doing} ({error.reason})")
            raise ShoalError(f"rank {self.rank}, {doing}: {error.reason}")

    @property
    def _epoch(self) -> int:
        return 0  # a server without replicas has one epoch

    def broken(self, kind: FrameKind, error: Exception) -> Broken:
        return Broken(self.rank, None, f"{self._doing(kind)} ({error})")

    def _doing(self, kind: FrameKind) -> str:
        return f"{kind.name} to server {self.index}"

    # ------------------------------------------------------------------ connecting

    def _reconnect(self, channel: Channel, broken: Broken) -> None:
        """Raises if the server does not answer, or has given this worker up."""
        if self._failure is not None or self.is_closing or self.is_unix:
            raise self._failure or broken
        try:
            connection = self._connect(channel, RECONNECT_S)
        except (ShoalError, OSError) as error:
            reason = error.__cause__ or error
            doing = f"{broken.doing}; reconnecting failed ({reason})"
            self._failure = PeerLost(self.rank, None, doing)
            raise self._failure from broken
        self._replace_connection(channel, connection)

    def _replace_connection(self, channel: Channel, connection: Connection) -> None:
        replaced = self.connection(channel)
        self._channels[channel].connection = connection
        self._replaced.append(replaced)
        replaced.close()
        if self.is_closing:
            connection.abort()

    def _connect(self, channel: Channel, timeout_s: float) -> Connection:
        start_s = time.monotonic()
        while True:
            try:
                return self._introduced(channel, timeout_s)
            except (FileNotFoundError, ConnectionError, TimeoutError) as error:
                is_final = isinstance(error, Closed) and self.address.startswith("unix:")
                after_s = round(time.monotonic() - start_s, 1)
                if self._is_over():
                    raise RunOver(self.rank) from error
                if is_final or after_s > timeout_s or self.is_closing:
                    doing = f"connecting to server {self.index} at {self.address} ({error})"
                    raise PeerLost(self.rank, None, doing, after_s) from error
            time.sleep(RETRY_S)

    def _introduced(self, channel: Channel, timeout_s: float) -> Connection:
        connection = self._authenticated(self.address, channel, timeout_s)
        connection.sock.settimeout(None)
        return connection

    def _authenticated(self, address: str, channel: Channel, timeout_s: float) -> Connection:
        """A connection whose socket still has the timeout."""
        connection = connect(address, self._tls, min(timeout_s, CONNECT_S))
        try:
            connection.sock.settimeout(timeout_s)
            authenticate(connection, self._secret, channel, self._header)
        except BaseException:
            connection.close()
            raise
        return connection

    def _all_connections(self) -> list[Connection]:
        return [*(channel.connection for channel in self._channels.values()), *self._replaced]
