"""Barriers: no rank leaves before all have arrived."""

from __future__ import annotations

import numpy as np

from shoal.schedules.collectives.collective import Collective
from shoal.schedules.collectives.ring import slow_ring_all_reduce
from shoal.schedules.collectives.transfer_table import EMPTY, rows


def dissemination_barrier(ranks: int) -> Collective:
    """In round k rank i tells rank i + 2^k which ranks have arrived: ceil(log2 p) rounds, no root.

    round 0   i -> i+1     round 1   i -> i+2     round 2   i -> i+4   (mod p)
    """
    rank = np.arange(ranks)
    rounds = [
        rows(0, rank, (rank + (1 << level)) % ranks, 0, True)
        for level in range((ranks - 1).bit_length())
    ]
    table = EMPTY.then(*rounds)
    return Collective("dissemination", ranks, 1, table, "barrier", one_port=True)


def ring_barrier(ranks: int) -> Collective:
    """A token visits all ranks of the ring, and then goes round again: 2(p-1) rounds."""
    return Collective("ring", ranks, 1, slow_ring_all_reduce(ranks).table, "barrier", one_port=True)
