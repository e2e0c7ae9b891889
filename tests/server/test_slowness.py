"""`--slow server:0:4x`: what a server does takes four times as long, and others see it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from shoal.server.consistency import Rule
from shoal.server.process import model_host
from shoal.server.process.server import Server
from tests.server.helpers import client_of, fill, servers, weights
from tests.server.replicas.world import push_one_hot, world

ASYNC = Rule(1, asynchronous=True)


class Clock:
    """Each look at the clock of a thread finds a second of work; sleeping is noted."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.slept_s: list[float] = []
        self._lock = threading.Lock()

    def work(self) -> float:
        with self._lock:
            self.busy_s += 1.0
            return self.busy_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(model_host, "busy_s", made.work)
    monkeypatch.setattr(model_host, "sleep", made.sleep)
    yield made


def slowed(server: Server) -> None:
    server.host.slowness.factor = 4.0


@pytest.mark.parametrize("tcp", [False, True])
def test_a_server_is_slow_in_all_that_it_does_before_others_see_it(clock: Clock, tcp: bool) -> None:
    with servers(tcp=tcp) as found:
        client = client_of(found, 0, ASYNC)
        assert clock.slept_s == []
        slowed(found[0])
        client.commit(*fill(client, 1.0))
        of_push = len(clock.slept_s)
        assert of_push >= 2, "for the update, and for the answer"
        weights(client)
        assert len(clock.slept_s) > of_push


@pytest.mark.parametrize("replica", [0, 1])
def test_a_replica_is_slow_wherever_it_is_in_its_chain(clock: Clock, replica: int) -> None:
    with world(replicas=2) as made:
        client = made.client(0, ASYNC)
        push_one_hot(client, 0, 0)
        assert clock.slept_s == []
        slowed(made.servers[0, replica])
        push_one_hot(client, 1, 1)
        made.weights_of(0, replica)
        assert clock.slept_s
