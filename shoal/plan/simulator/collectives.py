"""The messages of a collective's schedule, and how long its rounds take on a topology.

Every message is a flow that shares links with the others of its round; a round begins when the one
before has ended on all ranks. Equal rounds are simulated once, so that a ring over 1,024 ranks is
as cheap as one round of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shoal.plan.simulator.messages import Floats, Longs, MessageNetwork, Routes
from shoal.schedules.collectives import Collective

RoundTime = tuple[float, Floats]  # seconds, and the bytes that each link carries
TimeOfRound = Callable[[Longs, Longs, Floats], RoundTime]  # from src, dst and bytes


@dataclass(frozen=True)
class MessageTable:
    """The messages of a schedule, sorted by round: transfers of one pair travel as one."""

    ranks: int
    num_rounds: int
    round: Longs
    src: Longs
    dst: Longs
    chunks: Floats

    @cached_property
    def _starts(self) -> list[int]:
        starts: list[int] = np.searchsorted(self.round, np.arange(self.num_rounds + 1)).tolist()
        return starts

    def of_round(self, number: int) -> slice:
        return slice(self._starts[number], self._starts[number + 1])

    def sum_rounds(
        self, numbers: Iterable[int], chunk: float, timed: TimeOfRound, before: RoundTime
    ) -> RoundTime:
        """These rounds of chunks of so many bytes, after others; equal ones are timed once."""
        known: dict[bytes, RoundTime] = {}
        seconds, carried = before
        for number in numbers:
            rows = self.of_round(number)
            columns = (self.src[rows], self.dst[rows], self.chunks[rows])
            key = b"".join(column.tobytes() for column in columns)
            if key not in known:
                known[key] = timed(columns[0], columns[1], columns[2] * chunk)
            took_s, moved = known[key]
            seconds += took_s
            carried += moved
        return seconds, carried


def message_table(collective: Collective) -> MessageTable:
    table = collective.table
    ranks = collective.ranks
    wire = table.src != table.dst
    when, src, dst = (c[wire].astype(np.int64) for c in (table.round, table.src, table.dst))
    key, chunks = np.unique((when * ranks + src) * ranks + dst, return_counts=True)
    pairs = (key // (ranks * ranks), key // ranks % ranks, key % ranks)
    return MessageTable(ranks, table.num_rounds, *pairs, chunks.astype(np.float64))


def simulate_collective(collective: Collective, num_bytes: float, routes: Routes) -> float:
    """Seconds of one call on vectors of `num_bytes`."""
    table = message_table(collective)

    def timed(src: Longs, dst: Longs, sizes: Floats) -> RoundTime:
        if len(src) == 1:
            return _one_message(src, dst, float(sizes[0]), routes)
        network = MessageNetwork(routes, table.ranks)
        network.start(src, dst, sizes, np.arange(len(src)))
        end_s = 0.0
        while (at_s := network.next_end_s()) < math.inf:
            network.advance(at_s)
            end_s = at_s
        return end_s, network.carried_bytes

    nothing = (0.0, np.zeros(routes.capacities.size))
    chunk = collective.chunk_bytes(num_bytes)
    return table.sum_rounds(range(table.num_rounds), chunk, timed, nothing)[0]


def _one_message(src: Longs, dst: Longs, num_bytes: float, routes: Routes) -> RoundTime:
    """A message that has its path for itself."""
    row = routes.rows(src, dst)
    path = routes.paths(row)[0]
    path = path[path >= 0]
    rate = float(routes.capacities[path].min(initial=math.inf))
    carried = np.zeros(routes.capacities.size)
    carried[path] = num_bytes
    return float(routes.alphas_s(row)[0]) + num_bytes / rate, carried
