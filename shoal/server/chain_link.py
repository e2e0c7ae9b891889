"""The connections of one worker to the replicas of one shard.

    control, push         to the head of the chain
    pull, rows            to the member that serves this worker's pulls; what they set, to the head
    control, idle         to each other member, which maps the worker's memory (`replica_watch.py`)

A connection that breaks, or a server that says `Moved`, makes a worker look for the head: it asks
one replica after the other which epoch it is in, until the head of the latest one takes SETUP.
Other members answer, too, and are not taken for the head. What was not answered is sent again;
servers count a push once. Every frame has the epoch that the worker knows, and what a replica of an
earlier epoch says has no effect.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

from shoal.errors import PeerLost
from shoal.observe.trace import OFF, Tracer
from shoal.runtime.config import TlsConfig
from shoal.server.broken import Broken, MovedAway
from shoal.server.chain_view import ChainView
from shoal.server.head_search import FIRST_ASK_S, LONGEST_ASK_S, HeadSearch
from shoal.server.interruptions import Interruptions
from shoal.server.link import RETRY_S, START_TIMEOUT_S, IsOver, ServerLink, never
from shoal.server.protocol.connection import Connection
from shoal.server.protocol.endpoint import PLAIN
from shoal.server.protocol.frames import FrameKind, Header, Refused, decode, encode
from shoal.server.protocol.hello import Channel, Moved
from shoal.server.protocol.messages import SetUp, Stats
from shoal.server.replica_addresses import ReplicaAddresses
from shoal.server.replica_watch import ReplicaWatch
from shoal.server.request import Reply, Request

FIND_HEAD_S = 10.0  # how long a shard may be without a head
_READS = {  # every member serves them
    *(FrameKind.PULL, FrameKind.STATE_GET, FrameKind.RESIDUAL_GET),
    *(FrameKind.TABLE_PULL, FrameKind.TABLE_GET),
}
_OF_READERS = {"pull", "rows"}  # channels


def link_to(
    index: int,
    address: str | Sequence[str],
    secret: bytes,
    header: Header,
    rank_of: Callable[[int], int],
    tracer: Tracer = OFF,
    tls: TlsConfig = PLAIN,
    is_over: IsOver = never,
) -> ServerLink:
    """To one server, or to one with replicas: then it has several addresses."""
    if isinstance(address, str):
        return ServerLink(index, address, secret, header, rank_of, tracer, tls, is_over)
    return ChainLink(index, address, secret, header, rank_of, tracer, tls)


class ChainLink(ServerLink):
    """All channels from one worker to one shard, wherever its head is."""

    def __init__(
        self,
        index: int,
        addresses: Sequence[str],
        secret: bytes,
        header: Header,
        rank_of: Callable[[int], int],
        tracer: Tracer = OFF,
        tls: TlsConfig = PLAIN,
    ):
        self.addresses = addresses
        self.view = ChainView(len(addresses), header.worker)
        self.interruptions = Interruptions(self.view)
        self.find_head_s = FIND_HEAD_S
        self._viewing = threading.Lock()
        self.search = HeadSearch(self)
        self._unreachable: set[int] = set()  # readers, in this epoch
        self._reading: dict[Channel, bool] = {}  # whether the latest request of a channel reads
        self._spec = b""
        self._descriptor: int | None = None
        self._answer = SetUp()
        self._acknowledged = (0, 0)  # sequence and step of the latest push
        self._watch = ReplicaWatch(self)
        super().__init__(index, addresses[0], secret, header, rank_of, tracer, tls)

    def _begin(self) -> None:
        return None  # nothing is opened before the model is described

    def join(self, spec: bytes, descriptor: int | None) -> SetUp:
        self._spec = spec
        if descriptor is not None and self.is_unix:
            self._descriptor = os.dup(descriptor)
            self.shares_memory = True
        self.open("control")
        if self._answer.is_over:
            return self._answer
        self.interruptions.begin()
        self._watch.attach_members(LONGEST_ASK_S)
        self.open("push")
        self.open("pull")
        self._watch.start()
        return self._answer

    @property
    def is_unix(self) -> bool:
        return all(address.startswith("unix:") for address in self.addresses)

    @property
    def num_replicas(self) -> int:
        return len(self.addresses)

    @property
    def has_replicas(self) -> bool:
        return True

    @property
    def has_inbox(self) -> bool:
        return False  # a server that is the head no longer could write into it late

    @property
    def shares_rows(self) -> bool:
        return False  # for the same reason

    def interruptions_s(self) -> list[float]:
        return self.interruptions.seconds()

    def close(self) -> None:
        self.is_closing = True
        self._watch.close()
        super().close()
        control = self.search.take_control()
        self._replaced += [] if control is None else [control]
        for connection in self._replaced:
            connection.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    # ------------------------------------------------------------------ one request

    def _call(self, channel: Channel, request: Request) -> Reply:
        began_s = time.monotonic()
        self._aim(channel, request.kind in _READS)
        reply = super()._call(channel, request)
        is_push = request.kind is FrameKind.COMMIT
        if is_push:
            self._acknowledged = (request.sequence, request.argument)
        self.interruptions.answered(channel, began_s, is_push)
        return reply

    def _exchange(self, channel: Channel, request: Request) -> Reply:
        if not request.is_answered:
            return super()._exchange(channel, request)
        self._watch.begin(channel)
        try:
            return super()._exchange(channel, request)
        finally:
            self._watch.end(channel)

    @property
    def _lends(self) -> bool:
        return False  # an answer may say that another replica is to be asked

    @property
    def _resends(self) -> bool:
        return True

    @property
    def _epoch(self) -> int:
        return self.view.epoch

    def _doing(self, kind: FrameKind) -> str:
        return f"{kind.name} to {self.in_words()}"

    def in_words(self) -> str:
        first = self.index * len(self.addresses)
        last = first + len(self.addresses) - 1
        return f"shard {self.index} (servers {first} to {last})"

    # ------------------------------------------------------------------ where channels lead

    def learn(self, moved: Moved) -> bool:
        """Whether it is new. Then connections that lead to a wrong replica now are ended."""
        with self._viewing:
            if not self.view.learn(moved):
                return False
            self._unreachable.clear()
            heads = {self.view.head}
            members = set(self.view.members) | heads
        for channel, opened in list(self._channels.items()):
            if opened.replica not in (members if channel in _OF_READERS else heads):
                opened.connection.abort()
        return True

    def _targets(self, is_read: bool) -> list[int]:
        """Replicas in the order in which to connect to them."""
        with self._viewing:
            heads = [] if self.view.head is None else [self.view.head]
            if not is_read:
                return heads
            readers = [r for r in self.view.readers() if r not in self._unreachable]
            return list(dict.fromkeys([*readers, *heads]))

    def _aim(self, channel: Channel, is_read: bool) -> None:
        """Move a channel that leads to another replica than the one for the next request."""
        self._reading[channel] = is_read
        if channel == "control":
            self._use_fresh_control()
        elif self._first_target(is_read) != self._channels[channel].replica:
            self._move(channel, is_read, None)

    def _first_target(self, is_read: bool) -> int | None:
        return next(iter(self._targets(is_read)), None) if is_read else self.view.head

    def open(self, channel: Channel) -> None:
        """The first connection of a channel; servers may still be starting."""
        if channel == "control":
            self._ensure_head(self.search.generation, START_TIMEOUT_S)
            connection = self.search.take_control()
            assert connection is not None
            self._add_channel(channel, connection)
            self._channels[channel].replica = self.search.found_at or 0
        else:
            connection, replica = self._found(channel, channel == "pull", None, START_TIMEOUT_S)
            self._add_channel(channel, connection)
            self._channels[channel].replica = replica
        self._channels[channel].generation = self.search.generation

    def _reconnect(self, channel: Channel, broken: Broken) -> None:
        """Raises if no head is found in time."""
        if self._failure is not None or self.is_closing:
            raise self._failure or broken
        self.interruptions.broken(channel)
        if isinstance(broken, MovedAway):
            self.learn(broken.moved)
        is_read = self._reading.get(channel, False)
        if is_read:
            with self._viewing:
                self._unreachable.add(self._channels[channel].replica)
        self._move(channel, is_read, broken)

    def _move(self, channel: Channel, is_read: bool, broken: Broken | None) -> None:
        opened = self._channels[channel]
        lost = None if broken is None or is_read else opened.generation
        try:
            if channel == "control":
                self._ensure_head(opened.generation, self.find_head_s)
                self._use_fresh_control()
                return
            connection, replica = self._found(channel, is_read, lost, self.find_head_s)
        except PeerLost as error:
            self._failure = self._failure or error
            raise self._failure from broken
        self._replace_connection(channel, connection)
        opened.replica = replica
        opened.generation = self.search.generation

    def _found(
        self, channel: Channel, is_read: bool, lost: int | None, timeout_s: float
    ) -> tuple[Connection, int]:
        """A connection, and the replica that it leads to.

        `lost` is the generation of the connection before, where its head may be lost.
        """
        began_s = time.monotonic()
        ask_s = FIRST_ASK_S
        while True:
            left_s = began_s + timeout_s - time.monotonic()
            if lost is not None:
                self._ensure_head(lost, left_s)
            lost = self.search.generation
            reason: Exception | None = None
            for replica in self._targets(is_read):
                try:
                    return self._connected(channel, replica, ask_s), replica
                except MovedAway as moved:
                    self.learn(moved.moved)
                except (OSError, Broken, Refused) as error:
                    reason = error
            if left_s <= 0 or self.is_closing:
                raise self.not_found(began_s, reason)
            time.sleep(RETRY_S)
            ask_s = min(2 * ask_s, LONGEST_ASK_S)

    def _connected(self, channel: Channel, replica: int, timeout_s: float) -> Connection:
        if replica != self.search.found_at:
            self._watch.attach(replica, timeout_s)
        connection = self._reach(replica, channel, timeout_s)
        connection.sock.settimeout(None)
        return connection

    def _reach(self, replica: int, channel: Channel, timeout_s: float) -> Connection:
        try:
            return self._authenticated(self.addresses[replica], channel, timeout_s)
        except (OSError, Broken):
            if isinstance(self.addresses, ReplicaAddresses):
                self.addresses.look_again()
            raise

    # ------------------------------------------------------------------ finding the head

    def _ensure_head(self, lost: int, timeout_s: float) -> None:
        """Find the head, unless another thread has done so since generation `lost`."""
        if self.search.ensure(lost, timeout_s) and "control" in self._channels:
            self._channels["control"].connection.abort()

    def ask_epoch(self, replica: int, timeout_s: float) -> None:
        self._watch.ask(replica, timeout_s)

    def found_head(self, replica: int) -> None:
        self._watch.detach(replica)

    def drop(self, connection: Connection) -> None:
        """It is closed at the end."""
        self._replaced.append(connection)

    def greet_head(self) -> None:
        """Say at a new head where this worker is: others may wait for that."""
        with self._viewing:
            is_known = self.view.head in (None, self.search.found_at)
        if not is_known and not self.is_closing:
            self._ensure_head(self.search.generation, self.find_head_s)

    def set_up(self, replica: int, timeout_s: float) -> Connection:
        """A control connection to a replica that knows this worker and its memory."""
        connection = self._reach(replica, "control", timeout_s)
        sequence, step = self._acknowledged
        header = self._header._replace(
            kind=FrameKind.SETUP, sequence=sequence, argument=step, epoch=self.view.epoch
        )
        try:
            if self._descriptor is None:
                connection.send(header, self._spec)
            else:
                connection.send_descriptor(header, self._spec, self._descriptor)
            _, meta = self._receive_from(connection, FrameKind.SETUP)
            self._answer = decode(meta, SetUp)
            connection.sock.settimeout(None)
        except BaseException:
            connection.close()
            raise
        return connection

    @property
    def reader(self) -> int:
        """The replica that pulls go to."""
        return self._channels["pull"].replica

    def connect_reader(self, replica: int, timeout_s: float) -> Connection:
        """One more connection for pulls, to another replica than `reader`."""
        return self._connected("pull", replica, timeout_s)

    def ask(self, connection: Connection, request: Request) -> bytes:
        """The metadata of the answer on such a connection; its payload is skipped."""
        header = self._header._replace(kind=request.kind, epoch=self.view.epoch)
        connection.send(header, request.meta)
        answer, meta = self._receive_from(connection, request.kind)
        connection.skip(answer.payload_bytes)
        return meta

    def probe(self, connection: Connection, timeout_s: float, is_final: bool = False) -> bytes:
        """Ask a member that is not the head; MovedAway says in which epoch it is."""
        connection.sock.settimeout(timeout_s)
        header = self._header._replace(kind=FrameKind.STATS, epoch=self.view.epoch)
        connection.send(header, encode(Stats(is_final)))
        _, meta = self._receive_from(connection, FrameKind.STATS)
        return meta

    def other_stats(self) -> list[bytes]:
        return self._watch.final_stats(LONGEST_ASK_S)

    def _use_fresh_control(self) -> None:
        fresh = self.search.take_control()
        if fresh is not None:
            self._replace_connection("control", fresh)
            opened = self._channels["control"]
            opened.replica = self.search.found_at or 0
            opened.generation = self.search.generation

    def not_found(self, began_s: float, reason: Exception | None) -> PeerLost:
        after_s = round(time.monotonic() - began_s, 1)
        why = reason.doing if isinstance(reason, PeerLost) else reason or "no replica answers"
        doing = f"looking for the head of {self.in_words()} ({why})"
        return PeerLost(self.rank, None, doing, after_s)
