"""Several shards with replicas: one decision for all of them, whichever server ends."""

from __future__ import annotations

import threading

import pytest
import torch

from shoal.server.client.client import Client
from shoal.server.consistency import Rule
from shoal.server.messages import Commit
from tests.server.replicas.world import pulled, push_one_hot, world


@pytest.mark.parametrize("victim", [(0, 0), (1, 0), (1, 1)])
def test_pushes_count_on_all_shards_when_a_replica_ends(victim: tuple[int, int]) -> None:
    with world(replicas=2, shards=2) as made:
        client = made.client(0, Rule(1, asynchronous=True))
        push_one_hot(client, 0, 0)
        made.crash(*victim)
        elements = [1, 2, 12, 13]
        for step, element in enumerate(elements, start=1):
            push_one_hot(client, element, step)
        weights = pulled(client, version=5)
        assert [i for i, value in enumerate(weights) if value] == [0, *elements]
        assert made.copies_are_equal()


def step_of(client: Client, step: int, value: float) -> None:
    client.out.fill_(value)
    client.push(slice(0, client.size))
    heads = torch.ones(1, 1 + client.specs[0].parameters)
    client.commit(Commit(step, step, 0.5), heads)
    client.pull(step + 1, step + 1).wait()


@pytest.mark.whole
@pytest.mark.parametrize("victim", [None, (0, 0), (1, 0)])
def test_a_clipped_step_has_one_factor_on_all_shards(victim: tuple[int, int] | None) -> None:
    with world(replicas=2, shards=2) as made:
        clients = [made.client(rank, Rule(2), clip_norm=0.5) for rank in range(2)]

        def train(client: Client) -> None:
            for step in range(4):
                if step == 2 and victim is not None and client.rank == 0:
                    made.crash(*victim)
                step_of(client, step, 1.0)

        threads = [threading.Thread(target=train, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        weights = torch.tensor(pulled(clients[0], version=4))
        expected = -4 * 0.5 / len(weights) ** 0.5
        assert torch.allclose(weights, torch.full_like(weights, expected), atol=1e-5)
