"""Memory in which servers of a host put the rows that a worker pulls.

    worker   makes a memfd, passes its descriptor with SHARE_ROWS, and names it in its pulls
    server   writes each row where the worker wants it; the answer has no payload

Rows that a worker has got are a view of such memory. It is used again once no tensor refers to it,
so there are several; rows come with the answer while all of them are in use. The same memory is
used where servers are on other hosts, and is not shared: fresh memory costs more than the rows.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.comm.transport.shm import memfd
from shoal.server.embedding.hashing import Ids
from shoal.server.embedding.row_copy import Rows
from shoal.server.messages import MAX_ROW_MEMORIES
from shoal.server.protocol import Refused
from shoal.server.shared_memory import map_sealed

MAX_MEMORY_BYTES = 1 << 28
_MIN_BYTES = 1 << 20
_KEPT_NUMBERS = 4 << 20  # of a buffer: 16 MiB


class RowTarget(NamedTuple):
    """Where rows go: `places[i]` is that of the i-th; None: one after the other."""

    rows: Rows
    places: Ids | None = None

    def part(self, of_rows: slice) -> RowTarget:
        """Where these of the rows go."""
        if self.places is None:
            return RowTarget(self.rows[of_rows])
        return RowTarget(self.rows, self.places[of_rows])


def attach(descriptor: int) -> Rows:
    """The memory of a worker, as float32; Refused if it is not sealed or too large."""
    num_bytes = os.fstat(descriptor).st_size
    is_allowed = 0 < num_bytes <= MAX_MEMORY_BYTES and num_bytes % mmap.PAGESIZE == 0
    if not is_allowed:
        raise Refused(f"expected sealed memory for rows, of at most {MAX_MEMORY_BYTES} bytes")
    return np.frombuffer(map_sealed(descriptor, num_bytes), np.float32)


class RowBuffer:
    """Memory for rows that come or go one after the other, used again for the next ones."""

    def __init__(self) -> None:
        self._numbers = np.empty(0, np.float32)

    def rows(self, count: int, dim: int) -> Rows:
        """With any values."""
        size = count * dim
        if size > _KEPT_NUMBERS:
            return np.empty((count, dim), np.float32)
        if size > len(self._numbers):
            self._numbers = np.empty(1 << size.bit_length(), np.float32)
        return self._numbers[:size].reshape(count, dim)


class _Memory:
    """One piece of memory; free while no tensor refers to it."""

    def __init__(self, number: int, memory: mmap.mmap):
        self.number = number
        self.size = len(memory)
        self._memory = memory
        self._user: weakref.ref[Any] | None = None
        self.is_unsafe = False  # a server may still write to it

    @property
    def is_free(self) -> bool:
        return not self.is_unsafe and (self._user is None or self._user() is None)

    def rows(self, count: int, dim: int) -> Tensor:
        """A view that takes this memory for as long as a tensor refers to it."""
        numbers = np.frombuffer(self._memory, np.float32, count * dim)
        self._user = weakref.ref(numbers)
        return torch.from_numpy(numbers).view(count, dim)


class PulledRows(NamedTuple):
    """The rows of one pull, and the number of their memory where servers share it.

    Else they come to a buffer first.
    """

    rows: Tensor
    memory: int | None
    buffer: RowBuffer


class RowMemories:
    """The memories of one worker. `share(number, descriptor)` passes one to all servers.

    None: some servers are on other hosts, and no memory is shared.
    """

    def __init__(self, share: Callable[[int, int], None] | None):
        self._share = share
        self._buffer = RowBuffer()
        self._memories: list[_Memory | None] = [None] * MAX_ROW_MEMORIES

    @contextmanager
    def take(self, count: int, dim: int) -> Iterator[PulledRows]:
        """Memory for rows that are pulled in the block; used again, if one is free."""
        memory = self._find(4 * count * dim)
        rows = torch.empty(count, dim) if memory is None else memory.rows(count, dim)
        number = None if memory is None or self._share is None else memory.number
        try:
            yield PulledRows(rows, number, self._buffer)
        except BaseException:  # answers that were not waited for may still come
            self._buffer = RowBuffer()
            if memory is not None:
                memory.is_unsafe = True
            raise

    def _find(self, num_bytes: int) -> _Memory | None:
        if not 0 < num_bytes <= MAX_MEMORY_BYTES:
            return None
        free = [each for each in self._memories if each is not None and each.is_free]
        large = [each for each in free if each.size >= num_bytes]
        if large:
            return min(large, key=lambda each: each.size)
        unused = [number for number, each in enumerate(self._memories) if each is None]
        numbers = [*unused, *(each.number for each in free)]
        return self._make(numbers[0], num_bytes) if numbers else None

    def _make(self, number: int, num_bytes: int) -> _Memory | None:
        """New memory under this number, in place of a smaller one."""
        size = max(_MIN_BYTES, 1 << (num_bytes - 1).bit_length())
        if self._share is None:
            private = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._memories[number] = _Memory(number, private)
            return self._memories[number]
        descriptor = memfd.make("shoal-rows", size)
        if descriptor < 0:
            return None
        try:
            memory = _Memory(number, memfd.map_all(descriptor, size))
            self._memories[number] = None
            self._share(number, descriptor)
        finally:
            os.close(descriptor)
        self._memories[number] = memory
        return memory
