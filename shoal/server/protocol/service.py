"""Connections to a process that serves: each proves the run's secret, and has a thread."""

from __future__ import annotations

import itertools
import re
import socket
from collections import Counter
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from functools import partial

from shoal.runtime import clock
from shoal.runtime.acceptor import GRACE_S, Greeter, Strangers
from shoal.runtime.config import TlsConfig
from shoal.server.protocol import ErrorReply, FrameKind, Header, Hello, Refused, encode
from shoal.server.protocol.connection import Connection
from shoal.server.protocol.endpoint import Listener
from shoal.server.protocol.handshake import HANDSHAKE_S, authenticate_peer

MAX_REASONS = 64
JOIN_S = 5.0


class ConnectionService(AbstractContextManager["ConnectionService"]):
    """Accepts connections at its addresses, from `start` to `close`."""

    def __init__(self, secret: bytes, addresses: list[str], tls: TlsConfig):
        self.secret = secret
        self.listeners = _listen(addresses, tls)
        self.refused: Counter[str] = Counter()
        self.strangers = Strangers(grace_s=GRACE_S)
        self._greeter = Greeter("shoal-serve", self.strangers, self._count)
        self.connections: set[Connection] = set()  # that have proven the secret
        self.lock = clock.Lock()
        self.closed = clock.Event()
        self._numbers = itertools.count()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.stop_listening()
        self.end_connections()

    def serve(self, connection: Connection, hello: Hello, header: Header, number: int) -> None:
        """Serve a connection that has proven the secret, to its end."""
        raise NotImplementedError

    def forget(self, connection: Connection) -> None:
        """It has ended; under the lock."""
        self.connections.discard(connection)

    def start(self) -> None:
        for listener in self.listeners:
            self._greeter.start(listener.accept, partial(self._serve, listener))

    def stop_listening(self) -> None:
        with self.lock:
            self.closed.set()
        for listener in self.listeners:
            listener.close()

    def end_connections(self) -> None:
        """End all of them, and wait for their threads; nothing is accepted any more."""
        with self.lock:
            connections = list(self.connections)
        for connection in connections:
            connection.abort()
        self._greeter.close(JOIN_S)

    # ------------------------------------------------------------------ threads

    def _serve(self, listener: Listener, sock: socket.socket) -> None:
        connection: Connection | None = None
        try:
            sock.settimeout(HANDSHAKE_S)
            connection = listener.secure(sock)
            hello, header = authenticate_peer(connection, self.secret)
            if self.strangers.remove(sock):
                sock.settimeout(None)
                with self.lock:
                    self.connections.add(connection)
                    if self.closed.is_set():
                        return
                self.serve(connection, hello, header, next(self._numbers))
        except Refused as error:
            self._refuse(connection, error)
        except (OSError, TimeoutError):
            self._count("silent or broken before HELLO")
        except Exception as error:  # of bytes from a stranger: counted, without a traceback each
            self._count(f"failed before HELLO: {error!r}")
        finally:
            if connection is not None:
                with self.lock:
                    self.forget(connection)
                connection.close()

    def _refuse(self, connection: Connection | None, error: Refused) -> None:
        self._count(str(error))
        if connection is not None:
            with suppress(OSError):
                connection.send(Header(FrameKind.ERROR), encode(ErrorReply(str(error)[:4000])))

    def _count(self, reason: str) -> None:
        """By reason without numbers: their variety is limited, whatever arrives."""
        kind = re.sub(r"[0-9]+", "#", reason)[:80]
        is_known = kind in self.refused or len(self.refused) < MAX_REASONS
        self.refused[kind if is_known else "others"] += 1


def _listen(addresses: list[str], tls: TlsConfig) -> list[Listener]:
    with ExitStack() as stack:  # closes those before one that fails
        listeners = [stack.enter_context(closing(Listener(each, tls))) for each in addresses]
        stack.pop_all()
        return listeners
