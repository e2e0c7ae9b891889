"""An etcd cluster as coordinator: members that die, answers that are lost, TLS, addresses."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shoal.errors import BadInput
from shoal.runtime.config import EtcdConfig, RunConfig
from shoal.runtime.secret import new_secret
from shoal.server.coordinator import Unavailable
from shoal.server.coordinator.client import open_etcd
from shoal.server.coordinator.etcd_coordinator import EtcdCoordinator
from shoal.server.coordinator.etcd_gateway import (
    Endpoint,
    TransactionAnswer,
    check_trusted,
    parse,
    parse_endpoints,
)
from tests.server.coordinator.etcd_cluster import NEEDS_ETCD, EtcdCluster, etcd_cluster
from tests.server.coordinator.helpers import changed, count, incremented, until
from tests.server.cutting import proxied
from tests.server.test_tls import certificate, needs_openssl

SECRET = new_secret()


def opened(hosts: str, call_s: float = 30.0) -> EtcdCoordinator:
    return open_etcd(RunConfig(), f"etcd://{hosts}", SECRET, "a test", call_s)


# ---- addresses ----------------------------------------------------------------------------------


def test_addresses_of_members() -> None:
    assert parse_endpoints("etcd://h1:2380,h2") == [Endpoint("h1", 2380), Endpoint("h2", 2379)]
    assert parse_endpoints("etcds://[::1]:77,[fe80::1]") == [
        Endpoint("::1", 77),
        Endpoint("fe80::1", 2379),
    ]


@pytest.mark.parametrize(
    "address",
    [
        "etcd://",
        "etcd://h1,,h2",
        "etcd://h1:0",
        "etcd://h1:two",
        "etcd://h1:2379/path,h2",
        "etcd://::1",
        "http://h1",
    ],
)
def test_an_address_that_is_none_is_bad_input(address: str) -> None:
    with pytest.raises(BadInput, match=r"SHOAL_COORDINATOR is .*use etcd://"):
        parse_endpoints(address)


def test_members_of_this_host_or_of_a_trusted_network_need_no_tls() -> None:
    check_trusted(parse_endpoints("etcd://127.0.0.1,[::1],localhost"), trusted_network=False)
    check_trusted(parse_endpoints("etcd://10.0.0.1"), trusted_network=True)


@pytest.mark.parametrize(
    "answer", [b"", b"<html>", b"[]", b'{"header":{"revision":"x"}}', b"[" * 9]
)
def test_what_is_no_answer_of_etcd_is_an_error(answer: bytes) -> None:
    with pytest.raises(ValueError, match="is no answer of etcd"):
        parse(answer, TransactionAnswer)


def test_no_member_that_answers_is_unavailable_and_named() -> None:
    with opened("127.0.0.1:1,127.0.0.1:2", call_s=0.2) as coordinator:
        for call in (
            lambda: coordinator.get("a"),
            lambda: coordinator.put_if("a", b"", 0),
            lambda: coordinator.keep_alive(1),
            lambda: coordinator.watch("a", None, 0.1),
        ):
            with pytest.raises(Unavailable, match=r"etcd at 127\.0\.0\.1:1, 127\.0\.0\.1:2"):
                call()


# ---- a cluster of three -------------------------------------------------------------------------


@pytest.fixture
def three() -> Iterator[EtcdCluster]:
    with etcd_cluster(3) as cluster:
        cluster.leader()
        yield cluster


def incremented_there(hosts: str, ending: threading.Event) -> list[int]:
    with opened(hosts) as coordinator:
        return incremented(coordinator, lambda versions: ending.is_set())


@pytest.mark.whole
@NEEDS_ETCD
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_changes_go_on_when_the_leader_is_lost(three: EtcdCluster, how: signal.Signals) -> None:
    """Each change is made once, also those whose answer was lost with the leader."""
    with opened(three.hosts) as coordinator:
        coordinator.remove_all()
        lease = coordinator.grant(60.0, "server 1")
        coordinator.put_if("alive/1", b"", 0, lease.id)
        ending = threading.Event()
        with ThreadPoolExecutor(2) as pool:
            made = [pool.submit(incremented_there, three.hosts, ending) for _ in range(2)]
            _wait_count(coordinator, 5)
            leader = three.leader()
            three.signal(leader, how)
            _wait_count(coordinator, count(coordinator) + 10)
            ending.set()
            results = [each.result() for each in made]
        versions = [version for several in results for version in several]
        assert count(coordinator) == len(versions)
        assert len(set(versions)) == len(versions)
        assert coordinator.keep_alive(lease.id) > 0
        if how is signal.SIGSTOP:
            three.signal(leader, signal.SIGCONT)
            three.signal(leader, signal.SIGKILL)
        three.start(leader)
        assert coordinator.put_if("after", b"", 0).version > max(versions)


def _wait_count(coordinator: EtcdCoordinator, wanted: int) -> None:
    until(lambda: count(coordinator) >= wanted, f"{wanted} increments")


@pytest.mark.whole
@NEEDS_ETCD
def test_a_watch_goes_on_at_another_member(three: EtcdCluster) -> None:
    with opened(three.hosts) as coordinator, opened(three.hosts) as watcher:
        coordinator.remove_all()
        entry = coordinator.put_if("chain/0", b"0", 0)
        seen = watcher.watch("chain/0", None)
        leader = three.leader()
        three.signal(leader, signal.SIGKILL)
        for number in range(1, 4):
            entry = coordinator.put_if("chain/0", b"%d" % number, entry.version)
        while seen.entries["chain/0"].value != b"3":
            seen = watcher.watch("chain/0", seen)
        assert seen.entries == {"chain/0": entry}


# ---- lost answers -------------------------------------------------------------------------------


@pytest.mark.whole
@NEEDS_ETCD
@pytest.mark.parametrize("seed", [0, 1])
def test_each_change_is_made_once_however_often_connections_break(seed: int) -> None:
    with etcd_cluster() as cluster:
        cluster.leader()
        with proxied([f"tcp:{cluster.hosts}"], seed, 30, 3_000) as (proxy,):
            with opened(proxy.address.removeprefix("tcp:")) as client:
                seen = changed(client, 40)
            assert proxy.cut > 5
        assert seen == sorted(set(seen))
        with opened(cluster.hosts) as direct:
            assert direct.get("a") is None


@pytest.mark.whole
@NEEDS_ETCD
def test_a_change_that_was_given_up_is_not_made_after_the_next_call() -> None:
    """The member is stopped with the request in its socket, and goes on after the next call."""
    with etcd_cluster() as cluster:
        cluster.leader()
        with opened(cluster.hosts, call_s=1.0) as client, opened(cluster.hosts) as other:
            client.put_if("b", b"", 0)
            cluster.signal(0, signal.SIGSTOP)
            with pytest.raises(Unavailable, match="has not answered /v3/kv/txn"):
                client.put_if("a", b"late", 0)
            cluster.signal(0, signal.SIGCONT)
            seen = client.get("a")
            assert other.watch("a", other.list("a"), 1.0).entries.get("a") == seen


# ---- TLS ----------------------------------------------------------------------------------------


@pytest.mark.whole
@NEEDS_ETCD
@needs_openssl
def test_etcd_with_tls_and_certificates_of_clients(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "etcd")
    own, own_key = certificate(tmp_path, "client")
    both = tmp_path / "both.pem"
    both.write_text(cert.read_text() + own.read_text())  # its gateway is a client, too
    options = [
        *("--cert-file", str(cert), "--key-file", str(key)),
        *("--client-cert-auth", "--trusted-ca-file", str(both)),
    ]
    with etcd_cluster(1, options, "https") as cluster:
        address = f"etcds://{cluster.hosts}"
        config = RunConfig(etcd=EtcdConfig(str(cert), str(own), str(own_key)))
        with open_etcd(config, address, SECRET, "a test", 20.0) as client:
            written = client.put_if("a", b"1", 0)
            assert client.watch("a", None).entries == {"a": written}
        stranger = RunConfig(etcd=EtcdConfig(str(own), str(own), str(own_key)))
        with (
            open_etcd(stranger, address, SECRET, "a test", 0.5) as client,
            pytest.raises(Unavailable, match=r"(?i)certificate verify failed"),
        ):
            client.get("a")
    missing = RunConfig(etcd=EtcdConfig(str(tmp_path / "none.pem")))
    with pytest.raises(BadInput, match=r"SHOAL_ETCD_CA .*none\.pem"):
        open_etcd(missing, "etcds://127.0.0.1", SECRET, "a test")
