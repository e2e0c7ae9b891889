"""A replica keeps its lease whatever its other requests to the coordinator wait for."""

from __future__ import annotations

import threading
from pathlib import Path

from shoal.coordinator import Answer, KeepAlive, List, Request
from shoal.server.member.place import ChainPlace
from shoal.server.member.start import ChainSettings
from shoal.server.process.server import Server
from tests.coordinator.helpers import LocalCoordinator
from tests.server.helpers import SECRET
from tests.server.replicas.world import TTL_S, SharedCoordinator

RENEWALS = 8  # more than the time of a lease


class SlowReads(LocalCoordinator):
    """The same coordinator over a connection on which a list is not answered."""

    def __init__(self, shared: LocalCoordinator):
        self._core = shared._core
        self.asked = threading.Event()
        self.goes_on = threading.Event()

    def _ask(self, request: Request) -> Answer:
        if isinstance(request, List):
            self.asked.set()
            assert self.goes_on.wait(60)
        return super()._ask(request)

    def close(self) -> None:
        self.goes_on.set()


class Counted(SharedCoordinator):
    def __init__(self) -> None:
        super().__init__()
        self.renewals = threading.Semaphore(0)

    def _ask(self, request: Request) -> Answer:
        answer = super()._ask(request)
        if isinstance(request, KeepAlive):
            self.renewals.release()
        return answer


def test_a_read_that_takes_long_does_not_cost_the_lease(tmp_path: Path) -> None:
    shared = Counted()
    reads = SlowReads(shared)
    address = f"unix:{tmp_path}/server.sock"
    known = {0: address, 1: address}
    settings = ChainSettings(ChainPlace(0, 0, 2), known, reads, TTL_S, leases=shared)
    with Server(address, SECRET, chain=settings):
        assert reads.asked.wait(60)
        before = shared.live("alive/")
        for _ in range(RENEWALS):
            assert shared.renewals.acquire(timeout=60)
        assert before and shared.live("alive/") == before
        reads.goes_on.set()
