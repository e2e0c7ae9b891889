"""A view of shared memory whose changes stay in this process (copy on write)."""

from __future__ import annotations

import mmap
import os

import torch

_PAGE_WORD = 8  # bytes of /proc/self/pagemap


class PrivatePages:
    """A private mapping of shared memory, and whether it was written."""

    def __init__(self, fd: int, offset: int, num_bytes: int):
        access = mmap.PROT_READ | mmap.PROT_WRITE
        self.memory = mmap.mmap(fd, num_bytes, mmap.MAP_PRIVATE, access, offset=offset)
        address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
        self._where = address // mmap.PAGESIZE * _PAGE_WORD
        self._length = -(-num_bytes // mmap.PAGESIZE) * _PAGE_WORD
        self._map = open("/proc/self/pagemap", "rb", buffering=0)  # noqa: SIM115
        self.memory[0] = self.memory[0]
        self.can_tell = self.are_written()
        self.give_back()
        self.can_tell &= not self.are_written()

    def are_written(self) -> bool:
        """Whether a page is this process's own: it is there, or swapped out, and of no file."""
        words = os.pread(self._map.fileno(), self._length, self._where)
        if len(words) < self._length:
            return True
        state = torch.frombuffer(bytearray(words), dtype=torch.int64) >> 61 & 7
        return bool((state & 1 == 0).logical_and_(state & 6 != 0).any())

    def give_back(self) -> None:
        """What was written is forgotten: the mapping shows the shared memory again."""
        self.memory.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        self._map.close()
