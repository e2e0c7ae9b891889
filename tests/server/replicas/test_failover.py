"""Three replicas of a shard: nothing that was acknowledged is lost, whichever of them ends."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from shoal.server.chain.node import ChainNode
from shoal.server.consistency import Rule
from shoal.server.member import peer_link
from shoal.server.member.core import Outcome, Waiter, Waiters
from shoal.server.member.peer_link import PeerLink
from shoal.sync.ps.summary import counts_of_shards
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
    waiters.applied(1, Outcome("an answer"))
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


def test_a_push_is_overwritten_only_when_all_have_it() -> None:
    """`push_one_hot` overwrites the memory at once: each copy would differ."""
    with world() as made:
        client = made.client(0, ASYNC)
        for step in range(30):
            push_one_hot(client, step % 5, step)
        copies = [made.weights_of(0, replica) for replica in range(3)]
        assert pulled(client)[:5] == [-6.0] * 5
        assert all(torch.equal(copies[0], copy) for copy in copies)


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
