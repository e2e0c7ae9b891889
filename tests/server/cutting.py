"""A TCP proxy whose connections break at random places."""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

_RESET = struct.pack("ii", 1, 0)  # linger for 0 s: what was not sent yet is lost


class CuttingProxy:
    """Passes bytes on in both directions; each connection is reset after a random number of them.

    `cuts` is how many connections are broken before the proxy becomes reliable.
    """

    def __init__(self, target: str, seed: int, cuts: int, most_bytes: int):
        host, _, port = target.removeprefix("tcp:").rpartition(":")
        self._target = (host, int(port))
        self._random = random.Random(seed)
        self._most_bytes = most_bytes
        self._left = cuts
        self.cut = 0
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp:127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            budget = [self._draw()]
            self._sockets += [near, far]
            for source, sink in ((near, far), (far, near)):
                thread = threading.Thread(target=self._pass_on, args=(source, sink, budget))
                self._threads.append(thread)
                thread.start()

    def _draw(self) -> float:
        with self._lock:
            return self._random.randrange(self._most_bytes) if self._left > 0 else float("inf")

    def _pass_on(self, source: socket.socket, sink: socket.socket, budget: list[float]) -> None:
        with suppress(OSError):
            while data := source.recv(4096):
                with self._lock:
                    ends = len(data) >= budget[0] and self._left > 0
                    passed = data[: int(budget[0])] if ends else data
                    budget[0] -= len(passed)
                    self._left -= ends
                    self.cut += ends
                sink.sendall(passed)
                if ends:
                    for sock in (source, sink):
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    break
        for sock in (source, sink):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


@contextmanager
def proxied(
    addresses: list[str], seed: int, cuts: int, most_bytes: int = 2_500
) -> Iterator[list[CuttingProxy]]:
    with ExitStack() as stack:
        found = [CuttingProxy(a, seed + i, cuts, most_bytes) for i, a in enumerate(addresses)]
        for proxy in found:
            stack.callback(proxy.close)
        yield found
