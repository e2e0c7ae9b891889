"""How algorithms for powers of two serve any number of ranks.

With p = 2^k + e ranks, the first 2e ranks pair up. The odd one of a pair sends its data to the
even one before the algorithm runs on 2^k ranks, and receives the result after it:

    p = 6:   1 -> 0   3 -> 2      0 2 4 5 run      0 -> 1   2 -> 3

Every active rank answers for the chunks of its pair, so with p chunks active rank v has a group
of one or two of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.schedules.collectives.transfer_table import Ints, TransferTable, rows


@dataclass(frozen=True)
class Fold:
    """`active[v]` is the rank that plays v; `group[c]` the v that answers for chunk c."""

    ranks: int
    active: Ints
    group: Ints

    @property
    def size(self) -> int:
        return int(self.active.size)

    @property
    def keepers(self) -> NDArray[np.int64]:
        """The even ranks of the pairs; each one's partner is its right neighbour."""
        return np.arange(0, 2 * (self.ranks - self.size), 2)

    def exchange(self, distance: int, block_of_partner: bool, reduce: bool) -> TransferTable:
        """One round: v swaps with v ^ distance a block of `distance` groups.

        Halving sends the block that the partner will answer for, doubling the own one.
        """
        v = np.arange(self.size)
        sent = v ^ distance if block_of_partner else v
        who, chunk = np.nonzero((sent // distance)[:, None] == (self.group // distance)[None, :])
        return rows(0, self.active[who], self.active[who ^ distance], chunk, reduce)


def fold(ranks: int) -> Fold:
    size = 1 << (ranks.bit_length() - 1)
    rank = np.arange(ranks)
    extra = ranks - size
    group = np.where(rank < 2 * extra, rank // 2, rank - extra).astype(np.int32)
    active = np.where(np.arange(size) < extra, 2 * np.arange(size), np.arange(size) + extra)
    return Fold(ranks, active.astype(np.int32), group)
