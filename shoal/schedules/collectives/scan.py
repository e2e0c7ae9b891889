"""Prefix sums: rank r ends with x_0 + … + x_r, or without x_r where the scan is exclusive."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shoal.schedules.collectives.collective import Collective
from shoal.schedules.collectives.transfer_table import EMPTY, rows


def chain_scan(ranks: int) -> Collective:
    """The sum walks along the ranks: p-1 rounds of V bytes, p-1 messages in all.

    0 -> 1 -> 2 -> 3
    """
    step = np.arange(ranks - 1)
    table = rows(step, step, step + 1, 0, True)
    return Collective("chain", ranks, 1, table, "scan", one_port=True)


def hillis_steele_scan(ranks: int) -> Collective:
    """In round k rank i sends its sum to rank i + 2^k: ceil(log2 p) rounds of V bytes.

    round 0   0->1  1->2  2->3  3->4        every rank has the sum of 2 neighbours
    round 1   0->2  1->3  2->4              … of 4
    round 2   0->4                          … of 8, or all before it
    """
    rounds = [
        rows(0, np.arange(ranks - step), np.arange(step, ranks), 0, True)
        for step in (1 << level for level in range((ranks - 1).bit_length()))
    ]
    table = EMPTY.then(*rounds)
    return Collective("hillis_steele", ranks, 1, table, "scan", one_port=True)


def chain_exclusive_scan(ranks: int) -> Collective:
    """Every rank passes its vector one to the right; then a chain over ranks 1 to p-1.

    p-1 rounds of V bytes.
    """
    return _exclusive(chain_scan(max(ranks - 1, 1)), ranks)


def hillis_steele_exclusive_scan(ranks: int) -> Collective:
    """Every rank passes its vector one to the right; then Hillis-Steele over ranks 1 to p-1.

    1 + ceil(log2(p-1)) rounds of V bytes.
    """
    return _exclusive(hillis_steele_scan(max(ranks - 1, 1)), ranks)


def _exclusive(inclusive: Collective, ranks: int) -> Collective:
    shift = rows(0, np.arange(ranks - 1), np.arange(1, ranks), 0, False)
    one_up = inclusive.table.relabelled(np.arange(ranks) + 1, [0])
    return replace(inclusive, ranks=ranks, kind="exclusive_scan", rounds=shift.then(one_up))
