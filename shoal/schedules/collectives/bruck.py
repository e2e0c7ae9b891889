"""Bruck: logarithmic all-gather and all-to-all for any number of ranks.

all-gather, p = 5     round 0   i gets from i+1 its 1 chunk
                      round 1   i gets from i+2 its 2 chunks
                      round 2   i gets from i+4 the 1 chunk that is still missing
"""

from __future__ import annotations

import numpy as np

from shoal.schedules.collectives.collective import Collective
from shoal.schedules.collectives.transfer_table import EMPTY, rows


def bruck_all_gather(ranks: int) -> Collective:
    """What a rank has doubles in every round: ceil(log2 p) rounds; (p-1)V/p bytes per rank."""
    src = np.arange(ranks)[:, None]
    rounds = [
        rows(0, src, (src - step) % ranks, (src + np.arange(count)) % ranks, False)
        for step in _steps(ranks)
        for count in [min(step, ranks - step)]
    ]
    table = EMPTY.then(*rounds)
    return Collective("bruck", ranks, ranks, table, "all_gather", one_port=True)


def bruck_all_to_all(ranks: int) -> Collective:
    """A piece with d = (destination - source) mod p travels 2^k in round k if d has bit k.

    ceil(log2 p) rounds of about V/2 bytes, against p-1 rounds of V/p for the direct way: fewer
    messages, more bytes, and room for the pieces on their way.
    """
    rounds = []
    for step in _steps(ranks):
        offset = np.arange(ranks)
        offset = offset[offset & step > 0]
        holder = np.arange(ranks)[:, None]
        source = (holder - offset % step) % ranks  # rows of one message lie side by side
        piece = source * ranks + (source + offset) % ranks
        rounds.append(rows(0, holder, (holder + step) % ranks, piece, False))
    table = EMPTY.then(*rounds)
    return Collective("bruck", ranks, ranks * ranks, table, "all_to_all", one_port=True)


def _steps(ranks: int) -> list[int]:
    return [1 << level for level in range((ranks - 1).bit_length())]
