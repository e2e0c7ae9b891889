"""All that a copy knows of a model, as a value and tensors: for a copy that comes back.

The description names every tensor with its form, in the order in which their bytes follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from shoal.embedding.spec import TableSpec
from shoal.protocol.connection import Connection
from shoal.protocol.frames import FrameKind, Header, Refused, decode, encode
from shoal.runtime.failpoints import failpoint
from shoal.server.consistency import Count, LedgerState
from shoal.server.messages import (
    Ack,
    AnyDtype,
    Commit,
    Entered,
    Generations,
    LogEntry,
    ModelSpec,
    PushDecided,
    RowBatch,
    Shape,
    ShardState,
    WireMessage,
)
from shoal.server.model.membership import Member, ModelFailure
from shoal.server.model.push_buffer import (
    PullBuffer,
    PushAside,
    PushBuffer,
    PushTensors,
    RowPush,
)
from shoal.server.model.served_model import ServedModel
from shoal.server.model.shard import DTYPES, NAMES
from shoal.server.model.shard_state import restore_optimizer
from shoal.server.model.snapshot import optimizer_image
from shoal.server.model.state import LoggedCounts, OpenStep, WaitingPush
from shoal.server.process.model_host import MAX_MODELS, ModelHost
from shoal.server.shared_memory import bytes_of

_KEPT_ENTRIES = 512  # of the log, for servers of other shards


class TensorForm(WireMessage, frozen=True):
    dtype: AnyDtype
    shape: Shape


class MemberImage(WireMessage, frozen=True):
    worker: Count
    incarnation: Count
    committed: Count
    consumed: Count
    barriers: Count
    has_left: bool
    comes_back: bool
    is_late: bool
    is_arriving: bool
    is_staged: bool  # its gradients, loss and flags are among the tensors
    has_residual: bool
    rows: tuple[RowBatch, ...] = ()  # of the staged push
    entered: Entered | None = None
    aside: tuple[tuple[Count, tuple[RowBatch, ...]], ...] = ()  # pushes that are not in the buffer


class TableImage(WireMessage, frozen=True):
    spec: TableSpec
    steps: Count
    chunks: tuple[tuple[str, ...], ...]  # the names of the tensors of each


class Waiting(WireMessage, frozen=True):
    worker: Count
    sequence: Count
    commit: Commit


class ModelImage(WireMessage, frozen=True):
    number: Count
    spec: ModelSpec
    position: Count
    epoch: Count
    entries: tuple[LogEntry, ...]
    ledger: LedgerState
    decided: dict[int, int]
    counted: tuple[PushDecided, ...]
    fraction: float
    is_summed: bool
    open_step: tuple[float, PushDecided] | None
    waiting: tuple[Waiting, ...]
    acks: dict[int, Ack]
    departed: tuple[int, ...]
    failure: tuple[str, int | None] | None
    open_barriers: dict[int, Generations | None]
    lowest_at: dict[int, int]
    members: tuple[MemberImage, ...]
    optimizer: ShardState
    counted_rows: tuple[tuple[int, RowBatch], ...]
    tables: tuple[TableImage, ...]
    lost_pushes: Count
    counts: LoggedCounts
    tensors: Annotated[tuple[TensorForm, ...], msgspec.Meta(max_length=1 << 22)]


def image_of(number: int, model: ServedModel) -> tuple[ModelImage, list[Tensor]]:
    """Copies of everything; called between two operations."""
    with model.lock:
        state = model.state
        membership = model.membership
        optimizer, optimizer_tensors = optimizer_image(state.shard)
        tensors = [t.to("cpu", copy=True) for t in (state.shard.data, state.shard.sum)]
        tensors += [state.shard.loss_flags.clone(), *optimizer_tensors]
        members = [_member_image(model, m, tensors) for m in membership.members.values()]
        for _, rows in state.tables.counted:
            tensors += [rows.ids, rows.grads]
        tables = [_table_image(table, tensors) for table in state.tables.held]
        failure = membership.failure
        open_step = state.open_step
        image = ModelImage(
            number,
            model.spec,
            model.log.position,
            model.log.epoch,
            tuple(model.log.latest_entries(_KEPT_ENTRIES)),
            state.ledger.state(),
            dict(state.decided),
            tuple(state.counted),
            state.fraction,
            state.is_summed,
            None if open_step is None else (open_step.divisor, open_step.latest),
            tuple(Waiting(*push) for push in state.waiting),
            dict(state.acks),
            tuple(sorted(membership.departed)),
            None if failure is None else (failure.reason, failure.worker),
            {n: None if g is None else tuple(g) for n, g in membership.open_barriers.items()},
            dict(membership.lowest_at),
            tuple(members),
            optimizer,
            tuple((worker, _batch(rows)) for worker, rows in state.tables.counted),
            tuple(tables),
            state.lost_pushes,
            model.statistics.logged(),
            tuple(TensorForm(_name(t), tuple(t.shape)) for t in tensors),
        )
    return image, tensors


def _member_image(model: ServedModel, member: Member, tensors: list[Tensor]) -> MemberImage:
    pushes = member.pushes
    is_staged = pushes.consumed != pushes.committed
    if is_staged:
        tensors += [pushes.gradients.clone(), pushes.loss_flags.clone()]
        for rows in pushes.staged_rows:
            tensors += [rows.ids, rows.grads]
    for held in pushes.aside.values():
        tensors += [*held.tensors]
        for rows in held.rows:
            tensors += [rows.ids, rows.grads]
    if member.residual is not None:
        tensors.append(torch.frombuffer(bytearray(member.residual), dtype=torch.uint8))
    return MemberImage(
        member.worker,
        member.incarnation,
        pushes.committed,
        pushes.consumed,
        member.barriers,
        member.has_left,
        member.comes_back,
        member.is_late,
        model.state.arriving.get(member.worker) is pushes,
        is_staged,
        member.residual is not None,
        tuple(map(_batch, pushes.staged_rows)) if is_staged else (),
        member.entered,
        tuple((s, tuple(map(_batch, held.rows))) for s, held in pushes.aside.items()),
    )


def _table_image(table: Any, tensors: list[Tensor]) -> TableImage:
    names = []
    for chunk in table.state():
        names.append(tuple(chunk))
        tensors += list(chunk.values())
    return TableImage(table.spec, table.steps, tuple(names))


def _batch(rows: RowPush) -> RowBatch:
    return RowBatch(rows.table, len(rows.ids), rows.lr)


def _name(tensor: Tensor) -> Any:
    return NAMES[tensor.dtype]


def bytes_of_image(image: ModelImage) -> int:
    return sum(math.prod(form.shape) * DTYPES[form.dtype].itemsize for form in image.tensors)


def empty_tensors(image: ModelImage) -> list[Tensor]:
    return [torch.empty(form.shape, dtype=DTYPES[form.dtype]) for form in image.tensors]


# ---- installing ---------------------------------------------------------------------------------


def install_image(host: ModelHost, image: ModelImage, tensors: list[Tensor]) -> None:
    """Hold the model in this state; Refused if tensors and description do not fit."""
    model = host.hold(image.number, image.spec)
    source = iter(tensors)
    try:
        with model.lock:
            _install(model, image, source)
            model.lock.notify_all()
    except (StopIteration, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise Refused(f"the state of another replica does not fit: {error}") from error


def _install(model: ServedModel, image: ModelImage, source: Iterator[Tensor]) -> None:
    state = model.state
    shard = state.shard
    for own in (shard.data, shard.sum, shard.loss_flags):
        own.copy_(next(source))
    restore_optimizer(shard, image.optimizer, [next(source) for _ in image.optimizer.tensors])
    for member in image.members:
        _install_member(model, member, source)
    counted = [(worker, _rows(batch, source)) for worker, batch in image.counted_rows]
    state.tables.restore_counted(counted)
    for table in image.tables:
        chunks = [{name: next(source) for name in names} for names in table.chunks]
        state.tables.make(table.spec)
        state.tables.table(table.spec.name).load_state(chunks, table.steps)
    _install_numbers(model, image)


def _install_numbers(model: ServedModel, image: ModelImage) -> None:
    state = model.state
    membership = model.membership
    state.ledger.load(image.ledger)
    state.decided = dict(image.decided)
    state.counted = list(image.counted)
    state.fraction = image.fraction
    state.is_summed = image.is_summed
    state.open_step = None if image.open_step is None else OpenStep(*image.open_step)
    state.waiting = [WaitingPush(w.worker, w.sequence, w.commit) for w in image.waiting]
    state.acks = dict(image.acks)
    state.lost_pushes = image.lost_pushes
    model.statistics.learn(image.counts)
    membership.departed = set(image.departed)
    membership.failure = None if image.failure is None else ModelFailure(*image.failure)
    membership.open_barriers = dict(image.open_barriers)
    membership.lowest_at = dict(image.lowest_at)
    model.log.restart(image.position, image.epoch, image.entries)


def _install_member(model: ServedModel, image: MemberImage, source: Iterator[Tensor]) -> None:
    shard = model.state.shard
    pushes = PushBuffer(shard.new_gradients(), shard.new_loss_flags(), in_chain=True)
    pushes.committed = image.committed
    pushes.consumed = image.consumed
    pushes.decompressed = image.committed
    if image.is_staged:
        gradients = pushes.gradients.copy_(next(source))
        pushes.install(PushTensors(gradients, pushes.loss_flags.copy_(next(source))), False)
        pushes.staged_rows = [_rows(batch, source) for batch in image.rows]
    for sequence, rows in image.aside:
        tensors = PushTensors(next(source), next(source))
        pushes.aside[sequence] = PushAside(tensors, [_rows(batch, source) for batch in rows])
    member = Member(image.worker, image.incarnation, pushes, PullBuffer())
    if image.has_residual:
        member.residual = bytearray(next(source).numpy().tobytes())
    member.barriers = image.barriers
    member.has_left = image.has_left
    member.comes_back = image.comes_back
    member.is_late = image.is_late
    member.entered = image.entered
    model.membership.members[image.worker] = member
    into = model.state.arriving if image.is_arriving else model.state.pushes
    into[image.worker] = pushes


def _rows(batch: RowBatch, source: Iterator[Tensor]) -> RowPush:
    return RowPush(batch.table, next(source), next(source), batch.lr)


class SnapshotHead(WireMessage, frozen=True):
    incarnation: Count
    position: Count
    models: Count


@dataclass
class Incoming:
    """A snapshot that is being received, all of it over one connection."""

    connection: Connection
    head: SnapshotHead
    images: list[tuple[ModelImage, list[Tensor]]] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return len(self.images) == self.head.models


def snapshot_sender(
    host: ModelHost, incarnation: int, position: int
) -> Callable[[Connection, Header], None]:
    """Copy the state now; the function that is returned sends it."""
    failpoint("snapshot.begin")
    images = [image_of(number, model) for number, model in sorted(host.models.items())]
    head = SnapshotHead(incarnation, position, len(images))

    def send(connection: Connection, header: Header) -> None:
        frame = header._replace(kind=FrameKind.SNAPSHOT)
        connection.send(frame._replace(argument=1), encode(head))
        for image, tensors in images:
            connection.send(frame, encode(image), *map(bytes_of, tensors))

    return send


def read_head(meta: bytes) -> SnapshotHead:
    head = decode(meta, SnapshotHead)
    if head.models > MAX_MODELS:
        raise Refused(f"a snapshot of {head.models} models")
    return head


def read_image(
    meta: bytes, connection: Connection, num_bytes: int, max_bytes: int
) -> tuple[ModelImage, list[Tensor]]:
    """Refused, before anything is allocated, where the lengths do not fit."""
    image = decode(meta, ModelImage)
    expected = bytes_of_image(image)
    if num_bytes != expected or expected > max_bytes:
        raise Refused(f"a snapshot of {num_bytes} bytes, expected {expected}")
    tensors = empty_tensors(image)
    for tensor in tensors:
        connection.read_into(bytes_of(tensor))
    return image, tensors
