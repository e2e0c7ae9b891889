"""Requests of one worker to one server, or to the chain of one shard.

Requests of one channel are carried out in order: in the background (`post`), or at once by the
caller (`call`). Those that were not acknowledged when a connection broke are sent again over the
next one. The server numbers pushes and skips those that it already has.
"""

from __future__ import annotations

import time

from shoal.comm.work_queue import QueuedWork, WorkQueue
from shoal.errors import PeerLost, ShoalError
from shoal.protocol.connection import Closed, Connection
from shoal.protocol.frames import FrameKind, Header, decode
from shoal.protocol.hello import Channel
from shoal.runtime.trace import OFF, Tracer
from shoal.runtime.waits import waiting
from shoal.server.client.route import Broken, MovedAway, Reply, Request, Route
from shoal.server.messages import SetUp

CLOSE_TIMEOUT_S = 5.0
PATIENCE = 1.5  # times the limit of the run
MAX_RECONNECTS = 100  # while one request is carried out

_SPANS: dict[Channel, str] = {"control": "send", "push": "push", "pull": "pull", "rows": "pull"}
_NO_REPLY = Reply(b"", bytearray())


class PostedRequest(QueuedWork):
    """A request that is carried out, in the background or by the one who waits for it."""

    __slots__ = ("_channel", "_link", "_request", "reply")

    def __init__(self, queue: WorkQueue, link: ServerLink, channel: Channel, request: Request):
        super().__init__(queue)
        self._link = link
        self._channel = channel
        self._request = request

    def run(self) -> None:
        self.reply = self._link.call(self._channel, self._request)

    def result(self) -> Reply:
        """Wait for the answer."""
        self.wait()
        return self.reply


class ServerLink:
    """All channels from one worker to one server or shard; `route` says where they lead."""

    def __init__(self, route: Route, tracer: Tracer = OFF):
        self.index = route.index
        self.rank = route.rank
        self.route = route
        self.shares_memory = False
        self._tracer = tracer
        self._queues: dict[Channel, WorkQueue] = {}
        self._unacknowledged: dict[Channel, list[Request]] = {}

    def join(self, spec: bytes, descriptor: int | None) -> SetUp:
        """Describe the model; `descriptor` is memory to share with a server of this host."""
        self.shares_memory = descriptor is not None and self.route.is_unix
        descriptor = descriptor if self.shares_memory else None
        set_up = self.route.join(spec, descriptor)
        self._add_channel("control")
        if set_up is None:
            request = Request(FrameKind.SETUP, spec, descriptor=descriptor)
            set_up = decode(self.call("control", request).meta, SetUp)
        if not set_up.is_over:
            self.open("push")
            self.open("pull")
        return set_up

    def open(self, channel: Channel) -> None:
        self.route.open(channel)
        self._add_channel(channel)

    def _add_channel(self, channel: Channel) -> None:
        self._queues[channel] = WorkQueue(f"shoal-ps-{channel}-{self.index}")
        self._unacknowledged[channel] = []

    @property
    def has_copies(self) -> bool:
        """Whether the server is one of a chain: any of them may have to answer."""
        return self.route.copies > 1

    @property
    def has_inbox(self) -> bool:
        """Whether what is pulled is in shared memory; else it comes with the answer.

        A former head of a chain could write into it late.
        """
        return self.shares_memory and not self.has_copies

    @property
    def shares_rows(self) -> bool:
        """Whether the server can write pulled rows into memory of the worker."""
        return self.route.is_unix and not self.has_copies

    @property
    def sent_bytes(self) -> int:
        return sum(connection.sent_bytes for connection in self.route.all())

    @property
    def received_bytes(self) -> int:
        return sum(connection.received_bytes for connection in self.route.all())

    def connection(self, channel: Channel) -> Connection:
        return self.route.current[channel]

    def post(self, channel: Channel, request: Request) -> PostedRequest:
        """Carry out a request in the background, after those posted before it."""
        queue = self._queues[channel]
        posted = PostedRequest(queue, self, channel, request)
        queue.submit(posted)
        return posted

    def take(self, channel: Channel) -> Connection | None:
        """The connection for the caller alone, until `give_back`; None if it cannot be had."""
        connection = self.route.current[channel]
        is_usable = connection.is_whole or connection.is_unix  # another one takes its place
        # a copy may answer that another one is to be asked
        is_free = connection.is_plain and is_usable and not self.has_copies
        return connection if is_free and self._queues[channel].try_take() else None

    def give_back(self, channel: Channel) -> None:
        self._queues[channel].give_back()

    def close(self) -> None:
        self.route.close()
        for queue in self._queues.values():
            queue.close(CLOSE_TIMEOUT_S)
        for connection in self.route.all():
            connection.close()

    # ------------------------------------------------------------------ one request

    def call(self, channel: Channel, request: Request) -> Reply:
        """Carry out a request now, in this thread: sent again while connections break."""
        began_ns = time.monotonic_ns()
        unacknowledged = self._unacknowledged[channel]
        to_send = [request]
        self.route.aim(channel, request)
        for attempts_left in reversed(range(MAX_RECONNECTS)):
            connection = self.connection(channel)
            is_sent = False
            try:
                with self._waits_for(connection, request):
                    for each in to_send:
                        self.route.send(connection, each)
                    is_sent = True
                    reply = self._receive(connection, request)
                break
            except Closed as error:
                broken = self._why_broken(connection, request.kind, error, is_sent)
            except MovedAway as moved:
                broken = moved
            if not attempts_left:
                raise broken
            self.route.reconnect(channel, broken)
            to_send = [*unacknowledged, request]
        if request.is_answered:
            unacknowledged.clear()
        elif self.has_copies or not self.route.is_unix:  # it may have to be sent again
            unacknowledged.append(request)
        self.route.answered(channel, request, began_ns / 1e9)
        if self._tracer.enabled:
            track = f"{channel} server {self.index}"
            end_ns = time.monotonic_ns()
            self._tracer.add(_SPANS[channel], began_ns, end_ns, track, request.kind.name)
        return reply

    def _waits_for(self, connection: Connection, request: Request) -> waiting:
        """The server says which worker it waits for itself, so this side is more patient."""

        def give_up(seconds: float) -> None:
            self.give_up(connection, request.kind, seconds)

        who, whom = f"rank {self.rank}", self.route.whom
        return waiting(who, whom, request.kind.name, give_up, PATIENCE)

    def give_up(self, connection: Connection, kind: FrameKind, seconds: float) -> None:
        doing = f"{self.route.doing(kind)} (no answer)"
        self.route.fail(PeerLost(self.rank, None, doing, round(seconds, 1)))
        connection.break_off(TimeoutError(f"no answer in {seconds:.1f} s"))

    def _receive(self, connection: Connection, request: Request) -> Reply:
        if not request.is_answered:
            return _NO_REPLY
        header, meta = self.route.receive(connection, request.kind)
        payload = bytearray()
        views = request.into
        if views is None:
            payload = bytearray(header.payload_bytes)
            views = (memoryview(payload),)
        expected_bytes = sum(view.nbytes for view in views)
        if header.payload_bytes != expected_bytes:
            raise connection.break_off(self.wrong_size(request.kind, expected_bytes, header))
        for view in views:
            connection.read_into(view)
        return Reply(meta, payload)

    def wrong_size(self, kind: FrameKind, expected_bytes: int, header: Header) -> ShoalError:
        return ShoalError(
            f"rank {self.rank}: expected {expected_bytes} bytes in the answer of server "
            f"{self.index} to {kind.name}, got {header.payload_bytes}"
        )

    def _why_broken(
        self, connection: Connection, kind: FrameKind, error: Exception, is_sent: bool
    ) -> Broken:
        """Why a request has no answer; raises what the server said before it closed."""
        if not is_sent:
            try:
                self.route.receive(connection, kind)
            except MovedAway as moved:
                return moved
            except Closed:
                pass
        return self.broken(kind, error)

    def broken(self, kind: FrameKind, error: Exception) -> Broken:
        return Broken(self.rank, None, f"{self.route.doing(kind)} ({error})")
