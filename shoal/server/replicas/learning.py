"""Snapshots of the tail that arrive at a replica without state."""

from __future__ import annotations

from shoal.runtime.failpoints import failpoint
from shoal.server.protocol.connection import Connection
from shoal.server.protocol.frames import Header, Refused
from shoal.server.replicas.core import ReplicaCore
from shoal.server.replicas.images import install_image
from shoal.server.replicas.snapshots import Incoming, read_head, read_image


class Learning:
    """Called by the threads of the connections that other replicas have made."""

    def __init__(self, core: ReplicaCore):
        self._core = core
        self._incoming: dict[int, Incoming] = {}  # by sender

    def receive(self, sender: int, header: Header, meta: bytes, connection: Connection) -> None:
        """At a learner; a snapshot for an earlier life, or from a former tail, has no effect."""
        if header.argument:
            incoming = self._incoming[sender] = Incoming(connection, read_head(meta))
        else:
            known = self._incoming.get(sender)
            if known is None or known.connection is not connection or known.is_complete:
                raise Refused("a part of a snapshot without its head")
            incoming = known
            limits = (header.payload_bytes, self._core.host.max_bytes)
            incoming.images.append(read_image(meta, connection, *limits))
            failpoint("snapshot.temporary")
        if incoming.is_complete:
            if self._incoming.get(sender) is incoming:
                del self._incoming[sender]
            failpoint("snapshot.fsync")
            with self._core.settled():
                self._install(sender, incoming)
                failpoint("snapshot.rename")

    def _install(self, sender: int, incoming: Incoming) -> None:
        core = self._core
        node = core.node
        is_wanted = node.incarnation == incoming.head.incarnation and node.takes_snapshot
        if not is_wanted or sender != node.config.tail:
            return
        for image, tensors in incoming.images:
            install_image(core.host, image, tensors)
        core.applied = incoming.head.position
        core.run(node.install(incoming.head.position))
