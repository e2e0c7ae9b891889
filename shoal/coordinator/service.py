"""Serves a coordinator to other processes: a thread for each connection.

Both sides prove the run's secret first. Every frame is checked before anything follows from it;
one that is not a request ends its connection, and nothing else.
"""

from __future__ import annotations

import threading
from contextlib import suppress

import msgspec

from shoal.coordinator.core import Core
from shoal.coordinator.interface import MAX_NUMBER, requests
from shoal.coordinator.log import LogBroken
from shoal.coordinator.store import RequestId
from shoal.protocol.connection import Closed, Connection
from shoal.protocol.endpoint import PLAIN
from shoal.protocol.frames import FrameKind, Header, Refused, encode
from shoal.protocol.hello import Hello
from shoal.protocol.service import JOIN_S, ConnectionService
from shoal.runtime.config import TlsConfig

MAX_REQUEST_BYTES = 96 << 10
MAX_CLIENT_CONNECTIONS = 2048
_SEND_S = 10.0  # a client that takes no answer for so long is disconnected
_TICK_S = 0.03


class CoordinatorService(ConnectionService):
    """Listens at its addresses until it is closed."""

    def __init__(self, core: Core, secret: bytes, addresses: list[str], tls: TlsConfig = PLAIN):
        super().__init__(secret, addresses, tls)
        self.addresses = [listener.address for listener in self.listeners]
        self._core = core
        self._ticking = threading.Thread(target=self._tick, name="shoal-leases", daemon=True)
        self._ticking.start()
        self.start()

    def close(self) -> None:
        self.stop_listening()
        self._core.close()
        self.end_connections()
        self._ticking.join(JOIN_S)

    def _tick(self) -> None:
        while not self.closed.wait(_TICK_S):
            self._core.tick()

    def serve(self, connection: Connection, hello: Hello, header: Header, number: int) -> None:
        if hello.channel != "coordinator":
            raise Refused(f"this is the coordinator: it has no {hello.channel} connections")
        with self.lock:
            if len(self.connections) >= MAX_CLIENT_CONNECTIONS:
                raise Refused(f"the coordinator serves {MAX_CLIENT_CONNECTIONS} connections")
            self.connections.add(connection)
        with suppress(Closed):
            while not self.closed.is_set():
                self._serve_one(connection, header.incarnation)

    def _serve_one(self, connection: Connection, client: int) -> None:
        header, meta = connection.receive(MAX_REQUEST_BYTES)
        if header.kind is not FrameKind.COORDINATE or header.payload_bytes:
            raise Refused(f"{header.kind.name} is no request to a coordinator")
        by = RequestId(client, header.sequence, header.argument)
        if header.incarnation != client or max(client, by.sequence, by.attempt) > MAX_NUMBER:
            raise Refused("a request of another client")
        try:
            answer = self._core.answer(requests.decode(meta), by)
        except LogBroken as error:
            raise Refused(f"the coordinator cannot write its log: {error.strerror}") from error
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise Refused(f"not a request to a coordinator: {error}") from error
        connection.sock.settimeout(_SEND_S)
        connection.send(Header(FrameKind.OK, sequence=header.sequence), encode(answer))
        connection.sock.settimeout(None)
