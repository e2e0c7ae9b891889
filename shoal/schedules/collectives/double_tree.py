"""Two binary trees over the same ranks, each for one half of the data.

In a single tree half of the ranks are leaves that never pass anything on. Here the leaves of
one tree are inner nodes of the other, so all ports have work:

    tree 1, p = 8    0                     tree 2 is its mirror image    7
                     4                                                   3
                  2     6                                             5     1
                 1 3   5 7                                           6 4   2 0
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from shoal.schedules.collectives.collective import Collective
from shoal.schedules.collectives.transfer_table import Transfer

Edge = tuple[int, int, int, bool]  # (chunk, source, destination, reduce)


def double_tree_all_reduce(ranks: int, segments: int = 4) -> Collective:
    """Up one tree and down again, in `segments` per half that follow each other.

    About 4 log2 p + 4 k rounds of V/2k bytes for k segments; no rank sends more than 2V.
    Rounds are assigned greedily: every rank sends one and receives one chunk at a time, upward
    before downward and the foremost segment first.
    """
    chunks = 2 * segments
    trees = [_parents(ranks), _mirrored(ranks)]
    flows = [_Flow(chunk, trees[chunk // segments]) for chunk in range(chunks)]
    order = sorted(flows, key=lambda flow: flow.chunk % segments)
    rounds: list[tuple[Transfer, ...]] = []
    while any(flow.ready for flow in order):
        rounds.append(_deal(order))
    return Collective("double_tree", ranks, chunks, rounds, one_port=True)


@dataclass
class _Flow:
    """One chunk on its way up and down its tree; `ready` are the transfers that may go now."""

    chunk: int
    parents: list[int | None]
    ready: list[Edge] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.children: list[list[int]] = [[] for _ in self.parents]
        for rank, parent in enumerate(self.parents):
            if parent is not None:
                self.children[parent].append(rank)
        self.awaited = [len(children) for children in self.children]
        for rank, count in enumerate(self.awaited):
            if count == 0:
                self._complete(rank)

    def arrive(self, edge: Edge) -> None:
        _, _, rank, reduce = edge
        if not reduce:
            self._spread(rank)
            return
        self.awaited[rank] -= 1
        if self.awaited[rank] == 0:
            self._complete(rank)

    def _complete(self, rank: int) -> None:
        parent = self.parents[rank]
        if parent is None:
            self._spread(rank)
        else:
            self.ready.append((self.chunk, rank, parent, True))

    def _spread(self, rank: int) -> None:
        self.ready += [(self.chunk, rank, child, False) for child in self.children[rank]]


def _deal(flows: list[_Flow]) -> tuple[Transfer, ...]:
    """One round: as many of the ready transfers as the ports allow, those upward first."""
    sending: set[int] = set()
    receiving: set[int] = set()
    dealt: list[tuple[_Flow, Edge]] = []
    for flow, edge in _by_urgency(flows):
        _, src, dst, _ = edge
        if src not in sending and dst not in receiving:
            sending.add(src)
            receiving.add(dst)
            dealt.append((flow, edge))
    for flow, edge in dealt:
        flow.ready.remove(edge)
        flow.arrive(edge)
    return tuple(Transfer(src, dst, chunk, reduce) for _, (chunk, src, dst, reduce) in dealt)


def _by_urgency(flows: list[_Flow]) -> Iterator[tuple[_Flow, Edge]]:
    for upward in (True, False):
        for flow in flows:
            yield from ((flow, edge) for edge in flow.ready if edge[3] is upward)


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
