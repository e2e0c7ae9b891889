"""What changes the state of a server, as values. All copies of a shard apply the same ones.

A handler checks a request, makes an operation of it and lets it be executed. What it does to the
state follows from the operation, its payload and the state alone (`replicas/apply.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, TypeVar

import msgspec

from shoal.embedding.spec import TableSpec
from shoal.protocol.connection import Connection
from shoal.protocol.frames import Header
from shoal.server.consistency import Count
from shoal.server.member.place import ChainPlace, Elsewhere
from shoal.server.messages import (
    Commit,
    Generations,
    LogEntry,
    ModelSpec,
    RowBatch,
    RowChunk,
    ShardState,
    StepApplied,
    WireMessage,
)
from shoal.server.model.push_buffer import PushTensors, RowPush

Reason = Annotated[str, msgspec.Meta(max_length=4096)]
MAX_PUSHED_TABLES = 256


class Joined(WireMessage, frozen=True, tag="joined"):
    model: Count
    worker: Count
    incarnation: Count
    spec: ModelSpec


class Pushed(WireMessage, frozen=True, tag="pushed"):
    """A push is complete. Its gradients, loss, flags and rows are the payload.

    The leader's shard decides about it when it is applied; others keep it until then.
    """

    model: Count
    worker: Count
    incarnation: Count
    sequence: Count
    commit: Commit
    rows: Annotated[tuple[RowBatch, ...], msgspec.Meta(max_length=MAX_PUSHED_TABLES)] = ()


class Decided(WireMessage, frozen=True, tag="decided"):
    """A decision of the leader, in another shard."""

    model: Count
    entry: LogEntry


class StepClosed(WireMessage, frozen=True, tag="closed"):
    """The leader's shard: the norms of all shards are known, so the open step is applied."""

    model: Count
    step: StepApplied


class BarrierReached(WireMessage, frozen=True, tag="barrier"):
    model: Count
    worker: Count
    number: Count
    generations: Generations | None = None


class Returned(WireMessage, frozen=True, tag="returned"):
    """A worker that came back takes its place at the present step."""

    model: Count
    worker: Count


class Left(WireMessage, frozen=True, tag="left"):
    """A worker has finished its steps."""

    model: Count
    worker: Count


class Lost(WireMessage, frozen=True, tag="lost"):
    """A worker does not come back."""

    model: Count
    worker: Count
    reason: Reason


class StateSet(WireMessage, frozen=True, tag="state"):
    """Weights and optimizer state of a checkpoint are the payload."""

    model: Count
    state: ShardState


class TableMade(WireMessage, frozen=True, tag="table"):
    model: Count
    spec: TableSpec


class RowsSet(WireMessage, frozen=True, tag="rows"):
    """Saved rows of a table are the payload; without keys the table is cleared."""

    model: Count
    chunk: RowChunk


class ResidualSaved(WireMessage, frozen=True, tag="residual"):
    model: Count
    worker: Count


class Resumed(WireMessage, frozen=True, tag="resumed"):
    """Eventual consistency: where a worker is; pushes before it may have been lost."""

    model: Count
    worker: Count
    sequence: Count
    step: Count


Operation = (
    Joined
    | Pushed
    | Decided
    | StepClosed
    | BarrierReached
    | Returned
    | Left
    | Lost
    | StateSet
    | TableMade
    | RowsSet
    | ResidualSaved
    | Resumed
)


# an eventual head answers them before others have them; all else it answers when all have it
EARLY = (Pushed, Decided, StepClosed)


@dataclass(eq=False)
class Payload:
    """What an operation brings beside its fields.

    Without `push` the gradients, loss and flags of a push are in its worker's buffer already.
    """

    data: bytearray = field(default_factory=bytearray)
    rows: tuple[RowPush, ...] = ()
    push: PushTensors | None = None

    @property
    def nbytes(self) -> int:
        """What it takes up in memory."""
        count = len(self.data)
        for tensor in self.push or ():
            count += tensor.nbytes
        for rows in self.rows:
            count += rows.ids.nbytes + rows.grads.nbytes
        return count


EMPTY = Payload()
Execute = Callable[[Operation, Payload], Any]
OnCommitted = Callable[[Any], None]  # gets the answer


T = TypeVar("T")


class ChainAccess(Protocol):
    """The chain of a replicated server, as connections use it."""

    place: ChainPlace

    @property
    def is_head(self) -> bool: ...
    def check_epoch(self, epoch: int) -> None: ...
    def check_head(self) -> None: ...
    def elsewhere(self, reason: str) -> Elsewhere: ...
    def catch_up(self) -> Any: ...
    def await_committed(self) -> None: ...
    def execute(
        self, operation: Operation, payload: Payload, on_committed: OnCommitted | None = None
    ) -> Any: ...
    def read(self, action: Callable[[], T]) -> T: ...
    def receive_snapshot(
        self, sender: int, header: Header, meta: bytes, connection: Connection
    ) -> None: ...
    def receive(self, sender: int, header: Header, meta: bytes, connection: Connection) -> None: ...
