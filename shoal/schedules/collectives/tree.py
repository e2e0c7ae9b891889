"""Binomial trees: the number of ranks that take part doubles in every round.

round 0   0 -> 1
round 1   0 -> 2   1 -> 3
round 2   0 -> 4   1 -> 5   2 -> 6   3 -> 7

Two binary trees over the same ranks, each for one half of the data.

In a single tree half of the ranks are leaves that never pass anything on. Here the leaves of
one tree are inner nodes of the other, so all ports have work:

    tree 1, p = 8    0                     tree 2 is its mirror image    7
                     4                                                   3
                  2     6                                             5     1
                 1 3   5 7                                           6 4   2 0
"""

from __future__ import annotations

import numpy as np

from shoal.schedules.collectives import Collective
from shoal.schedules.collectives.ring import ring_all_gather, ring_reduce_scatter
from shoal.schedules.collectives.transfer_table import EMPTY, Transfer, TransferTable, rows


def tree_broadcast(ranks: int) -> Collective:
    """Every rank that has it passes it on: ceil(log2 p) rounds of V bytes."""
    return Collective("tree", ranks, 1, _spread(ranks), "broadcast", one_port=True)


def tree_reduce(ranks: int) -> Collective:
    """The broadcast backwards, adding: ceil(log2 p) rounds of V bytes."""
    table = _spread(ranks).reversed(reduce=True)
    return Collective("tree", ranks, 1, table, "reduce", one_port=True)


def tree_all_reduce(ranks: int) -> Collective:
    """Reduce to rank 0, then broadcast: 2 ceil(log2 p) rounds of V bytes."""
    table = tree_reduce(ranks).table.then(tree_broadcast(ranks).table)
    return Collective("tree", ranks, 1, table, one_port=True)


def tree_scatter(ranks: int) -> Collective:
    """Halves of what is left go down the tree: ceil(log2 p) rounds; the root sends (p-1)V/p.

    round 0   0 -[4 5 6 7]-> 4
    round 1   0 -[2 3]-> 2      4 -[6 7]-> 6
    round 2   0 -[1]-> 1   2 -[3]-> 3   4 -[5]-> 5   6 -[7]-> 7
    """
    return Collective("tree", ranks, ranks, _halving_tree(ranks), "scatter", one_port=True)


def tree_gather(ranks: int) -> Collective:
    """The scatter backwards: ceil(log2 p) rounds; the root receives (p-1)V/p bytes."""
    table = _halving_tree(ranks).reversed(reduce=False)
    return Collective("tree", ranks, ranks, table, "gather", one_port=True)


def scatter_gather_broadcast(ranks: int) -> Collective:
    """Scatter down the tree, then all-gather round the ring: for long messages.

    ceil(log2 p) + p-1 rounds; no rank sends or receives more than about 2V.
    """
    table = _halving_tree(ranks).then(ring_all_gather(ranks).table)
    return Collective("scatter_gather", ranks, ranks, table, "broadcast", one_port=True)


def scatter_gather_reduce(ranks: int) -> Collective:
    """Reduce-scatter round the ring, then gather up the tree: for long messages.

    p-1 + ceil(log2 p) rounds; no rank sends or receives more than about 2V.
    """
    table = ring_reduce_scatter(ranks).table.then(tree_gather(ranks).table)
    return Collective("scatter_gather", ranks, ranks, table, "reduce", one_port=True)


def _spread(ranks: int) -> TransferTable:
    dst = np.arange(1, ranks)
    level = np.floor(np.log2(dst)).astype(np.int32) if ranks > 1 else dst
    return rows(level, dst - (1 << level), dst, 0, False)


def _halving_tree(ranks: int) -> TransferTable:
    depth = (ranks - 1).bit_length()
    levels = []
    for half in (1 << level for level in reversed(range(depth))):
        child, chunk = np.nonzero(
            (np.arange(ranks)[:, None] % (2 * half) == half)
            & (np.arange(ranks)[:, None] // half == np.arange(ranks) // half)
        )
        levels.append(rows(0, child - half, child, chunk, False))
    return EMPTY.then(*levels)


def double_tree_all_reduce(ranks: int, segments: int = 4) -> Collective:
    """Up one tree and down again, in `segments` per half that follow each other.

    About 4 log2 p + 4 k rounds of V/2k bytes for k segments; no rank sends more than 2V.
    Rounds are assigned greedily: every rank sends one and receives one chunk at a time, upward
    before downward and the foremost segment first.
    """
    chunks = 2 * segments
    trees = [_parents(ranks), _mirrored(ranks)]
    flows = [_Flow(chunk, trees[chunk // segments]) for chunk in range(chunks)]
    flows.sort(key=lambda flow: flow.chunk % segments)
    rounds: list[list[Transfer]] = []
    while any(flow.ready for flow in flows):
        dealt: list[tuple[_Flow, Transfer]] = []
        sending: set[int] = set()
        receiving: set[int] = set()
        for upward in (True, False):
            for flow in flows:
                for t in flow.ready:
                    if t.reduce is upward and t.src not in sending and t.dst not in receiving:
                        sending.add(t.src)
                        receiving.add(t.dst)
                        dealt.append((flow, t))
        for flow, t in dealt:
            flow.arrive(t)
        rounds.append([t for _, t in dealt])
    return Collective("double_tree", ranks, chunks, rounds, one_port=True)


class _Flow:
    """One chunk on its way up and down its tree; `ready` are the transfers that may go now."""

    def __init__(self, chunk: int, parents: list[int | None]):
        self.chunk = chunk
        self.parents = parents
        self.ready: list[Transfer] = []
        self.children: list[list[int]] = [[] for _ in parents]
        for rank, parent in enumerate(parents):
            if parent is not None:
                self.children[parent].append(rank)
        self.awaited = [len(children) for children in self.children]
        for rank, count in enumerate(self.awaited):
            if not count:
                self._complete(rank)

    def arrive(self, transfer: Transfer) -> None:
        self.ready.remove(transfer)
        if not transfer.reduce:
            self._spread(transfer.dst)
            return
        self.awaited[transfer.dst] -= 1
        if not self.awaited[transfer.dst]:
            self._complete(transfer.dst)

    def _complete(self, rank: int) -> None:
        parent = self.parents[rank]
        if parent is None:
            self._spread(rank)
        else:
            self.ready.append(Transfer(rank, parent, self.chunk, True))

    def _spread(self, rank: int) -> None:
        self.ready += [Transfer(rank, child, self.chunk, False) for child in self.children[rank]]


def _parents(ranks: int) -> list[int | None]:
    """The parent of every rank: clear its lowest bit and set the next, where that exists."""
    parents: list[int | None] = [None]
    for rank in range(1, ranks):
        bit = rank & -rank
        up = (rank ^ bit) | (bit << 1)
        parents.append(up if up < ranks else rank ^ bit)
    return parents


def _mirrored(ranks: int) -> list[int | None]:
    """The tree whose leaves are the first one's inner nodes: mirrored, or turned for odd p."""
    first = _parents(ranks)
    if ranks % 2 == 0:
        return [None if up is None else ranks - 1 - up for up in reversed(first)]
    turned = [None if up is None else (up + 1) % ranks for up in first]
    return turned[-1:] + turned[:-1]
