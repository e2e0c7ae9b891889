"""What a schedule costs, counted from its transfers alone.

The model: a message of n bytes takes alpha + n*beta. Every rank has one port out and one port
in, which work at the same time, each with one message at a time. So in a round a rank is busy
for the longer of its sends and its receives, plus gamma for every byte that it reduces. A round
ends when its slowest rank has finished, and the next begins then:

    time = sum over rounds of max over ranks of ( max(sends, receives) + gamma * reduced )

Copies within a rank are free.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shoal.schedules.collectives import Collective, catalog
from shoal.schedules.collectives.catalog import algorithms, build
from shoal.schedules.collectives.transfer_table import Ints

Floats = NDArray[np.float64]
Longs = NDArray[np.int64]
_DENSE = 1 << 23  # up to so many (round, rank) cells are held as a full matrix


@dataclass(frozen=True)
class Link:
    """A port: seconds per message, per byte sent, per byte reduced. 10 GB/s by default."""

    alpha_s: float = 10e-6
    beta_s_per_byte: float = 1e-10
    gamma_s_per_byte: float = 0.0


@dataclass(frozen=True)
class ScheduleTraffic:
    """Messages and chunks by cell; a cell is one rank in one round, sorted by round."""

    rounds: int
    cell_starts: Longs  # the first cell of every round
    cell_ranks: Longs
    sent_messages: Floats
    received_messages: Floats
    sent_chunks: Floats
    received_chunks: Floats
    reduced_chunks: Floats
    ranks: int

    def time_s(self, chunk_bytes: float, link: Link) -> float:
        per_chunk = chunk_bytes * link.beta_s_per_byte
        sends = self.sent_messages * link.alpha_s + self.sent_chunks * per_chunk
        receives = self.received_messages * link.alpha_s + self.received_chunks * per_chunk
        busy = np.maximum(sends, receives)
        busy += self.reduced_chunks * (chunk_bytes * link.gamma_s_per_byte)
        return float(np.maximum.reduceat(busy, self.cell_starts).sum()) if busy.size else 0.0

    @property
    def idle_share(self) -> float:
        """Of the ports out and in of all ranks, in rounds as long as their busiest port."""
        larger = np.maximum(self.sent_chunks, self.received_chunks)
        lasts = np.maximum.reduceat(larger, self.cell_starts).sum() if larger.size else 0.0
        return float(1 - self.sent_chunks.sum() / (self.ranks * lasts)) if lasts else 0.0

    def by_rank(self, cells: Floats) -> Floats:
        return np.bincount(self.cell_ranks, cells, minlength=self.ranks).astype(np.float64)


def traffic(collective: Collective) -> ScheduleTraffic:
    """Count the messages and chunks of every rank in every round."""
    table = collective.table
    ranks = collective.ranks
    wire = table.src != table.dst
    when, src, dst = (column[wire] for column in (table.round, table.src, table.dst))
    key = (when.astype(np.int64) * ranks + src) * ranks + dst
    first = np.flatnonzero(np.diff(key, prepend=-1))  # of a message; most lie in one piece
    if not np.all(np.diff(key[first]) > 0):
        first = first[np.unique(key[first], return_index=True)[1]]
    reduced = table.reduce[wire]
    cells, sender, receiver = _cells(when.astype(np.int64) * ranks, src, dst, len(table) * ranks)

    def count(cells_of_rows: Longs) -> Floats:
        return np.bincount(cells_of_rows, minlength=cells.size).astype(np.float64)

    return ScheduleTraffic(
        int(np.count_nonzero(np.diff(when, prepend=-1))),
        np.flatnonzero(np.diff(cells // ranks, prepend=-1)),
        cells % ranks,
        count(sender[first]),
        count(receiver[first]),
        count(sender),
        count(receiver),
        count(receiver[reduced]),
        ranks,
    )


def memory_chunks(collective: Collective, counted: ScheduleTraffic) -> float:
    """Room beyond input and output: scratch, what arrives to be added, what is passed on."""
    kind = collective.pattern
    ranks = collective.ranks
    table = collective.table
    held = collective.scratch + float(counted.reduced_chunks.max(initial=0.0))
    if kind.reduces or kind.units(ranks) == 1 or kind.name == "all_gather":
        return held
    unit = table.chunk // collective.chunks_per_unit
    root = collective.root
    cell = table.round.astype(np.int64) * ranks
    received = (cell + table.dst)[~kind.ends(table.dst, unit, ranks, root)]
    sent = (cell + table.src)[~kind.begins(table.src, unit, ranks, root)]
    size = len(table) * ranks
    change = np.bincount(received, minlength=size) - np.bincount(sent, minlength=size)
    return held + float(np.cumsum(change.reshape(-1, ranks), axis=0).max(initial=0))


@lru_cache(maxsize=512)
def cheapest(kind: str, ranks: int, num_bytes: int, link: Link) -> str:
    """The algorithm with the lowest time; on a tie the one that is listed first."""
    times = {
        entry.name: predicted_s(kind, entry.name, ranks, num_bytes, link)
        for entry in catalog.CATALOG[kind].values()
        if not entry.for_show
    }
    return min(times, key=lambda name: times[name])


def predicted_s(kind: str, name: str, ranks: int, num_bytes: int, link: Link) -> float:
    chunk, counted = _counted(kind, name, ranks)
    return counted.time_s(num_bytes * chunk, link)


@lru_cache(maxsize=64)
def _counted(kind: str, name: str, ranks: int) -> tuple[float, ScheduleTraffic]:
    collective = catalog.build(kind, name, ranks)
    return collective.chunk_bytes(1.0), traffic(collective)


def _cells(when: Longs, src: Ints, dst: Ints, size: int) -> tuple[Longs, Longs, Longs]:
    """The cells to count in, and every row's two: all cells, or of too many those in use."""
    if size <= _DENSE:
        return np.arange(size), when + src, when + dst
    keys = np.stack([when + src, when + dst], axis=1).ravel()  # nearly sorted, by round
    order = np.argsort(keys, kind="stable")
    fresh = np.diff(keys[order], prepend=-1) > 0
    cell = np.empty_like(order)
    cell[order] = np.cumsum(fresh) - 1
    return keys[order][fresh], cell[0::2], cell[1::2]


@dataclass(frozen=True)
class Price:
    """What one call costs. "Largest" is the rank that has the most, "total" all ranks together.

    `busiest_bytes` is what the busiest port carries: per round the larger of what it sends and
    what it receives. `ratio` is that against the least that any algorithm of the kind needs,
    2(p-1)/p V for an all-reduce; None where the bound is zero. `extra_memory_bytes` is room
    beyond input and output on the worst rank; `redundant_bytes` is what all ranks together hold
    when the collective is done, in place, beyond one copy of the result. `idle_share` is how much
    of the time of all ports nothing goes through them, where a message costs nothing but its bytes.
    """

    kind: str
    algorithm: str
    ranks: int
    num_bytes: int
    rounds: int
    time_s: float
    sent_largest_bytes: float
    sent_total_bytes: float
    received_largest_bytes: float
    received_total_bytes: float
    busiest_bytes: float
    bound_bytes: float
    ratio: float | None
    extra_memory_bytes: float
    redundant_bytes: float
    idle_share: float


def price(collective: Collective, num_bytes: int, link: Link) -> Price:
    """Price one call on vectors of `num_bytes`.

    `num_bytes` is V, the whole vector of one rank: for gather, scatter, all_gather and
    reduce_scatter all pieces together, for all_to_all the p pieces that a rank sends.
    """
    counted = traffic(collective)
    chunk = collective.chunk_bytes(num_bytes)
    sent = counted.by_rank(counted.sent_chunks)
    received = counted.by_rank(counted.received_chunks)
    bound = collective.pattern.bound(collective.ranks) * num_bytes
    larger = np.maximum(counted.sent_chunks, counted.received_chunks)
    busiest = float(counted.by_rank(larger).max()) * chunk
    return Price(
        kind=collective.kind,
        algorithm=collective.name,
        ranks=collective.ranks,
        num_bytes=num_bytes,
        rounds=counted.rounds,
        time_s=counted.time_s(chunk, link),
        sent_largest_bytes=float(sent.max()) * chunk,
        sent_total_bytes=float(sent.sum()) * chunk,
        received_largest_bytes=float(received.max()) * chunk,
        received_total_bytes=float(received.sum()) * chunk,
        busiest_bytes=busiest,
        bound_bytes=bound,
        ratio=busiest / bound if bound else None,
        extra_memory_bytes=memory_chunks(collective, counted) * chunk,
        redundant_bytes=float(collective.pattern.redundant(collective.ranks) * num_bytes),
        idle_share=counted.idle_share,
    )


def price_all(kind: str, ranks: int, num_bytes: int, link: Link) -> list[Price]:
    """Every algorithm of a kind, the fastest first."""
    prices = [price(build(kind, name, ranks), num_bytes, link) for name in algorithms(kind)]
    return sorted(prices, key=lambda one: one.time_s)
