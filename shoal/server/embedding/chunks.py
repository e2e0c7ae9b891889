"""Saved rows of a table, in chunks.

    ids [, last], rows, optimizer state           rows that are trained
    waiting_ids [, waiting_last], waiting_count   ids that were not seen often enough yet

"last" is the step that has seen an id last, where rows leave after a while (`ttl_steps`). A
checkpoint joins all chunks of a table by these names.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.errors import BadInput
from shoal.server.embedding.spec import LARGEST_COUNT, RowOptimizer, TableSpec

_DTYPES = {torch.float32: np.float32, torch.int64: np.int64, torch.int32: np.int32}


class ReservedArray:
    """Zeros of one shape. The system allocates pages when they are first written.

    With `gives_back`, `release` frees the memory of rows that are not needed any more.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, gives_back: bool):
        """MemoryError or ValueError if the system does not reserve so much."""
        self._memory: mmap.mmap | None = None
        self._row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
        num_bytes = shape[0] * self._row_bytes
        if gives_back and num_bytes:
            pages = -(-num_bytes // mmap.PAGESIZE)
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            try:
                self._memory = mmap.mmap(-1, pages * mmap.PAGESIZE, flags=flags)
            except (OSError, OverflowError) as error:
                raise MemoryError(str(error)) from error
            flat = np.frombuffer(self._memory, _DTYPES[dtype])
            array = flat[: num_bytes // dtype.itemsize].reshape(shape)
        else:
            array = np.zeros(shape, _DTYPES[dtype])
        with torch.inference_mode(False):  # what is made in inference mode cannot be trained
            self.tensor: Tensor = torch.from_numpy(array)

    def release(self, start: int, stop: int) -> None:
        """Rows `start` to `stop` are not needed: give back the pages that hold nothing else."""
        if self._memory is None:
            return
        first = -(-start * self._row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        last = stop * self._row_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            with suppress(OSError):  # the memory stays taken, and is used again
                self._memory.madvise(mmap.MADV_DONTNEED, first, last - first)


_FEW_ENTRIES = 1024


class Column(NamedTuple):
    """The type of one column, the numbers of an entry in it, and their initial value."""

    dtype: torch.dtype
    width: int | None = None  # None: one number, and a tensor of one dimension
    initial: float = 0.0


class RowPool:
    """Entries at positions 0 to `size`, each with an id and one value in every column.

    Entries that are removed leave no gaps: the last ones take their places.
    """

    def __init__(self, capacity: int, columns: Mapping[str, Column], gives_back: bool):
        self.size = 0
        self._written = 0  # entries that take memory
        self._capacity = capacity
        self._gives_back = gives_back
        self._columns: dict[str, Column] = {}
        self._arrays: dict[str, ReservedArray] = {}
        for name, column in {"ids": Column(torch.int64), **columns}.items():
            self.set_column(name, column)

    def __getitem__(self, name: str) -> Tensor:
        """A whole column; entries are at its beginning."""
        return self._arrays[name].tensor

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._columns)

    def set_column(self, name: str, column: Column) -> None:
        """Add a column, or replace it: all entries have its initial value."""
        width = () if column.width is None else (column.width,)
        array = ReservedArray((self._capacity, *width), column.dtype, self._gives_back)
        if column.initial:
            array.tensor[: self.size] = column.initial
        self._columns[name] = column
        self._arrays[name] = array

    def drop_column(self, name: str) -> None:
        del self._columns[name]
        del self._arrays[name]

    def append(self, ids: Tensor) -> Tensor:
        """New entries with initial values; returns their positions."""
        new = slice(self.size, self.size + len(ids))
        for name, column in self._columns.items():
            if column.initial or self._gives_back:  # else zeros that were never written
                self[name][new] = column.initial
        self["ids"][new] = ids
        self.size = new.stop
        self._written = max(self._written, self.size)
        return torch.arange(new.start, new.stop)

    def remove(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Remove the entries at these positions, which differ.

        Returns the ids of the entries that have filled their places, and where these are.
        """
        size = self.size - len(positions)
        tail = torch.arange(size, self.size)
        holes = positions[positions < size]
        movers = tail[~torch.isin(tail, positions)]
        for array in self._arrays.values():
            array.tensor[holes] = array.tensor[movers]
        self.size = size
        self._give_back()
        return self["ids"][holes], holes

    def _give_back(self) -> None:
        """Free the memory behind the last entry once it is worth a call of the system."""
        if self._written - self.size < max(_FEW_ENTRIES, self.size // 8):
            return
        for array in self._arrays.values():
            array.release(self.size, self._written)
        self._written = self.size


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
