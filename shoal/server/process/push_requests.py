"""Pushes: gradients, and the commit that makes them count."""

from __future__ import annotations

from contextlib import suppress

import torch

from shoal.protocol import FrameKind, Header, Refused, decode, encode
from shoal.protocol.connection import Closed
from shoal.runtime.failpoints import failpoint
from shoal.server.member.operations import Payload, Pushed, ResidualSaved, StateSet
from shoal.server.messages import Ack, Commit, Pull, RowBatch, SavedResidual, ShardState
from shoal.server.model.compression import PushCompression
from shoal.server.model.push_buffer import PushBuffer
from shoal.server.model.served_model import ServedModel
from shoal.server.process.peer import Peer, handles
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
    flag_bytes = pushes.loss_flags.nbytes
    if header.payload_bytes != flag_bytes:
        raise Refused(f"expected {flag_bytes} bytes of loss and flags, got {header.payload_bytes}")
    failpoint("push.validated")
    catch_up(peer, pushes, header.sequence)
    if pushes.is_repeated(header.sequence):
        peer.connection.skip(flag_bytes)
        if peer.host.chain is not None:
            model.note_repeat()
            peer.reply(encode(model.verdict(peer.worker, header.sequence)))
            return
    else:
        model.check_push(member, header.sequence)
        peer.connection.read_into(bytes_of(pushes.arriving.loss_flags))
        if member.out is not None:
            pushes.arriving.gradients.copy_(member.out)
    failpoint("push.deduplicated")
    rows = pushes.take_rows()
    batches = tuple(RowBatch(push.table, len(push.ids), push.lr) for push in rows)
    identity = (peer.model_id, peer.worker, peer.incarnation, header.sequence)
    payload = Payload(rows=rows, push=pushes.take_arrived())
    sent: list[memoryview | None] = []  # by another thread; what is left of the answer

    def answer_early(ack: Ack) -> None:
        """By the thread that hears of the commitment: no other has to be woken. It may not wait."""
        if not _is_open(ack, model) and not peer.host.slowness.is_slow:
            with suppress(Closed):  # the thread that serves the worker notices it, too
                sent.append(peer.connection.send_now(peer.ok, encode(ack)))

    ack: Ack = peer.host.execute(Pushed(*identity, request, batches), payload, answer_early)
    if ack.verdict == "again":
        model.note_repeat()
    if _is_open(ack, model):
        peer.reply(encode(model.verdict(peer.worker, header.sequence)))
    elif not sent or sent[0] is None:
        peer.reply_committed(encode(ack))
    elif sent[0].nbytes:
        peer.connection.send_rest(sent[0])
    failpoint("push.acknowledged")


def _is_open(ack: Ack, model: ServedModel) -> bool:
    """The leader's answer waits for others."""
    return ack.verdict == "staged" and model.is_leader


def catch_up(peer: Peer, pushes: PushBuffer, sequence: int) -> None:
    """A worker may have seen an update at another copy before this one has applied it."""
    is_behind = sequence > pushes.committed + 1 or not pushes.is_free
    chain = peer.host.chain
    if chain is None or not is_behind:
        return
    chain.catch_up()
    if peer.host.may_lose and sequence == pushes.committed + 1:
        model, _ = peer.joined()
        with model.lock:  # decisions that a server which is gone had come again
            model.membership.wait(peer.worker, lambda: pushes.is_free)


@handles(FrameKind.SETTLE, "push")
def settle(peer: Peer, header: Header, meta: bytes) -> None:
    """Answered when the log has been applied up to the position in `argument`."""
    model, _ = peer.joined()
    model.settle(peer.worker, header.argument, header.sequence)
    peer.reply()


@handles(FrameKind.COMPRESSED, "push", has_payload=True)
def push(peer: Peer, header: Header, meta: bytes) -> None:
    """All gradients of a push; no answer."""
    model, member = peer.joined()
    compression = _compression(model, header)
    if header.payload_bytes != compression.num_bytes:
        expected = compression.num_bytes
        raise Refused(f"expected {expected} bytes of COMPRESSED, got {header.payload_bytes}")
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
    peer.execute_with_payload(ResidualSaved(peer.model_id, peer.worker), header)


@handles(FrameKind.RESIDUAL_GET, "pull")
def get_residual(peer: Peer, header: Header, meta: bytes) -> None:
    """The residual of the worker in `argument`; zeros if the worker has departed."""
    model, _ = peer.joined()
    compression = _compression(model, header)
    residual = peer.read(lambda: model.membership.residual_of(header.argument))
    payload = bytearray(compression.residual_bytes) if residual is None else residual
    peer.reply(encode(SavedResidual(residual is not None)), memoryview(payload))


def _compression(model: ServedModel, header: Header) -> PushCompression:
    if model.compression is None:
        raise Refused(f"{header.kind.name}, but this model is not compressed")
    return model.compression


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
    peer.execute_with_payload(StateSet(peer.model_id, decode(meta, ShardState)), header)
