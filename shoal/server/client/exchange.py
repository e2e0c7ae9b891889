"""Short requests to several servers at once: sent in one call, answered in another.

Rows of servers on other hosts go from the sockets straight to their places, in the order in which
they come. Where this is not possible (`begin` returns None), requests are posted (`link.py`).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from shoal.embedding.hashing import Ids
from shoal.embedding.row_copy import Rows
from shoal.protocol.connection import Closed, Connection, pack_frame
from shoal.protocol.frames import HEADER_BYTES, unpack, verify
from shoal.protocol.hello import Channel
from shoal.runtime.waits import waiting
from shoal.server.client.link import PATIENCE, ServerLink
from shoal.server.client.route import Request

try:
    from shoal.protocol import _frames as _native
    from shoal.protocol._frames import receive_rows as _receive_rows
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
        self._awaited = np.zeros(1, np.int64)
        self._errors: list[int] = []  # of requests that could not be sent
        self._is_over = False

    def metas(self) -> list[bytes | None]:
        """Wait for the metadata of all answers, which have no payload."""
        sizes = [0] * len(self._asked)
        return self._answers(lambda: _native.receive(self._sockets, self._awaited), sizes)

    def rows(self, target: Rows, places: Sequence[Ids]) -> list[bytes | None]:
        """Wait for all answers, whose rows go to these places; returns their metadata.

        None: the connection is broken, and the request is to be sent again over another one.
        """
        row_bytes = 4 * target.shape[1]
        asked = list(zip(self._sockets, places, strict=True))
        sizes = [len(where) * row_bytes for where in places]
        return self._answers(lambda: _receive_rows(asked, target, row_bytes, self._awaited), sizes)

    @property
    def _sockets(self) -> list[int]:
        return [each.connection.sock.fileno() for each in self._asked]

    def _answers(
        self, receive: Callable[[], Sequence[bytes | int]], sizes: Sequence[int]
    ) -> list[bytes | None]:
        first = self._asked[0]
        who, doing = f"rank {first.link.rank}", first.request.kind.name
        try:
            with waiting(who, self._whom, doing, self._give_up, PATIENCE):
                answers = receive()
            for each, answer in zip(self._asked, answers, strict=False):  # up to one that broke
                if isinstance(answer, int):
                    broken = self._broken(each, answer)
                    each.connection.break_off(broken)
                    if each.link.route.is_unix:  # it breaks with its server
                        raise broken
        except BaseException as error:
            self._break_off(error)
            raise
        finally:
            self._give_back()
        return [
            None if isinstance(answer, int) else _meta(each, answer, size)
            for each, answer, size in zip(self._asked, answers, sizes, strict=True)
        ]

    def abandon(self, error: BaseException) -> None:
        """Answers that were not read yet are not read: no request can follow."""
        if not self._is_over:
            self._break_off(error)
            self._give_back()

    def _send(self) -> None:
        frames = []
        for link, request, connection in self._asked:
            head = pack_frame(link.route.header_of(request), request.meta, request.payload)
            frames.append((connection.sock.fileno(), head, *request.payload))
            connection.sent_bytes += len(head) + sum([view.nbytes for view in request.payload])
        try:
            for each in self._asked:
                each.connection.check_whole()
            self._errors = _native.send(frames)
        except BaseException as error:
            self.abandon(error)
            raise

    def _broken(self, asked: Asked, number: int) -> Exception:
        """Why there is no answer; why the request could not be sent, if it could not."""
        number = self._errors[self._asked.index(asked)] or number
        reason: Exception = OSError(number, os.strerror(number))
        if number == errno.ECONNRESET:
            reason = Closed("the other side has closed the connection")
        try:
            asked.connection.check_whole()
        except Closed as closed:
            reason = closed
        return asked.link.broken(asked.request.kind, reason)

    def _whom(self) -> str:
        return f"server {self._asked[int(self._awaited[0])].link.index}"

    def _give_up(self, seconds: float) -> None:
        link, request, connection = self._asked[int(self._awaited[0])]
        link.give_up(connection, request.kind, seconds)

    def _break_off(self, error: BaseException) -> None:
        for each in self._asked:
            each.connection.break_off(error)

    def _give_back(self) -> None:
        self._is_over = True
        for each in self._asked:
            each.link.give_back(self._channel)


def _meta(asked: Asked, answer: bytes, payload_bytes: int) -> bytes:
    link, request, connection = asked
    header, meta = unpack(answer), answer[HEADER_BYTES:]
    verify(answer, meta, header)
    connection.received_bytes += len(answer) + header.payload_bytes
    connection.requests += 1
    link.route.check_answer(header, meta, request.kind)
    if header.payload_bytes != payload_bytes:
        raise connection.break_off(link.wrong_size(request.kind, payload_bytes, header))
    return meta


def begin(
    requests: Sequence[tuple[ServerLink, Request]], channel: Channel
) -> ServerExchange | None:
    """Send one request to each of these servers; None if one of them is busy with another."""
    if _native is None or not requests:
        return None
    asked: list[Asked] = []
    for link, request in requests:
        connection = link.take(channel)
        if connection is None:
            for each in asked:
                each.link.give_back(channel)
            return None
        asked.append(Asked(link, request, connection))
    exchange = ServerExchange(asked, channel)
    exchange._send()
    return exchange
