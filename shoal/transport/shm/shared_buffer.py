"""One buffer that the processes of a host read and write at any time, without locks.

    [ a line of marks for each rank ]  [ body ................................ ]
      generation (rank 0's line), steps done, closed, life, steps missed, steps of the job

Rank 0 makes the memory and the others open it.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from shoal.transport.shm import memfd
from shoal.transport.shm.lasting_memory import LastingMemory
from shoal.transport.shm.memfd import Exchange, Offer
from shoal.transport.shm.process_exit import close_pidfds, has_ended, open_pidfds

_LINE = 8  # marks of a rank: one cache line of int64
_GENERATION, _STEPS, _CLOSED, _LIFE, _MISSED, _JOB_STEPS = range(6)


class SharedBuffer:
    """One process's view of the buffer. Made by `join`."""

    def __init__(self, memory: mmap.mmap, rank: int, pidfds: list[int]):
        self.memory = memory
        self.rank = rank
        self.size = len(pidfds)
        self.offset = _header_bytes(self.size)  # where the body begins in `memory`
        self._pidfds = pidfds
        lines = np.frombuffer(memory, np.int64, _LINE * self.size)
        self._marks: NDArray[np.int64] = lines.reshape(self.size, _LINE)

    @classmethod
    def join(cls, exchange: Exchange, rank: int, size: int, num_bytes: int) -> SharedBuffer | None:
        """All ranks call it with the same size of body; None on all of them if one cannot join."""
        num_bytes += _header_bytes(size)
        generation = memfd.new_generation()
        fd = memfd.make("shoal-buffer", num_bytes, generation) if rank == 0 else -1

        def attach(offers: list[Offer]) -> SharedBuffer:
            pidfds = open_pidfds([offer.pid for offer in offers])
            try:
                return cls(offers[0].map(num_bytes), rank, pidfds)
            except (OSError, ValueError):
                close_pidfds(pidfds)
                raise

        return memfd.rendezvous(exchange, fd, attach, cls._close_pidfds, generation)

    @property
    def steps(self) -> NDArray[np.int64]:
        """How many steps each rank has done; a rank writes its own entry only."""
        return self._marks[:, _STEPS]

    @property
    def turns(self) -> NDArray[np.int64]:
        """How far each rank is: its steps, and those that it missed while it was away."""
        return self._marks[:, _STEPS] + self._marks[:, _MISSED]

    def life(self, peer: int) -> int:
        """How often its process was started again."""
        return int(self._marks[peer, _LIFE])

    def note_job_steps(self, steps: int) -> None:
        self._marks[self.rank, _JOB_STEPS] = steps

    def job_steps(self, peer: int) -> int:
        """The step that it has begun last, as `note_job_steps` says."""
        return int(self._marks[peer, _JOB_STEPS])

    def take_turn(self) -> None:
        """Go on where the fastest rank is."""
        mine = self._marks[self.rank]
        mine[_MISSED] = int(self.turns.max()) - int(mine[_STEPS])
        mine[_JOB_STEPS] = int(self._marks[:, _JOB_STEPS].max())

    def has_finished(self, peer: int) -> bool:
        """It changes nothing any more: it has closed, or its process has ended."""
        return bool(self._marks[peer, _CLOSED]) or has_ended(self._pidfds[peer])

    def has_died(self, peer: int) -> bool:
        """Its process has ended before it closed."""
        return self.has_finished(peer) and not self._marks[peer, _CLOSED]

    def close(self) -> None:
        """This rank changes nothing any more. The memory stays mapped while tensors show it."""
        self._marks[self.rank, _CLOSED] = 1
        self._close_pidfds()

    def _close_pidfds(self) -> None:
        close_pidfds(self._pidfds)
        self._pidfds = []


class LastingBuffer(SharedBuffer):
    """A buffer of ranks that may come back, or come late.

    `has_ended(rank, life)` tells whether that process of a rank has ended.
    """

    def __init__(
        self,
        lasting: LastingMemory,
        place: tuple[int, int, int],
        has_ended: Callable[[int, int], bool],
    ):
        """`place` is the rank, the number of ranks, and how often this one was started again."""
        rank, size, life = place
        super().__init__(lasting.memory, rank, [-1] * size)
        self._lasting = lasting
        self._has_ended = has_ended
        self._marks[rank, _LIFE] = life
        self._marks[rank, _CLOSED] = 0

    @staticmethod
    def needed_bytes(size: int, num_bytes: int) -> int:
        return num_bytes + _header_bytes(size)

    def has_finished(self, peer: int) -> bool:
        return bool(self._marks[peer, _CLOSED]) or self._has_ended(peer, self.life(peer))

    def _close_pidfds(self) -> None:
        self._lasting.close()


def _header_bytes(size: int) -> int:
    return size * _LINE * 8
