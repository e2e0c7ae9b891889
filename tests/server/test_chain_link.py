"""A worker and the replicas of a shard: it finds the head, and each push counts once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shoal.errors import PeerLost
from shoal.protocol.frames import FrameKind, Moved, encode
from shoal.server.client.chain_route import ChainRoute
from shoal.server.client.chain_view import ChainView
from shoal.server.client.client import Client
from shoal.server.client.route import Request
from shoal.server.consistency import Rule
from shoal.server.shared_memory import bytes_of
from tests.server.fake_chain import FakeChain, fake_chain
from tests.server.helpers import client_at, fill


@contextmanager
def worker_of(chain: FakeChain, rank: int = 0) -> Iterator[Client]:
    client = client_at([[replica.address for replica in chain.replicas]], rank, Rule(workers=1))
    (spec,) = client.specs
    chain.pull_bytes = 4 * (1 + spec.parameters) + 4 * (spec.stop - spec.start)
    try:
        yield client
    finally:
        client.close()


def route_of(client: Client) -> ChainRoute:
    (link,) = client.links
    assert isinstance(link.route, ChainRoute)
    return link.route


def push(client: Client, times: int = 1) -> list[str]:
    return [client.commit(*fill(client, 1.0)).verdict for _ in range(times)]


def commit_request(client: Client) -> Request:
    commit, loss_flags = fill(client, 1.0)
    client.sequence += 1
    payload = (bytes_of(loss_flags),)
    return Request(FrameKind.COMMIT, encode(commit), payload, sequence=client.sequence)


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
    with fake_chain() as chain, worker_of(chain, rank) as client:
        assert set(chain.descriptors) == {0, 1, 2}
        push(client, 2)
        client.pull(None, 0).wait()
        client.links[0].call("pull", Request(FrameKind.STATE_SET))
        client.pull(None, 0).wait()
        assert chain.counted == [1, 2]
        assert chain.pulls == [rank, rank]


def test_the_head_is_found_wherever_it_is() -> None:
    with fake_chain() as chain:
        chain.move(2, 0, 1)
        with worker_of(chain) as client:
            assert push(client) == ["admitted"]
            assert route_of(client).view.head == 2


def test_a_stopped_head_is_left_when_another_replica_tells_of_a_new_epoch() -> None:
    with fake_chain() as chain, worker_of(chain) as client:
        push(client)
        chain.replicas[0].believes = chain.moved()
        chain.replicas[0].stopped.set()
        pushing = client.links[0].post("push", commit_request(client))
        assert chain.replicas[0].held.wait(60)
        chain.move(1, 2)
        pushing.result()
        chain.replicas[0].goes_on.set()  # it answers late, on a connection that is gone
        push(client)
        assert chain.counted == [1, 2, 3]


def test_members_that_answer_are_not_taken_for_the_head() -> None:
    with fake_chain() as chain, worker_of(chain) as client:
        push(client)
        chain.replicas[0].die()
        route = route_of(client)
        route.find_head_s = 0.1
        with pytest.raises(PeerLost, match="looking for the head"):
            route.find_head(route.find_head_s)  # the others are members of its epoch
        chain.move(1, 2)
        replica, connection = route.find_head(60)
        connection.close()
        assert (replica, chain.set_ups[-1]) == (1, (1, 2)), "SETUP in the epoch in which it leads"


def test_the_search_for_a_head_ends_and_names_the_shard_and_its_replicas() -> None:
    with fake_chain() as chain, worker_of(chain) as client:
        route_of(client).find_head_s = 0.1
        for replica in chain.replicas:
            replica.die()
        with pytest.raises(PeerLost, match=r"head of shard 0 \(servers 0 to 2\)"):
            push(client)
