"""Compressed pushes, and the residuals that workers save for checkpoints."""

from __future__ import annotations

import torch

from shoal.server.handlers.dispatch import handles
from shoal.server.handlers.push import catch_up
from shoal.server.model.compression import PushCompression
from shoal.server.model.served_model import ServedModel
from shoal.server.peer import Peer
from shoal.server.protocol.frames import FrameKind, Header, Refused, encode
from shoal.server.protocol.messages import SavedResidual
from shoal.server.replicas.operations import Payload, ResidualSaved
from shoal.server.shared_memory import bytes_of


@handles(FrameKind.COMPRESSED, "push", has_payload=True)
def push(peer: Peer, header: Header, meta: bytes) -> None:
    """All gradients of a push; no answer."""
    model, member = peer.joined()
    compression = _compression(model, header)
    _check_size(header, compression.num_bytes)
    catch_up(peer, member.pushes, header.sequence)
    if member.pushes.is_repeated(header.sequence):
        peer.connection.skip(header.payload_bytes)
        return
    member.pushes.expect(header.sequence)
    payload = torch.empty(header.payload_bytes, dtype=torch.uint8)
    peer.connection.read_into(bytes_of(payload))
    compression.unpack(payload, member.pushes.arriving.gradients[0])
    member.pushes.decompressed = header.sequence


@handles(FrameKind.RESIDUAL_SET, "push", has_payload=True)
def set_residual(peer: Peer, header: Header, meta: bytes) -> None:
    """What a worker carries from step to step, for the worker that saves a checkpoint."""
    model, _ = peer.joined()
    _check_size(header, _compression(model, header).residual_bytes)
    residual = bytearray(header.payload_bytes)
    peer.connection.read_into(memoryview(residual))
    peer.execute(ResidualSaved(peer.model_id, peer.worker), Payload(residual))
    peer.reply()


@handles(FrameKind.RESIDUAL_GET, "pull")
def get_residual(peer: Peer, header: Header, meta: bytes) -> None:
    """The residual of the worker in `argument`; zeros if the worker has departed."""
    model, _ = peer.joined()
    compression = _compression(model, header)
    residual = peer.read(lambda: _residual_of(model, header.argument))
    payload = bytearray(compression.residual_bytes) if residual is None else residual
    peer.reply(encode(SavedResidual(residual is not None)), memoryview(payload))


def _residual_of(model: ServedModel, worker: int) -> bytearray | None:
    with model.lock:
        return model.membership.residual_of(worker)


def _compression(model: ServedModel, header: Header) -> PushCompression:
    if model.compression is None:
        raise Refused(f"{header.kind.name}, but this model is not compressed")
    return model.compression


def _check_size(header: Header, num_bytes: int) -> None:
    """Refuse a payload of another length before anything is allocated for it."""
    if header.payload_bytes != num_bytes:
        raise Refused(
            f"expected {num_bytes} bytes of {header.kind.name}, got {header.payload_bytes}"
        )
