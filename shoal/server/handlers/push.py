"""Pushes: gradients, and the commit that makes them count."""

from __future__ import annotations

from shoal.runtime.failpoints import failpoint
from shoal.server.handlers.dispatch import handles
from shoal.server.model.membership import Member
from shoal.server.model.push_buffer import PushBuffer, PushTensors, RowPush
from shoal.server.peer import Peer
from shoal.server.protocol.frames import FrameKind, Header, Refused, decode, encode
from shoal.server.protocol.messages import Ack, Commit, RowBatch
from shoal.server.replicas.operations import Payload, Pushed
from shoal.server.replicas.payloads import memory_of
from shoal.server.shared_memory import bytes_of


@handles(FrameKind.BUCKET, "push", has_payload=True)
def bucket(peer: Peer, header: Header, meta: bytes) -> None:
    """Some elements of a push, straight into its buffer; no answer."""
    model, member = peer.joined()
    start = header.argument
    count = header.payload_bytes
    itemsize = member.pushes.gradients.element_size()
    if member.shares_memory:
        raise Refused("BUCKET from a worker that shares its memory")
    if model.compression is not None:
        raise Refused("BUCKET, but the gradients of this model are compressed")
    gradients = bytes_of(member.pushes.arriving.gradients)
    if start % itemsize or count % itemsize or start + count > gradients.nbytes:
        raise Refused(f"{count} bytes at {start} do not fit into {gradients.nbytes} bytes")
    catch_up(peer, member.pushes, header.sequence)
    if member.pushes.is_repeated(header.sequence):
        peer.connection.skip(count)
        return
    member.pushes.expect(header.sequence)
    peer.connection.read_into(gradients[start : start + count])


@handles(FrameKind.COMMIT, "push", has_payload=True)
def commit(peer: Peer, header: Header, meta: bytes) -> None:
    """The push is complete; its loss and flags are the payload."""
    failpoint("push.received")
    model, member = peer.joined()
    model.membership.check()
    request = decode(meta, Commit)
    pushes = member.pushes
    loss_flags = bytes_of(pushes.arriving.loss_flags)
    if header.payload_bytes != loss_flags.nbytes:
        raise Refused(
            f"expected {loss_flags.nbytes} bytes of loss and flags, got {header.payload_bytes}"
        )
    failpoint("push.validated")
    catch_up(peer, pushes, header.sequence)
    if pushes.is_repeated(header.sequence):
        peer.connection.skip(loss_flags.nbytes)
        if peer.host.chain is not None:
            peer.reply(encode(model.repeat(member, header.sequence)))
            return
    else:
        model.check_push(member, header.sequence)
        peer.connection.read_into(loss_flags)
    failpoint("push.deduplicated")
    rows = pushes.take_rows()
    batches = tuple(RowBatch(push.table, len(push.ids), push.lr) for push in rows)
    identity = (peer.model_id, peer.worker, peer.incarnation, header.sequence)
    operation = Pushed(*identity, request, batches, _is_lent(peer, member))
    ack: Ack = peer.execute(operation, _payload(peer, operation, member, rows))
    if ack.verdict == "staged" and model.is_leader:
        peer.reply(encode(model.verdict(member, header.sequence)))
    else:
        peer.reply_committed(encode(ack))
    failpoint("push.acknowledged")


def _is_lent(peer: Peer, member: Member) -> bool:
    """Whether replicas apply the push where the worker has it, without a copy."""
    chain = peer.host.chain
    return chain is not None and not chain.acknowledges_at_once and member.out is not None


def _payload(peer: Peer, operation: Pushed, member: Member, rows: tuple[RowPush, ...]) -> Payload:
    pushes = member.pushes
    chain = peer.host.chain
    if chain is None or member.out is None:
        return Payload(rows=rows, push=pushes.take_arrived())
    source = None if chain.acknowledges_at_once else memory_of(operation, member)
    if operation.is_lent:
        tensors = PushTensors(member.out, pushes.arriving.loss_flags.clone())
        return Payload(rows=rows, push=tensors, source=source, is_lent=True)
    pushes.arriving.gradients.copy_(member.out)
    return Payload(rows=rows, push=pushes.take_arrived(), source=source)


def catch_up(peer: Peer, pushes: PushBuffer, sequence: int) -> None:
    """A worker may have seen an update at another replica before this one has applied it."""
    is_behind = sequence > pushes.committed + 1 or pushes.consumed != pushes.committed
    chain = peer.host.chain
    if chain is None or not is_behind:
        return
    chain.catch_up()
    if peer.host.may_lose and sequence == pushes.committed + 1:
        peer.joined()[0].wait_consumed(peer.worker, pushes)


@handles(FrameKind.SETTLE, "push")
def settle(peer: Peer, header: Header, meta: bytes) -> None:
    """Answered when the log has been applied up to the position in `argument`."""
    model, _ = peer.joined()
    model.settle(peer.worker, header.argument, header.sequence)
    peer.reply()
