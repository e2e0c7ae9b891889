"""Recursive doubling: in round k every rank exchanges with the one at distance 2^k.

round 0   0<->1   2<->3   4<->5   6<->7
round 1   0<->2   1<->3   4<->6   5<->7
round 2   0<->4   1<->5   2<->6   3<->7
"""

from __future__ import annotations

import numpy as np

from shoal.schedules.collectives.collective import Collective
from shoal.schedules.collectives.powers_of_two import fold
from shoal.schedules.collectives.transfer_table import EMPTY, rows


def doubling_all_reduce(ranks: int) -> Collective:
    """Whole vectors are exchanged: log2 p rounds of V bytes, the lowest latency for one port.

    Where p is no power of two, one round of V bytes before and one after (`powers_of_two.py`).
    """
    folded = fold(ranks)
    keep = folded.keepers
    v = np.arange(folded.size)
    rounds = [
        rows(0, folded.active, folded.active[v ^ distance], 0, True)
        for distance in _distances(folded.size)
    ]
    if keep.size:
        rounds = [rows(0, keep + 1, keep, 0, True), *rounds, rows(0, keep, keep + 1, 0, False)]
    return Collective("doubling", ranks, 1, EMPTY.then(*rounds), one_port=True)


def doubling_all_gather(ranks: int) -> Collective:
    """What a rank has doubles in every round: log2 p rounds; each rank sends (p-1)V/p bytes.

    Where p is no power of two, two more rounds, and some ranks receive V at the end.
    """
    folded = fold(ranks)
    keep = folded.keepers
    rounds = [folded.exchange(distance, False, False) for distance in _distances(folded.size)]
    if keep.size:
        owner, chunk = np.nonzero((keep + 1)[:, None] != np.arange(ranks)[None, :])
        before = rows(0, keep + 1, keep, keep + 1, False)
        rounds = [before, *rounds, rows(0, keep[owner], keep[owner] + 1, chunk, False)]
    table = EMPTY.then(*rounds)
    return Collective("doubling", ranks, ranks, table, "all_gather", one_port=True)


def _distances(size: int) -> list[int]:
    return [1 << level for level in range(size.bit_length() - 1)]
