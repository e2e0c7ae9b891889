"""Every rank to every other at once: one round, and p-1 messages in and out of every port.

0 <-> 1
| \\ / |      the lowest latency where ports are many, the most traffic where they are few
| / \\ |
3 <-> 2
"""

from __future__ import annotations

import numpy as np

from shoal.schedules.collectives.collective import Collective
from shoal.schedules.collectives.transfer_table import Ints, rows


def direct_all_reduce(ranks: int) -> Collective:
    """All reduce at once: 1 round; each rank sends (p-1)V bytes, p(p-1)V in all."""
    src, dst = _pairs(ranks)
    return Collective("direct", ranks, 1, rows(0, src, dst, 0, True))


def direct_reduce_scatter(ranks: int) -> Collective:
    """Each rank sends piece r to rank r: 1 round; each rank sends (p-1)V/p bytes."""
    src, dst = _pairs(ranks)
    return Collective("direct", ranks, ranks, rows(0, src, dst, dst, True), "reduce_scatter")


def direct_all_gather(ranks: int) -> Collective:
    """Each rank sends its piece to all others: 1 round; each rank sends (p-1)V/p bytes."""
    src, dst = _pairs(ranks)
    return Collective("direct", ranks, ranks, rows(0, src, dst, src, False), "all_gather")


def direct_all_to_all(ranks: int) -> Collective:
    """Each rank sends every piece straight to its owner: 1 round; (p-1)V/p bytes per rank."""
    src, dst = _pairs(ranks)
    table = rows(0, src, dst, src * ranks + dst, False)
    return Collective("direct", ranks, ranks * ranks, table, "all_to_all")


def shifted_all_to_all(ranks: int) -> Collective:
    """Round k: rank i sends to rank i+k+1. p-1 rounds of V/p bytes with one port each way."""
    step = np.arange(ranks - 1)[:, None]
    src = np.arange(ranks)
    dst = (src + step + 1) % ranks
    table = rows(step, src, dst, src * ranks + dst, False)
    return Collective("shift", ranks, ranks * ranks, table, "all_to_all", one_port=True)


def _pairs(ranks: int) -> tuple[Ints, Ints]:
    src, dst = np.nonzero(~np.eye(ranks, dtype=np.bool_))
    return src.astype(np.int32), dst.astype(np.int32)
