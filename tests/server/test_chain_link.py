"""A worker and the replicas of a shard: it finds the head, and each push counts once."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

import pytest

from shoal.errors import PeerLost
from shoal.protocol import MAX_META_BYTES, ErrorReply, FrameKind, Header, Moved, Refused, encode
from shoal.protocol.connection import Closed, Connection
from shoal.protocol.endpoint import Listener
from shoal.protocol.handshake import authenticate_peer
from shoal.server.client.chain_route import ChainRoute
from shoal.server.client.chain_view import ChainView
from shoal.server.client.client import Client
from shoal.server.client.route import Request
from shoal.server.consistency import Rule
from shoal.server.messages import Ack, LowestSurvivor, Pulled, SetUp
from shoal.server.shared_memory import bytes_of
from tests.folders import socket_folder
from tests.server.helpers import SECRET, client_at, fill


@contextmanager
def worker_of(chain: FakeChain, rank: int = 0) -> Iterator[Client]:
    client = client_at([[replica.address for replica in chain.replicas]], rank, Rule(workers=1))
    (spec,) = client.specs
    chain.pull_bytes = 4 * (1 + spec.parameters) + 4 * (spec.stop - spec.start)
    try:
        yield client
    finally:
        client.close()


def route_of(client: Client) -> ChainRoute:
    (link,) = client.links
    assert isinstance(link.route, ChainRoute)
    return link.route


def push(client: Client, times: int = 1) -> list[str]:
    return [client.commit(*fill(client, 1.0)).verdict for _ in range(times)]


def commit_request(client: Client) -> Request:
    commit, loss_flags = fill(client, 1.0)
    client.sequence += 1
    payload = (bytes_of(loss_flags),)
    return Request(FrameKind.COMMIT, encode(commit), payload, sequence=client.sequence)


def test_a_view_follows_the_highest_epoch_and_reads_are_spread_over_members() -> None:
    view = ChainView(3, worker=4)
    assert view.to_ask() == [0, 1, 2]
    assert view.learn(Moved(3, 1, (1, 2)))
    assert not view.learn(Moved(2, 0, (0, 1, 2))), "a head of an earlier epoch"
    assert not view.learn(Moved(3, 1, (1, 2)))
    assert (view.epoch, view.head, view.to_ask()) == (3, 1, [1, 2, 0])
    assert view.readers() == [1, 2]
    assert view.learn(Moved(4, None, ())), "a replica that does not know the head"
    assert view.learn(Moved(4, 2, (2,))), "and one that does"
    assert view.readers() == [2]
    assert view.learn(Moved(5, 9, (9,)))
    assert view.head is None, "there is no replica 9"


@pytest.mark.parametrize("rank", [0, 1])
def test_all_members_get_the_memory_of_a_worker_and_pulls_are_spread(rank: int) -> None:
    with fake_chain() as chain, worker_of(chain, rank) as client:
        assert set(chain.descriptors) == {0, 1, 2}
        push(client, 2)
        client.pull(None, 0).wait()
        client.links[0].call("pull", Request(FrameKind.STATE_SET))
        client.pull(None, 0).wait()
        assert chain.counted == [1, 2]
        assert chain.pulls == [rank, rank]


def test_the_head_is_found_wherever_it_is() -> None:
    with fake_chain() as chain:
        chain.move(2, 0, 1)
        with worker_of(chain) as client:
            assert push(client) == ["admitted"]
            assert route_of(client).view.head == 2


def test_a_stopped_head_is_left_when_another_replica_tells_of_a_new_epoch() -> None:
    with fake_chain() as chain, worker_of(chain) as client:
        push(client)
        chain.replicas[0].believes = chain.moved()
        chain.replicas[0].stopped.set()
        pushing = client.links[0].post("push", commit_request(client))
        assert chain.replicas[0].held.wait(60)
        chain.move(1, 2)
        pushing.result()
        chain.replicas[0].goes_on.set()  # it answers late, on a connection that is gone
        push(client)
        assert chain.counted == [1, 2, 3]


def test_members_that_answer_are_not_taken_for_the_head() -> None:
    with fake_chain() as chain, worker_of(chain) as client:
        push(client)
        chain.replicas[0].die()
        route = route_of(client)
        route.find_head_s = 0.1
        with pytest.raises(PeerLost, match="looking for the head"):
            route.find_head(route.find_head_s)  # the others are members of its epoch
        chain.move(1, 2)
        replica, connection = route.find_head(60)
        connection.close()
        assert (replica, chain.set_ups[-1]) == (1, (1, 2)), "SETUP in the epoch in which it leads"


def test_the_search_for_a_head_ends_and_names_the_shard_and_its_replicas() -> None:
    with fake_chain() as chain, worker_of(chain) as client:
        route_of(client).find_head_s = 0.1
        for replica in chain.replicas:
            replica.die()
        with pytest.raises(PeerLost, match=r"head of shard 0 \(servers 0 to 2\)"):
            push(client)


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
