"""A replica that comes back takes the state of the others, while pushes go on."""

from __future__ import annotations

from shoal.server.consistency import Rule
from tests.server.replicas.world import pulled, push_one_hot, world


def test_a_replica_comes_back_and_then_serves_alone() -> None:
    with world(replicas=2) as made:
        client = made.client(0, Rule(1, asynchronous=True))
        push_one_hot(client, 0, 0)
        made.crash(0, 0)
        push_one_hot(client, 1, 1)
        made.start(0, 0)
        step = 2
        while len(made.members()) < 2:
            push_one_hot(client, 2, step)
            step += 1
        made.crash(0, 1)
        push_one_hot(client, 3, step)
        assert made.members() == (0,)
        assert pulled(client)[:5] == [-1.0, -1.0, -(step - 2.0), -1.0, 0.0]
        client.close()
