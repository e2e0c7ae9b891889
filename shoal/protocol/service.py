"""Connections to a process that serves: each proves the run's secret, and has a thread."""

from __future__ import annotations

import itertools
import re
import socket
import threading
from collections import Counter
from contextlib import AbstractContextManager, ExitStack, closing, suppress

from shoal.protocol import ErrorReply, FrameKind, Header, Hello, Refused, encode
from shoal.protocol.connection import Connection
from shoal.protocol.endpoint import Listener
from shoal.protocol.handshake import HANDSHAKE_S, authenticate_peer
from shoal.runtime import clock
from shoal.runtime.acceptor import Strangers, service_thread
from shoal.runtime.config import TlsConfig

MAX_REASONS = 64
JOIN_S = 5.0


class ConnectionService(AbstractContextManager["ConnectionService"]):
    """Accepts connections at its addresses, from `start` to `close`."""

    def __init__(self, secret: bytes, addresses: list[str], tls: TlsConfig):
        self.secret = secret
        self.listeners = _listen(addresses, tls)
        self.refused: Counter[str] = Counter()
        self.strangers = Strangers()
        self.connections: set[Connection] = set()  # that have proven the secret
        self.lock = clock.Lock()
        self.closed = clock.Event()
        self._numbers = itertools.count()
        self._threads: set[threading.Thread] = set()
        self._accepting = [
            service_thread("shoal-accept", self._accept, each) for each in self.listeners
        ]

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError

    def serve(self, connection: Connection, hello: Hello, header: Header, number: int) -> None:
        """Serve a connection that has proven the secret, to its end."""
        raise NotImplementedError

    def forget(self, connection: Connection) -> None:
        """It has ended; under the lock."""
        self.connections.discard(connection)

    def start(self) -> None:
        for thread in self._accepting:
            thread.start()

    def stop_listening(self) -> None:
        with self.lock:
            self.closed.set()
        for listener in self.listeners:
            listener.close()

    def end_connections(self) -> None:
        """End all of them, and wait for their threads; nothing is accepted any more."""
        with self.lock:
            threads = [*self._accepting, *self._threads]
            connections = list(self.connections)
        for connection in connections:
            connection.abort()
        self.strangers.end_all()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(JOIN_S)

    # ------------------------------------------------------------------ threads

    def _accept(self, listener: Listener) -> None:
        while (sock := listener.accept(self.strangers.make_room)) is not None:
            for _ in range(self.strangers.add(sock)):
                self._count("too many unauthenticated connections")
            arguments = (listener, sock, next(self._numbers))
            thread = service_thread("shoal-serve", self._serve, *arguments)
            with self.lock:
                self._threads.add(thread)
                if self.closed.is_set():
                    self.strangers.end_all()
            try:
                thread.start()
            except RuntimeError:  # as many threads as this process may have
                self._count("no thread left")
                self._forget(thread, sock, None)

    def _serve(self, listener: Listener, sock: socket.socket, number: int) -> None:
        connection: Connection | None = None
        try:
            sock.settimeout(HANDSHAKE_S)
            connection = listener.secure(sock)
            hello, header = authenticate_peer(connection, self.secret)
            if self.strangers.remove(sock):
                sock.settimeout(None)
                self.serve(connection, hello, header, number)
        except Refused as error:
            self._refuse(connection, error)
        except (OSError, TimeoutError):
            self._count("silent or broken before HELLO")
        except Exception as error:  # of bytes from a stranger: counted, without a traceback each
            self._count(f"failed before HELLO: {error!r}")
        finally:
            self._forget(threading.current_thread(), sock, connection)

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

    def _forget(
        self, thread: threading.Thread, sock: socket.socket, connection: Connection | None
    ) -> None:
        with self.lock:
            if connection is not None:
                self.forget(connection)
            self._threads.discard(thread)
        if connection is not None:
            connection.close()
        sock.close()
        self.strangers.remove(sock)


def _listen(addresses: list[str], tls: TlsConfig) -> list[Listener]:
    with ExitStack() as stack:  # closes those before one that fails
        listeners = [stack.enter_context(closing(Listener(each, tls))) for each in addresses]
        stack.pop_all()
        return listeners
