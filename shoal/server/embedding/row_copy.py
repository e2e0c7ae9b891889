"""Copies rows between two tensors, each from and to any position, in one pass."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shoal.server.embedding import native
from shoal.server.embedding.hashing import Ids

Rows = NDArray[np.float32]


def copy_rows(source: Tensor, origins: Ids | None, target: Tensor, places: Ids | None) -> None:
    """Row `places[i]` of the target becomes row `origins[i]` of the source; None: 0, 1, 2, …

    Both are contiguous, on the CPU and of one type and width. An IndexError if a position is out of
    range: then nothing is copied.
    """
    count = len(source if origins is None else origins) if places is None else len(places)
    if origins is not None and len(origins) != count:
        raise IndexError(f"{len(origins)} rows for {count} places")
    wrong = native.memory.copy_rows(
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
    row_bytes = 4 * rows.shape[1]
    return native.memory.take_rows(index, low, ids, rows, target, places, row_bytes) < 0


def _address(numbers: Ids) -> int:
    assert numbers.dtype == "int64" and numbers.flags.c_contiguous
    return numbers.ctypes.data
