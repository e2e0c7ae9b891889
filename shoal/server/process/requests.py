"""All requests but those for rows: joining, barriers, leaving, counts, and the other servers;
pushes, which are gradients and the commit that makes them count; weights and state."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import torch

from shoal.server import messages
from shoal.server.member import operations
from shoal.server.model.compression import PushCompression
from shoal.server.model.shard import DTYPES, partial_sums
from shoal.server.process.model_host import check_spec
from shoal.server.process.peer import Peer, handles
from shoal.server.protocol import FrameKind, Header, Refused, encode, generation_of
from shoal.server.protocol.connection import Closed
from shoal.server.shared_memory import attach, bytes_of, offer

MAX_LOST_PUSHES = 4096  # of a worker, with servers of eventual consistency


@handles(FrameKind.SETUP, "control", messages.ModelSpec)
def set_up(peer: Peer, header: Header, spec: messages.ModelSpec) -> None:
    """A worker describes the model, perhaps with memory that it shares, and joins."""
    is_again = peer.has_reconnected and peer.has_entered  # the answer was lost
    if peer.has_entered and not is_again:
        raise Refused(f"worker {peer.worker} has joined before")
    with peer.descriptor() as descriptor:
        has_returned = not is_again and generation_of(peer.incarnation)
        if has_returned and peer.host.is_released(peer.model_id):
            peer.reply(encode(messages.SetUp(is_over=True)))
            return
        if peer.has_entered and spec != peer.model.spec:
            raise Refused("the workers of one model describe it differently")
        check_spec(spec, peer.host.max_bytes)
        segment = None
        if descriptor is not None and (not is_again or peer.host.in_chain):
            segment = attach(descriptor, DTYPES[spec.dtype], spec.size, partial_sums(spec))
    if not is_again:
        peer.host.execute(operations.Joined(peer.model_id, peer.worker, peer.incarnation, spec))
    model = peer.host.models[peer.model_id]
    if segment is not None:
        held = slice(spec.start, spec.stop)
        model.attach(peer.worker, segment.out[:, held], segment.inbox[held])
    if not is_again:
        peer.enter(model)
    _resume(peer, header)
    peer.reply(encode(messages.SetUp(peer.member.comes_back)))


def _resume(peer: Peer, header: Header) -> None:
    """A worker says which of its pushes was acknowledged last, in which step."""
    peer.check_joined()
    chain = peer.host.chain
    missing = header.sequence - peer.member.pushes.committed
    if chain is None or not chain.node.is_head or missing <= 0:
        return
    if not peer.host.may_lose or missing > MAX_LOST_PUSHES:
        raise Refused(f"the last {missing} pushes of worker {peer.worker} are not here")
    peer.host.execute(
        operations.Resumed(peer.model_id, peer.worker, header.sequence, header.argument)
    )


@handles(FrameKind.ENTER, "control")
def enter(peer: Peer, header: Header, meta: bytes) -> None:
    peer.model.wait_for_weights(peer.member)
    peer.reply(encode(peer.host.execute(operations.Returned(peer.model_id, peer.worker))))


@handles(FrameKind.SHARE_WEIGHTS, "control")
def share_weights(peer: Peer, header: Header, meta: bytes) -> None:
    with peer.descriptor(is_needed=True) as descriptor:
        assert descriptor is not None
        peer.model.share_weights(peer.worker, descriptor)
    peer.reply()


@handles(FrameKind.BARRIER, "control", messages.BarrierRequest)
def barrier(peer: Peer, header: Header, request: messages.BarrierRequest) -> None:
    meeting = peer.worker, request.number, request.generations
    peer.model.wait_closed(peer.worker)  # before: all copies have what comes before the barrier
    peer.host.execute(operations.BarrierReached(peer.model_id, *meeting))
    lowest = peer.model.membership.wait_barrier(*meeting)
    peer.reply(encode(messages.LowestSurvivor(lowest)))


@handles(FrameKind.STATS, "control", messages.Stats)
def stats(peer: Peer, header: Header, request: messages.Stats) -> None:
    if request.final:
        peer.model.membership.wait_over()
    counts = {**peer.model.report(with_tables=request.final), **peer.host.report()}
    peer.reply(msgspec.msgpack.encode(counts))


@handles(FrameKind.LEAVE, "control")
def leave(peer: Peer, header: Header, meta: bytes) -> None:
    lowest = peer.host.execute(operations.Left(peer.model_id, peer.worker))
    peer.reply(encode(messages.LowestSurvivor(lowest)))


@handles(FrameKind.NORMS, "control")
def norms(peer: Peer, header: Header, meta: bytes) -> None:
    peer.reply(encode(messages.Norms(tuple(peer.model.log.norms(peer.worker)))))


@handles(FrameKind.TOTAL_NORM, "control", messages.Scalar)
def total_norm(peer: Peer, header: Header, request: messages.Scalar) -> None:
    if peer.model.in_chain:
        peer.model.close_with(peer.worker, request.value)
    else:
        peer.model.log.set_total(request.value, (peer.worker, header.sequence))
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


@handles(FrameKind.SHARE_DEVICE, "control", messages.DeviceAsked)
def share_device(peer: Peer, header: Header, asked: messages.DeviceAsked) -> None:
    """Asked once for memory, and once more when the worker has opened it."""
    if peer.member.pushes.committed:
        raise Refused("SHARE_DEVICE arrives after the first push")
    offered = messages.DeviceOffered()
    if asked.is_accepted:
        if peer.member.offered is None:
            raise Refused(f"worker {peer.worker} was offered no memory on a GPU")
        peer.model.attach(peer.worker, peer.member.offered.out, peer.member.offered.inbox)
        peer.member.offered = None
    elif peer.model.compression is None and not peer.model.in_chain:
        made = offer(asked, peer.model.spec, peer.model.state.shard.device)
        peer.member.offered, offered = made or (None, offered)
    peer.reply(encode(offered))


@handles(FrameKind.BUCKET, "push", has_payload=True)
def bucket(peer: Peer, header: Header, meta: bytes) -> None:
    """Some elements of a push, straight into its buffer; no answer."""
    start = header.argument
    count = header.payload_bytes
    itemsize = peer.member.pushes.gradients.element_size()
    if peer.member.shares_memory:
        raise Refused("BUCKET from a worker that shares its memory")
    if peer.model.compression is not None:
        raise Refused("BUCKET, but the gradients of this model are compressed")
    gradients = bytes_of(peer.member.pushes.arriving.gradients)
    if start % itemsize or count % itemsize or start + count > gradients.nbytes:
        raise Refused(f"{count} bytes at {start} do not fit into {gradients.nbytes} bytes")
    if _is_expected(peer, header):
        peer.member.pushes.receive(start, start + count, count)
        peer.connection.read_into(gradients[start : start + count])


def _is_expected(peer: Peer, header: Header) -> bool:
    """Whether a payload is of the next push; it is skipped if it came before."""
    catch_up(peer, header.sequence)
    if peer.member.pushes.is_repeated(header.sequence):
        peer.connection.skip(header.payload_bytes)
        return False
    peer.member.pushes.expect(header.sequence)
    return True


@handles(FrameKind.COMMIT, "push", messages.Commit, has_payload=True)
def commit(peer: Peer, header: Header, request: messages.Commit) -> None:
    """The push is complete; its loss and flags are the payload."""
    peer.model.membership.check()
    pushes = peer.member.pushes
    flag_bytes = pushes.loss_flags.nbytes
    if header.payload_bytes != flag_bytes:
        raise Refused(f"expected {flag_bytes} bytes of loss and flags, got {header.payload_bytes}")
    catch_up(peer, header.sequence)
    if pushes.is_repeated(header.sequence):
        peer.connection.skip(flag_bytes)
        if peer.host.chain is not None:
            peer.model.note_repeat()
            peer.reply(encode(peer.model.verdict(peer.worker, header.sequence)))
            return
    else:
        peer.model.check_push(peer.member, header.sequence, request)
        peer.connection.read_into(bytes_of(pushes.arriving.loss_flags))
        if peer.member.out is not None:
            pushes.arriving.gradients.copy_(peer.member.out)
    rows = pushes.take_rows()
    batches = tuple(messages.RowBatch(push.table, len(push.ids), push.lr) for push in rows)
    payload = operations.Payload(rows=rows, push=pushes.take_arrived())
    sent: list[memoryview | None] = []  # by another thread; what is left of the answer

    def answer_early(ack: messages.Ack) -> None:
        """By the thread that hears of the commitment: no other has to be woken. It may not wait."""
        if not _is_open(ack, peer) and not peer.host.slowness.is_slow:
            with suppress(Closed):  # the thread that serves the worker notices it, too
                sent.append(peer.connection.send_now(peer.ok, encode(ack)))

    ack: messages.Ack = peer.host.execute(
        operations.Pushed(
            peer.model_id, peer.worker, peer.incarnation, header.sequence, request, batches
        ),
        payload,
        answer_early,
    )
    if ack.verdict == "again":
        peer.model.note_repeat()
    if _is_open(ack, peer):
        peer.reply(encode(peer.model.verdict(peer.worker, header.sequence)))
    elif not sent or sent[0] is None:
        peer.reply_committed(encode(ack))
    elif sent[0].nbytes:
        peer.connection.send_rest(sent[0])


def _is_open(ack: messages.Ack, peer: Peer) -> bool:
    """The leader's answer waits for others."""
    return ack.verdict == "staged" and peer.model.is_leader


def catch_up(peer: Peer, sequence: int) -> None:
    """A worker may have seen an update at another copy before this one has applied it."""
    pushes = peer.member.pushes
    is_behind = sequence > pushes.committed + 1 or not pushes.is_free
    chain = peer.host.chain
    if chain is None or not is_behind:
        return
    chain.catch_up()
    if peer.host.may_lose and sequence == pushes.committed + 1:
        peer.check_joined()
        with peer.model.lock:  # decisions that a server which is gone had come again
            peer.model.membership.wait(peer.worker, lambda: pushes.is_free)


@handles(FrameKind.SETTLE, "push")
def settle(peer: Peer, header: Header, meta: bytes) -> None:
    """Answered when the log has been applied up to the position in `argument`."""
    peer.model.settle(peer.worker, header.argument, header.sequence)
    peer.reply()


@handles(FrameKind.COMPRESSED, "push", has_payload=True)
def compressed(peer: Peer, header: Header, meta: bytes) -> None:
    """All gradients of a push; no answer."""
    compression = _compression(peer, header)
    peer.check_size(header, compression.num_bytes)
    if _is_expected(peer, header):
        pushes = peer.member.pushes
        pushes.receive(0, pushes.gradients.nbytes, header.payload_bytes)
        payload = torch.empty(header.payload_bytes, dtype=torch.uint8)
        peer.connection.read_into(bytes_of(payload))
        compression.unpack(payload, pushes.arriving.gradients[0])


@handles(FrameKind.RESIDUAL_SET, "push", has_payload=True)
def set_residual(peer: Peer, header: Header, meta: bytes) -> None:
    """What a worker carries from step to step, for the worker that saves a checkpoint."""
    peer.execute_with_payload(operations.ResidualSaved(peer.model_id, peer.worker), header)


@handles(FrameKind.RESIDUAL_GET, "pull")
def get_residual(peer: Peer, header: Header, meta: bytes) -> None:
    """The residual of the worker in `argument`; zeros if the worker has departed."""
    compression = _compression(peer, header)
    residual = peer.read(lambda: peer.model.membership.residual_of(header.argument))
    payload = bytearray(compression.residual_bytes) if residual is None else residual
    peer.reply(encode(messages.SavedResidual(residual is not None)), memoryview(payload))


def _compression(peer: Peer, header: Header) -> PushCompression:
    if peer.model.compression is None:
        raise Refused(f"{header.kind.name}, but this model is not compressed")
    return peer.model.compression


@handles(FrameKind.PULL, "pull", messages.Pull)
def pull(peer: Peer, header: Header, request: messages.Pull) -> None:
    pulled, loss_flags, weights = peer.read(lambda: peer.model.pull(peer.worker, request))
    payload = [bytes_of(loss_flags)]
    if weights is not None:
        payload.append(bytes_of(weights))
    else:
        peer.shared_bytes += peer.model.state.shard.pulled.nbytes
    peer.reply_committed(encode(pulled), *payload)


@handles(FrameKind.STATE_GET, "pull")
def get_state(peer: Peer, header: Header, meta: bytes) -> None:
    state, tensors = peer.read(peer.model.optimizer_state)
    peer.reply_committed(encode(state), *map(bytes_of, tensors))


@handles(FrameKind.STATE_SET, "pull", messages.ShardState, has_payload=True)
def set_state(peer: Peer, header: Header, request: messages.ShardState) -> None:
    peer.execute_with_payload(operations.StateSet(peer.model_id, request), header)
