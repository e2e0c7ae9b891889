"""A server: its connections, a thread each. Every frame is checked before anything follows from it.

A worker has one connection per channel, so that small messages do not wait behind bulk data or
behind a pull that waits for other workers:

    control   joining, barriers, leaving, counts
    push      gradients and commits
    pull      weights and state
    rows      rows of embedding tables
    follow    another server reads the log

    Server ── accept, handshake ──> Peer ── check ──> handlers ──> ServedModel
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from shoal.runtime.acceptor import notice_silence
from shoal.runtime.config import TlsConfig
from shoal.server.member.peer_link import SILENT_COPY_S
from shoal.server.member.start import ChainParts, ChainSettings
from shoal.server.model.served_model import ServedModel
from shoal.server.process import requests, rows_requests
from shoal.server.process.model_host import ModelHost
from shoal.server.process.peer import Peer
from shoal.server.protocol import Header, Hello
from shoal.server.protocol.connection import Connection
from shoal.server.protocol.endpoint import PLAIN, remove_left_socket
from shoal.server.protocol.service import JOIN_S, ConnectionService

HANDLER_MODULES = (requests, rows_requests)  # they fill the table
_COUNTED = ("requests", "received_bytes", "sent_bytes")


class Server(ConnectionService):
    """Listens at one address, or at a second one for workers on other hosts."""

    def __init__(
        self,
        address: str,
        secret: bytes,
        has_exited: Callable[[int], bool] | None = None,
        remote_address: str = "",
        tls: TlsConfig = PLAIN,
        chain: ChainSettings | None = None,
    ):
        """`has_exited(rank)`: it never joins. With `chain` this is one copy of its shard."""
        if chain is not None:
            remove_left_socket(address)
        super().__init__(secret, [address, *filter(None, [remote_address])], tls)
        max_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self.host = ModelHost(secret, max_bytes, self.report, has_exited, tls)
        self.address = self.listeners[0].address
        self.remote_address = self.listeners[1].address if remote_address else ""
        self._counts: Counter[str] = Counter()  # of connections that have ended
        self._of_chain: set[Connection] = set()
        self.chain: ChainParts | None = None
        if chain is not None:
            listens = (self.address, self.remote_address)
            self.chain = ChainParts(chain, self.host, secret, self._end_workers, listens, tls)
        self.start()
        if self.chain is not None:
            self.chain.start()

    @property
    def models(self) -> dict[int, ServedModel]:
        return self.host.models

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Wait until every worker of every model has departed."""
        with self.host.changed:
            return self.host.changed.wait_for(lambda: not self.models, timeout_s)

    def close(self) -> None:
        self.stop_listening()
        if self.chain is not None:  # workers go on with another copy, and hear no error
            with self.lock:
                connections = list(self.connections)
            for connection in connections:
                connection.abort()
            self.chain.close(JOIN_S)
        self.host.close(JOIN_S)
        self.end_connections()

    def serve(self, connection: Connection, hello: Hello, header: Header, number: int) -> None:
        if hello.channel == "chain":
            self._of_chain.add(connection)
            notice_silence(connection.sock, SILENT_COPY_S)
        Peer(self.host, connection, hello.channel, header, number).run()

    def forget(self, connection: Connection) -> None:
        super().forget(connection)
        if connection in self._of_chain:
            self._of_chain.discard(connection)
        else:
            self._counts.update(_counts_of(connection))

    def _end_workers(self) -> None:
        """End the connections of workers and other shards; copies go on."""
        with self.lock:
            connections = list(self.connections - self._of_chain)
        for connection in connections:
            connection.abort()

    def report(self) -> dict[str, Any]:
        """Counts of the whole server, without what copies exchange."""
        with self.lock:
            counts = Counter(self._counts)
            served = self.connections - self._of_chain
            for connection in (*served, *self.host.connections):
                counts.update(_counts_of(connection))
            report: dict[str, Any] = {name: counts[name] for name in _COUNTED}
            return report | {"refused": dict(self.refused), "cpu_s": time.process_time()}


def _counts_of(connection: Connection) -> dict[str, int]:
    return {name: getattr(connection, name) for name in _COUNTED}
