"""The ways to reduce that come to mind first. Both move p(p-1)V bytes in all.

Every rank needs its own vector again and again while the sum grows in its place, so it keeps a
copy of it in a scratch slot: V bytes of extra memory. The contributions arrive everywhere in
the order of ranks, so all ranks get the same bits.
"""

from __future__ import annotations

import numpy as np

from shoal.schedules.collectives.collective import Collective
from shoal.schedules.collectives.transfer_table import TransferTable, rows

_DATA = 0
_OWN = 1


def naive_all_reduce(ranks: int) -> Collective:
    """Every rank sends everything to every rank, one message at a time.

    p(p-1) rounds of V bytes: time p(p-1)(alpha + V beta), traffic p(p-1)V.

        round 0   0 -> 1      round 2   1 -> 0      …      the wire is never used by two at once
    """
    src, dst = (column.ravel() for column in np.indices((ranks, ranks)))
    wire = src != dst
    when = np.maximum(np.cumsum(wire) - 1, 0)  # a rank's own contribution rides along for free
    sums = rows(when, src, dst, _OWN, src > 0, _DATA)
    return _with_copy("naive", ranks, sums, one_port=True)


def sequential_all_reduce(ranks: int) -> Collective:
    """One rank after the other reduces: in round r all ranks send their vectors to rank r.

    p rounds of p-1 messages to one rank: time p(p-1)(alpha + V beta), O(p) steps where the
    receiver can listen to all at once; traffic p(p-1)V.
    """
    reducer = np.arange(ranks)[:, None]
    src = np.arange(ranks)[None, :]
    keep = src != reducer
    when = np.broadcast_to(reducer, keep.shape)[keep]
    who = np.broadcast_to(src, keep.shape)[keep]
    return _with_copy("sequential", ranks, rows(when, who, when, _OWN, True, _DATA))


def _with_copy(name: str, ranks: int, sums: TransferTable, one_port: bool = False) -> Collective:
    every_rank = np.arange(ranks)
    copy = rows(0, every_rank, every_rank, _DATA, False, _OWN)
    return Collective(name, ranks, 1, copy.then(sums), one_port=one_port, scratch=1)
