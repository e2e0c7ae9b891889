"""A collective in segments, as the runtime runs it over a network: rounds overlap.

Each rank works through (round, segment) in order: before it issues segment s of a round, segment
s of its round before has arrived. A message needs both its ends. Between two ranks messages follow
each other; those of different pairs share links fairly.

    rank 1   s0 s1 s2                 star of two ranks in three segments: what comes back
    rank 0      s0 s1 s2              shares no link with what is sent
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from shoal.plan.contention.messages import MessageNetwork, MessageTable, Routes, message_table
from shoal.schedules.collectives import Collective


def simulate_in_segments(
    collective: Collective, num_bytes: float, routes: Routes, segments: int
) -> float:
    """Seconds of one call on vectors of `num_bytes`, each chunk in so many segments."""
    chunk = collective.chunk_bytes(num_bytes)
    return _Segments(message_table(collective), chunk / segments, routes, segments).run()


@dataclass
class _RankSteps:
    """Where a rank is: position number * segments + segment is issued next."""

    rounds: list[list[int]]  # the messages of each round in which the rank has some
    open: dict[tuple[int, int], int] = field(default_factory=dict)  # by number, segment
    position: int = 0


class _Segments:
    def __init__(self, table: MessageTable, chunk: float, routes: Routes, segments: int):
        self._table = table
        self._sizes = table.chunks * chunk
        self._segments = segments
        self._routes = routes
        self._network = MessageNetwork(routes.capacities)
        self._ranks = [_RankSteps([]) for _ in range(table.ranks)]
        self._numbers: list[dict[int, int]] = [{} for _ in range(table.ranks)]  # by round
        self._halves: dict[int, int] = {}  # ends that have issued a message
        self._queues: dict[tuple[int, int], deque[int]] = {}  # by pair; the first one travels
        for row, (when, src, dst) in enumerate(
            zip(table.round.tolist(), table.src.tolist(), table.dst.tolist(), strict=True)
        ):
            for rank in (src, dst):
                self._add(rank, when, row)

    def _add(self, rank: int, when: int, row: int) -> None:
        steps, numbers = self._ranks[rank], self._numbers[rank]
        number = numbers.setdefault(when, len(steps.rounds))
        if number == len(steps.rounds):
            steps.rounds.append([])
        steps.rounds[number].append(row)
        for segment in range(self._segments):
            key = (number, segment)
            steps.open[key] = steps.open.get(key, 0) + 1

    def run(self) -> float:
        for rank in range(len(self._ranks)):
            self._go_on(rank)
        end_s = 0.0
        while (at_s := self._network.next_end_s()) < math.inf:
            for message in self._network.advance(at_s):
                self._end(message)
                end_s = at_s
        return end_s

    def _go_on(self, rank: int) -> None:
        """Issue what this rank can issue now."""
        steps = self._ranks[rank]
        while steps.position < len(steps.rounds) * self._segments:
            number, segment = divmod(steps.position, self._segments)
            if number and steps.open[number - 1, segment]:
                return
            steps.position += 1
            for row in steps.rounds[number]:
                self._issue(row * self._segments + segment)

    def _issue(self, message: int) -> None:
        self._halves[message] = self._halves.get(message, 0) + 1
        if self._halves[message] < 2:
            return
        pair = self._pair(message)
        queue = self._queues.setdefault(pair, deque())
        queue.append(message)
        if len(queue) == 1:
            self._start(message, pair)

    def _start(self, message: int, pair: tuple[int, int]) -> None:
        src, dst = (np.array([rank]) for rank in pair)
        size = self._sizes[message // self._segments]
        self._network.start(self._routes.ways(src, dst), np.array([size]), np.array([message]))

    def _end(self, message: int) -> None:
        pair = self._pair(message)
        queue = self._queues[pair]
        queue.popleft()
        if queue:
            self._start(queue[0], pair)
        row, segment = divmod(message, self._segments)
        when = int(self._table.round[row])
        for rank in pair:
            self._ranks[rank].open[self._numbers[rank][when], segment] -= 1
            self._go_on(rank)

    def _pair(self, message: int) -> tuple[int, int]:
        row = message // self._segments
        return int(self._table.src[row]), int(self._table.dst[row])
