"""Joining, barriers, leaving, counts, and the other servers."""

from __future__ import annotations

import os

import msgspec

from shoal.server.handlers.dispatch import handles
from shoal.server.model.shard import DTYPES, partial_sums
from shoal.server.peer import Peer
from shoal.server.protocol.connection import Closed
from shoal.server.protocol.frames import FrameKind, Header, Refused, decode, encode
from shoal.server.protocol.incarnation import generation_of
from shoal.server.protocol.messages import (
    BarrierRequest,
    Follow,
    LowestSurvivor,
    ModelSpec,
    Norms,
    SetUp,
    Stats,
    TotalNorm,
)
from shoal.server.shared_memory import WorkerSegment, attach


@handles(FrameKind.SETUP, "control")
def set_up(peer: Peer, header: Header, meta: bytes) -> None:
    """A worker describes the model, perhaps with memory that it shares, and joins."""
    if peer.has_reconnected and peer.model is not None:  # the answer was lost
        if decode(meta, ModelSpec) != peer.model.spec:
            raise Refused("the workers of one model describe it differently")
        peer.reply(_set_up(peer))
        return
    if peer.member is not None:
        raise Refused(f"worker {peer.worker} has joined before")
    descriptor = peer.connection.take_descriptor()
    try:
        if generation_of(peer.incarnation) and peer.host.is_released(peer.model_id):
            peer.reply(encode(SetUp(is_over=True)))
            return
        spec = decode(meta, ModelSpec)
        model = peer.host.hold(peer.model_id, spec)
        model.join(peer.worker, peer.incarnation, _segment(descriptor, spec))
    finally:
        if descriptor is not None:
            os.close(descriptor)
    peer.enter(model)
    peer.reply(_set_up(peer))


def _set_up(peer: Peer) -> bytes:
    _, member = peer.joined()
    return encode(SetUp(member.comes_back))


@handles(FrameKind.ENTER, "control")
def enter(peer: Peer, header: Header, meta: bytes) -> None:
    model, _ = peer.joined()
    peer.reply(encode(model.enter(peer.worker)))


def _segment(descriptor: int | None, spec: ModelSpec) -> WorkerSegment | None:
    if descriptor is None:
        return None
    return attach(descriptor, DTYPES[spec.dtype], spec.size, partial_sums(spec))


@handles(FrameKind.SHARE_WEIGHTS, "control")
def share_weights(peer: Peer, header: Header, meta: bytes) -> None:
    model, _ = peer.joined()
    descriptor = peer.connection.take_descriptor()
    if descriptor is None:
        raise Refused("SHARE_WEIGHTS arrives without memory")
    try:
        model.share_weights(peer.worker, descriptor)
    finally:
        os.close(descriptor)
    peer.reply()


@handles(FrameKind.BARRIER, "control")
def barrier(peer: Peer, header: Header, meta: bytes) -> None:
    model, _ = peer.joined()
    request = decode(meta, BarrierRequest)
    lowest = model.membership.barrier(peer.worker, request.number, request.generations)
    peer.reply(encode(LowestSurvivor(lowest)))


@handles(FrameKind.STATS, "control")
def stats(peer: Peer, header: Header, meta: bytes) -> None:
    model, _ = peer.joined()
    if decode(meta, Stats).final:
        model.membership.wait_over()
    peer.reply(msgspec.msgpack.encode({**model.report(), **peer.host.report()}))


@handles(FrameKind.LEAVE, "control")
def leave(peer: Peer, header: Header, meta: bytes) -> None:
    model, _ = peer.joined()
    model.membership.leave(peer.worker)
    peer.reply(encode(LowestSurvivor(model.membership.lowest_survivor)))


@handles(FrameKind.NORMS, "control")
def norms(peer: Peer, header: Header, meta: bytes) -> None:
    model, _ = peer.joined()
    peer.reply(encode(Norms(tuple(model.clipping.norms(peer.worker)))))


@handles(FrameKind.TOTAL_NORM, "control")
def total_norm(peer: Peer, header: Header, meta: bytes) -> None:
    model, _ = peer.joined()
    model.clipping.set_total(decode(meta, TotalNorm).value)
    peer.reply()


@handles(FrameKind.FOLLOW, "follow")
def follow(peer: Peer, header: Header, meta: bytes) -> None:
    """Another server reads the log until the model is released."""
    peer.host.serve_follower(peer.model_id, decode(meta, Follow), peer.connection)
    raise Closed("the model was released")
