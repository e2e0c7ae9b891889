"""One replica of a shard, as the connections of workers and of other replicas use it.

Proposals     operations of workers, at the head
Reads         what a member may say about its state
PeerFrames    messages of the other replicas
Learning      the snapshot that brings a replica back
LostWorkers   workers that the head gives up
ReplicaCore   the lock, the chain node, and what its effects do
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from shoal.server.model_host import ModelHost
from shoal.server.protocol.connection import Connection
from shoal.server.protocol.frames import Header
from shoal.server.replicas.core import ReplicaCore
from shoal.server.replicas.learning import Learning
from shoal.server.replicas.lost_workers import LostWorkers
from shoal.server.replicas.operations import EMPTY, OnCommitted, Operation, Payload
from shoal.server.replicas.peer_frames import PeerFrames
from shoal.server.replicas.peer_link import PeerLink
from shoal.server.replicas.place import ReplicaPlace
from shoal.server.replicas.proposals import Proposals
from shoal.server.replicas.reads import Reads

T = TypeVar("T")


class ChainRuntime(ReplicaCore):
    """The chain of one shard, as one of its replicas takes part in it."""

    def __init__(self, place: ReplicaPlace, host: ModelHost, on_reset: Callable[[], None]):
        """`on_reset` ends all connections of workers: this replica has lost its place."""
        super().__init__(place, host, self._forget_workers)
        self._end_connections = on_reset
        self.frames = PeerFrames(self)
        self.reads = Reads(self)
        self._proposals = Proposals(self, self.reads.confirm)
        self._learning = Learning(self)
        self._losses = LostWorkers(host, lambda: self.is_head, self.execute)
        host.is_replicated = True
        host.may_lose = place.consistency == "eventual"
        host.execute = self.execute
        host.on_loss = self._losses.note

    def start(self, links: dict[int, PeerLink]) -> None:
        self.links = links
        for link in links.values():
            link.start()
        self._losses.start()

    def close(self, join_s: float) -> None:
        with self.changed:
            self.is_closed = True
            self.waiters.end_all()
            self.changed.notify_all()
        self._losses.close()
        for link in self.links.values():
            link.close()
        for link in self.links.values():
            link.join(join_s)

    def _forget_workers(self) -> None:
        self._losses.forget()
        self._end_connections()

    # ------------------------------------------------------------------ its place in the chain

    @property
    def is_head(self) -> bool:
        return self.node.is_head

    def check_head(self) -> None:
        if not self.node.is_head:
            raise self.elsewhere("is not the head of its chain")

    def check_epoch(self, epoch: int) -> None:
        """Elsewhere if a worker's epoch is not the present one, or this is no member."""
        node = self.node
        if not node.is_member:
            raise self.elsewhere("is no member of its chain")
        if epoch != node.epoch:
            raise self.elsewhere(f"is in epoch {node.epoch}, and the request in epoch {epoch}")

    # ------------------------------------------------------------------ workers ask

    def execute(
        self,
        operation: Operation,
        payload: Payload = EMPTY,
        on_committed: OnCommitted | None = None,
    ) -> Any:
        return self._proposals.execute(operation, payload, on_committed)

    def read(self, action: Callable[[], T]) -> T:
        return self.reads.read(action)

    def catch_up(self) -> None:
        self.reads.catch_up()

    def await_committed(self) -> None:
        self.reads.await_committed()

    # ------------------------------------------------------------------ replicas speak

    def receive(self, sender: int, header: Header, meta: bytes, connection: Connection) -> None:
        self.frames.receive(sender, header, meta, connection)

    def receive_snapshot(
        self, sender: int, header: Header, meta: bytes, connection: Connection
    ) -> None:
        self._learning.receive(sender, header, meta, connection)
