"""One rank in the middle: the pattern of a parameter server.

    1
    |
4 - 0 - 2     every byte passes through the root's port
    |
    3
"""

from __future__ import annotations

import numpy as np

from shoal.schedules.collectives.collective import Collective
from shoal.schedules.collectives.transfer_table import rows


def star_broadcast(ranks: int) -> Collective:
    """The root sends the vector to all ranks: 1 round; the root sends (p-1)V bytes."""
    leaves = np.arange(1, ranks)
    return Collective("star", ranks, 1, rows(0, 0, leaves, 0, False), "broadcast")


def star_reduce(ranks: int) -> Collective:
    """Every rank sends its vector to the root: 1 round; the root receives (p-1)V bytes."""
    leaves = np.arange(1, ranks)
    return Collective("star", ranks, 1, rows(0, leaves, 0, 0, True), "reduce")


def star_all_reduce(ranks: int) -> Collective:
    """Reduce at the root, then broadcast: 2 rounds; 2(p-1)V bytes in all, all at the root."""
    table = star_reduce(ranks).table.then(star_broadcast(ranks).table)
    return Collective("star", ranks, 1, table)


def star_scatter(ranks: int) -> Collective:
    """The root sends every rank its piece: 1 round; the root sends (p-1)V/p bytes."""
    leaves = np.arange(1, ranks)
    return Collective("star", ranks, ranks, rows(0, 0, leaves, leaves, False), "scatter")


def star_gather(ranks: int) -> Collective:
    """Every rank sends its piece to the root: 1 round; the root receives (p-1)V/p bytes."""
    leaves = np.arange(1, ranks)
    return Collective("star", ranks, ranks, rows(0, leaves, 0, leaves, False), "gather")


def star_barrier(ranks: int) -> Collective:
    """Every rank reports to the root, which answers when all have: 2 rounds of p-1 messages."""
    return Collective("star", ranks, 1, star_all_reduce(ranks).table, "barrier")
