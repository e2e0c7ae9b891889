"""Every rank to every other at once (direct), or through one rank in the middle (star).

direct    one round, p-1 messages in and out of every port: the lowest latency where ports are
          many, the most traffic where they are few
star      the pattern of a parameter server: every byte passes through the root's port

Naive and sequential all-reduce move p(p-1)V bytes in all. A rank needs its own vector while the
sum grows in its place, so it keeps a copy in a scratch slot. Contributions arrive in the order of
ranks, so all ranks get the same bits.
"""

from __future__ import annotations

import numpy as np

from shoal.schedules.collectives import Collective
from shoal.schedules.collectives.transfer_table import Ints, TransferTable, rows


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


def shift_all_to_all(ranks: int) -> Collective:
    """Round k: rank i sends to rank i+k+1. p-1 rounds of V/p bytes with one port each way."""
    step = np.arange(ranks - 1)[:, None]
    src = np.arange(ranks)
    dst = (src + step + 1) % ranks
    table = rows(step, src, dst, src * ranks + dst, False)
    return Collective("shift", ranks, ranks * ranks, table, "all_to_all", one_port=True)


def _pairs(ranks: int) -> tuple[Ints, Ints]:
    src, dst = np.nonzero(~np.eye(ranks, dtype=np.bool_))
    return src.astype(np.int32), dst.astype(np.int32)


def naive_all_reduce(ranks: int) -> Collective:
    """Every rank sends everything to every rank, one message at a time.

    p(p-1) rounds of V bytes: time p(p-1)(alpha + V beta), traffic p(p-1)V.

        round 0   0 -> 1      round 2   1 -> 0      …      the wire is never used by two at once
    """
    src, dst = (column.ravel() for column in np.indices((ranks, ranks)))
    when = np.maximum(np.cumsum(src != dst) - 1, 0)  # a rank's own contribution rides along
    table = _copies(ranks).then(rows(when, src, dst, 1, src > 0, 0))
    return Collective("naive", ranks, 1, table, one_port=True, scratch=1)


def sequential_all_reduce(ranks: int) -> Collective:
    """One rank after the other reduces: in round r all ranks send their vectors to rank r.

    p rounds of p-1 messages to one rank: time p(p-1)(alpha + V beta), O(p) steps where the
    receiver can listen to all at once; traffic p(p-1)V.
    """
    reducer, src = _pairs(ranks)
    table = _copies(ranks).then(rows(reducer, src, reducer, 1, True, 0))
    return Collective("sequential", ranks, 1, table, scratch=1)


def _copies(ranks: int) -> TransferTable:
    """Every rank keeps its vector, slot 0, in the scratch slot 1."""
    return rows(0, np.arange(ranks), np.arange(ranks), 0, False, 1)


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
