"""Binomial trees: the number of ranks that take part doubles in every round.

round 0   0 -> 1
round 1   0 -> 2   1 -> 3
round 2   0 -> 4   1 -> 5   2 -> 6   3 -> 7
"""

from __future__ import annotations

import numpy as np

from shoal.schedules.collectives.collective import Collective
from shoal.schedules.collectives.ring import ring_all_gather, ring_reduce_scatter
from shoal.schedules.collectives.transfer_table import EMPTY, TransferTable, rows


def tree_broadcast(ranks: int) -> Collective:
    """Every rank that has it passes it on: ceil(log2 p) rounds of V bytes."""
    return Collective("tree", ranks, 1, _spread(ranks), "broadcast", one_port=True)


def tree_reduce(ranks: int) -> Collective:
    """The broadcast backwards, adding: ceil(log2 p) rounds of V bytes."""
    table = _spread(ranks).reversed(reduce=True)
    return Collective("tree", ranks, 1, table, "reduce", one_port=True)


def tree_all_reduce(ranks: int) -> Collective:
    """Reduce to rank 0, then broadcast: 2 ceil(log2 p) rounds of V bytes."""
    table = tree_reduce(ranks).table.then(tree_broadcast(ranks).table)
    return Collective("tree", ranks, 1, table, one_port=True)


def tree_scatter(ranks: int) -> Collective:
    """Halves of what is left go down the tree: ceil(log2 p) rounds; the root sends (p-1)V/p.

    round 0   0 -[4 5 6 7]-> 4
    round 1   0 -[2 3]-> 2      4 -[6 7]-> 6
    round 2   0 -[1]-> 1   2 -[3]-> 3   4 -[5]-> 5   6 -[7]-> 7
    """
    return Collective("tree", ranks, ranks, _halving_tree(ranks), "scatter", one_port=True)


def tree_gather(ranks: int) -> Collective:
    """The scatter backwards: ceil(log2 p) rounds; the root receives (p-1)V/p bytes."""
    table = _halving_tree(ranks).reversed(reduce=False)
    return Collective("tree", ranks, ranks, table, "gather", one_port=True)


def scatter_gather_broadcast(ranks: int) -> Collective:
    """Scatter down the tree, then all-gather round the ring: for long messages.

    ceil(log2 p) + p-1 rounds; no rank sends or receives more than about 2V.
    """
    table = _halving_tree(ranks).then(ring_all_gather(ranks).table)
    return Collective("scatter_gather", ranks, ranks, table, "broadcast", one_port=True)


def scatter_gather_reduce(ranks: int) -> Collective:
    """Reduce-scatter round the ring, then gather up the tree: for long messages.

    p-1 + ceil(log2 p) rounds; no rank sends or receives more than about 2V.
    """
    table = ring_reduce_scatter(ranks).table.then(tree_gather(ranks).table)
    return Collective("scatter_gather", ranks, ranks, table, "reduce", one_port=True)


def _spread(ranks: int) -> TransferTable:
    dst = np.arange(1, ranks)
    level = np.floor(np.log2(dst)).astype(np.int32) if ranks > 1 else dst
    return rows(level, dst - (1 << level), dst, 0, False)


def _halving_tree(ranks: int) -> TransferTable:
    depth = (ranks - 1).bit_length()
    levels = [EMPTY]
    for half in (1 << level for level in reversed(range(depth))):
        child, chunk = np.nonzero(
            (np.arange(ranks)[:, None] % (2 * half) == half)
            & (np.arange(ranks)[:, None] // half == np.arange(ranks) // half)
        )
        levels.append(rows(0, child - half, child, chunk, False))
    return levels[0].then(*levels[1:])
