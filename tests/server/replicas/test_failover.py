"""Copies of a shard: nothing that was acknowledged is lost, whichever of them ends."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from shoal.errors import PeerLost
from shoal.runtime.trace import server_name
from shoal.server.chain.node import ChainNode
from shoal.server.client.chain_route import ChainRoute
from shoal.server.client.chain_view import ChainView
from shoal.server.client.client import Client
from shoal.server.consistency import Rule
from shoal.server.coordinator import forget
from shoal.server.member import peer_link
from shoal.server.member.core import Waiter, Waiters
from shoal.server.member.peer_link import PeerLink
from shoal.server.messages import ShardState
from shoal.server.protocol import Moved
from shoal.sync.ps.summary import counts_of_shards
from tests.server.coordinator.helpers import until
from tests.server.helpers import MODEL
from tests.server.replicas.world import pulled, push_one_hot, world

ASYNC = Rule(1, asynchronous=True)


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


def test_a_replica_that_is_removed_acknowledges_nothing_that_is_not_committed() -> None:
    waiters = Waiters()
    waiter = waiters[1] = Waiter(ChainNode(0), 1, is_early=False)
    waiters.applied(1, ("an answer", None))
    assert not waiter.woken.acquire(blocking=False)
    waiters.end_all()
    assert waiter.woken.acquire(blocking=False)
    assert waiter.outcome is None


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


def test_pushes_go_on_after_the_head_ends_and_the_lost_ones_are_counted() -> None:
    with world(replicas=2, consistency="eventual") as made:
        client = made.client(0, ASYNC)
        for step in range(4):
            push_one_hot(client, step, step)
        made.crash(0, made.head())
        for step in range(4, 8):
            push_one_hot(client, step, step)
        (report,) = client.stats()
        applied = -sum(pulled(client, report["updates"]))
        assert applied + report["lost_pushes"] == 8


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
        client = made.client(0, ASYNC)
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


@pytest.mark.parametrize("rule", [Rule(2), Rule(2, quorum=2)], ids=["synchronous", "quorum"])
def test_a_push_that_waits_for_others_is_kept(rule: Rule) -> None:
    """Worker 0 overwrites its memory while its push waits for that of worker 1."""
    with world() as made:
        first, second = made.client(0, rule), made.client(1, rule)
        push_one_hot(first, 0, 0)
        first.out.fill_(7.0)
        push_one_hot(second, 1, 0)
        moved = -1.0 if rule.quorum is None else -0.5  # of the fraction that was pushed
        assert pulled(first, version=1)[:3] == [moved, moved, 0.0]


# ------------------------------------------------------------------------------ several shards


@pytest.mark.parametrize("victim", [(0, 0), (1, 0), (1, 1)])
def test_pushes_count_on_all_shards_when_a_replica_ends(victim: tuple[int, int]) -> None:
    with world(replicas=2, shards=2) as made:
        client = made.client(0, ASYNC)
        push_one_hot(client, 0, 0)
        made.crash(*victim)
        elements = [1, 2, 12, 13]
        for step, element in enumerate(elements, start=1):
            push_one_hot(client, element, step)
        weights = pulled(client, version=5)
        assert [i for i, value in enumerate(weights) if value] == [0, *elements]
        assert made.copies_are_equal()


# ------------------------------------------------------------------------------ the worker's route


def route_of(client: Client) -> ChainRoute:
    (link,) = client.links
    assert isinstance(link.route, ChainRoute)
    return link.route


def test_a_view_follows_the_highest_epoch_and_reads_are_spread_over_members() -> None:
    view = ChainView(3, worker=4)
    assert view.to_ask() == [0, 1, 2]
    assert view.learn(Moved(3, 1, (1, 2)))
    assert not view.learn(Moved(2, 0, (0, 1, 2))), "a head of an earlier epoch"
    assert not view.learn(Moved(3, 1, (1, 2)))
    assert (view.epoch, view.head, view.to_ask()) == (3, 1, [1, 2, 0])
    assert view.readers() == [1, 2]
    assert view.learn(Moved(4, None, ())), "a replica that does not know the head"
    assert view.learn(Moved(4, 2, (2,))), "and one that does"
    assert view.readers() == [2]
    assert view.learn(Moved(5, 9, (9,)))
    assert view.head is None, "there is no replica 9"


@pytest.mark.parametrize("rank", [0, 1])
def test_all_members_get_the_memory_of_a_worker_and_pulls_are_spread(rank: int) -> None:
    with world() as made:
        client = made.client(rank, Rule(2, asynchronous=True))
        for server in made.servers.values():
            assert server.models[MODEL].membership.members[rank].out is not None
        for _ in range(2):
            assert pulled(client) and route_of(client).server("pull") == server_name(0, rank)
            client.set_state([(ShardState(0, ()), [])], client.inbox)  # at the head


def test_a_stopped_head_is_left_when_another_replica_tells_of_a_new_epoch() -> None:
    with world() as made:
        client = made.client(0, ASYNC)
        push_one_hot(client, 0, 0)
        head = made.servers[0, 0].chain
        assert head is not None
        node, logged = head.runtime.node, head.runtime.node.position
        with head.runtime.applying, ThreadPoolExecutor(1) as pool:
            pushing = pool.submit(push_one_hot, client, 1, 1)
            until(lambda: node.position > logged, "the push has come to it")
            forget(made.coordinator, 0, os.getpid())  # its lease ends
            assert pushing.result(60) == "admitted"
        assert 0 not in made.members() and pulled(client)[:3] == [-1.0, -1.0, 0.0]


def test_members_that_answer_are_not_taken_for_the_head() -> None:
    with world() as made:
        route = route_of(made.client(0, ASYNC))
        made.servers.pop((0, 0)).close()  # its lease lasts
        with pytest.raises(PeerLost, match="looking for the head"):
            route.find_head(0.1)
        forget(made.coordinator, 0, os.getpid())
        copy, connection = route.find_head(60)
        connection.close()
        assert copy == made.head() != 0


def test_the_search_for_a_head_ends_and_names_the_shard_and_its_replicas() -> None:
    with world() as made:
        client = made.client(0, ASYNC)
        route_of(client).find_head_s = 0.1
        for replica in range(3):
            made.crash(0, replica)
        with pytest.raises(PeerLost, match=r"head of shard 0 \(servers 0 to 2\)"):
            push_one_hot(client, 0, 0)
