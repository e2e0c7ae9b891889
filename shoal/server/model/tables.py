"""Rows of embedding tables on one server: pulls, and the row pushes of a step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.server.embedding.chunks import cursor_after
from shoal.server.embedding.hashing import Ids
from shoal.server.embedding.spec import TableSpec
from shoal.server.embedding.table import RowTable, sum_duplicates
from shoal.server.messages import ModelSpec, RowsPulled
from shoal.server.model.hot_table import NO_IDS, HotTable
from shoal.server.model.shard import PushBuffer, RowPush
from shoal.server.protocol import Refused
from shoal.server.rows.memory import RowTarget

MAX_TABLES = 256
COPY_WAIT_S = 0.05  # for copies of the version that a worker has


class Tables:
    """This server's rows of all tables of a model. Row pushes count with their push."""

    def __init__(self, lock: threading.Condition, spec: ModelSpec):
        self._lock = lock
        self._spec = spec
        self.held: dict[str, RowTable] = {}
        self.hot: dict[str, HotTable] = {}
        self.counted: list[tuple[int, RowPush]] = []  # (worker, push) of the open step

    def make(self, spec: TableSpec) -> None:
        """Hold this server's rows of a table; has no effect if they are held already."""
        with self._lock:
            table = self.held.get(spec.name)
            if table is None:
                if len(self.held) >= MAX_TABLES:
                    raise Refused(f"a model has at most {MAX_TABLES} tables")
                table = RowTable(spec, self._spec.index, self._spec.servers)
                self.held[spec.name] = table
                self.hot[spec.name] = HotTable(table)
            elif replace(table.spec, optimizer=spec.optimizer) != spec:
                raise Refused(f"{spec} exists already, with other rows")
            elif table.optimizer != spec.optimizer:
                table.set_optimizer(spec.optimizer)

    def table(self, name: str) -> RowTable:
        if name not in self.held:
            raise Refused(f"there is no table {name!r} here")
        return self.held[name]

    def hot_table(self, name: str) -> HotTable:
        self.table(name)
        return self.hot[name]

    def pull(
        self, name: str, ids: Ids, target: RowTarget, copies: int = 0, version: int = 0
    ) -> RowsPulled:
        """Rows of this server; the first `copies` of them are copies not older than `version`.

        Waits a little for copies that are on their way; the worker asks their owners for others.
        """
        with self._lock:
            table = self.table(name)
            hot = self.hot[name]
            missing = NO_IDS
            if not hot.serve(ids, copies, version, *target):
                if copies:
                    missing = self._copy_hot(table, hot, ids[:copies], version, target)
                table.copy(ids[copies:], *target.part(slice(copies, None)))
                hot.note(ids, copies, missing)
            return RowsPulled(hot.number, hot.asks(), tuple(missing.tolist()))

    def _copy_hot(
        self, table: RowTable, hot: HotTable, ids: Ids, version: int, target: RowTarget
    ) -> Ids:
        """Copies of rows of other servers; returns the positions of those that are not here."""
        target = target.part(slice(len(ids)))
        table.spec.check(torch.from_numpy(ids))
        found = hot.look(ids, version)
        if not found.is_settled:
            self._lock.wait_for(lambda: hot.look(ids, version).is_settled, COPY_WAIT_S)
            found = hot.look(ids, version)
        hot.read(found, *target)
        return np.flatnonzero(~found.is_fresh)

    def clear(self, name: str, steps: int) -> None:
        """Reset all rows of a table, and forget copies of them."""
        with self._lock:
            self.table(name).load_state([], steps)
            self.hot[name].clear()

    def stage(self, buffer: PushBuffer, sequence: int, rows: RowPush) -> None:
        """Rows of a push that is being received; they count if and when the push does."""
        with self._lock:
            table = self.table(rows.table)
            if buffer.is_repeated(sequence):
                return
            buffer.expect(sequence)
            if len(buffer.rows) >= MAX_TABLES:
                raise Refused(f"a push has rows of at most {MAX_TABLES} tables")
            table.check(rows.ids, rows.grads)
            buffer.rows.append(rows)
            buffer.received_bytes += rows.ids.nbytes + rows.grads.nbytes

    def update(self, divisor: float) -> None:
        """One update of each table that a worker has pushed to, on this server or another."""
        by_table: dict[str, list[RowPush]] = {}
        for _, push in sorted(self.counted, key=lambda item: item[0]):
            by_table.setdefault(push.table, []).append(push)
        self.counted = []
        for name, pushes in by_table.items():
            table = self.held[name]
            grads = torch.cat([push.grads for push in pushes])
            if divisor not in (0.0, 1.0):
                grads = grads / divisor
            unique, sums = sum_duplicates(torch.cat([push.ids for push in pushes]), grads)
            table.push(unique, sums, pushes[-1].lr, table.steps + 1)

    def report(self) -> dict[str, Any]:
        """The load of each table, if there is one."""
        tables = {name: hot.report() for name, hot in self.hot.items()}
        return {"tables": tables} if tables else {}


class TableReader:
    """Reads the state of a table in chunks. In order, each chunk is read once."""

    def __init__(self) -> None:
        self._chunks: Iterator[dict[str, Tensor]] = iter(())
        self._cursor = -1

    def read(self, table: RowTable, cursor: int, chunk_rows: int) -> dict[str, Tensor] | None:
        """The chunk from `cursor` on, on any connection; None behind the last one."""
        if cursor == 0 or cursor != self._cursor:
            self._chunks = table.state(chunk_rows, cursor)
        chunk = next(self._chunks, None)
        self._cursor = -1 if chunk is None else cursor_after(chunk)
        return chunk
