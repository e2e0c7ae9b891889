"""A coordinator in this process, for tests: the same store, without a log."""

from __future__ import annotations

import time
from collections.abc import Callable

from shoal.coordinator.interface import Answer, Coordinator, Request
from shoal.coordinator.service import Core
from shoal.coordinator.store import Store


class LocalCoordinator(Coordinator):
    """Threads of one process share it. `clock_s` is what leases count in."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic):
        self._core = Core(Store(), clock_s=clock_s)

    def _ask(self, request: Request) -> Answer:
        return self._core.answer(request)

    def close(self) -> None:
        self._core.close()
