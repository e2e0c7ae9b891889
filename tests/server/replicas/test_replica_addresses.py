"""A replica that starts again elsewhere: workers find it through the coordinator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from shoal.coordinator.alive import Alive, alive_key
from shoal.coordinator.core import Core
from shoal.coordinator.service import CoordinatorService
from shoal.errors import PeerLost
from shoal.runtime.config import RunConfig
from shoal.server.chain_route import ChainRoute
from shoal.server.chain_view import CopyAddresses
from shoal.server.client import Client
from shoal.server.consistency import Rule
from shoal.server.model.named_optimizer import NamedOptimizer
from shoal.server.protocol.endpoint import PLAIN
from shoal.sync.ps.connect import ServedOptions, specs_of
from tests.coordinator.helpers import until
from tests.server.helpers import MODEL, SECRET, flat_of
from tests.server.replicas.world import World, pulled, push_one_hot, world

ASYNC = Rule(1, asynchronous=True)
HERE, THERE = "tcp:127.0.0.1:1", "tcp:127.0.0.1:2"


@contextmanager
def served(core: Core) -> Iterator[RunConfig]:
    """The configuration of a worker that reaches this coordinator."""
    with CoordinatorService(core, SECRET, ["tcp:127.0.0.1:0"]) as service:
        yield RunConfig(coordinator=service.addresses[0], secret=SECRET)


def worker_of(made: World, config: RunConfig | None) -> Client:
    addresses = CopyAddresses(made.addresses[0], 0, config)
    served = ServedOptions(ASYNC, optimizer=NamedOptimizer("SGD", {"lr": 1.0}))
    specs = specs_of(flat_of(), [addresses[0]], served)
    return Client(0, MODEL, [addresses], SECRET, specs)


def push_while_one_comes_back(made: World, client: Client) -> int:
    """Replica 0 is lost, starts at another port and catches up; then replica 1 is lost."""
    push_one_hot(client, 0, 0)
    made.crash(0, 0)
    push_one_hot(client, 1, 1)
    before = made.addresses[0][0]
    made.start(0, 0)
    assert made.addresses[0][0] != before
    step = 2
    while len(made.members()) < 2:
        push_one_hot(client, 2, step)
        step += 1
    made.crash(0, 1)
    return step


def test_a_replica_that_moved_serves_alone_when_the_others_are_lost() -> None:
    with world(replicas=2, tls=PLAIN) as made, served(made.coordinator._core) as config:
        client = worker_of(made, config)
        step = push_while_one_comes_back(made, client)
        push_one_hot(client, 3, step)
        assert made.members() == (0,)
        assert pulled(client)[:5] == [-1.0, -1.0, -(step - 2.0), -1.0, 0.0]
        client.close()


def test_without_a_coordinator_it_is_not_found() -> None:
    with world(replicas=2, tls=PLAIN) as made:
        client = worker_of(made, None)
        route = client.links[0].route
        assert isinstance(route, ChainRoute)
        route.find_head_s = 0.5
        with pytest.raises(PeerLost, match="looking for the head of shard 0"):
            push_one_hot(client, 3, push_while_one_comes_back(made, client))
        client.close()


def test_an_address_is_replaced_by_one_that_other_hosts_reach() -> None:
    with world(replicas=2, tls=PLAIN) as made, served(made.coordinator._core) as config:
        addresses = CopyAddresses([HERE, HERE, HERE, HERE], 2, config)
        said = {
            2: Alive(1, "unix:/a.sock", 1, THERE),
            3: Alive(1, "unix:/b.sock", 1),  # its host alone reaches it
            4: Alive(1, THERE, 1),
        }
        for process, alive in said.items():
            made.coordinator.put_if(alive_key(process), msgspec.msgpack.encode(alive), 0)
        made.coordinator.put_if(alive_key(5), b"no msgpack", 0)
        addresses.look_again()
        until(lambda: addresses[2] == THERE, "the third address is known")
        assert addresses[:] == [THERE, HERE, THERE, HERE]
        until(lambda: not addresses._asking.locked(), "the thread has ended")


def test_sockets_of_this_host_do_not_move() -> None:
    addresses = CopyAddresses(["unix:/a.sock"], 0, RunConfig(coordinator=HERE, secret=SECRET))
    addresses.look_again()
    assert not addresses._asking.locked()
