"""Eventual consistency: the head acknowledges, the others follow."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from shoal.server.consistency import Rule
from shoal.server.replicas import peer_link
from shoal.server.replicas.peer_link import PeerLink
from tests.server.helpers import MODEL
from tests.server.replicas.world import pulled, push_one_hot, world


def test_pushes_go_on_after_the_head_ends_and_the_lost_ones_are_counted() -> None:
    with world(replicas=2, consistency="eventual") as made:
        client = made.client(0, Rule(1, asynchronous=True))
        for step in range(4):
            push_one_hot(client, step, step)
        made.crash(0, made.head())
        for step in range(4, 8):
            push_one_hot(client, step, step)
        (report,) = client.stats()
        applied = -sum(pulled(client, report["updates"]))
        assert applied + report["lost_pushes"] == 8
        client.close()


def test_pushes_that_wait_to_be_sent_are_not_overwritten_by_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_send = threading.Event()
    send = PeerLink._send_posted

    def send_late(link: PeerLink, *arguments: Any) -> None:
        assert may_send.wait(60)
        send(link, *arguments)

    monkeypatch.setattr(PeerLink, "_send_posted", send_late)
    monkeypatch.setattr(peer_link, "_SMALL_BYTES", 0)
    with world(replicas=2, consistency="eventual") as made:
        may_send.set()
        client = made.client(0, Rule(1, asynchronous=True))
        may_send.clear()
        for step in range(5):
            push_one_hot(client, step, step)
        may_send.set()
        other = made.servers[0, 1 - made.head()]
        model = other.models[MODEL]
        pushes = model.membership.members[0].pushes
        with model.lock:
            assert model.lock.wait_for(lambda: pushes.committed == 5, 60)
        assert made.weights_of(0, 1 - made.head())[:6].tolist() == [-1.0] * 5 + [0.0]
        client.close()
