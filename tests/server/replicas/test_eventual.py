"""Eventual consistency: the head acknowledges, the others follow."""

from __future__ import annotations

from shoal.server.consistency import Rule
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
