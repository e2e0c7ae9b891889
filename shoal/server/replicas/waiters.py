"""Threads of handlers that have proposed an operation, and its outcome."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from shoal.server.chain.node import ChainNode


@dataclass
class Outcome:
    answer: Any = None
    error: Exception | None = None


@dataclass
class Waiter:
    """A thread that waits for one operation: it is woken alone, and once."""

    node: ChainNode
    position: int
    is_early: bool  # it is answered before it is committed
    outcome: Outcome | None = None
    woken: threading.Lock = field(default_factory=threading.Lock)  # held until it is woken

    def __post_init__(self) -> None:
        self.woken.acquire()


class Waiters:
    """By the position of the operation; guarded by the replica's lock."""

    def __init__(self) -> None:
        self._by_position: dict[int, Waiter] = {}

    def add(self, waiter: Waiter) -> Waiter:
        self._by_position[waiter.position] = waiter
        return waiter

    def __contains__(self, position: int) -> bool:
        return position in self._by_position

    def applied(self, position: int, outcome: Outcome) -> None:
        """It has been applied here."""
        waiter = self._by_position.get(position)
        if waiter is not None:
            waiter.outcome = outcome
            if waiter.is_early:
                self.wake(position)

    def wake(self, position: int) -> None:
        waiter = self._by_position.pop(position, None)
        if waiter is not None:
            waiter.woken.release()

    def end_all(self) -> None:
        """This replica was removed: what it has applied and not committed counts for nothing."""
        for position, waiter in list(self._by_position.items()):
            waiter.outcome = None
            self.wake(position)
