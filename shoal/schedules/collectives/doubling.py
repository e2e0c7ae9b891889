"""Recursive doubling: in round k every rank exchanges with the one at distance 2^k.

round 0   0<->1   2<->3   4<->5   6<->7
round 1   0<->2   1<->3   4<->6   5<->7
round 2   0<->4   1<->5   2<->6   3<->7

Bruck: logarithmic all-gather and all-to-all for any number of ranks.

all-gather, p = 5     round 0   i gets from i+1 its 1 chunk
                      round 1   i gets from i+2 its 2 chunks
                      round 2   i gets from i+4 the 1 chunk that is still missing

Scans, prefix sums: rank r ends with x_0 + … + x_r, or without x_r where the scan is exclusive.

Algorithms for powers of two serve any number of ranks: of p = 2^k + e ranks, the first 2e pair up.
The odd one of a pair sends its data to the even one before the algorithm runs on 2^k ranks, and
receives the result after it:

    p = 6:   1 -> 0   3 -> 2      0 2 4 5 run      0 -> 1   2 -> 3

Every active rank answers for the chunks of its pair, so with p chunks active rank v has a group
of one or two of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shoal.schedules.collectives import Collective
from shoal.schedules.collectives.ring import slow_ring_all_reduce
from shoal.schedules.collectives.transfer_table import EMPTY, Ints, TransferTable, rows


@dataclass(frozen=True)
class Fold:
    """`active[v]` is the rank that plays v; `group[c]` the v that answers for chunk c."""

    ranks: int
    active: Ints
    group: Ints

    @property
    def size(self) -> int:
        return int(self.active.size)

    @property
    def keepers(self) -> NDArray[np.int64]:
        """The even ranks of the pairs; each one's partner is its right neighbour."""
        return np.arange(0, 2 * (self.ranks - self.size), 2)

    def exchange(self, distance: int, block_of_partner: bool, reduce: bool) -> TransferTable:
        """One round: v swaps with v ^ distance a block of `distance` groups.

        Halving sends the block that the partner will answer for, doubling the own one.
        """
        v = np.arange(self.size)
        sent = v ^ distance if block_of_partner else v
        who, chunk = np.nonzero((sent // distance)[:, None] == (self.group // distance)[None, :])
        return rows(0, self.active[who], self.active[who ^ distance], chunk, reduce)


def fold(ranks: int) -> Fold:
    size = 1 << (ranks.bit_length() - 1)
    rank = np.arange(ranks)
    extra = ranks - size
    group = np.where(rank < 2 * extra, rank // 2, rank - extra).astype(np.int32)
    active = np.where(np.arange(size) < extra, 2 * np.arange(size), np.arange(size) + extra)
    return Fold(ranks, active.astype(np.int32), group)


def doubling_all_reduce(ranks: int) -> Collective:
    """Whole vectors are exchanged: log2 p rounds of V bytes, the lowest latency for one port.

    Where p is no power of two, one round of V bytes before and one after.
    """
    folded = fold(ranks)
    keep = folded.keepers
    v = np.arange(folded.size)
    rounds = [rows(0, folded.active, folded.active[v ^ d], 0, True) for d in _steps(folded.size)]
    if keep.size:
        rounds = [rows(0, keep + 1, keep, 0, True), *rounds, rows(0, keep, keep + 1, 0, False)]
    return Collective("doubling", ranks, 1, EMPTY.then(*rounds), one_port=True)


def doubling_all_gather(ranks: int) -> Collective:
    """What a rank has doubles in every round: log2 p rounds; each rank sends (p-1)V/p bytes.

    Where p is no power of two, two more rounds, and some ranks receive V at the end.
    """
    folded = fold(ranks)
    keep = folded.keepers
    rounds = [folded.exchange(distance, False, False) for distance in _steps(folded.size)]
    if keep.size:
        owner, chunk = np.nonzero((keep + 1)[:, None] != np.arange(ranks)[None, :])
        before = rows(0, keep + 1, keep, keep + 1, False)
        rounds = [before, *rounds, rows(0, keep[owner], keep[owner] + 1, chunk, False)]
    table = EMPTY.then(*rounds)
    return Collective("doubling", ranks, ranks, table, "all_gather", one_port=True)


def dissemination_barrier(ranks: int) -> Collective:
    """In round k rank i tells rank i + 2^k which ranks have arrived: ceil(log2 p) rounds, no root.

    round 0   i -> i+1     round 1   i -> i+2     round 2   i -> i+4   (mod p)
    """
    rank = np.arange(ranks)
    table = EMPTY.then(*(rows(0, rank, (rank + d) % ranks, 0, True) for d in _steps(ranks)))
    return Collective("dissemination", ranks, 1, table, "barrier", one_port=True)


def ring_barrier(ranks: int) -> Collective:
    """A token visits all ranks of the ring, and then goes round again: 2(p-1) rounds."""
    return Collective("ring", ranks, 1, slow_ring_all_reduce(ranks).table, "barrier", one_port=True)


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
    """1, 2, 4, … below the number of ranks."""
    return [1 << level for level in range((ranks - 1).bit_length())]


def halving_reduce_scatter(ranks: int) -> Collective:
    """log2 p rounds of V/2, V/4, … bytes: each rank sends (p-1)V/p.

    Where p is no power of two, some ranks send V before and some V/p after.
    """
    keep = fold(ranks).keepers
    after = [rows(0, keep, keep + 1, keep + 1, False)] if keep.size else []
    table = EMPTY.then(*_halving(ranks), *after)
    return Collective("halving", ranks, ranks, table, "reduce_scatter", one_port=True)


def halving_all_reduce(ranks: int) -> Collective:
    """Halving, then doubling: 2 log2 p rounds; each rank sends 2(p-1)V/p bytes.

    Where p is no power of two, one round of V bytes before and one after.
    """
    folded = fold(ranks)
    keep = folded.keepers[:, None]
    doubling = [folded.exchange(distance, False, False) for distance in _steps(folded.size)]
    after = [rows(0, keep, keep + 1, np.arange(ranks), False)] if keep.size else []
    table = EMPTY.then(*_halving(ranks), *doubling, *after)
    return Collective("halving", ranks, ranks, table, one_port=True)


def _halving(ranks: int) -> list[TransferTable]:
    """Pairs fold first, if there are some; then v sends half of what it still answers for."""
    folded = fold(ranks)
    keep = folded.keepers[:, None]
    halves = [folded.exchange(distance, True, True) for distance in reversed(_steps(folded.size))]
    return [rows(0, keep + 1, keep, np.arange(ranks), True), *halves]


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
        rows(0, np.arange(ranks - step), np.arange(step, ranks), 0, True) for step in _steps(ranks)
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
