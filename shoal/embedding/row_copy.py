"""Copies rows between two tensors, each from and to any position, in one pass."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.embedding.hashing import Ids

try:
    from shoal.transport.shm._shm import copy_rows as _native
    from shoal.transport.shm._shm import take_rows as _native_take
except ImportError:  # Shoal was installed without a compiler, or is newer than its native part
    _native = None  # type: ignore[assignment]
    _native_take = None  # type: ignore[assignment]

Rows = NDArray[np.float32]


def copy_rows(source: Tensor, origins: Ids | None, target: Tensor, places: Ids | None) -> None:
    """Row `places[i]` of the target becomes row `origins[i]` of the source; None: 0, 1, 2, …

    Both are contiguous, on the CPU and of one type and width. An IndexError if a position is out of
    range: then nothing is copied.
    """
    count = len(source if origins is None else origins) if places is None else len(places)
    if origins is not None and len(origins) != count:
        raise IndexError(f"{len(origins)} rows for {count} places")
    if _native is None:
        _copy(source, origins, target, places, count)
        return
    wrong = _native(
        source.data_ptr(),
        len(source),
        target.data_ptr(),
        len(target),
        source.stride(0) * source.element_size(),
        0 if origins is None else _address(origins),
        0 if places is None else _address(places),
        count,
    )
    if wrong >= 0:
        raise IndexError(f"row {wrong} of {count} to copy is out of range")


def take_rows(
    index: NDArray[np.int32], low: int, ids: Ids, rows: Rows, target: Rows, places: Ids | None
) -> bool:
    """Row `places[i]` of the target becomes the row at position `index[ids[i] - low] - 1`.

    False, and nothing is copied, if a row has no position (the index has 0 or less), or is out of
    range. Ids come from other processes: nothing is assumed of them.
    """
    if _native_take is not None:
        return _native_take(index, low, ids, rows, target, places, 4 * rows.shape[1]) < 0
    slots = ids - low
    try:
        _check_range(slots, len(slots), len(index))
        positions = index[slots].astype(np.int64) - 1
        _copy(torch.from_numpy(rows), positions, torch.from_numpy(target), places, len(positions))
    except IndexError:
        return False
    return True


def _address(numbers: Ids) -> int:
    assert numbers.dtype == "int64" and numbers.flags.c_contiguous
    return numbers.ctypes.data


def _copy(
    source: Tensor, origins: Ids | None, target: Tensor, places: Ids | None, count: int
) -> None:
    _check_range(origins, count, len(source))
    _check_range(places, count, len(target))
    rows = source[:count] if origins is None else source.index_select(0, torch.from_numpy(origins))
    if places is None:
        target[:count] = rows
    else:
        target.index_copy_(0, torch.from_numpy(places), rows)


def _check_range(numbers: Ids | None, count: int, size: int) -> None:
    low, high = (0, count - 1) if numbers is None or not count else (numbers.min(), numbers.max())
    if low < 0 or high >= size:
        raise IndexError(f"a row of {count} to copy is out of range")
