"""One piece of memory that the processes of a host read and write at will, without locks.

    [ a line of marks for each rank ]  [ body ................................ ]
      steps done, closed

Rank 0 makes it and the others open it through rank 0's process: it has no name, so it goes when
the last of them goes, whoever is killed when. It is open to the same user only.
"""

from __future__ import annotations

import mmap
import os
import select
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from shoal.transport.shm.memfd import make, map_all, open_from
from shoal.transport.shm.segment import Exchange

_LINE = 8  # marks of a rank: one cache line of int64
_STEPS, _CLOSED = range(2)


class Commons:
    """One process's view of it. `meet` makes it."""

    def __init__(self, memory: mmap.mmap, rank: int, processes: list[int]):
        self.memory = memory
        self.rank = rank
        self.size = len(processes)
        self.offset = _head_bytes(self.size)  # where the body begins in `memory`
        self._processes = processes
        lines = np.frombuffer(memory, np.int64, _LINE * self.size)
        self._marks: NDArray[np.int64] = lines.reshape(self.size, _LINE)

    @classmethod
    def meet(cls, exchange: Exchange, rank: int, size: int, num_bytes: int) -> Commons | None:
        """All ranks call it with the same size of body; None on all of them if one cannot."""
        num_bytes += _head_bytes(size)
        fd = make("shoal-commons", num_bytes) if rank == 0 else -1
        memory = None
        processes = []
        try:
            said = [offer.split() for offer in exchange(f"{os.getpid()} {fd}".encode())]
            with suppress(OSError, ValueError):
                memory = _open(int(said[0][0]), int(said[0][1]), num_bytes)
                processes = [os.pidfd_open(int(pid)) for pid, _ in said]
            answers = exchange(b"no" if memory is None or len(processes) < size else b"yes")
        finally:
            if fd >= 0:
                os.close(fd)
        if memory is None or b"no" in answers:
            for process in processes:
                os.close(process)
            return None
        return cls(memory, rank, processes)

    @property
    def steps(self) -> NDArray[np.int64]:
        """How many steps each rank says it has done."""
        return self._marks[:, _STEPS]

    def is_over(self, peer: int) -> bool:
        """It changes nothing any more: it has closed, or its process has ended."""
        if self._marks[peer, _CLOSED]:
            return True
        poll = select.poll()
        poll.register(self._processes[peer], select.POLLIN)
        return bool(poll.poll(0))

    def has_died(self, peer: int) -> bool:
        """Its process has ended before it closed."""
        return self.is_over(peer) and not self._marks[peer, _CLOSED]

    def close(self) -> None:
        """This rank changes nothing any more. The memory stays as long as tensors show it."""
        self._marks[self.rank, _CLOSED] = 1
        for process in self._processes:
            os.close(process)
        self._processes = []


def _head_bytes(size: int) -> int:
    return size * _LINE * 8


def _open(pid: int, fd: int, num_bytes: int) -> mmap.mmap:
    own = open_from(pid, fd, num_bytes)
    try:
        return map_all(own, num_bytes)
    finally:
        os.close(own)
