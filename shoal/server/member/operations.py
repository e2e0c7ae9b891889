"""What changes the state of a server, as values. All copies of a shard apply the same ones.

A handler checks a request, makes an operation of it and lets it be executed. `apply` is
deterministic: servers that apply the same operations in the same order have the same state, bit
for bit, and give the same answers. No connection takes part in it. Refused is an answer, too: it
changes nothing.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import torch

from shoal.server import messages
from shoal.server.chain.messages import Append, ChainMessage, Teach
from shoal.server.consistency import Count
from shoal.server.embedding.chunks import columns_with, entry_bytes, read_columns
from shoal.server.embedding.spec import TableSpec
from shoal.server.model.served_model import ServedModel
from shoal.server.model.shard import PushTensors, RowPush
from shoal.server.model.shard_state import check_state, restore
from shoal.server.protocol import Refused
from shoal.server.protocol.connection import Connection
from shoal.server.shared_memory import bytes_of

if TYPE_CHECKING:
    from shoal.server.process.model_host import ModelHost

Reason = Annotated[str, msgspec.Meta(max_length=4096)]
MAX_PUSHED_TABLES = 256


@dataclass(eq=False)
class Payload:
    """What an operation brings beside its fields; without `push` it is in the buffer already."""

    data: bytearray = field(default_factory=bytearray)
    rows: tuple[RowPush, ...] = ()
    push: PushTensors | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Gradients, loss and flags, rows: as they are sent."""
        rows = [tensor for push in self.rows for tensor in (push.ids, push.grads)]
        return [*(self.push or ()), *rows]

    @property
    def nbytes(self) -> int:
        """What it takes up in memory."""
        return len(self.data) + sum(tensor.nbytes for tensor in self.tensors)


EMPTY = Payload()


class Operation(messages.WireMessage, frozen=True):
    model: Count

    def apply(self, host: ModelHost, payload: Payload = EMPTY) -> Any:
        """Returns the answer for the worker that asked for it."""
        return self.apply_to(host.model(self.model), payload)

    def apply_to(self, model: ServedModel, payload: Payload) -> Any:
        raise NotImplementedError

    def payload_bytes(self, model: ServedModel) -> int:
        """What its payload has to have."""
        return 0


class Joined(Operation, frozen=True, tag="joined"):
    worker: Count
    incarnation: Count
    spec: messages.ModelSpec

    def apply(self, host: ModelHost, payload: Payload = EMPTY) -> None:
        model = host.hold(self.model, self.spec)
        known = model.membership.members.get(self.worker)
        if known is None or known.incarnation != self.incarnation or not host.in_chain:
            model.join(self.worker, self.incarnation)


class Pushed(Operation, frozen=True, tag="pushed"):
    """A push is complete: gradients, loss, flags and rows are the payload."""

    worker: Count
    incarnation: Count
    sequence: Count
    commit: messages.Commit
    rows: Annotated[tuple[messages.RowBatch, ...], msgspec.Meta(max_length=MAX_PUSHED_TABLES)] = ()

    def apply(self, host: ModelHost, payload: Payload = EMPTY) -> messages.Ack:
        model = host.model(self.model)
        member = model.membership.members.get(self.worker)
        if member is None or member.incarnation != self.incarnation:
            raise Refused(f"worker {self.worker} was started again: its former process is refused")
        with model.lock:
            if payload.push is not None and not member.pushes.is_repeated(self.sequence):
                member.pushes.expect(self.sequence)
                # an eventual head may have pushes of this worker that are not sent yet
                is_needed = host.keeps_payloads or host.may_lose
                member.pushes.install(payload.push, recycles=not is_needed)
            return model.commit(member, self.sequence, self.commit, payload.rows)

    def payload_bytes(self, model: ServedModel) -> int:
        member = model.membership.members.get(self.worker)
        if member is None:
            raise Refused(f"a push of worker {self.worker}, which has not joined here")
        pushes = member.pushes
        rows = sum(r.count * (8 + 4 * model.tables.table(r.table).spec.dim) for r in self.rows)
        return pushes.gradients.nbytes + pushes.loss_flags.nbytes + rows


class Decided(Operation, frozen=True, tag="decided"):
    """A decision of the leader, in another shard."""

    entry: messages.LogEntry

    def apply_to(self, model: ServedModel, payload: Payload) -> None:
        model.replay(self.entry)


class StepClosed(Operation, frozen=True, tag="closed"):
    """The leader's shard: the norms of all shards are known, so the open step is applied."""

    step: messages.StepApplied

    def apply_to(self, model: ServedModel, payload: Payload) -> None:
        with model.lock:
            model.log.close_step(self.step)
            model.lock.notify_all()


class BarrierReached(Operation, frozen=True, tag="barrier"):
    worker: Count
    number: Count
    generations: messages.Generations | None = None

    def apply_to(self, model: ServedModel, payload: Payload) -> None:
        model.membership.reach(self.worker, self.number, self.generations)


class Returned(Operation, frozen=True, tag="returned"):
    """A worker that came back takes its place at the present step."""

    worker: Count

    def apply_to(self, model: ServedModel, payload: Payload) -> messages.Entered:
        membership = model.membership
        state = model.state
        with model.lock:
            membership.check()
            member = membership.members[self.worker]
            if model.is_leader and not member.comes_back and member.entered is not None:
                return member.entered  # the answer was lost
            if not model.is_leader or not member.comes_back:
                raise Refused(f"worker {self.worker} takes no place here: it was never away")
            if membership.is_finished:
                return messages.Entered(model.version, 0, is_over=True)
            if not model.in_chain:
                model.log.followers.wait_connected()
            clock = state.ledger.clocks[self.worker]
            step = model.log.rejoin(self.worker, member.incarnation)
            state.returns[self.worker] += step - clock
            gives_weights = not model.will_have_weights
            if gives_weights:
                state.weights_from = self.worker
            membership.enter(self.worker)
            member.entered = messages.Entered(step, clock, gives_weights=gives_weights)
            return member.entered


class Left(Operation, frozen=True, tag="left"):
    """A worker has finished its steps."""

    worker: Count

    def apply_to(self, model: ServedModel, payload: Payload) -> int:
        if not model.membership.has_left(self.worker):
            model.membership.leave(self.worker)
        return model.membership.lowest_survivor


class Lost(Operation, frozen=True, tag="lost"):
    """A worker does not come back."""

    worker: Count
    reason: Reason

    def apply_to(self, model: ServedModel, payload: Payload) -> None:
        model.membership.record_loss(self.worker, self.reason)


class StateSet(Operation, frozen=True, tag="state"):
    """Weights and optimizer state of a checkpoint are the payload; all go on from its step."""

    state: messages.ShardState

    def apply_to(self, model: ServedModel, payload: Payload) -> None:
        try:
            with model.lock:
                restore(model.state.shard, self.state, payload.data)
                model.state.ledger.restart(self.state.steps)
                model.state.has_weights = True
                model.log.restart(model.log.position)
                model.lock.notify_all()
        except (ValueError, TypeError, RuntimeError, KeyError) as error:
            raise Refused(f"the optimizer refuses this state: {error}") from error

    def payload_bytes(self, model: ServedModel) -> int:
        return check_state(model.state.shard, self.state)


class TableMade(Operation, frozen=True, tag="table"):
    spec: TableSpec

    def apply_to(self, model: ServedModel, payload: Payload) -> None:
        model.tables.make(self.spec)


class RowsSet(Operation, frozen=True, tag="rows"):
    """Saved rows of a table are the payload; without keys the table is cleared."""

    chunk: messages.RowChunk

    def apply_to(self, model: ServedModel, payload: Payload) -> None:
        chunk = self.chunk
        with model.lock:
            table = model.tables.table(chunk.table)
            if chunk.keys:
                columns = columns_with(table.spec, table.optimizer, chunk.keys)
                table.load_chunk(read_columns(columns, chunk.count, payload.data))
            else:
                model.tables.clear(chunk.table, chunk.steps)

    def payload_bytes(self, model: ServedModel) -> int:
        table = model.tables.table(self.chunk.table)
        columns = columns_with(table.spec, table.optimizer, self.chunk.keys)
        if self.chunk.keys and not columns:
            raise Refused(f"{self.chunk.keys} are not the columns of a chunk of {table.spec}")
        return self.chunk.count * entry_bytes(columns)


class ResidualSaved(Operation, frozen=True, tag="residual"):
    worker: Count

    def apply_to(self, model: ServedModel, payload: Payload) -> None:
        with model.lock:
            model.membership.members[self.worker].residual = payload.data

    def payload_bytes(self, model: ServedModel) -> int:
        if model.compression is None:
            raise Refused("a residual, but this model is not compressed")
        return model.compression.residual_bytes


class Resumed(Operation, frozen=True, tag="resumed"):
    """Pushes that a server which is gone had acknowledged (eventual consistency) may not be here.

    The leader leaves them out in all shards. Another server goes on without what it lacks: it
    adds nothing where the leader counts such a push.
    """

    worker: Count
    sequence: Count
    step: Count

    def apply_to(self, model: ServedModel, payload: Payload) -> None:
        with model.lock:
            pushes = model.membership.members[self.worker].pushes
            if self.sequence <= pushes.committed:
                return
            model.state.lost_pushes += self.sequence - pushes.committed
            if model.is_leader:
                model.log.lose_pushes(self.worker, self.sequence, self.step)
            else:
                pushes.skip_to(self.sequence)
            model.lock.notify_all()


# an eventual head answers them before others have them; all else it answers when all have it
EARLY = (Pushed, Decided, StepClosed)
OnCommitted = Callable[[Any], None]  # gets the answer
_messages = msgspec.msgpack.Decoder(ChainMessage)
_operations = msgspec.msgpack.Decoder(functools.reduce(operator.or_, Operation.__subclasses__()))


class Proposed(NamedTuple):
    """What the chain carries: it never looks into it."""

    operation: Operation
    payload: Payload = EMPTY


def encode_message(message: ChainMessage) -> tuple[bytes, list[memoryview]]:
    """The metadata, and the payload that follows it."""
    if not isinstance(message, Append | Teach):
        return msgspec.msgpack.encode(message), []
    proposed: Proposed = message.op
    operation = msgspec.msgpack.encode(proposed.operation)
    return msgspec.msgpack.encode(with_op(message, operation)), _views_of(proposed.payload)


def with_op(message: Append | Teach, op: bytes | Proposed | None) -> Append | Teach:
    """The same message with another operation, or its bytes, or none."""
    return msgspec.structs.replace(message, op=op)


def decode_message(meta: bytes) -> tuple[ChainMessage, Operation | None]:
    """A message, and the operation in it; Refused if it is none."""
    try:
        message = _messages.decode(meta)
        if not isinstance(message, Append | Teach):
            return message, None
        return message, _operations.decode(message.op)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise Refused(f"not a message between copies: {error}") from error


def _views_of(payload: Payload) -> list[memoryview]:
    """What is sent: tensors, or plain bytes."""
    if payload is EMPTY:
        return []
    return [*map(bytes_of, payload.tensors), memoryview(payload.data)]


def read_payload(
    host: ModelHost, operation: Operation, connection: Connection, num_bytes: int
) -> Payload:
    """Refused, before anything is allocated, where the length is another one."""
    model = host.models.get(operation.model)
    expected = 0 if model is None else operation.payload_bytes(model)
    if num_bytes != expected:
        kind = type(operation).__name__
        raise Refused(f"{kind} of another copy has {num_bytes} bytes, expected {expected}")
    if model is None or not expected:
        return EMPTY
    if isinstance(operation, Pushed):
        return _read_push(model, operation, connection)
    data = bytearray(expected)
    connection.read_into(memoryview(data))
    return Payload(data)


def _read_push(model: ServedModel, operation: Pushed, connection: Connection) -> Payload:
    push = model.membership.members[operation.worker].pushes.new_tensors()
    rows = []
    for batch in operation.rows:
        grads = torch.empty(batch.count, model.tables.table(batch.table).spec.dim)
        ids = torch.empty(batch.count, dtype=torch.int64)
        rows.append(RowPush(batch.table, ids, grads, batch.lr))
    payload = Payload(rows=tuple(rows), push=push)
    for view in _views_of(payload):
        connection.read_into(view)
    return payload
