"""Saved rows of a table, in chunks.

    ids [, last], rows, optimizer state           rows that are trained
    waiting_ids [, waiting_last], waiting_count   ids that were not seen often enough yet

"last" is the step that has seen an id last, where rows leave after a while (`ttl_steps`). A
checkpoint joins all chunks of a table by these names.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.embedding.pool import Column
from shoal.embedding.spec import LARGEST_COUNT, RowOptimizer, TableSpec
from shoal.errors import BadInput

Chunk = Mapping[str, Tensor]
WAITING = "waiting_"
_COUNT = Column(torch.int64)
_OF_WAITING = 1 << 63  # in a cursor; ids are below 2⁶²


def row_columns(spec: TableSpec, optimizer: RowOptimizer | None) -> dict[str, Column]:
    """What is kept of a row that is trained, besides its id."""
    state = optimizer.initial_state() if optimizer is not None else {}
    columns = {**_last_column(spec), "rows": Column(torch.float32, spec.dim)}
    return columns | {n: Column(torch.float32, spec.dim, value) for n, value in state.items()}


def waiting_columns(spec: TableSpec) -> dict[str, Column]:
    """What is kept of an id that is not trained yet, besides the id."""
    return {**_last_column(spec), "count": _COUNT}


def _last_column(spec: TableSpec) -> dict[str, Column]:
    return {} if spec.ttl_steps is None else {"last": _COUNT}


def chunk_columns(
    spec: TableSpec, optimizer: RowOptimizer | None
) -> tuple[dict[str, Column], dict[str, Column]]:
    """The columns of a chunk of rows, and of one of waiting ids, in the order of the wire."""
    rows = {"ids": _COUNT, **row_columns(spec, optimizer)}
    waiting = {"ids": _COUNT, **waiting_columns(spec)} if spec.min_count > 1 else {}
    return rows, {WAITING + name: column for name, column in waiting.items()}


def entry_bytes(columns: Mapping[str, Column]) -> int:
    """The bytes of one entry of a chunk."""
    return sum(c.dtype.itemsize * (c.width or 1) for c in columns.values())


def cursor_after(chunk: Chunk) -> int:
    """Where the chunk behind this one begins: an id, and which kind of rows."""
    first = next(iter(chunk))
    after = int(chunk[first][-1]) + 1
    return after | _OF_WAITING if first.startswith(WAITING) else after


def is_behind(prefix: str, ids: Tensor, cursor: int) -> Tensor:
    """Which of these ids, in rows of the kind `prefix`, a cursor has before it."""
    is_of_waiting = cursor >= _OF_WAITING
    if is_of_waiting and not prefix:
        return torch.zeros(len(ids), dtype=torch.bool)
    return ids >= (cursor & (_OF_WAITING - 1) if is_of_waiting == bool(prefix) else 0)


def columns_with(
    spec: TableSpec, optimizer: RowOptimizer | None, keys: tuple[str, ...]
) -> dict[str, Column]:
    """Of the chunk that has these columns behind its ids; empty if there is no such chunk."""
    known = chunk_columns(spec, optimizer)
    return next((columns for columns in known if tuple(columns)[1:] == keys), {})


def read_columns(columns: Mapping[str, Column], count: int, data: bytearray) -> dict[str, Tensor]:
    """A chunk in bytes whose number has been checked: one column after the other."""
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    tensors = {}
    start = 0
    for key, column in columns.items():
        stop = start + count * (column.width or 1) * column.dtype.itemsize
        values = flat[start:stop].clone().view(column.dtype)
        tensors[key] = values if column.width is None else values.view(count, column.width)
        start = stop
    return tensors


def fit_chunks(
    spec: TableSpec, optimizer: RowOptimizer | None, chunk: Chunk, steps: int
) -> list[dict[str, Tensor]]:
    """A chunk of rows, or of waiting ids, or both, as this table saves them; BadInput else.

    A table that was saved without a lifetime of rows may get one, and the other way round. Then
    all rows count as seen at the present step.
    """
    chunks = []
    for columns in chunk_columns(spec, optimizer):
        prefix = WAITING if WAITING + "ids" in columns else ""
        known = {name for name in chunk if name.startswith(WAITING) == bool(prefix)}
        if not columns or not known:
            continue
        part = {name: chunk[name] for name in known if name in columns or "last" not in name}
        if prefix + "last" in columns and prefix + "ids" in part:
            unseen = torch.full((len(part[prefix + "ids"]),), steps)
            part.setdefault(prefix + "last", unseen)
        _check(spec, columns, part, steps)
        chunks.append({name: part[name] for name in columns})
    return chunks


def _check(spec: TableSpec, columns: Mapping[str, Column], part: Chunk, steps: int) -> None:
    if set(part) != set(columns):
        raise BadInput(
            f"{spec} keeps {', '.join(sorted(columns))} of each row, and the saved chunk "
            f"has {', '.join(sorted(part))}: it was trained with another optimizer"
        )
    names = list(columns)
    ids = part[names[0]]
    spec.check(ids)
    if torch.unique(ids).numel() != ids.numel():
        raise BadInput(f"{spec} has one row for each id, and the saved chunk has several")
    for name in names[1:]:
        if columns[name].width is not None:
            check_rows(spec, name, ids, part[name])
        else:
            _check_counts(spec, name, ids, part[name], steps)


def _check_counts(spec: TableSpec, name: str, ids: Tensor, counts: Tensor, steps: int) -> None:
    is_fitting = counts.shape == ids.shape and counts.dtype == torch.int64
    if not is_fitting or counts.device.type != "cpu":
        raise BadInput(f"{name} of {spec} must be one int64 for each row, on the CPU")
    most = steps if name.endswith("last") else LARGEST_COUNT
    if counts.numel() and (int(counts.min()) < 0 or int(counts.max()) > most):
        raise BadInput(f"{name} of {spec} must be from 0 to {most}")


def check_rows(spec: TableSpec, what: str, ids: Tensor, rows: Tensor) -> None:
    """Refuse what is not one row of numbers for each id."""
    shape = (ids.numel(), spec.dim)
    if rows.shape != shape or rows.dtype != torch.float32 or rows.device.type != "cpu":
        raise BadInput(
            f"{what} of {spec} must be {shape} of torch.float32 on the CPU, not "
            f"{tuple(rows.shape)} of {rows.dtype} on {rows.device}"
        )
