"""The state of a model at one position of its log, as a value.

Gradients of pushes that are staged and not summed yet are not included: the worker has staged them
on every server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from torch import Tensor

from shoal.embedding.spec import TableSpec
from shoal.server.consistency import LedgerState
from shoal.server.messages import PushDecided, ShardState
from shoal.server.model.named_optimizer import options_of
from shoal.server.model.push_buffer import RowPush
from shoal.server.model.shard import Shard
from shoal.server.model.shard_state import get_state
from shoal.server.model.state import ModelState


@dataclass(frozen=True)
class TableSnapshot:
    """The rows of one table that have been used."""

    spec: TableSpec
    steps: int
    chunks: tuple[dict[str, Tensor], ...]


@dataclass(frozen=True)
class Snapshot:
    """Copies of everything; nothing in it changes later."""

    position: int
    epoch: int
    ledger: LedgerState
    decided: dict[int, int]  # worker -> its latest push with a verdict
    counted: tuple[PushDecided, ...]  # of the open step
    fraction: float
    weights: Tensor
    sum: Tensor
    loss_flags: Tensor
    optimizer: ShardState
    optimizer_tensors: tuple[Tensor, ...]
    counted_rows: tuple[tuple[int, RowPush], ...]
    tables: tuple[TableSnapshot, ...]


class SavedWorker(NamedTuple):
    """What a checkpoint has of one worker besides its pushes."""

    incarnation: int
    residual: bytes | bytearray | None  # what compression has not sent yet; None without one


def take_snapshot(state: ModelState, position: int, epoch: int) -> Snapshot:
    """A snapshot between two entries; called under the model's lock."""
    optimizer, tensors = optimizer_image(state.shard)
    return Snapshot(
        position,
        epoch,
        state.ledger.state(),
        dict(state.decided),
        tuple(state.counted),
        state.fraction,
        state.shard.data.to("cpu", copy=True),
        state.shard.sum.to("cpu", copy=True),
        state.shard.loss_flags.clone(),
        optimizer,
        tensors,
        tuple(state.tables.counted),
        tuple(
            TableSnapshot(table.spec, table.steps, tuple(table.state()))
            for table in state.tables.held
        ),
    )


def optimizer_image(shard: Shard) -> tuple[ShardState, tuple[Tensor, ...]]:
    """Copies of the state of the optimizer, with its settings."""
    optimizer, tensors = get_state(shard, steps=0)
    if shard.optimizer is not None:
        groups = shard.optimizer.param_groups
        options = tuple(options_of(shard.optimizer, group) for group in groups)
        optimizer = msgspec.structs.replace(optimizer, options=options)
    return optimizer, tuple(tensor.clone() for tensor in tensors)
