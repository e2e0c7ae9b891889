"""Replicas on several hosts: each says through the coordinator where it listens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch

from shoal.errors import BadInput
from shoal.runtime.config import RunConfig, TlsConfig
from shoal.server.client.chain_view import CopyAddresses
from shoal.server.consistency import Rule
from shoal.server.coordinator import Alive, alive_key
from shoal.server.coordinator.service import CoordinatorService, Core
from shoal.server.member.place import AddressBook, ChainPlace, own_address
from shoal.server.member.start import ChainSettings
from shoal.server.process.server import Server
from shoal.server.protocol.endpoint import PLAIN
from tests.server.coordinator.helpers import LocalCoordinator, until
from tests.server.helpers import SECRET, client_at
from tests.server.replicas.world import pulled, push_one_hot, world
from tests.server.test_tls import certificate, needs_openssl

UNIX = "unix:/run/0.sock"


def test_a_unix_socket_is_for_its_own_host() -> None:
    alive = own_address(UNIX, "tcp:a:1", "a", "")
    here, there = AddressBook("a"), AddressBook("b")
    for book in (here, there):
        book.saw(4, alive)
    assert (here.get(4), there.get(4), here.get(5)) == (UNIX, "tcp:a:1", None)


def test_an_address_that_others_cannot_use_does_not_replace_one_that_is_known() -> None:
    book = AddressBook("b")
    book[4] = "tcp:a:1"
    book.saw(4, Alive(1, UNIX, 2, "", "a"))
    assert book == {4: "tcp:a:1"}


def test_one_that_listens_at_all_addresses_is_found_by_the_name_of_its_host() -> None:
    own = own_address("tcp:0.0.0.0:7", "tcp::::8", "a", "node1")
    assert (own.address, own.remote) == ("tcp:node1:7", "tcp:node1:8")
    assert own_address("tcp:h:7", "", "a", "node1") == Alive(0, "tcp:h:7", host="a")


def test_a_replica_does_not_listen_beyond_loopback_in_the_clear() -> None:
    settings = ChainSettings(ChainPlace(0, 0, 2), LocalCoordinator(), 0.5)
    with pytest.raises(BadInput, match="in the clear"):
        Server("tcp:0.0.0.0:0", SECRET, chain=settings)


@pytest.mark.parametrize(
    "is_tls", [False, pytest.param(True, marks=[pytest.mark.whole, needs_openssl])]
)
def test_replicas_find_each_other_over_tcp(tmp_path: Path, is_tls: bool) -> None:
    tls = PLAIN
    if is_tls:
        cert, key = certificate(tmp_path, "server")
        tls = TlsConfig(str(cert), str(key), authority=str(cert))
    with world(replicas=2, shards=2, tls=tls) as made:
        client = made.client(0, Rule(1, asynchronous=True))
        elements = [0, 12, 1, 13]
        for step, element in enumerate(elements):
            if step == 2:
                made.crash(0, 0)
            push_one_hot(client, element, step)
        weights = pulled(client, version=4)
        assert [i for i, value in enumerate(weights) if value] == sorted(elements)
        assert torch.equal(made.weights_of(1, 0), made.weights_of(1, 1))


ASYNC = Rule(1, asynchronous=True)
HERE, THERE = "tcp:127.0.0.1:1", "tcp:127.0.0.1:2"


@contextmanager
def served(core: Core) -> Iterator[RunConfig]:
    """The configuration of a worker that reaches this coordinator."""
    with CoordinatorService(core, SECRET, ["tcp:127.0.0.1:0"]) as service:
        yield RunConfig(coordinator=service.addresses[0], secret=SECRET)


def test_a_replica_that_moved_serves_alone_when_the_others_are_lost() -> None:
    """Replica 0 is lost, starts at another port and catches up; then replica 1 is lost."""
    with world(replicas=2, tls=PLAIN) as made, served(made.coordinator._core) as config:
        client = client_at([CopyAddresses(made.addresses[0], 0, config)], 0, ASYNC)
        made.clients.append(client)
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
        push_one_hot(client, 3, step)
        assert made.members() == (0,)
        assert pulled(client)[:5] == [-1.0, -1.0, -(step - 2.0), -1.0, 0.0]
        counts = client.stats()[0]
        assert sum(counts["missed_updates"].values()) == counts["updates"] == step + 1
        assert not counts["is_complete"]  # who had served earlier pulls is gone


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
