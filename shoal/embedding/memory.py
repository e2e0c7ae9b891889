"""Arrays that take memory where they were written, and can give it back."""

from __future__ import annotations

import mmap
from contextlib import suppress

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
