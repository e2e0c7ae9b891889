"""The shards that one rank holds, one after the other in one tensor: its own, then copies.

flat buffer    [ shard 0 | shard 1 | shard 2 | shard 3 ]
of rank 2      [ shard 2 | shard 1 ]                        with copies=1
"""

from __future__ import annotations

import itertools
from operator import itemgetter

from torch import Tensor

from shoal.replica.flat.layout import FlatLayout
from shoal.schedules.buffer_layout import held_shards


class HeldShards:
    """Where the shards of a rank lie in its memory."""

    def __init__(self, flat: FlatLayout, rank: int, ranks: int, copies: int):
        self._flat = flat
        self.rank = rank
        self.ranks = ranks
        self.slices = flat.shards(ranks)
        self.own = self.slices[rank]
        self.owners = [self._owner_of(param.start) for param in flat.ranges]
        self.shards = held_shards(rank, ranks, copies)
        self._held = [self.slices[shard] for shard in self.shards]
        lengths: list[int] = [where.stop - where.start for where in self._held]
        self._offsets: list[int] = [0, *itertools.accumulate(lengths)]

    @property
    def size(self) -> int:
        """Elements of all shards that are held."""
        return self._offsets[-1]

    @property
    def params(self) -> list[int]:
        """The parameters of these shards, those of the own shard first."""
        return [i for where in self._held for i in self._flat.params_in(where)]

    @property
    def copied(self) -> list[slice]:
        """The shards of other ranks."""
        return self._held[1:]

    def view(self, i: int, memory: Tensor) -> Tensor:
        """A parameter that is held, in memory of `size` elements."""
        start = self._flat.ranges[i].start
        return self._flat.view(i, memory, start - self.offset_of(start))

    def offset_of(self, position: int) -> int:
        """Where a position of the flat buffer is in the memory of this rank."""
        for where, offset in zip(self._held, self._offsets, strict=False):
            if where.start <= position < where.stop:
                return offset + position - int(where.start)
        raise IndexError(f"rank {self.rank} holds no shard with position {position}")

    def position_of(self, offset: int) -> int:
        """The other way round; of the end of the memory, too."""
        places = zip(self._held, self._offsets, strict=False)
        starts = [(start, where) for where, start in places if where.start < where.stop]
        start, where = max((place for place in starts if place[0] <= offset), key=itemgetter(0))
        return int(where.start) + offset - start

    def _owner_of(self, start: int) -> int:
        slices = enumerate(self.slices)
        return next(rank for rank, where in slices if where.start <= start < where.stop)
