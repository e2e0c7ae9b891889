"""Which positions of a sequence each rank of a cp group has, in zigzag order.

8 positions, 2 ranks    0 1 | 2 3 | 4 5 | 6 7      rank 0 has 0 1 6 7, rank 1 has 2 3 4 5
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.comm.group import Group
from shoal.replica.tensor.shard_spec import ShardSpec


@dataclass(frozen=True)
class SequenceSpec:
    """How one dimension of a tensor is sharded by positions.

    Positions `start` to `stop` of a sequence of `length` are there. The dimension may be several
    ones in one: `outer` × positions × `inner`, as after `flatten(0, 1)`.
    """

    dim: int
    length: int
    ranks: int
    start: int
    stop: int
    outer: int = 1
    inner: int = 1

    @classmethod
    def of(cls, dim: int, length: int, ranks: int) -> SequenceSpec:
        return cls(dim, length, ranks, 0, length)

    @property
    def positions(self) -> int:
        """How many there are, over all ranks."""
        return self.stop - self.start

    @property
    def size(self) -> int:
        """Of the dimension, over all ranks."""
        return self.outer * self.positions * self.inner

    @property
    def is_whole(self) -> bool:
        """Whether the dimension is all positions and nothing else."""
        return self.positions == self.length and self.outer == self.inner == 1

    def same_positions(self, other: SequenceSpec) -> bool:
        return replace(self, dim=0) == replace(other, dim=0)

    def at(self, dim: int) -> SequenceSpec:
        return replace(self, dim=dim)

    def ranges(self, rank: int) -> tuple[range, ...]:
        """A rank's positions, counted from `start`."""
        found = []
        for chunk in (rank, 2 * self.ranks - 1 - rank):
            first = chunk * self.length // (2 * self.ranks)
            last = (chunk + 1) * self.length // (2 * self.ranks)
            lower = min(max(first, self.start), self.stop)
            upper = max(min(last, self.stop), lower)
            found.append(range(lower - self.start, upper - self.start))
        return tuple(found)

    def count(self, rank: int) -> int:
        return sum(map(len, self.ranges(rank)))

    def local_size(self, rank: int) -> int:
        """Of the dimension, on one rank."""
        return self.outer * self.count(rank) * self.inner

    def local_positions(self, rank: int, device: torch.device) -> Tensor:
        """A rank's positions in the sequence."""
        parts = [torch.arange(r.start, r.stop, device=device) for r in self.ranges(rank)]
        return torch.cat(parts) + self.start

    def full_shape(self, local: Sequence[int]) -> torch.Size:
        shape = list(local)
        shape[self.dim] = self.size
        return torch.Size(shape)

    def take_local(self, full: Tensor, rank: int) -> Tensor:
        """A rank's part of a tensor that is there in full."""
        spread = torch.unflatten(full, self.dim, (self.outer, self.positions, self.inner))
        parts = [spread.narrow(self.dim + 1, r.start, len(r)) for r in self.ranges(rank)]
        return torch.cat(parts, self.dim + 1).flatten(self.dim, self.dim + 2)

    def all_gather(self, local: Tensor, group: Group) -> Tensor:
        """The full tensor from the parts of all ranks."""
        count = self.count(group.rank)
        spread = torch.unflatten(local, self.dim, (self.outer, count, self.inner))
        full = self._shards().all_gather(spread, group)
        return full.flatten(self.dim, self.dim + 2)

    def sum_to_local(self, full: Tensor, group: Group) -> Tensor:
        """A rank's part of the sum over ranks of tensors that they have in full."""
        spread = torch.unflatten(full, self.dim, (self.outer, self.positions, self.inner))
        local = self._shards().reduce_scatter(spread.contiguous(), group)
        return local.flatten(self.dim, self.dim + 2)

    def reshaped(self, old: Sequence[int], new: Sequence[int]) -> SequenceSpec | None:
        """The same positions after a reshape of full shapes; None if it tears them apart."""
        before = math.prod(old[: self.dim]) * self.outer
        for dim, size in enumerate(new):
            outer, rest = divmod(before, max(1, math.prod(new[:dim])))
            if rest == 0 and outer and size % (outer * self.positions) == 0 and size:
                inner = size // (outer * self.positions)
                return replace(self, dim=dim, outer=outer, inner=inner)
        return None

    def _shards(self) -> ShardSpec:
        ranges = tuple(self.ranges(rank) for rank in range(self.ranks))
        return ShardSpec(self.dim + 1, ranges)
