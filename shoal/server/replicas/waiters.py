"""Threads of handlers that have proposed an operation, and its outcome."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from shoal.server.chain.node import ChainNode
from shoal.server.replicas.operations import OnCommitted


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
    on_committed: OnCommitted | None = None
    outcome: Outcome | None = None
    woken: threading.Lock = field(default_factory=threading.Lock)  # held until it is woken

    def __post_init__(self) -> None:
        self.woken.acquire()

    def wake(self) -> None:
        outcome = self.outcome
        if self.on_committed is not None and outcome is not None and outcome.error is None:
            self.on_committed(outcome.answer)
        self.woken.release()


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
            waiter.wake()

    def end_all(self) -> None:
        """This replica was removed: what it has applied and not committed counts for nothing."""
        for position, waiter in list(self._by_position.items()):
            waiter.outcome = None
            self.wake(position)
