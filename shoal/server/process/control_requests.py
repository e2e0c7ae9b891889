"""Joining, barriers, leaving, counts, and the other servers."""

from __future__ import annotations

import os

import msgspec

from shoal.protocol.connection import Closed
from shoal.protocol.frames import FrameKind, Header, Refused, decode, encode
from shoal.protocol.hello import generation_of
from shoal.server.device_memory import offer
from shoal.server.member.operations import BarrierReached, Joined, Left, Resumed, Returned
from shoal.server.messages import (
    BarrierRequest,
    DeviceAsked,
    DeviceOffered,
    Entered,
    Follow,
    LowestSurvivor,
    ModelSpec,
    Norms,
    SetUp,
    Stats,
    TotalNorm,
)
from shoal.server.model.served_model import ServedModel
from shoal.server.model.shard import DTYPES, partial_sums
from shoal.server.process.model_host import check_spec
from shoal.server.process.peer import Peer, handles
from shoal.server.shared_memory import WorkerSegment, attach

MAX_LOST_PUSHES = 4096  # of a worker, with servers of eventual consistency


@handles(FrameKind.SETUP, "control")
def set_up(peer: Peer, header: Header, meta: bytes) -> None:
    """A worker describes the model, perhaps with memory that it shares, and joins."""
    if peer.has_reconnected and peer.model is not None:  # the answer was lost
        if decode(meta, ModelSpec) != peer.model.spec:
            raise Refused("the workers of one model describe it differently")
        _attach_again(peer, peer.model)
        _resume(peer, header)
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
        check_spec(spec, peer.host.max_bytes)
        segment = None if descriptor is None else _segment(descriptor, spec)
        peer.host.execute(Joined(peer.model_id, peer.worker, peer.incarnation, spec))
        model = peer.host.models[peer.model_id]
        if segment is not None:
            model.attach(peer.worker, segment)
    finally:
        if descriptor is not None:
            os.close(descriptor)
    peer.enter(model)
    _resume(peer, header)
    peer.reply(_set_up(peer))


def _resume(peer: Peer, header: Header) -> None:
    """A worker says which of its pushes was acknowledged last, in which step."""
    _, member = peer.joined()
    chain = peer.host.chain
    missing = header.sequence - member.pushes.committed
    if chain is None or not chain.is_head or missing <= 0:
        return
    if not peer.host.may_lose or missing > MAX_LOST_PUSHES:
        raise Refused(f"the last {missing} pushes of worker {peer.worker} are not here")
    peer.host.execute(Resumed(peer.model_id, peer.worker, header.sequence, header.argument))


def _attach_again(peer: Peer, model: ServedModel) -> None:
    """A copy reads pushes from the memory that the worker shares."""
    descriptor = peer.connection.take_descriptor()
    if descriptor is None:
        return
    try:
        if peer.host.in_chain:
            model.attach(peer.worker, _segment(descriptor, model.spec))
    finally:
        os.close(descriptor)


def _set_up(peer: Peer) -> bytes:
    _, member = peer.joined()
    return encode(SetUp(member.comes_back))


@handles(FrameKind.ENTER, "control")
def enter(peer: Peer, header: Header, meta: bytes) -> None:
    peer.joined()
    entered: Entered = peer.host.execute(Returned(peer.model_id, peer.worker))
    peer.reply(encode(entered))


def _segment(descriptor: int, spec: ModelSpec) -> WorkerSegment:
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
    number = request.number
    peer.host.execute(BarrierReached(peer.model_id, peer.worker, number, request.generations))
    lowest = model.membership.wait_barrier(peer.worker, number, request.generations)
    peer.reply(encode(LowestSurvivor(lowest)))


@handles(FrameKind.STATS, "control")
def stats(peer: Peer, header: Header, meta: bytes) -> None:
    model, _ = peer.joined()
    is_final = decode(meta, Stats).final
    if is_final:
        model.membership.wait_over()
    counts = {**model.report(with_tables=is_final), **peer.host.report()}
    peer.reply(msgspec.msgpack.encode(counts))


@handles(FrameKind.LEAVE, "control")
def leave(peer: Peer, header: Header, meta: bytes) -> None:
    peer.joined()
    lowest = peer.host.execute(Left(peer.model_id, peer.worker))
    peer.reply(encode(LowestSurvivor(lowest)))


@handles(FrameKind.NORMS, "control")
def norms(peer: Peer, header: Header, meta: bytes) -> None:
    model, _ = peer.joined()
    peer.reply(encode(Norms(tuple(model.clipping.norms(peer.worker)))))


@handles(FrameKind.TOTAL_NORM, "control")
def total_norm(peer: Peer, header: Header, meta: bytes) -> None:
    model, _ = peer.joined()
    value = decode(meta, TotalNorm).value
    if model.in_chain:
        model.close_with(peer.worker, value)
    else:
        model.clipping.set_total(value)
    peer.reply()


@handles(FrameKind.FOLLOW, "follow")
def follow(peer: Peer, header: Header, meta: bytes) -> None:
    """Another server reads the log until the model is released."""
    peer.host.serve_follower(peer.model_id, decode(meta, Follow), peer.connection)
    raise Closed("the model was released")


@handles(FrameKind.CHAIN, "chain", has_payload=True)
def chain(peer: Peer, header: Header, meta: bytes) -> None:
    """No answer: what there is to say goes over the connection in the other direction."""
    if peer.host.chain is None:
        raise Refused("this server has no replicas")
    peer.host.chain.receive(header.worker, header, meta, peer.connection)


@handles(FrameKind.SNAPSHOT, "chain", has_payload=True)
def snapshot(peer: Peer, header: Header, meta: bytes) -> None:
    """The state of the tail, for a copy that has none; no answer."""
    if peer.host.chain is None:
        raise Refused("this server has no replicas")
    peer.host.chain.receive_snapshot(header.worker, header, meta, peer.connection)


@handles(FrameKind.SHARE_DEVICE, "control")
def share_device(peer: Peer, header: Header, meta: bytes) -> None:
    """Asked once for memory, and once more when the worker has opened it."""
    model, member = peer.joined()
    asked = decode(meta, DeviceAsked)
    if member.pushes.committed:
        raise Refused("SHARE_DEVICE arrives after the first push")
    if asked.is_accepted:
        if member.offered is None:
            raise Refused(f"worker {peer.worker} was offered no memory on a GPU")
        model.attach_device(peer.worker, member.offered)
        member.offered = None
        peer.reply(encode(DeviceOffered()))
        return
    is_plain = model.compression is None and not model.in_chain
    made = offer(asked, model.spec, model.state.shard.device) if is_plain else None
    if made is None:
        peer.reply(encode(DeviceOffered()))
        return
    member.offered, offered = made
    peer.reply(encode(offered))
