"""Ranks as threads, joined by real TCP connections at loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from shoal.transport.tcp.connect import TcpSpec
from shoal.transport.tcp.transport import TcpEngine, TcpTransport
from tests.comm.threads import Ranks, Table

KEY = b"k" * 32


def on_tcp(size: int, body: Callable[[TcpTransport], Any], **options: Any) -> list[Any]:
    """What `body` returned or raised, by rank. A rank that raises closes its connections."""
    table = Table(size)
    ranks = Ranks[Any]()
    done = threading.Barrier(size)

    def main(rank: int) -> None:
        engine = TcpEngine(TcpSpec(rank, size, KEY, **options), table.exchange(rank))
        try:
            ranks.results[rank] = body(TcpTransport(engine, timeout_s=20.0))
        except BaseException as error:
            ranks.results[rank] = error
            engine.close()
        done.wait(30)
        engine.close()

    return ranks.run(size, main)
