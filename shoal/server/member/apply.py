"""What an operation does to the state of a server.

Deterministic: servers that apply the same operations in the same order have the same state, bit
for bit, and give the same answers. No connection takes part in it. Refused is an answer, too: it
changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.embedding.chunks import columns_with, read_columns
from shoal.protocol.frames import Refused
from shoal.server.member import operations as ops
from shoal.server.member.operations import EMPTY, Operation, Payload
from shoal.server.messages import Ack, Entered
from shoal.server.process.model_host import ModelHost


def apply(host: ModelHost, operation: Operation, payload: Payload = EMPTY) -> Any:
    """Returns the answer for the worker that asked for it."""
    return _APPLIED_BY[type(operation)](host, operation, payload)


def _join(host: ModelHost, operation: ops.Joined, _: Payload) -> None:
    model = host.hold(operation.model, operation.spec)
    known = model.membership.members.get(operation.worker)
    if known is None or known.incarnation != operation.incarnation or not host.in_chain:
        model.join(operation.worker, operation.incarnation)


def _push(host: ModelHost, operation: ops.Pushed, payload: Payload) -> Ack:
    model = host.model(operation.model)
    worker = operation.worker
    member = model.membership.members.get(worker)
    if member is None or member.incarnation != operation.incarnation:
        raise Refused(f"worker {worker} was started again: its former process is refused")
    with model.lock:
        if payload.push is not None and not member.pushes.is_repeated(operation.sequence):
            member.pushes.expect(operation.sequence)
            # an eventual head may have pushes of this worker that are not sent yet
            is_needed = host.keeps_payloads or host.may_lose
            member.pushes.install(payload.push, recycles=not is_needed)
            member.pushes.decompressed = operation.sequence
        return model.commit(member, operation.sequence, operation.commit, payload.rows)


def _enter(host: ModelHost, operation: ops.Returned, _: Payload) -> Entered:
    return host.model(operation.model).enter(operation.worker)


def _decide(host: ModelHost, operation: ops.Decided, _: Payload) -> None:
    host.model(operation.model).replay(operation.entry)


def _close_step(host: ModelHost, operation: ops.StepClosed, _: Payload) -> None:
    model = host.model(operation.model)
    with model.lock:
        model.log.close_step(operation.step)
        model.lock.notify_all()


def _reach(host: ModelHost, operation: ops.BarrierReached, _: Payload) -> None:
    host.model(operation.model).membership.reach(
        operation.worker, operation.number, operation.generations
    )


def _leave(host: ModelHost, operation: ops.Left, _: Payload) -> int:
    membership = host.model(operation.model).membership
    if not membership.has_left(operation.worker):
        membership.leave(operation.worker)
    return membership.lowest_survivor


def _lose(host: ModelHost, operation: ops.Lost, _: Payload) -> None:
    host.model(operation.model).membership.record_loss(operation.worker, operation.reason)


def _set_state(host: ModelHost, operation: ops.StateSet, payload: Payload) -> None:
    model = host.model(operation.model)
    try:
        model.restore(operation.state, payload.data)
    except (ValueError, TypeError, RuntimeError, KeyError) as error:
        raise Refused(f"the optimizer refuses this state: {error}") from error


def _make_table(host: ModelHost, operation: ops.TableMade, _: Payload) -> None:
    host.model(operation.model).tables.make(operation.spec)


def _set_rows(host: ModelHost, operation: ops.RowsSet, payload: Payload) -> None:
    model = host.model(operation.model)
    chunk = operation.chunk
    with model.lock:
        table = model.tables.table(chunk.table)
        if chunk.keys:
            columns = columns_with(table.spec, table.optimizer, chunk.keys)
            table.load_chunk(read_columns(columns, chunk.count, payload.data))
        else:
            model.tables.clear(chunk.table, chunk.steps)


def _save_residual(host: ModelHost, operation: ops.ResidualSaved, payload: Payload) -> None:
    model = host.model(operation.model)
    with model.lock:
        model.membership.members[operation.worker].residual = payload.data


def _resume(host: ModelHost, operation: ops.Resumed, _: Payload) -> None:
    host.model(operation.model).resume(operation.worker, operation.sequence, operation.step)


_APPLIED_BY: dict[type, Callable[..., Any]] = {
    ops.Joined: _join,
    ops.Pushed: _push,
    ops.Decided: _decide,
    ops.Returned: _enter,
    ops.StepClosed: _close_step,
    ops.BarrierReached: _reach,
    ops.Left: _leave,
    ops.Lost: _lose,
    ops.StateSet: _set_state,
    ops.TableMade: _make_table,
    ops.RowsSet: _set_rows,
    ops.ResidualSaved: _save_residual,
    ops.Resumed: _resume,
}
