"""Messages of the other replicas of the shard."""

from __future__ import annotations

from shoal.server.handlers.dispatch import handles
from shoal.server.peer import Peer
from shoal.server.protocol.frames import FrameKind, Header, Refused


@handles(FrameKind.CHAIN, "chain", has_payload=True)
def chain(peer: Peer, header: Header, meta: bytes) -> None:
    """No answer: what there is to say goes over the connection in the other direction."""
    if peer.host.chain is None:
        raise Refused("this server has no replicas")
    peer.host.chain.receive(header.worker, header, meta, peer.connection)


@handles(FrameKind.SNAPSHOT, "chain", has_payload=True)
def snapshot(peer: Peer, header: Header, meta: bytes) -> None:
    """The state of the tail, for a replica that has none; no answer."""
    if peer.host.chain is None:
        raise Refused("this server has no replicas")
    peer.host.chain.receive_snapshot(header.worker, header, meta, peer.connection)
