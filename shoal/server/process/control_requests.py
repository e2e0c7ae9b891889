"""Joining, barriers, leaving, counts, and the other servers."""

from __future__ import annotations

import msgspec

from shoal.protocol import FrameKind, Header, Refused, decode, encode, generation_of
from shoal.protocol.connection import Closed
from shoal.server.member.operations import BarrierReached, Joined, Left, Resumed, Returned
from shoal.server.messages import (
    BarrierRequest,
    DeviceAsked,
    DeviceOffered,
    LowestSurvivor,
    ModelSpec,
    Norms,
    Scalar,
    SetUp,
    Stats,
)
from shoal.server.model.shard import DTYPES, partial_sums
from shoal.server.process.model_host import check_spec
from shoal.server.process.peer import Peer, handles
from shoal.server.shared_memory import attach, offer

MAX_LOST_PUSHES = 4096  # of a worker, with servers of eventual consistency


@handles(FrameKind.SETUP, "control")
def set_up(peer: Peer, header: Header, meta: bytes) -> None:
    """A worker describes the model, perhaps with memory that it shares, and joins."""
    is_again = peer.has_reconnected and peer.model is not None  # the answer was lost
    if peer.member is not None and not is_again:
        raise Refused(f"worker {peer.worker} has joined before")
    with peer.descriptor() as descriptor:
        if (
            not is_again
            and generation_of(peer.incarnation)
            and peer.host.is_released(peer.model_id)
        ):
            peer.reply(encode(SetUp(is_over=True)))
            return
        spec = decode(meta, ModelSpec)
        if peer.model is not None and spec != peer.model.spec:
            raise Refused("the workers of one model describe it differently")
        check_spec(spec, peer.host.max_bytes)
        segment = None
        if descriptor is not None and (not is_again or peer.host.in_chain):
            segment = attach(descriptor, DTYPES[spec.dtype], spec.size, partial_sums(spec))
    if not is_again:
        peer.host.execute(Joined(peer.model_id, peer.worker, peer.incarnation, spec))
    model = peer.host.models[peer.model_id]
    if segment is not None:
        held = slice(spec.start, spec.stop)
        model.attach(peer.worker, segment.out[:, held], segment.inbox[held])
    if not is_again:
        peer.enter(model)
    _resume(peer, header)
    peer.reply(encode(SetUp(peer.joined()[1].comes_back)))


def _resume(peer: Peer, header: Header) -> None:
    """A worker says which of its pushes was acknowledged last, in which step."""
    _, member = peer.joined()
    chain = peer.host.chain
    missing = header.sequence - member.pushes.committed
    if chain is None or not chain.node.is_head or missing <= 0:
        return
    if not peer.host.may_lose or missing > MAX_LOST_PUSHES:
        raise Refused(f"the last {missing} pushes of worker {peer.worker} are not here")
    peer.host.execute(Resumed(peer.model_id, peer.worker, header.sequence, header.argument))


@handles(FrameKind.ENTER, "control")
def enter(peer: Peer, header: Header, meta: bytes) -> None:
    peer.joined()
    peer.reply(encode(peer.host.execute(Returned(peer.model_id, peer.worker))))


@handles(FrameKind.SHARE_WEIGHTS, "control")
def share_weights(peer: Peer, header: Header, meta: bytes) -> None:
    model, _ = peer.joined()
    with peer.descriptor(is_needed=True) as descriptor:
        assert descriptor is not None
        model.share_weights(peer.worker, descriptor)
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
    peer.reply(encode(Norms(tuple(model.log.norms(peer.worker)))))


@handles(FrameKind.TOTAL_NORM, "control")
def total_norm(peer: Peer, header: Header, meta: bytes) -> None:
    model, _ = peer.joined()
    value = decode(meta, Scalar).value
    if model.in_chain:
        model.close_with(peer.worker, value)
    else:
        model.log.set_total(value)
    peer.reply()


@handles(FrameKind.FOLLOW, "follow")
def follow(peer: Peer, header: Header, meta: bytes) -> None:
    """Another server reads the log until the model is released."""
    peer.host.followers(peer.model_id).serve(peer.worker, header.argument, peer.connection)
    raise Closed("the model was released")


@handles(FrameKind.CHAIN, "chain", has_payload=True)
@handles(FrameKind.SNAPSHOT, "chain", has_payload=True)
def chain(peer: Peer, header: Header, meta: bytes) -> None:
    """A message of another copy, or the state of the tail for one that has none. No answer."""
    chain = peer.host.chain
    if chain is None:
        raise Refused("this server has no replicas")
    receive = chain.receive if header.kind is FrameKind.CHAIN else chain.receive_snapshot
    receive(header.worker, header, meta, peer.connection)


@handles(FrameKind.SHARE_DEVICE, "control")
def share_device(peer: Peer, header: Header, meta: bytes) -> None:
    """Asked once for memory, and once more when the worker has opened it."""
    model, member = peer.joined()
    asked = decode(meta, DeviceAsked)
    if member.pushes.committed:
        raise Refused("SHARE_DEVICE arrives after the first push")
    offered = DeviceOffered()
    if asked.is_accepted:
        if member.offered is None:
            raise Refused(f"worker {peer.worker} was offered no memory on a GPU")
        model.attach(peer.worker, member.offered.out, member.offered.inbox)
        member.offered = None
    elif model.compression is None and not model.in_chain:
        made = offer(asked, model.spec, model.state.shard.device)
        member.offered, offered = made or (None, offered)
    peer.reply(encode(offered))
