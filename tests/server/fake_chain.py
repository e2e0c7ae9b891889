"""Replicas of one shard as scripted servers in threads: they count pushes and hold no weights."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

from shoal.protocol.connection import Closed, Connection
from shoal.protocol.endpoint import Listener
from shoal.protocol.frames import (
    MAX_META_BYTES,
    ErrorReply,
    FrameKind,
    Header,
    Moved,
    Refused,
    encode,
)
from shoal.protocol.handshake import authenticate_peer
from shoal.server.messages import Ack, LowestSurvivor, Pulled, SetUp
from tests.folders import socket_folder
from tests.server.helpers import SECRET


@dataclass
class FakeChain:
    """What all replicas share: the configuration, and the pushes that are committed."""

    epoch: int = 1
    members: tuple[int, ...] = (0, 1, 2)
    pull_bytes: int = 0
    counted: list[int] = field(default_factory=list)  # sequences, in order
    pulls: list[int] = field(default_factory=list)  # the replica that served each
    set_ups: list[tuple[int, int]] = field(default_factory=list)  # replica, epoch
    descriptors: dict[int, int] = field(default_factory=dict)  # replica to how many
    replicas: list[FakeReplica] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def move(self, *members: int) -> None:
        self.epoch += 1
        self.members = members

    def moved(self) -> Moved:
        return Moved(self.epoch, self.members[0] if self.members else None, self.members)


class FakeReplica:
    """One server of the chain; `die` ends its connections, as SIGKILL would."""

    def __init__(self, chain: FakeChain, number: int, address: str):
        self.chain = chain
        self.number = number
        self.address = address
        self.stopped = threading.Event()  # as after SIGSTOP: takes connections, answers nothing
        self.goes_on = threading.Event()
        self.believes: Moved | None = None  # that it is still the head of this epoch
        self.held = threading.Event()  # a request came while it was stopped
        self._connections: list[Connection] = []
        self._listener = Listener(self.address)
        self.is_dead = False
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def die(self) -> None:
        self.is_dead = True
        self._listener.close()
        for connection in self._connections:
            connection.abort()

    def close(self) -> None:
        self.goes_on.set()
        self.die()

    def _accept(self, listener: Listener) -> None:
        while (sock := listener.accept()) is not None:
            connection = Connection(sock)
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with suppress(Closed, OSError, Refused):
            self._pause()
            authenticate_peer(connection, SECRET)
            while not self.is_dead:
                header, _ = connection.receive(MAX_META_BYTES)
                connection.skip(header.payload_bytes)
                self._pause()
                self._answer(connection, header)
        connection.close()

    def _pause(self) -> None:
        if self.stopped.is_set():
            self.held.set()
            self.goes_on.wait(60)

    def _answer(self, connection: Connection, header: Header) -> None:
        now = self.believes or self.chain.moved()
        if not self._takes(header, now):
            error = ErrorReply("not the head", moved=now)
            connection.send(Header(FrameKind.ERROR), encode(error))
            return
        answer = self._carried_out(connection, header)
        if header.kind is not FrameKind.BUCKET:
            connection.send(Header(FrameKind.OK), *answer)

    def _takes(self, header: Header, now: Moved) -> bool:
        if header.epoch != now.epoch:
            return False
        reads = (FrameKind.PULL, FrameKind.STATE_GET, FrameKind.SETUP)
        return self.number == now.head or (header.kind in reads and self.number in now.members)

    def _carried_out(self, connection: Connection, header: Header) -> tuple[bytes, memoryview]:
        chain = self.chain
        nothing = memoryview(b"")
        with chain.lock:
            if header.kind is FrameKind.COMMIT and self.believes is None:
                chain.counted.append(header.sequence)
                return encode(Ack("admitted", header.sequence)), nothing
            if header.kind is FrameKind.PULL:
                chain.pulls.append(self.number)
                payload = bytes(chain.pull_bytes)
                return encode(Pulled(len(chain.counted), 0, 0)), memoryview(payload)
            if header.kind is FrameKind.SETUP:
                self._set_up(connection, header)
                return encode(SetUp()), nothing
            if header.kind in (FrameKind.BARRIER, FrameKind.LEAVE):
                return encode(LowestSurvivor(0)), nothing
        return b"", nothing

    def _set_up(self, connection: Connection, header: Header) -> None:
        descriptor = connection.take_descriptor()
        if descriptor is not None:
            os.close(descriptor)
            taken = self.chain.descriptors
            taken[self.number] = taken.get(self.number, 0) + 1
        self.chain.set_ups.append((self.number, header.epoch))


@contextmanager
def fake_chain(replicas: int = 3) -> Iterator[FakeChain]:
    with ExitStack() as stack:
        folder = stack.enter_context(socket_folder())
        chain = FakeChain(members=tuple(range(replicas)))
        for number in range(replicas):
            replica = FakeReplica(chain, number, f"unix:{folder}/server-{number}.sock")
            stack.callback(replica.close)
            chain.replicas.append(replica)
        yield chain
