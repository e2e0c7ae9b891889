"""The state of a model between two entries of its log, as a value and tensors.

saved_state   what the checkpoint of a server has of it
image_of      all of it, for a copy that comes back: `install` gives it to a model

The value names every tensor, in the order in which they follow.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
import torch
from torch import Tensor

from shoal.server import messages
from shoal.server.consistency import Count, LedgerState
from shoal.server.embedding.spec import TableSpec
from shoal.server.model.membership import Member, ModelFailure
from shoal.server.model.named_optimizer import options_of
from shoal.server.model.served_model import ServedModel
from shoal.server.model.shard import NAMES, PendingPush, PushTensors, RowPush
from shoal.server.model.shard_state import get_state, load_optimizer
from shoal.server.model.state import OpenStep, WaitingPush

T = TypeVar("T", bound=msgspec.Struct)
_KEPT_ENTRIES = 512  # of the log, for servers of other shards
Format = Literal["shoal server checkpoint 1"]
_FORMAT: Format = "shoal server checkpoint 1"


def copied(kind: type[T], *sources: object) -> T:
    """The attributes that `kind` names, of the first source that has each."""
    owners = {n: next(s for s in sources if hasattr(s, n)) for n in kind.__struct_fields__}
    return kind(**{name: copy.deepcopy(getattr(owner, name)) for name, owner in owners.items()})


def put_back(value: msgspec.Struct, *targets: object) -> None:
    for name in value.__struct_fields__:
        owner = next(target for target in targets if hasattr(target, name))
        own = copy.deepcopy(getattr(value, name))
        setattr(owner, name, Counter(own) if isinstance(getattr(owner, name), Counter) else own)


# ---------------------------------------------------------------------- a checkpoint


class SavedTable(messages.WireMessage, frozen=True):
    """Names of the tensors of each chunk of rows that have been used."""

    spec: TableSpec
    steps: Count
    chunks: tuple[tuple[messages.Name, ...], ...]


class ShardDocument(messages.WireMessage, frozen=True):
    """What is no tensor in the file of a server. Pushes that are not applied are left out."""

    format: Format
    number: Count
    spec: messages.ModelSpec
    position: Count
    ledger: LedgerState
    optimizer: messages.ShardState
    tables: tuple[SavedTable, ...]
    residuals: tuple[Count, ...] = ()  # workers whose residuals are here

    def tensor_names(self) -> Iterator[str]:
        yield "weights"
        yield from (f"optimizer/{i}" for i in range(len(self.optimizer.tensors)))
        for i, table in enumerate(self.tables):
            for j, chunk in enumerate(table.chunks):
                yield from (f"table/{i}/{j}/{key}" for key in chunk)
        yield from (f"residual/{worker}" for worker in self.residuals)


class StateTensors(NamedTuple):
    weights: Tensor
    optimizer: list[Tensor]
    tables: dict[str, list[dict[str, Tensor]]]
    residuals: dict[int, Tensor]  # worker -> bytes

    @classmethod
    def of(cls, document: ShardDocument, source: Iterator[Tensor]) -> StateTensors:
        """In the order of `tensor_names`."""
        return cls(
            next(source),
            [next(source) for _ in document.optimizer.tensors],
            {
                table.spec.name: [{key: next(source) for key in chunk} for chunk in table.chunks]
                for table in document.tables
            },
            {worker: next(source) for worker in document.residuals},
        )


def saved_state(model: ServedModel, number: int = 0) -> tuple[ShardDocument, list[Tensor]]:
    """Copies, made under the model's lock; nothing in them changes later."""
    state = model.state
    shard = model.state.shard
    members = model.membership.members
    optimizer, tensors = get_state(shard, steps=0)
    if shard.optimizer is not None:
        groups = shard.optimizer.param_groups
        options = tuple(options_of(shard.optimizer, group) for group in groups)
        optimizer = msgspec.structs.replace(optimizer, options=options)
    tensors = [shard.data.to("cpu", copy=True), *(tensor.clone() for tensor in tensors)]
    tables = []
    for table in state.tables.held.values():
        chunks = list(table.state())
        tables.append(SavedTable(table.spec, table.steps, tuple(map(tuple, chunks))))
        tensors += [tensor for chunk in chunks for tensor in chunk.values()]
    residuals = {worker: model.membership.residual_of(worker) for worker in sorted(members)}
    held = {worker: residual for worker, residual in residuals.items() if residual is not None}
    tensors += [torch.frombuffer(bytearray(r), dtype=torch.uint8) for r in held.values()]
    document = ShardDocument(
        _FORMAT,
        number,
        model.spec,
        model.log.position,
        copied(LedgerState, state.ledger),
        optimizer,
        tuple(tables),
        tuple(held),
    )
    return document, tensors


# ---------------------------------------------------------------------- a copy


class TensorForm(messages.WireMessage, frozen=True):
    dtype: messages.AnyDtype
    shape: messages.Shape


class ModelNumbers(messages.WireMessage, frozen=True):
    """Attributes of `ModelState` and `Membership`: all copies have the same."""

    decided: dict[int, int]
    counted: list[messages.PushDecided]
    fraction: float
    is_summed: bool
    open_step: OpenStep | None
    waiting: list[WaitingPush]
    acks: dict[int, messages.Ack]
    has_weights: bool
    weights_from: Count | None
    lost_pushes: Count
    departed: set[int]
    open_barriers: dict[int, messages.Generations | None]
    lowest_at: dict[int, int]
    missed_updates: dict[int, int]
    returns: dict[int, int]


class WorkerNumbers(messages.WireMessage, frozen=True):
    """Attributes of `Member` and its `PushBuffer`."""

    worker: Count
    incarnation: Count
    barriers: Count
    has_left: bool
    comes_back: bool
    is_late: bool
    entered: messages.Entered | None
    committed: Count


class WorkerImage(messages.WireMessage, frozen=True):
    numbers: WorkerNumbers
    is_arriving: bool
    staged: tuple[tuple[Count, tuple[messages.RowBatch, ...]], ...]  # by sequence


class ModelImage(messages.WireMessage, frozen=True):
    number: Count
    saved: ShardDocument
    numbers: ModelNumbers
    failure: tuple[str, int | None] | None
    workers: tuple[WorkerImage, ...]
    counted_rows: tuple[tuple[int, messages.RowBatch], ...]
    entries: tuple[messages.LogEntry, ...]
    tensors: Annotated[tuple[TensorForm, ...], msgspec.Meta(max_length=1 << 22)]


def image_of(number: int, model: ServedModel) -> tuple[ModelImage, list[Tensor]]:
    """Copies of everything; called between two operations."""
    with model.lock:
        state = model.state
        membership = model.membership
        saved, tensors = saved_state(model)
        tensors += [state.shard.sum.to("cpu", copy=True), state.shard.loss_flags.clone()]
        workers = [_worker_image(model, m, tensors) for m in membership.members.values()]
        failure = membership.failure
        counted = [(w, _describe([rows], tensors)[0]) for w, rows in state.tables.counted]
        image = ModelImage(
            number,
            saved,
            copied(ModelNumbers, state, membership),
            None if failure is None else (failure.reason, failure.worker),
            tuple(workers),
            tuple(counted),
            tuple(model.log.latest_entries(_KEPT_ENTRIES)),
            tuple(TensorForm(NAMES[t.dtype], tuple(t.shape)) for t in tensors),
        )
    return image, tensors


def _worker_image(model: ServedModel, member: Member, tensors: list[Tensor]) -> WorkerImage:
    pushes = member.pushes
    staged = []
    for sequence, held in pushes.staged.items():
        tensors += [tensor.clone() for tensor in held.tensors]
        staged.append((sequence, _describe(held.rows, tensors)))
    return WorkerImage(
        copied(WorkerNumbers, member, pushes),
        model.state.arriving.get(member.worker) is pushes,
        tuple(staged),
    )


def _describe(pushes: Any, tensors: list[Tensor]) -> tuple[messages.RowBatch, ...]:
    for rows in pushes:
        tensors += [rows.ids, rows.grads]
    return tuple(messages.RowBatch(rows.table, len(rows.ids), rows.lr) for rows in pushes)


def install(model: ServedModel, image: ModelImage, source: Iterator[Tensor]) -> None:
    """Under the model's lock. Any error of torch, or StopIteration, if the tensors do not fit."""
    state = model.state
    shard = model.state.shard
    document = image.saved
    saved = StateTensors.of(image.saved, source)
    shard.data.copy_(saved.weights)
    load_optimizer(shard, document.optimizer, [tensor.clone() for tensor in saved.optimizer])
    for table in document.tables:
        state.tables.make(table.spec)
        name = table.spec.name
        state.tables.table(name).load_state(saved.tables[name], table.steps)
    shard.sum.copy_(next(source))
    shard.loss_flags.copy_(next(source))
    for worker in image.workers:
        _install_worker(model, worker, saved.residuals.get(worker.numbers.worker), source)
    counted = [(worker, _rows(batch, source)) for worker, batch in image.counted_rows]
    state.tables.counted = counted
    put_back(document.ledger, state.ledger)
    put_back(image.numbers, state, model.membership)
    state.is_from_start = False
    model.membership.failure = None if image.failure is None else ModelFailure(*image.failure)
    model.log.restart(document.position, image.entries)


def _install_worker(
    model: ServedModel, image: WorkerImage, residual: Tensor | None, source: Iterator[Tensor]
) -> None:
    pushes = model.state.shard.new_pushes(in_chain=True)
    worker = image.numbers.worker
    member = Member(worker, image.numbers.incarnation, pushes)
    put_back(image.numbers, member, pushes)
    for sequence, rows in image.staged:
        tensors = PushTensors(next(source), next(source))
        pushes.staged[sequence] = PendingPush(tensors, [_rows(batch, source) for batch in rows])
        if sequence == pushes.committed:
            pushes.install(tensors, recycles=False)
    member.residual = None if residual is None else bytearray(residual.numpy().tobytes())
    model.membership.members[worker] = member
    into = model.state.arriving if image.is_arriving else model.state.pushes
    into[worker] = pushes


def _rows(batch: messages.RowBatch, source: Iterator[Tensor]) -> RowPush:
    return RowPush(batch.table, next(source), next(source), batch.lr)
