"""The workers of one replica, who do the same thing at the same time; the first decides.

pp(2) + tp(2)    stage 0: parts 0 1    stage 1: parts 2 3

gather           along tp, then along pp: all have come when the first goes on
tell             the first's word goes along pp to the first of each stage, then along tp
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.comm import objects
from shoal.comm.executors.solo import SoloGroup
from shoal.comm.group import Group


class Fellows:
    """All of them call `gather` and `tell` in the same order."""

    def __init__(self, pp: Group | None = None, tp: Group | None = None):
        """Without groups: one worker is the whole replica."""
        self._pp = pp or SoloGroup()
        self._tp = tp or SoloGroup()
        self.part = self._pp.rank * self._tp.size + self._tp.rank
        self.parts = self._pp.size * self._tp.size

    @property
    def is_first(self) -> bool:
        return self.part == 0

    def gather(self) -> None:
        """Wait until all of them have come."""
        self._tp.barrier().wait()
        self._pp.barrier().wait()

    def tell(self, data: Tensor) -> None:
        """Replace everybody's tensor by the first one's."""
        if self._tp.rank == 0:
            self._pp.broadcast(data).wait()
        self._tp.broadcast(data).wait()

    def tell_words(self, said: bytes, room_bytes: int) -> bytes:
        """What the first one says."""
        if self._tp.rank == 0:
            said = objects.broadcast_bytes(self._pp, said, 0, room_bytes)
        return objects.broadcast_bytes(self._tp, said, 0, room_bytes)

    def tell_numbers(self, numbers: Sequence[int]) -> list[int]:
        """The first one's numbers; all give as many."""
        told = torch.tensor(numbers, dtype=torch.int64)
        self.tell(told)
        return [int(number) for number in told]
