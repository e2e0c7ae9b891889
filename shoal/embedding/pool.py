"""Columns of entries without gaps: what a table keeps for each of its ids."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

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
            self._memory = _map(num_bytes)
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


def _map(num_bytes: int) -> mmap.mmap:
    pages = -(-num_bytes // mmap.PAGESIZE)
    try:
        return mmap.mmap(-1, pages * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(str(error)) from error


_FEW_ENTRIES = 1024


class Column(NamedTuple):
    """The type of one column, the numbers of an entry in it, and their initial value."""

    dtype: torch.dtype
    width: int | None = None  # None: one number, and a tensor of one dimension
    initial: float = 0.0


class MovedEntries(NamedTuple):
    """Entries that have filled the places of removed ones."""

    ids: Tensor
    positions: Tensor


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

    def remove(self, positions: Tensor) -> MovedEntries:
        """Remove the entries at these positions, which differ."""
        size = self.size - len(positions)
        tail = torch.arange(size, self.size)
        holes = positions[positions < size]
        movers = tail[~torch.isin(tail, positions)]
        for array in self._arrays.values():
            array.tensor[holes] = array.tensor[movers]
        self.size = size
        self._give_back()
        return MovedEntries(self["ids"][holes], holes)

    def _give_back(self) -> None:
        """Free the memory behind the last entry once it is worth a call of the system."""
        if self._written - self.size < max(_FEW_ENTRIES, self.size // 8):
            return
        for array in self._arrays.values():
            array.release(self.size, self._written)
        self._written = self.size
