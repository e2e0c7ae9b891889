"""Ranks as threads, joined by real TCP connections at loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from shoal.transport.tcp.connect import TcpSpec
from shoal.transport.tcp.transport import TcpEngine, TcpTransport
from tests.cores import one_core

KEY = b"k" * 32


class Meeting:
    """An all-gather of bytes among threads."""

    def __init__(self, size: int):
        self._barrier = threading.Barrier(size)
        self._said: list[bytes] = [b""] * size

    def exchange(self, rank: int) -> Callable[[bytes], list[bytes]]:
        def all_gather(message: bytes) -> list[bytes]:
            self._said[rank] = message
            self._barrier.wait(20)
            return list(self._said)

        return all_gather


def on_tcp(size: int, body: Callable[[TcpTransport], Any], **options: Any) -> list[Any]:
    """What `body` returned or raised, by rank. A rank that raises closes its connections."""
    meeting = Meeting(size)
    results: list[Any] = [None] * size
    done = threading.Barrier(size)

    def main(rank: int) -> None:
        engine = TcpEngine(TcpSpec(rank, size, KEY, **options), meeting.exchange(rank))
        try:
            results[rank] = body(TcpTransport(engine, timeout_s=20.0))
        except BaseException as error:
            results[rank] = error
            engine.close()
        done.wait(30)
        engine.close()

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(size)]
    with one_core():
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join()
    return results
