"""Simulated time: events in order, and processes that can stop, go on, die and start again."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

MAX_EVENTS = 50_000  # a schedule has some hundred


class Loop:
    """A seeded event loop. All randomness of a world comes from `rng`, in the order of events."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def after(self, delay_s: float, do: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now_s + delay_s, self._count, do, arguments))

    def soon(self, mean_s: float) -> float:
        """A random delay: mostly short, sometimes six times as long."""
        x = self.rng.random()
        return mean_s * (0.1 + x + 5.0 * x**8)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def run(self, until_s: float, is_done: Callable[[], bool] = lambda: False) -> bool:
        """Until the time has come, or it is done: whether it is."""
        events = self._events
        while events and events[0][0] <= until_s:
            self.now_s, _, do, arguments = heapq.heappop(events)
            do(*arguments)
            assert self._count < MAX_EVENTS, "messages without end"
            if is_done():
                return True
        self.now_s = until_s
        return is_done()


class Process:
    """What runs in it waits while it is paused, and is gone when it dies."""

    def __init__(self, loop: Loop):
        self.loop = loop
        self.life = 0
        self.is_up = False
        self.is_paused = False
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    @property
    def is_running(self) -> bool:
        return self.is_up and not self.is_paused

    def after(self, delay_s: float, do: Callable[..., None], *arguments: Any) -> None:
        """A timer of this life of the process."""
        self.loop.after(delay_s, self.run, self.life, do, arguments)

    def run(self, life: int, do: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if life != self.life or not self.is_up:
            return
        if self.is_paused:
            self._backlog.append((do, arguments))
        else:
            do(*arguments)

    def start(self) -> None:
        self.life += 1
        self.is_up = True

    def die(self) -> None:
        self.life += 1
        self.is_up = self.is_paused = False
        self._backlog = []

    def pause(self) -> None:
        self.is_paused = self.is_up

    def resume(self) -> None:
        """All that has come in the meantime comes now."""
        self.is_paused = False
        backlog, self._backlog = self._backlog, []
        life = self.life
        for do, arguments in backlog:
            self.run(life, do, arguments)
