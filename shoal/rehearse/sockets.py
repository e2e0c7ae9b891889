"""Connections between virtual workers and servers: bytes that take their time on the links."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from shoal.errors import BadInput
from shoal.rehearse.network import VirtualMessage, VirtualNetwork
from shoal.rehearse.virtual_time import Fiber, FiberEnd, VirtualTime
from shoal.server.protocol import FrameKind, unpack

_ADDRESS = "virtual:"


_LARGE_BYTES = 64 << 10  # travels as a reference
# its payload stays as it is until the answer was read, or the next request of the channel
_LASTING = (FrameKind.BUCKET, FrameKind.OK)


@dataclass(eq=False)
class _Flight:
    """Bytes on their way; None is the end of the connection."""

    data: Sequence[memoryview] | None
    is_here: bool = False


@dataclass(eq=False)
class VirtualProcess:
    """A process: where it runs."""

    name: str
    device: int
    exited: Callable[[int], None] = lambda status: None  # called with its exit status
    is_dead: bool = False
    sockets: list[VirtualSocket] = field(default_factory=list)


class VirtualSocket:
    """One end of a TCP connection. What is sent arrives in its order, and nothing is refused."""

    family = socket.AF_INET

    def __init__(self, network: VirtualNetwork, time: VirtualTime, place: VirtualProcess):
        self._network = network
        self._time = time
        self.place = place
        self._peer: VirtualSocket | None = None
        self._flights: deque[_Flight] = deque()  # to the peer
        self._arrived: deque[memoryview] = deque()
        self._is_over = False  # nothing else will arrive
        self._is_shut = False
        self._reader: Fiber | None = None
        self._timeout_s: float | None = None
        place.sockets.append(self)

    def join(self, peer: VirtualSocket) -> None:
        self._peer = peer
        peer._peer = self

    # ------------------------------------------------------------------ sending

    def sendmsg(self, views: Sequence[memoryview], ancillary: object = ()) -> int:
        """What is large is read from the memory of its sender when it is received."""
        size = sum([view.nbytes for view in views])
        head, *payload = views
        if size >= _LARGE_BYTES and unpack(head).kind in _LASTING:
            self._transmit([memoryview(bytes(head)), *payload], size)
        else:
            self._transmit([memoryview(b"".join(views))], size)
        return size

    def send(self, data: bytes, flags: int = 0) -> int:
        self._transmit([memoryview(bytes(data))], len(data))
        return len(data)

    def sendall(self, data: memoryview) -> None:
        self.send(bytes(data))

    def _transmit(self, data: Sequence[memoryview] | None, size: int = 0) -> None:
        peer = self._peer
        if self._is_shut or peer is None or (data is not None and peer._is_shut):
            if data is None:
                return
            raise BrokenPipeError("the connection has ended")
        flight = _Flight(data)
        self._flights.append(flight)

        def arrived() -> None:
            flight.is_here = True
            while self._flights and self._flights[0].is_here:
                peer._take(self._flights.popleft().data)

        self._network.send([VirtualMessage(self.place.device, peer.place.device, size)], arrived)

    def _take(self, data: Sequence[memoryview] | None) -> None:
        if data is None:
            self._is_over = True
        else:
            self._arrived += [view for view in data if view.nbytes]
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None:
            self._time.wake(self._reader)

    # ------------------------------------------------------------------ receiving

    def recv_into(self, view: memoryview) -> int:
        end_s = None if self._timeout_s is None else self._time.now_s + self._timeout_s
        self._reader = self._time.current
        if end_s is not None:
            self._time.at(end_s, self._wake)
        while not self._arrived and not (self._is_over or self._is_shut):
            if end_s is not None and self._time.now_s >= end_s:
                raise TimeoutError("timed out")
            self._time.park(f"bytes from {self._peer.place.name if self._peer else 'no peer'}")
        if not self._arrived:
            return 0
        first = self._arrived.popleft()
        count = min(len(view), len(first))
        if count < _LARGE_BYTES or _address(view) != _address(first):
            view[:count] = first[:count]
        if count < len(first):
            self._arrived.appendleft(first[count:])
        return count

    # ------------------------------------------------------------------ the rest of a socket

    def settimeout(self, seconds: float | None) -> None:
        self._timeout_s = seconds

    def gettimeout(self) -> float | None:
        return self._timeout_s

    def setsockopt(self, level: int, option: int, value: int) -> None:
        return None

    def getpeername(self) -> tuple[str, int]:
        """The host of the peer, by name: a listener counts those that come from one."""
        assert self._peer is not None
        node = self._peer.place.device // self._network.cluster.node.devices
        return f"node-{node}", 0

    def fileno(self) -> int:
        return -1

    def shutdown(self, how: int) -> None:
        if self._is_shut:
            return
        self._transmit(None)
        self._is_shut = True
        self._wake()

    def close(self) -> None:
        self.shutdown(socket.SHUT_RDWR)


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


class VirtualListener:
    """What accepts at an address."""

    def __init__(self, time: VirtualTime, place: VirtualProcess):
        self.place = place
        self._time = time
        self._waiting: deque[VirtualSocket] = deque()
        self._acceptor: Fiber | None = None
        self.is_closed = False

    def add(self, sock: VirtualSocket) -> None:
        self._waiting.append(sock)
        if self._acceptor is not None:
            self._time.wake(self._acceptor)

    def accept(self, make_room: Callable[[], bool]) -> VirtualSocket | None:
        self._acceptor = self._time.current
        while not self._waiting and not self.is_closed:
            self._time.park("connections")
        return self._waiting.popleft() if self._waiting else None

    def close(self) -> None:
        self.is_closed = True
        if self._acceptor is not None:
            self._time.wake(self._acceptor)


class VirtualSockets:
    """The connections of a rehearsal, not those of the machine (`server/protocol/endpoint.py`)."""

    def __init__(self, network: VirtualNetwork, time: VirtualTime):
        self._network = network
        self._time = time
        self._listeners: dict[str, VirtualListener] = {}

    def listen(self, address: str) -> tuple[str, VirtualListener]:
        name = address if address.startswith(_ADDRESS) else _ADDRESS + address
        if name.endswith(":0"):
            name += f"-{len(self._listeners)}"  # as the kernel chooses a port
        listener = VirtualListener(self._time, self._place())
        self._listeners[name] = listener
        return name, listener

    def connect(self, address: str, timeout_s: float) -> VirtualSocket:
        listener = self._listeners.get(address)
        if listener is None or listener.is_closed or listener.place.is_dead:
            raise ConnectionRefusedError(f"nothing listens at {address}")
        here = VirtualSocket(self._network, self._time, self._place())
        there = VirtualSocket(self._network, self._time, listener.place)
        here.join(there)
        listener.add(there)
        return here

    def end(self, process: VirtualProcess) -> None:
        """What it has sent still arrives; then its connections end."""
        for listener in self._listeners.values():
            if listener.place is process:
                listener.close()
        for sock in process.sockets:
            sock.close()
        process.sockets.clear()

    def _place(self) -> VirtualProcess:
        place = self._time.current.group
        if not isinstance(place, VirtualProcess):
            raise BadInput("a connection is opened outside of all workers and servers")
        if place.is_dead:
            raise FiberEnd
        return place
