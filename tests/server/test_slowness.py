"""`--slow server:0:4x`: what a server does takes four times as long, and others see it."""

from __future__ import annotations

import itertools

import pytest

from shoal.server.consistency import Rule
from shoal.server.process import model_host
from tests.server.helpers import client_of, fill, servers, weights
from tests.server.replicas.world import push_one_hot, world

ASYNC = Rule(1, asynchronous=True)


@pytest.fixture
def slept_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long threads slept; each look at the clock of a thread finds a second of work."""
    found: list[float] = []
    monkeypatch.setattr(model_host, "busy_s", itertools.count(1.0).__next__)
    monkeypatch.setattr(model_host, "sleep", found.append)
    return found


@pytest.mark.parametrize("tcp", [False, True])
def test_a_server_is_slow_in_all_that_it_does_before_others_see_it(
    slept_s: list[float], tcp: bool
) -> None:
    with servers(tcp=tcp) as found:
        client = client_of(found, 0, ASYNC)
        assert slept_s == []
        found[0].host.slowness.factor = 4.0
        client.commit(*fill(client, 1.0))
        of_push = len(slept_s)
        assert of_push >= 2, "for the update, and for the answer"
        weights(client)
        assert len(slept_s) > of_push


@pytest.mark.parametrize("replica", [0, 1])
def test_a_replica_is_slow_wherever_it_is_in_its_chain(slept_s: list[float], replica: int) -> None:
    with world(replicas=2) as made:
        client = made.client(0, ASYNC)
        made.servers[0, replica].host.slowness.factor = 4.0
        push_one_hot(client, 1, 0)
        made.weights_of(0, replica)
        assert slept_s
