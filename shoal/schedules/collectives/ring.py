"""Rings: every rank receives from its left neighbour only, and sends to its right one only.

0 -> 1 -> 2 -> 3 -+
^                 |     all links busy in every round, each with 1/p of the data
+-----------------+
"""

from __future__ import annotations

import numpy as np

from shoal.schedules.collectives import Collective
from shoal.schedules.collectives.transfer_table import EMPTY, TransferTable, rows


def ring_reduce_scatter(ranks: int) -> Collective:
    """Chunk r travels once round the ring, growing, and ends at rank r.

    p-1 rounds of V/p bytes: each rank sends and receives (p-1)V/p.

        round 0   0 -c3-> 1 -c0-> 2 -c1-> 3 -c2-> 0
        round 1   0 -c2-> 1 -c3-> 2 -c0-> 3 -c1-> 0     what has just arrived goes on
        round 2   0 -c1-> 1 -c2-> 2 -c3-> 3 -c0-> 0     so chunk 1 is complete at rank 1
    """
    table = _round_the_ring(ranks, first=-1, reduce=True)
    return Collective("ring", ranks, ranks, table, "reduce_scatter", one_port=True)


def ring_all_gather(ranks: int) -> Collective:
    """Every rank's piece travels once round the ring: p-1 rounds of V/p bytes per rank."""
    table = _round_the_ring(ranks, first=0, reduce=False)
    return Collective("ring", ranks, ranks, table, "all_gather", one_port=True)


def ring_all_reduce(ranks: int) -> Collective:
    """Reduce-scatter, then all-gather: 2(p-1) rounds; each rank sends 2(p-1)V/p bytes.

    That is the least any all-reduce can send, and it hardly depends on p.
    """
    table = ring_reduce_scatter(ranks).table.then(ring_all_gather(ranks).table)
    return Collective("ring", ranks, ranks, table, one_port=True)


def slow_ring_all_reduce(ranks: int) -> Collective:
    """The ring without chunks, one link at a time: the sum walks round, then the result does.

    2(p-1) rounds of V bytes, and in each of them p-1 of the p links are idle.

        0 -> 1 -> 2 -> 3   the sum grows           3 -> 0 -> 1 -> 2   the result is passed on
    """
    step = np.arange(ranks - 1)
    grow = rows(step, step, step + 1, 0, True)
    spread = rows(step, (step - 1) % ranks, step, 0, False)
    return Collective("slow_ring", ranks, 1, grow.then(spread), one_port=True)


def whole_ring_all_reduce(ranks: int) -> Collective:
    """The ring without chunks, all links at once: every vector visits every rank.

    p-1 rounds of V bytes: each rank sends (p-1)V. A visiting vector is kept in a scratch slot
    (V bytes) and added while it travels on. Ranks add in different orders, so the last bits may
    differ between them.
    """
    data = 0
    visitor = 1
    rank = np.arange(ranks)
    right = (np.arange(ranks) + 1) % ranks
    step = np.arange(1, ranks)[:, None]
    first = rows(0, rank, right, data, False, visitor, num_rounds=int(ranks > 1))
    if ranks == 1:
        return Collective("whole_ring", 1, 1, EMPTY, scratch=1)
    travel = rows(step[:-1], rank, right, visitor, False, num_rounds=ranks)
    add = rows(step, rank, rank, visitor, True, data)
    table = first.beside(travel, add)
    return Collective("whole_ring", ranks, 1, table, one_port=True, scratch=1, same_bits=ranks < 3)


def ring_broadcast(ranks: int, chunks: int | None = None) -> Collective:
    """A chain from the root, chunk after chunk: p-2+k rounds of V/k bytes, k = p by default."""
    count = chunks or ranks
    table = _chain(ranks, count)
    return Collective("ring", ranks, count, table, "broadcast", one_port=True)


def ring_reduce(ranks: int, chunks: int | None = None) -> Collective:
    """A chain to the root, chunk after chunk: p-2+k rounds of V/k bytes, k = p by default."""
    count = chunks or ranks
    table = _chain(ranks, count).reversed(reduce=True)
    return Collective("ring", ranks, count, table, "reduce", one_port=True)


def _chain(ranks: int, chunks: int) -> TransferTable:
    chunk = np.arange(chunks)[:, None]
    src = np.arange(ranks - 1)
    return rows(chunk + src, src, src + 1, chunk, False)


def _round_the_ring(ranks: int, first: int, reduce: bool) -> TransferTable:
    """In round k rank i sends chunk i+first-k to its right neighbour."""
    step = np.arange(ranks - 1)[:, None]
    src = np.arange(ranks)
    return rows(step, src, (src + 1) % ranks, (src + first - step) % ranks, reduce)
