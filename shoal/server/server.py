"""Accepts connections, a thread each. Every frame is checked before anything follows from it.

A worker has one connection per channel, so that small messages do not wait behind bulk data or
behind a pull that waits for other workers:

    control   joining, barriers, leaving, counts
    push      gradients and commits
    pull      weights and state
    rows      rows of embedding tables
    follow    another server reads the log

    Server ── accept, handshake ──> Session ── check ──> handlers ──> ServedModel
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from shoal.runtime.config import TlsConfig
from shoal.runtime.strangers import Strangers
from shoal.server.model.served_model import ServedModel
from shoal.server.model_host import ModelHost
from shoal.server.peer import Peer
from shoal.server.protocol.connection import Closed, Connection
from shoal.server.protocol.endpoint import PLAIN, Listener, expect_answers, remove_left_socket
from shoal.server.protocol.frames import FrameKind, Header, Refused, encode
from shoal.server.protocol.handshake import HANDSHAKE_S, authenticate_peer
from shoal.server.protocol.messages import ErrorReply
from shoal.server.replicas.apply import apply
from shoal.server.replicas.peer_link import SILENT_COPY_S
from shoal.server.replicas.start import ChainParts, ChainSettings
from shoal.server.session import Session

MAX_REASONS = 64
_JOIN_S = 5.0


class Server:
    """Listens at one address, or at a second one for workers on other hosts."""

    def __init__(
        self,
        address: str,
        secret: bytes,
        max_bytes: int | None = None,
        has_exited: Callable[[int], bool] | None = None,
        remote_address: str = "",
        tls: TlsConfig = PLAIN,
        chain: ChainSettings | None = None,
    ):
        """`has_exited(rank)` tells whether a worker that has not joined never will.

        With `chain` this server holds one copy of its shard.
        """
        self.secret = secret
        self.host = ModelHost(secret, max_bytes or _memory_bytes(), self.report, has_exited, tls)
        if chain is not None:
            remove_left_socket(address)
        self.host.execute = partial(apply, self.host)
        self.listeners = _listen(address, remote_address, tls)
        self.address = self.listeners[0].address
        self.remote_address = self.listeners[1].address if remote_address else ""
        self.refused: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()  # of connections that have ended
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self.strangers = Strangers()
        self._connections: set[Connection] = set()
        self._of_chain: set[Connection] = set()
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self.chain: ChainParts | None = None
        if chain is not None:
            listens = (self.address, self.remote_address)
            self.chain = ChainParts(chain, self.host, secret, self._end_workers, listens, tls)
        self._accepting = [
            threading.Thread(
                target=self._accept, args=(listener,), name="shoal-server", daemon=True
            )
            for listener in self.listeners
        ]
        for thread in self._accepting:
            thread.start()
        if self.chain is not None:
            self.chain.start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def models(self) -> dict[int, ServedModel]:
        return self.host.models

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Wait until every worker of every model has departed."""
        return self.host.wait_idle(timeout_s)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            connections = list(self._connections)
            threads = list(self._threads)
        for listener in self.listeners:
            listener.close()
        if self.chain is not None:  # workers go on with another copy, and hear no error
            for connection in connections:
                connection.abort()
            self.chain.close(_JOIN_S)
        self.host.close(_JOIN_S)
        for connection in connections:
            connection.abort()
        self.strangers.end_all()
        for thread in [*self._accepting, *threads]:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)

    def _end_workers(self) -> None:
        """End the connections of workers and other shards; copies go on."""
        with self._lock:
            connections = list(self._connections - self._of_chain)
        for connection in connections:
            connection.abort()

    def report(self) -> dict[str, Any]:
        """Counts of the whole server, without what copies exchange."""
        with self._lock:
            counts = Counter(self._counts)
            served = self._connections - self._of_chain
            for connection in (*served, *self.host.connections):
                counts.update(_counts_of(connection))
            names = ("requests", "received_bytes", "sent_bytes")
            report: dict[str, Any] = {name: counts[name] for name in names}
            return report | {"refused": dict(self.refused), "cpu_s": time.process_time()}

    # ------------------------------------------------------------------ connections

    def _accept(self, listener: Listener) -> None:
        while (sock := listener.accept(self.strangers.make_room)) is not None:
            for _ in range(self.strangers.add(sock)):
                self._count("too many unauthenticated connections")
            thread = threading.Thread(
                target=self._serve,
                args=(listener, sock, next(self._numbers)),
                name="shoal-serve",
                daemon=True,
            )
            with self._lock:
                self._threads.add(thread)
                if self._closed:
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
            peer = self._authenticate(connection, number)
            if peer is not None:
                Session(peer).run()
        except Refused as error:
            self._refuse(connection, error)
        except (OSError, TimeoutError):
            self._count("silent or broken before HELLO")
        except Exception as error:  # of bytes from a stranger: counted, without a traceback each
            self._count(f"failed before HELLO: {error!r}")
        finally:
            self._forget(threading.current_thread(), sock, connection)

    def _authenticate(self, connection: Connection, number: int) -> Peer | None:
        """The peer, once it has proven the secret; None if the server was closed meanwhile."""
        hello, header = authenticate_peer(connection, self.secret)
        if not self.strangers.remove(connection.sock):
            return None
        connection.sock.settimeout(None)
        with self._lock:
            self._connections.add(connection)
            if hello.channel == "chain":
                self._of_chain.add(connection)
                expect_answers(connection.sock, SILENT_COPY_S)
            if self._closed:
                return None
        return Peer(self.host, connection, hello.channel, header, number)

    def _refuse(self, connection: Connection | None, error: Refused) -> None:
        self._count(str(error))
        if connection is not None:
            with suppress(Closed, OSError):
                connection.send(Header(FrameKind.ERROR), encode(ErrorReply(str(error)[:4000])))

    def _count(self, reason: str) -> None:
        """By reason without numbers: their variety is limited, whatever arrives."""
        kind = re.sub(r"[0-9]+", "#", reason)[:80]
        is_known = kind in self.refused or len(self.refused) < MAX_REASONS
        self.refused[kind if is_known else "others"] += 1

    def _forget(
        self, thread: threading.Thread, sock: socket.socket, connection: Connection | None
    ) -> None:
        with self._lock:
            if connection is not None:
                self._connections.discard(connection)
                if connection in self._of_chain:
                    self._of_chain.discard(connection)
                else:
                    self._counts.update(_counts_of(connection))
            self._threads.discard(thread)
        if connection is not None:
            connection.close()
        sock.close()
        self.strangers.remove(sock)


def _listen(address: str, remote_address: str, tls: TlsConfig) -> list[Listener]:
    listeners = [Listener(address, tls)]
    if remote_address:
        try:
            listeners.append(Listener(remote_address, tls))
        except BaseException:
            listeners[0].close()
            raise
    return listeners


def _counts_of(connection: Connection) -> dict[str, int]:
    return {
        "requests": connection.requests,
        "received_bytes": connection.received_bytes,
        "sent_bytes": connection.sent_bytes,
    }


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return sys.maxsize
