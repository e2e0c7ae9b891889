"""Recursive halving and doubling: the bytes of the ring in the rounds of a tree.

Halving: in every round a rank gives away one half of what it answers for, and adds what it
receives to the other half. Doubling is the way back.

    p = 4, chunks that rank 0 sends:   halving  [2 3] -> 2   [1] -> 1
                                       doubling [0] -> 1     [0 1] -> 2
"""

from __future__ import annotations

import numpy as np

from shoal.schedules.collectives.collective import Collective
from shoal.schedules.collectives.powers_of_two import Fold, fold
from shoal.schedules.collectives.transfer_table import TransferTable, rows


def halving_reduce_scatter(ranks: int) -> Collective:
    """log2 p rounds of V/2, V/4, … bytes: each rank sends (p-1)V/p.

    Where p is no power of two, some ranks send V before and some V/p after (`powers_of_two.py`).
    """
    folded = fold(ranks)
    keep = folded.keepers
    parts = [_fold_in(folded, ranks), *_halving(folded)]
    if keep.size:
        parts.append(rows(0, keep, keep + 1, keep + 1, False))
    table = parts[0].then(*parts[1:])
    return Collective("halving", ranks, ranks, table, "reduce_scatter", one_port=True)


def halving_all_reduce(ranks: int) -> Collective:
    """Halving, then doubling: 2 log2 p rounds; each rank sends 2(p-1)V/p bytes.

    Where p is no power of two, one round of V bytes before and one after (`powers_of_two.py`).
    """
    folded = fold(ranks)
    halving = _halving(folded)
    keep = folded.keepers
    doubling = [folded.exchange(d, False, False) for d in reversed(_distances(folded.size))]
    parts = [_fold_in(folded, ranks), *halving, *doubling]
    if keep.size:
        parts.append(rows(0, keep[:, None], keep[:, None] + 1, np.arange(ranks), False))
    table = parts[0].then(*parts[1:])
    return Collective("halving", ranks, ranks, table, one_port=True)


def _halving(folded: Fold) -> list[TransferTable]:
    return [folded.exchange(distance, True, True) for distance in _distances(folded.size)]


def _fold_in(folded: Fold, ranks: int) -> TransferTable:
    keep = folded.keepers[:, None]
    return rows(0, keep + 1, keep, np.arange(ranks), True)


def _distances(size: int) -> list[int]:
    return [1 << level for level in reversed(range(size.bit_length() - 1))]
