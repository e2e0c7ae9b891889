"""A collective on a topology: every message is a flow that shares links with the others.

Dependencies are those of the runtime: a rank begins its next round when it has sent and received
what this round asks of it, and has reduced what it received. With `lockstep` a round begins when
the one before has ended on all ranks, as the closed form of `plan.price` has it; equal rounds are
then simulated once, so that a ring over 1,024 ranks is as cheap as one round of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from shoal.plan.simulator.flows import Floats, Longs
from shoal.plan.simulator.messages import MessageNetwork, Routes, Wires
from shoal.schedules.collectives.collective import Collective


@dataclass(frozen=True)
class RankMessage:
    """One message of a simulated collective."""

    round: int
    src: int
    dst: int
    num_bytes: float
    start_s: float
    end_s: float


@dataclass(frozen=True)
class CollectiveRun:
    """What a simulated collective took, and what its links carried."""

    seconds: float
    rank_end_s: tuple[float, ...]
    link_bytes: Floats = field(repr=False)
    messages: tuple[RankMessage, ...] = ()  # empty in lockstep

    def busiest(self, routes: Routes) -> int:
        """The link that would take longest for what it carried, alone."""
        return int(np.argmax(self.link_bytes / routes.capacities))


@dataclass(frozen=True)
class MessageTable:
    """The messages of a schedule, sorted by round: transfers of one pair travel as one."""

    ranks: int
    num_rounds: int
    round: Longs
    src: Longs
    dst: Longs
    chunks: Floats
    reductions: Longs  # one number for each chunk that is reduced: round * ranks + rank, sorted

    @cached_property
    def _starts(self) -> list[int]:
        starts: list[int] = np.searchsorted(self.round, np.arange(self.num_rounds + 1)).tolist()
        return starts

    def of_round(self, number: int) -> slice:
        return slice(self._starts[number], self._starts[number + 1])

    def reduced(self, number: int) -> Floats:
        """Chunks that each rank reduces in a round."""
        cells = np.array([number, number + 1]) * self.ranks
        first, last = np.searchsorted(self.reductions, cells)
        ranks = self.reductions[first:last] - cells[0]
        return np.bincount(ranks, minlength=self.ranks).astype(np.float64)

    def all_reduced(self) -> Floats:
        """The same of all rounds, of shape rounds x ranks."""
        counted = np.bincount(self.reductions, minlength=max(1, self.num_rounds * self.ranks))
        return counted.astype(np.float64).reshape(-1, self.ranks)


def message_table(collective: Collective) -> MessageTable:
    table = collective.table
    ranks = collective.ranks
    wire = table.src != table.dst
    when, src, dst = (c[wire].astype(np.int64) for c in (table.round, table.src, table.dst))
    key, chunks = np.unique((when * ranks + src) * ranks + dst, return_counts=True)
    cells = (when * ranks + dst)[table.reduce[wire]]
    return MessageTable(
        ranks,
        table.num_rounds,
        key // (ranks * ranks),
        key // ranks % ranks,
        key % ranks,
        chunks.astype(np.float64),
        np.sort(cells),
    )


def simulate_collective(
    collective: Collective,
    num_bytes: float,
    wires: Wires | Routes,
    gamma_s_per_byte: float = 0.0,
    lockstep: bool = False,
    start_s: Sequence[float] | None = None,
) -> CollectiveRun:
    """Simulate one call on vectors of `num_bytes`; `start_s` is when each rank calls it."""
    routes = wires if isinstance(wires, Routes) else Routes(wires)
    table = message_table(collective)
    chunk = collective.chunk_bytes(num_bytes)
    if lockstep:
        begin_s = max(start_s, default=0.0) if start_s is not None else 0.0
        return _in_lockstep(table, chunk, routes, chunk * gamma_s_per_byte, begin_s)
    starts_s = [0.0] * collective.ranks if start_s is None else list(start_s)
    return _ByRank(table, chunk, routes, chunk * gamma_s_per_byte, starts_s).run()


def _in_lockstep(
    table: MessageTable, chunk: float, routes: Routes, per_chunk_s: float, begin_s: float
) -> CollectiveRun:
    known: dict[bytes, tuple[float, Floats]] = {}
    now_s = begin_s
    carried = np.zeros(routes.capacities.size)
    for number in range(table.num_rounds):
        rows = table.of_round(number)
        columns = (table.src[rows], table.dst[rows], table.chunks[rows])
        reduced = table.reduced(number)
        key = b"".join(c.tobytes() for c in (*columns, reduced))
        if key not in known:
            known[key] = _one_round(*columns, reduced * per_chunk_s, chunk, routes)
        took_s, moved = known[key]
        now_s += took_s
        carried += moved
    return CollectiveRun(now_s, (now_s,) * table.ranks, carried)


def _one_round(
    src: Longs, dst: Longs, chunks: Floats, reduce_s: Floats, chunk: float, routes: Routes
) -> tuple[float, Floats]:
    if len(src) == 1:
        return _one_message(src, dst, float(chunks[0] * chunk), float(reduce_s.max()), routes)
    network = MessageNetwork(routes, len(reduce_s))
    network.start(src, dst, chunks * chunk, np.arange(len(src)))
    ends_s = np.zeros(len(reduce_s))
    while (at_s := network.next_end_s()) < math.inf:
        ended = network.advance(at_s)
        ends_s[src[ended]] = at_s
        ends_s[dst[ended]] = at_s
    return float((ends_s + reduce_s).max(initial=0.0)), network.carried_bytes


def _one_message(
    src: Longs, dst: Longs, num_bytes: float, reduce_s: float, routes: Routes
) -> tuple[float, Floats]:
    """A message that has its path for itself; the receiver alone reduces."""
    row = routes.rows(src, dst)
    path = routes.paths(row)[0]
    path = path[path >= 0]
    rate = float(routes.capacities[path].min(initial=math.inf))
    carried = np.zeros(routes.capacities.size)
    carried[path] = num_bytes
    return float(routes.alphas_s(row)[0]) + num_bytes / rate + reduce_s, carried


class _ByRank:
    """Each rank has a round of its own; it goes on when its messages of that round are done."""

    def __init__(
        self,
        table: MessageTable,
        chunk: float,
        routes: Routes,
        per_chunk_s: float,
        starts_s: list[float],
    ):
        self._table = table
        self._sizes = table.chunks * chunk
        self._reduce_s = table.all_reduced() * per_chunk_s
        self._network = MessageNetwork(routes, table.ranks)
        self._round = [-1] * table.ranks
        self._ready_s = starts_s
        self._begun_s = np.full(len(table.src), math.nan)
        self._ended_s = np.full(len(table.src), math.nan)
        self._open = _messages_of_ranks(table)  # by round and rank: messages to wait for
        self._rows = _rows_of_ranks(table)
        self._half = np.zeros(len(table.src), np.int64)  # ends that have reached the message
        self._timers: dict[float, list[int]] = {}

    def run(self) -> CollectiveRun:
        for rank, at_s in enumerate(self._ready_s):
            self._timers.setdefault(at_s, []).append(rank)
        while True:
            timer_s = min(self._timers, default=math.inf)
            at_s = min(timer_s, self._network.next_end_s())
            if at_s == math.inf:
                return self._result()
            self._finish(self._network.advance(at_s), at_s)
            self._begin(self._timers.pop(timer_s) if timer_s <= at_s else [], at_s)

    def _finish(self, ended: list[int], at_s: float) -> None:
        for message in ended:
            self._ended_s[message] = at_s
            when = self._table.round[message]
            for rank in (self._table.src[message], self._table.dst[message]):
                self._open[when, rank] -= 1
                if self._open[when, rank] == 0:
                    done_s = at_s + float(self._reduce_s[when, rank])
                    self._timers.setdefault(done_s, []).append(int(rank))

    def _begin(self, ranks: list[int], at_s: float) -> None:
        """These ranks enter their next round that has messages; a message needs both its ends."""
        started: list[int] = []
        for rank in ranks:
            self._ready_s[rank] = at_s
            rows = self._rows[rank]
            if rows:
                entered = rows.pop()
                for message in entered:
                    self._half[message] += 1
                    if self._half[message] == 2:
                        started.append(message)
        if started:
            rows_now = np.array(started)
            self._begun_s[rows_now] = at_s
            src, dst = self._table.src[rows_now], self._table.dst[rows_now]
            self._network.start(src, dst, self._sizes[rows_now], rows_now)

    def _result(self) -> CollectiveRun:
        table = self._table
        columns = (table.round, table.src, table.dst, self._sizes, self._begun_s, self._ended_s)
        messages = [RankMessage(*row) for row in zip(*(c.tolist() for c in columns), strict=True)]
        ends_s = tuple(self._ready_s)
        return CollectiveRun(max(ends_s), ends_s, self._network.carried_bytes, tuple(messages))


def _messages_of_ranks(table: MessageTable) -> Longs:
    """How many messages each rank takes part in, by round and rank."""
    size = max(1, table.num_rounds * table.ranks)
    cells = np.concatenate([table.round * table.ranks + end for end in (table.src, table.dst)])
    return np.bincount(cells, minlength=size).reshape(-1, table.ranks)


def _rows_of_ranks(table: MessageTable) -> list[list[list[int]]]:
    """The messages of each rank, round after round, the last round first."""
    found: list[list[list[int]]] = [[] for _ in range(table.ranks)]
    last = [-1] * table.ranks
    columns = (table.round.tolist(), table.src.tolist(), table.dst.tolist())
    for row, (when, src, dst) in enumerate(zip(*columns, strict=True)):
        for rank in (src, dst):
            if last[rank] != when:
                found[rank].append([])
                last[rank] = when
            found[rank][-1].append(row)
    return [rounds[::-1] for rounds in found]
