"""Replicas on several hosts: each says through the coordinator where it listens."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from shoal.coordinator.alive import Alive
from shoal.errors import BadInput
from shoal.runtime.config import TlsConfig
from shoal.server.consistency import Rule
from shoal.server.protocol.endpoint import PLAIN
from shoal.server.replicas.place import AddressBook, ChainPlace, OwnAddress
from shoal.server.replicas.start import ChainSettings
from shoal.server.server import Server
from tests.coordinator.local import LocalCoordinator
from tests.server.helpers import SECRET
from tests.server.replicas.world import pulled, push_one_hot, world
from tests.server.test_tls import certificate

UNIX = "unix:/run/0.sock"


def test_a_unix_socket_is_for_its_own_host() -> None:
    alive = OwnAddress(UNIX, "tcp:a:1", "a").alive(1, 2)
    here, there = AddressBook("a"), AddressBook("b")
    for book in (here, there):
        book.saw(4, alive)
    assert (here.of(4), there.of(4), here.of(5)) == (UNIX, "tcp:a:1", None)


def test_an_address_that_others_cannot_use_does_not_replace_one_that_is_known() -> None:
    book = AddressBook("b", {4: "tcp:a:1"})
    book.saw(4, Alive(1, UNIX, 2, "", "a"))
    assert book.of(4) == "tcp:a:1"


def test_one_that_listens_at_all_addresses_is_found_by_the_name_of_its_host() -> None:
    own = OwnAddress.of("tcp:0.0.0.0:7", "tcp::::8", "a", "node1")
    assert (own.local, own.remote) == ("tcp:node1:7", "tcp:node1:8")
    assert OwnAddress.of("tcp:h:7", "", "a", "node1") == OwnAddress("tcp:h:7", "", "a")


def test_a_replica_does_not_listen_beyond_loopback_in_the_clear() -> None:
    settings = ChainSettings(ChainPlace(0, 0, 2), (), LocalCoordinator(), 0.5)
    with pytest.raises(BadInput, match="in the clear"):
        Server("tcp:0.0.0.0:0", SECRET, chain=settings)


def replicas_over_tcp(tls: TlsConfig) -> None:
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
        client.close()


def test_replicas_find_each_other_over_tcp() -> None:
    replicas_over_tcp(PLAIN)


@pytest.mark.whole
@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")
def test_replicas_find_each_other_under_tls(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "server")
    replicas_over_tcp(TlsConfig(str(cert), str(key), authority=str(cert)))
