"""Three replicas of a shard: nothing that was acknowledged is lost, whichever of them ends."""

from __future__ import annotations

import pytest
import torch

from shoal.server.chain.node import ChainNode
from shoal.server.consistency import Rule
from shoal.server.replicas.core import Outcome, Waiter, Waiters
from tests.server.replicas.world import pulled, push_one_hot, world

ASYNC = Rule(1, asynchronous=True)


def test_three_replicas_hold_the_same_weights() -> None:
    with world() as made:
        client = made.client(0, ASYNC)
        for step in range(4):
            assert push_one_hot(client, step, step) == "admitted"
        assert pulled(client)[:5] == [-1.0, -1.0, -1.0, -1.0, 0.0]
        client.close()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_pushes_go_on_when_a_replica_ends(place: int) -> None:
    with world() as made:
        client = made.client(0, ASYNC)
        push_one_hot(client, 0, 0)
        victim = made.members()[place]
        made.crash(0, victim)
        for step in range(1, 4):
            push_one_hot(client, step, step)
        assert pulled(client)[:5] == [-1.0, -1.0, -1.0, -1.0, 0.0]
        assert victim not in made.members()
        copies = [made.weights_of(0, replica) for replica in made.members()]
        assert torch.equal(copies[0], copies[1])
        client.close()


def test_a_replica_that_is_removed_acknowledges_nothing_that_is_not_committed() -> None:
    waiters = Waiters()
    waiter = waiters.add(Waiter(ChainNode(0), 1, is_early=False))
    waiters.applied(1, Outcome("an answer"))
    assert not waiter.woken.acquire(blocking=False)
    waiters.end_all()
    assert waiter.woken.acquire(blocking=False)
    assert waiter.outcome is None
