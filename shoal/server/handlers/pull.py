"""Pulls: weights, and optimizer state for checkpoints."""

from __future__ import annotations

from shoal.server.handlers.dispatch import handles
from shoal.server.model.shard_state import check_state
from shoal.server.peer import Peer
from shoal.server.protocol.frames import FrameKind, Header, Refused, decode, encode
from shoal.server.protocol.messages import Pull, ShardState
from shoal.server.replicas.operations import Payload, StateSet
from shoal.server.shared_memory import bytes_of


@handles(FrameKind.PULL, "pull")
def pull(peer: Peer, header: Header, meta: bytes) -> None:
    model, _ = peer.joined()
    request = decode(meta, Pull)
    pulled, loss_flags, weights = peer.read(lambda: model.pull(peer.worker, request))
    payload = [bytes_of(loss_flags)]
    if weights is not None:
        payload.append(bytes_of(weights))
    peer.reply_committed(encode(pulled), *payload)


@handles(FrameKind.STATE_GET, "pull")
def get_state(peer: Peer, header: Header, meta: bytes) -> None:
    model, _ = peer.joined()
    state, tensors = peer.read(model.optimizer_state)
    peer.reply_committed(encode(state), *map(bytes_of, tensors))


@handles(FrameKind.STATE_SET, "pull", has_payload=True)
def set_state(peer: Peer, header: Header, meta: bytes) -> None:
    model, _ = peer.joined()
    state = decode(meta, ShardState)
    num_bytes = check_state(model.state.shard, state)
    if header.payload_bytes != num_bytes:
        raise Refused(f"expected {num_bytes} bytes of state, got {header.payload_bytes}")
    payload = bytearray(num_bytes)
    peer.connection.read_into(memoryview(payload))
    peer.execute(StateSet(peer.model_id, state), Payload(payload))
    peer.reply()
