"""Where the rows of embedding tables live."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from shoal.embedding.spec import TableSpec
from shoal.embedding.table import RowTable
from shoal.errors import BadInput


class EmbeddingTable(Protocol):
    """Rows by id. Ids are int64 and rows float32, both on the CPU."""

    steps: int  # updates by all workers, as of the latest `state`

    def pull(self, ids: Tensor) -> Tensor:
        """Copies of rows, [n, dim]."""

    def push(self, ids: Tensor, grads: Tensor, lr: float, step: int) -> None:
        """Update number `step` of the table, from 1 on: these rows by these gradients."""

    def state(self) -> Iterator[dict[str, Tensor]]:
        """All rows that have been used, and their optimizer state: see `RowTable.state`."""

    def load_state(self, chunks: Iterable[dict[str, Tensor]], steps: int) -> None:
        """Replace all rows by saved ones: see `RowTable.load_state`."""


class RowStore(Protocol):
    def create(self, spec: TableSpec) -> EmbeddingTable:
        """A table, before its first use; the present one if the same table exists."""


class LocalStore(RowStore):
    """Tables in this process."""

    def __init__(self) -> None:
        self.tables: dict[str, RowTable] = {}

    def create(self, spec: TableSpec) -> EmbeddingTable:
        table = self.tables.get(spec.name)
        if table is None:
            table = self.tables[spec.name] = RowTable(spec)
        elif replace(table.spec, optimizer=spec.optimizer) != spec:
            raise BadInput(f"there is another {spec} already, with other rows: rename one of them")
        elif table.optimizer != spec.optimizer:
            table.set_optimizer(spec.optimizer)
        return table
