"""Which rows or columns of a tensor each worker of a tp group has."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.comm.group import Group


def cut(size: int, parts: int, unit: int = 1) -> list[range]:
    """Consecutive ranges of whole units, as equal as can be; the longer ones first.

    12 in 2 parts by units of 4    0..7  8..11
    """
    units, rest = divmod(size // unit, parts)
    ends = [unit * (units * r + min(r, rest)) for r in range(parts + 1)]
    return [range(a, b) for a, b in itertools.pairwise(ends)]


@dataclass(frozen=True)
class Share:
    """How one dimension of a tensor is dealt out: some ranges of it for every rank."""

    dim: int
    ranges: tuple[tuple[range, ...], ...]

    @classmethod
    def even(cls, dim: int, size: int, parts: int, unit: int = 1) -> Share:
        return cls(dim, tuple((r,) for r in cut(size, parts, unit)))

    @classmethod
    def of_each(cls, dim: int, blocks: int, size: int, parts: int, unit: int) -> Share:
        """Blocks of `size` stand one after the other (q, k, v); each of them is cut."""
        found = tuple(
            tuple(range(b * size + r.start, b * size + r.stop) for b in range(blocks))
            for r in cut(size, parts, unit)
        )
        return cls(dim, found)

    @property
    def size(self) -> int:
        return sum(len(r) for ranges in self.ranges for r in ranges)

    def length(self, rank: int) -> int:
        return sum(map(len, self.ranges[rank]))

    def shape(self, whole: Sequence[int], rank: int) -> torch.Size:
        found = list(whole)
        found[self.dim] = self.length(rank)
        return torch.Size(found)

    def whole_shape(self, piece: Sequence[int]) -> torch.Size:
        found = list(piece)
        found[self.dim] = self.size
        return torch.Size(found)

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """That rank's piece, as a tensor of its own."""
        parts = [whole.narrow(self.dim, r.start, len(r)) for r in self.ranges[rank]]
        return torch.cat(parts, self.dim) if len(parts) > 1 else parts[0].clone()

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        whole = pieces[0].new_empty(self.whole_shape(pieces[0].shape))
        for piece, ranges in zip(pieces, self.ranges, strict=True):
            start = 0
            for r in ranges:
                part = piece.narrow(self.dim, start, len(r))
                whole.narrow(self.dim, r.start, len(r)).copy_(part)
                start += len(r)
        return whole

    def add_up(self, whole: Tensor, group: Group) -> Tensor:
        """This rank's piece of the sum over ranks; one reduce-scatter, as long as `gather`'s."""
        pieces = [self.take(whole, rank).view(-1) for rank in range(group.size)]
        longest = max(piece.numel() for piece in pieces)
        rows = whole.new_zeros(group.size, longest)
        for row, piece in zip(rows, pieces, strict=True):
            row[: piece.numel()] = piece
        mine = whole.new_empty(longest)
        group.reduce_scatter(mine, rows.view(-1)).wait()
        return mine[: pieces[group.rank].numel()].view(self.shape(whole.shape, group.rank))

    def gather(self, piece: Tensor, group: Group) -> Tensor:
        """All pieces, joined, on every rank; one all-gather of pieces as long as the longest."""
        whole = self.whole_shape(piece.shape)
        shapes = [self.shape(whole, rank) for rank in range(group.size)]
        longest = max(shape.numel() for shape in shapes)
        mine = piece.new_zeros(longest)
        mine[: piece.numel()] = piece.reshape(-1)
        everyone = mine.new_empty(longest * group.size)
        group.all_gather(everyone, mine).wait()
        rows = everyone.view(group.size, longest)
        return self.join([r[: s.numel()].view(s) for r, s in zip(rows, shapes, strict=True)])
