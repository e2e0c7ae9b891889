"""What it costs that workers wait for each other between pieces of computation.

A call that is repeated at once finds all ranks awake. In a step they compute some hundred
microseconds before it: a rank that waits has gone to sleep and is woken up, its threads too, and
the slowest of all decides.

    work         a rank computes
    meet         ranks compute, then sum a few numbers
    hand over    one of two ranks computes while the other waits for its message
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from shoal.bench.sampling import sample_rounds
from shoal.comm.group import Group

_WORK_S = 5e-4  # of computation between two calls
_SIZE = 128
_NUMBERS = 1024
_CALLS = 40
_ROUNDS = 5


class HandoverBench:
    def __init__(self, group: Group):
        self._group = group
        self._matrix = torch.ones(_SIZE, _SIZE)
        self._message = torch.zeros(_NUMBERS)
        self._products = 1
        self._turn = 0

    def measure(self) -> dict[str, Any]:
        """Seconds of one piece of work, and of one with a call behind it."""
        self._products = self._agree(self._products_of_work())
        ways = {"work": self._work, "meet": self._meet, "hand over": self._hand_over}
        return {name: self._sample(way) for name, way in ways.items()}

    def _products_of_work(self) -> float:
        self._work()
        start_s = time.perf_counter()
        for _ in range(_CALLS):
            self._work()
        return _WORK_S / max(1e-9, (time.perf_counter() - start_s) / _CALLS)

    def _agree(self, number: float) -> int:
        numbers = torch.tensor([number])
        self._group.broadcast(numbers).wait()
        return max(1, round(float(numbers)))

    def _sample(self, way: Callable[[], None]) -> dict[str, float]:
        took = sample_rounds(way, _CALLS, _ROUNDS, lambda: self._group.barrier().wait())
        return took._asdict()

    def _work(self) -> None:
        for _ in range(self._products):
            torch.mm(self._matrix, self._matrix)

    def _meet(self) -> None:
        self._work()
        self._group.all_reduce(self._message).wait()

    def _hand_over(self) -> None:
        """In turns: a call of either rank of a pair is half of a round."""
        partner = self._group.rank ^ 1
        if partner >= self._group.size:
            return
        self._turn ^= 1
        if self._turn == self._group.rank % 2:
            self._work()
            self._group.send(self._message, partner).wait()
        else:
            self._group.recv(self._message, partner).wait()
