"""A replica that comes back takes the state of the others, while pushes go on."""

from __future__ import annotations

from shoal.server.consistency import Rule
from shoal.sync.ps.summary import counts_of_shards
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
        counts = client.stats()[0]
        assert sum(counts["missed_updates"].values()) == counts["updates"] == step + 1
        assert not counts["is_complete"]  # who had served earlier pulls is gone
        client.close()


def test_the_final_counts_of_a_shard_are_those_of_all_replicas() -> None:
    with world(replicas=2) as made:
        clients = [made.client(rank, Rule(2, asynchronous=True)) for rank in range(2)]
        for client in clients:
            push_one_hot(client, 0, 0)
            client.pull(1, 1).wait()
        for client in clients:
            client.leave()
        final = clients[0].stats(final=True)
        [shard] = counts_of_shards(final)
        [other] = final[0]["replicas"]
        assert shard["is_complete"]
        assert sum(shard["steps_ahead"].values()) == 2  # each worker pulls from another replica
        assert shard["requests"] == final[0]["requests"] + other["requests"]
        for client in clients:
            client.close()
