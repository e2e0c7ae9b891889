"""Requests of one worker to one server, or to the chain of one shard.

Requests of one channel are carried out in order: in the background (`post`), or at once by the
caller (`call`). Those that were not acknowledged when a connection broke are sent again over the
next one. The server numbers pushes and skips those that it already has.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from shoal.comm.work_queue import QueuedWork, WorkQueue
from shoal.errors import PeerLost, ShoalError
from shoal.runtime import clock
from shoal.runtime.trace import OFF, Tracer
from shoal.runtime.waits import waiting
from shoal.server.client.route import Broken, MovedAway, Reply, Request, Route
from shoal.server.embedding.hashing import Ids
from shoal.server.embedding.row_copy import Rows
from shoal.server.messages import SetUp
from shoal.server.protocol import HEADER_BYTES, Channel, FrameKind, Header, decode, unpack, verify
from shoal.server.protocol.connection import Closed, Connection, pack_frame

CLOSE_TIMEOUT_S = 5.0
PATIENCE = 1.5  # times the limit of the run: servers say themselves which worker they wait for
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
        self.pushed_bytes = 0  # since the latest commit
        self._tracer = tracer
        self._queues: dict[Channel, WorkQueue] = {}
        self._unacknowledged: dict[Channel, list[Request]] = {}
        self._failures: dict[Channel, ShoalError] = {}  # of a request that has no answer

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
        if not request.is_answered:
            self.pushed_bytes += sum(part.nbytes for part in request.payload)
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

    def is_native(self, channel: Channel) -> bool:
        """Whether its bytes go through a socket of the machine."""
        return self.route.current[channel].sock.fileno() >= 0

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
        if (failure := self._failures.get(channel)) is not None:
            raise failure  # what came before is missing there
        try:
            return self._carry_out(channel, request)
        except ShoalError as error:
            if not request.is_answered:
                self._failures[channel] = error
            raise

    def _carry_out(self, channel: Channel, request: Request) -> Reply:
        began_ns = clock.monotonic_ns()
        unacknowledged = self._unacknowledged[channel]
        before = self.connection(channel)
        self.route.aim(channel, request)
        has_moved = self.connection(channel) is not before
        to_send = [*unacknowledged, request] if has_moved else [request]
        who = f"rank {self.rank}"
        for attempts_left in reversed(range(MAX_RECONNECTS)):
            connection = self.connection(channel)
            is_sent = False
            try:
                give_up = partial(self.give_up, connection, request.kind)
                with waiting(who, self.route.whom, request.kind.name, give_up, PATIENCE):
                    for each in to_send:
                        self.route.send(connection, each)
                    is_sent = True
                    reply = self._receive(connection, request)
                break
            except Closed as error:
                broken = self.broken(request.kind, error)
                if not is_sent:  # raises what the server said before it closed
                    try:
                        self.route.receive(connection, request.kind)
                    except MovedAway as moved:
                        broken = moved
                    except Closed:
                        pass
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
            server = self.route.server(channel)
            more = (request.kind.name, None, sum(len(part) for part in request.payload), server)
            end_ns = clock.monotonic_ns()
            self._tracer.add(_SPANS[channel], began_ns, end_ns, f"{channel} {server}", *more)
        return reply

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
        self.check_size(connection, request.kind, sum(view.nbytes for view in views), header)
        for view in views:
            connection.read_into(view)
        return Reply(meta, payload)

    def check_size(
        self, connection: Connection, kind: FrameKind, expected_bytes: int, header: Header
    ) -> None:
        if header.payload_bytes != expected_bytes:
            what = f"expected {expected_bytes} bytes in the answer of server {self.index}"
            got = f"{kind.name}, got {header.payload_bytes}"
            raise connection.break_off(ShoalError(f"rank {self.rank}: {what} to {got}"))

    def broken(self, kind: FrameKind, error: Exception) -> Broken:
        return Broken(self.rank, None, f"{self.route.doing(kind)} ({error})")


try:
    from shoal.server.protocol import _frames as _native
    from shoal.server.protocol._frames import receive_rows as _receive_rows
except ImportError:  # Shoal was installed without a compiler, or is newer than its native part
    _native = None  # type: ignore[assignment]


class Asked(NamedTuple):
    """A server, and what it is asked."""

    link: ServerLink
    request: Request
    connection: Connection


class ServerExchange:
    """Requests that were sent. Their connections are taken until the answers are read."""

    def __init__(self, asked: Sequence[Asked], channel: Channel):
        self._asked = asked
        self._channel = channel
        self._is_over = False
        frames = []
        for link, request, connection in asked:
            head = pack_frame(link.route.header_of(request), request.meta, request.payload)
            frames.append((connection.sock.fileno(), head, *request.payload))
            connection.sent_bytes += len(head) + sum([view.nbytes for view in request.payload])
        try:
            for each in asked:
                each.connection.check_whole()
            self._errors = _native.send(frames)  # of requests that could not be sent
        except BaseException as error:
            self.abandon(error)
            raise

    def answers(self, target: Rows | None, places: Sequence[Ids]) -> list[bytes | None]:
        """Wait for all answers, whose rows go to these places of a target; returns their metadata.

        None: the connection is broken, and the request is to be sent again over another one.
        """
        sockets = [each.connection.sock.fileno() for each in self._asked]
        row_bytes = 0 if target is None else 4 * target.shape[1]
        awaited = np.zeros(1, np.int64)

        def whom() -> str:
            return f"server {self._asked[int(awaited[0])].link.index}"

        def give_up(seconds: float) -> None:
            link, request, connection = self._asked[int(awaited[0])]
            link.give_up(connection, request.kind, seconds)

        first = self._asked[0]
        doing = first.request.kind.name
        answers: Sequence[bytes | int]
        try:
            with waiting(f"rank {first.link.rank}", whom, doing, give_up, PATIENCE):
                if target is None:
                    answers = _native.receive(sockets, awaited)
                else:
                    asked = list(zip(sockets, places, strict=True))
                    answers = _receive_rows(asked, target, row_bytes, awaited)
            for index, answer in enumerate(answers):  # up to one that broke
                if isinstance(answer, int):
                    self._break(index, answer)
        except BaseException as error:
            self.abandon(error)
            raise
        self._give_back()
        return [
            None if isinstance(answer, int) else _meta(each, answer, len(where) * row_bytes)
            for each, answer, where in zip(self._asked, answers, places, strict=True)
        ]

    def abandon(self, error: BaseException) -> None:
        """Answers that were not read yet are not read: no request can follow."""
        if not self._is_over:
            for each in self._asked:
                each.connection.break_off(error)
            self._give_back()

    def _break(self, index: int, number: int) -> None:
        """There is no answer, or the request could not be sent; raises if its server is lost."""
        link, request, connection = self._asked[index]
        number = self._errors[index] or number
        reason: Exception = OSError(number, os.strerror(number))
        if number == errno.ECONNRESET:
            reason = Closed("the other side has closed the connection")
        try:
            connection.check_whole()
        except Closed as closed:
            reason = closed
        broken = link.broken(request.kind, reason)
        connection.break_off(broken)
        if link.route.is_unix:  # it breaks with its server
            raise broken

    def _give_back(self) -> None:
        self._is_over = True
        for each in self._asked:
            each.link.give_back(self._channel)


def _meta(asked: Asked, answer: bytes, payload_bytes: int) -> bytes:
    link, request, connection = asked
    header = unpack(answer)
    meta = answer[HEADER_BYTES:]
    verify(answer, meta, header)
    connection.received_bytes += len(answer) + header.payload_bytes
    connection.requests += 1
    link.route.check_answer(header, meta, request.kind)
    link.check_size(connection, request.kind, payload_bytes, header)
    return meta


def begin_exchange(
    requests: Sequence[tuple[ServerLink, Request]], channel: Channel
) -> ServerExchange | None:
    """Send one request to each of these servers; None if one of them is busy with another."""
    if _native is None or not requests:
        return None
    asked: list[Asked] = []
    for link, request in requests:
        connection = link.take(channel) if link.is_native(channel) else None
        if connection is None:
            for each in asked:
                each.link.give_back(channel)
            return None
        asked.append(Asked(link, request, connection))
    return ServerExchange(asked, channel)
