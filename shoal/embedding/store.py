"""Where the rows of embedding tables live."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from shoal.embedding.spec import TableSpec
from shoal.embedding.table import RowTable
from shoal.errors import BadInput


class RowStore(Protocol):
    """Holds the rows of tables by id. Ids are int64 and rows float32, both on the CPU."""

    def create(self, spec: TableSpec) -> None:
        """Create a table before its first use; no effect if the same table exists."""
        ...

    def pull(self, table: str, ids: Tensor) -> Tensor:
        """Copies of rows, [n, dim]."""
        ...

    def push(self, table: str, ids: Tensor, grads: Tensor, lr: float, step: int) -> None:
        """Update number `step` of the table, from 1 on: these rows by these gradients."""
        ...

    def state(self, table: str) -> Iterator[dict[str, Tensor]]:
        """All rows that have been used, and their optimizer state: see `RowTable.state`."""
        ...

    def steps(self, table: str) -> int:
        """Updates of the table by all workers, as of the latest `state`."""
        ...

    def load_state(self, table: str, chunks: Iterable[dict[str, Tensor]], steps: int) -> None:
        """Replace all rows by saved ones: see `RowTable.load_state`."""
        ...


class LocalStore(RowStore):
    """Tables in this process."""

    def __init__(self) -> None:
        self.tables: dict[str, RowTable] = {}

    def create(self, spec: TableSpec) -> None:
        table = self.tables.get(spec.name)
        if table is None:
            self.tables[spec.name] = RowTable(spec)
        elif replace(table.spec, optimizer=spec.optimizer) != spec:
            raise BadInput(f"there is another {spec} already, with other rows: rename one of them")
        elif table.optimizer != spec.optimizer:
            table.set_optimizer(spec.optimizer)

    def pull(self, table: str, ids: Tensor) -> Tensor:
        return self.tables[table].pull(ids)

    def push(self, table: str, ids: Tensor, grads: Tensor, lr: float, step: int) -> None:
        self.tables[table].push(ids, grads, lr, step)

    def state(self, table: str) -> Iterator[dict[str, Tensor]]:
        return self.tables[table].state()

    def steps(self, table: str) -> int:
        return self.tables[table].steps

    def load_state(self, table: str, chunks: Iterable[dict[str, Tensor]], steps: int) -> None:
        self.tables[table].load_state(chunks, steps)
