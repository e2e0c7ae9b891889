"""Serves a coordinator to other processes: a thread for each connection.

Both sides prove the run's secret first. Every frame is checked before anything follows from it;
one that is not a request ends its connection, and nothing else.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Any

import msgspec

from shoal.coordinator.core import Core
from shoal.coordinator.log import LogBroken
from shoal.coordinator.records import MAX_NUMBER, Request, RequestId
from shoal.errors import ShoalError
from shoal.runtime.config import TlsConfig
from shoal.runtime.strangers import Strangers
from shoal.server.protocol.connection import Connection
from shoal.server.protocol.endpoint import PLAIN, Listener
from shoal.server.protocol.frames import FrameKind, Header, Refused, encode
from shoal.server.protocol.handshake import HANDSHAKE_S, authenticate_peer
from shoal.server.protocol.hello import ErrorReply

MAX_REQUEST_BYTES = 96 << 10
MAX_CLIENT_CONNECTIONS = 2048
_SEND_S = 10.0  # a client that takes no answer for so long is disconnected
_TICK_S = 0.03
_JOIN_S = 5.0
_requests: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Request)


class CoordinatorService:
    """Listens at its addresses until it is closed."""

    def __init__(self, core: Core, secret: bytes, addresses: list[str], tls: TlsConfig = PLAIN):
        self._core = core
        self._secret = secret
        self._listeners = _listen(addresses, tls)
        self.addresses = [listener.address for listener in self._listeners]
        self.refused = 0
        self._strangers = Strangers()
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()
        self._threads: set[threading.Thread] = set()
        self._closed = threading.Event()
        self._own = [threading.Thread(target=self._tick, name="shoal-leases", daemon=True)]
        for listener in self._listeners:
            accepting = threading.Thread(
                target=self._accept, args=(listener,), name="shoal-coordinator", daemon=True
            )
            self._own.append(accepting)
        for thread in self._own:
            thread.start()

    def __enter__(self) -> CoordinatorService:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._closed.set()
        for listener in self._listeners:
            listener.close()
        self._core.close()
        self._strangers.end_all()
        with self._lock:
            threads = list(self._threads)
            for connection in self._connections:
                connection.abort()
        for thread in (*self._own, *threads):
            thread.join(_JOIN_S)

    def _tick(self) -> None:
        while not self._closed.wait(_TICK_S):
            self._core.tick()

    # ------------------------------------------------------------------ connections

    def _accept(self, listener: Listener) -> None:
        while (sock := listener.accept(self._strangers.make_room)) is not None:
            self._strangers.add(sock)
            thread = threading.Thread(
                target=self._serve, args=(listener, sock), name="shoal-coordinate", daemon=True
            )
            with self._lock:
                self._threads.add(thread)
            try:
                thread.start()
            except RuntimeError:  # as many threads as this process may have
                self._forget(thread, sock, None)
            if self._closed.is_set():
                self._strangers.end_all()

    def _serve(self, listener: Listener, sock: socket.socket) -> None:
        connection: Connection | None = None
        try:
            sock.settimeout(HANDSHAKE_S)
            connection = listener.secure(sock)
            client = self._authenticated(connection)
            while client is not None:
                self._serve_one(connection, client)
        except ShoalError as error:
            self._refuse(connection, str(error))
        except (OSError, ValueError):
            pass  # it has ended
        except Exception as error:  # of bytes that this code does not expect
            self._refuse(connection, repr(error))
        finally:
            self._forget(threading.current_thread(), sock, connection)

    def _authenticated(self, connection: Connection) -> int | None:
        """The client, once it has proven the secret; None if this service was closed meanwhile."""
        hello, header = authenticate_peer(connection, self._secret)
        if hello.channel != "coordinator":
            raise Refused(f"this is the coordinator: it has no {hello.channel} connections")
        if not self._strangers.remove(connection.sock):
            return None
        connection.sock.settimeout(None)
        with self._lock:
            if len(self._connections) >= MAX_CLIENT_CONNECTIONS:
                raise Refused(f"the coordinator serves {MAX_CLIENT_CONNECTIONS} connections")
            self._connections.add(connection)
        return None if self._closed.is_set() else header.incarnation

    def _serve_one(self, connection: Connection, client: int) -> None:
        header, meta = connection.receive(MAX_REQUEST_BYTES)
        if header.kind is not FrameKind.COORDINATE or header.payload_bytes:
            raise Refused(f"{header.kind.name} is no request to a coordinator")
        by = RequestId(client, header.sequence, header.argument)
        if header.incarnation != client or max(client, by.sequence, by.attempt) > MAX_NUMBER:
            raise Refused("a request of another client")
        request = decode_request(meta)
        try:
            answer = self._core.answer(request, by)
        except LogBroken as error:
            raise Refused(f"the coordinator cannot write its log: {error.strerror}") from error
        connection.sock.settimeout(_SEND_S)
        connection.send(Header(FrameKind.OK, sequence=header.sequence), encode(answer))
        connection.sock.settimeout(None)

    def _refuse(self, connection: Connection | None, reason: str) -> None:
        with self._lock:
            self.refused += 1
        if connection is not None:
            with suppress(OSError):
                connection.send(Header(FrameKind.ERROR), encode(ErrorReply(reason[:4000])))

    def _forget(
        self, thread: threading.Thread, sock: socket.socket, connection: Connection | None
    ) -> None:
        with self._lock:
            self._threads.discard(thread)
            if connection is not None:
                self._connections.discard(connection)
        if connection is not None:
            connection.close()
        sock.close()
        self._strangers.remove(sock)


def decode_request(meta: bytes) -> Request:
    try:
        request: Request = _requests.decode(meta)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Refused(f"not a request to a coordinator: {error}") from error
    return request


def _listen(addresses: list[str], tls: TlsConfig) -> list[Listener]:
    listeners: list[Listener] = []
    try:
        for address in addresses:
            listeners.append(Listener(address, tls))
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return listeners
