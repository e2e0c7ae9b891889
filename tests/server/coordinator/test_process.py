"""The coordinator as a process: killed while it writes, stopped, without room on the disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from shoal.errors import BadInput
from shoal.launch.here.coordinator import MAX_RESTARTS, coordinated
from shoal.launch.here.process_config import Replication
from shoal.runtime.config import RunConfig, TlsConfig
from shoal.server.coordinator import Alive, Conflict, Unavailable
from shoal.server.coordinator.client import RemoteCoordinator, open_coordinator
from shoal.server.coordinator.service import CoordinatorService, Core
from tests.server.coordinator.etcd_cluster import NEEDS_ETCD, etcd_cluster
from tests.server.coordinator.helpers import (
    SECRET,
    Said,
    changed,
    count,
    embedded,
    incremented,
    run_dir,
    service,
    until,
)
from tests.server.cutting import proxied
from tests.server.test_tls import certificate, needs_openssl

POINTS = [f"store.{name}" for name in ("begin", "partial", "temporary", "fsync", "rename")]


def test_it_starts_without_torch() -> None:
    hidden = "import sys; sys.modules['torch'] = None\n"
    program = "import shoal.server.coordinator.main, shoal.server.coordinator.client"
    subprocess.run([sys.executable, "-c", hidden + program], check=True)


def test_it_is_started_again_from_its_store_and_ends_with_the_block() -> None:
    with embedded() as found:
        written = found.client.put_if("chain/0", b"1", 0)
        first = found.process.pid
        found.signal()
        assert found.client.get("chain/0") == written
        assert found.client.put_if("chain/0", b"2", written.version).version > written.version
        second = found.process.pid
    assert second != first
    assert found.said == ["the coordinator was killed (SIGKILL): started again (1 of 5)"]
    for pid in (first, second):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.whole
@pytest.mark.parametrize("name", POINTS)
@pytest.mark.parametrize("passage", [1, 2])
def test_killed_while_it_writes_it_loses_nothing_and_counts_nothing_twice(
    name: str, passage: int
) -> None:
    """Two clients go on through the kill; what was answered is there, once."""
    each = 30
    with embedded(f"{name}:kill@{passage}") as found, ThreadPoolExecutor(2) as pool:
        with RemoteCoordinator(found.run_dir.coordinator, SECRET, call_s=20.0) as other:
            made = [
                pool.submit(incremented, client, lambda v: len(v) == each, bytes(60_000))
                for client in (found.client, other)
            ]
            versions = [version for several in made for version in several.result()]
        assert len(found.said) == 1
        assert len(set(versions)) == 2 * each
        assert count(found.client) == 2 * each
        found.signal()
        assert count(found.client) == 2 * each


@pytest.mark.whole
@pytest.mark.parametrize("name", POINTS)
def test_a_fresh_coordinator_that_is_killed_at_its_first_change_starts_again(name: str) -> None:
    with embedded(f"{name}:kill") as found:
        assert found.client.put_if("a", b"", 0).version == 1
        assert len(found.said) == 1


@pytest.mark.whole
def test_leases_have_their_whole_time_after_a_restart() -> None:
    with embedded() as found:
        client = found.client
        lease = client.grant(60.0, "server 1")
        bound = client.put_if("alive/1", b"address", 0, lease.id)
        found.signal()
        assert client.live("alive/") == {"alive/1": bound}
        assert client.keep_alive(lease.id) > 50.0
        assert client.grant(60.0, "server 2").id > lease.id
        assert client.put_if("alive/1", b"", bound.version).version > bound.version


@pytest.mark.whole
def test_a_coordinator_that_was_stopped_ends_no_lease_for_it() -> None:
    with embedded() as found:
        lease = found.client.grant(1.0, "server 1")
        found.client.put_if("alive/1", b"address", 0, lease.id)
        found.signal(signal.SIGSTOP)
        said = r"this process: the coord.*not answered List alive/1"
        with (
            RemoteCoordinator(found.run_dir.coordinator, SECRET, call_s=1.5, start_s=0.0) as client,
            pytest.raises(Unavailable, match=said),
        ):
            client.get("alive/1")
        found.signal(signal.SIGCONT)
        assert found.client.keep_alive(lease.id) > 0


@pytest.mark.whole
def test_a_stopped_coordinator_ends_with_the_block_and_leaves_no_socket() -> None:
    with embedded() as found:
        found.client.get("a")
        found.client.close()
        found.signal(signal.SIGSTOP)
        found.process.close()
        assert not (found.run_dir.path / "coordinator.sock").exists()
    assert not [t for t in threading.enumerate() if t.name == "shoal-coordinator"]


@pytest.mark.whole
def test_it_is_started_again_a_few_times_only() -> None:
    with embedded() as found:
        for number in range(MAX_RESTARTS + 1):
            found.client.get("a")
            found.signal()
            until(lambda count=number: len(found.said) > count, "a line about it")  # type: ignore[misc]
    assert found.said[-1].endswith("no server that is lost can be replaced now")
    assert len(found.said) == MAX_RESTARTS + 1


@pytest.mark.whole
def test_what_it_writes_is_said_before_it_is_given_up() -> None:
    with embedded() as found:
        found.client.put_if("a", bytes(1000), 0)
        file = found.run_dir.coordinator_store
        data = bytearray(file.read_bytes())
        data[40] ^= 1
        file.write_bytes(data)
        found.signal()
        said = found.said
        until(lambda: bool(said) and "no server that is lost" in said[-1], "the last line")
    assert "damaged" in said[1] and said[1].startswith(
        "coordinator: shoal: the coordinator's store"
    )


@pytest.mark.whole
def test_a_server_that_has_exited_is_forgotten_before_its_lease_ends() -> None:
    with embedded() as found:
        lease = found.client.grant(60.0, "server 1")
        value = msgspec.msgpack.encode(Alive(1, "", 77))
        found.client.put_if("alive/1", value, 0, lease.id)
        seen = found.client.list("alive/")
        found.process.server_exited(1, 77)
        assert found.client.watch("alive/", seen, 20.0).entries == {}
        found.signal(signal.SIGSTOP)
        found.process.server_exited(1, 77)  # its thread ends with the block


# ---------------------------------------------------------------------- of the user


def test_a_coordinator_of_the_user_is_used_as_it_is() -> None:
    with run_dir() as folder:
        config = replace(RunConfig(), coordinator="tcp:127.0.0.1:4000")
        with coordinated(Replication(2), config, folder, Said()) as coordinator:
            coordinator.watch(lambda listing: None)
            assert coordinator.config == config


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("etcd://10.0.0.1", r"etcd at 10\.0\.0\.1:2379 in the clear: use etcds"),
        pytest.param(
            "etcd://127.0.0.1:1",
            r"the launcher: etcd at 127\.0\.0\.1:1 has not answered",
            marks=pytest.mark.whole,
        ),
    ],
)
def test_an_etcd_that_is_not_trusted_or_does_not_answer_is_bad_input(
    address: str, said: str
) -> None:
    config = replace(RunConfig(), coordinator=address)
    with run_dir() as folder, pytest.raises(BadInput, match=said):
        coordinated(Replication(2), config, folder, Said()).__enter__()


@pytest.mark.whole
@NEEDS_ETCD
def test_no_key_of_the_run_is_left_in_etcd() -> None:
    with run_dir() as folder, etcd_cluster() as cluster:
        config = replace(RunConfig(), coordinator=f"etcd://{cluster.hosts}")
        with coordinated(Replication(2), config, folder, Said()) as coordinator:
            client = open_coordinator(replace(coordinator.config, run_dir=folder))
            client.put_if("chain/0", b"1", 0)
        assert client.list("").entries == {}
        client.close()


@pytest.mark.whole
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_each_change_is_made_once_however_often_connections_break(seed: int) -> None:
    """Without a Conflict: there is no other client, so each one would be of a change of its own."""
    with service(tcp=True) as found, proxied([found.addresses[0]], seed, 25, 900) as (proxy,):
        with RemoteCoordinator(proxy.address, SECRET, call_s=30.0) as client:
            seen = changed(client, 60, leases=True)
        assert proxy.cut > 5
        assert seen == sorted(set(seen))
        assert found._core._store.revision == len(seen) * 11 // 10


def test_a_client_that_is_closed_ends_the_waits_of_other_threads() -> None:
    with service() as found:
        client = RemoteCoordinator(found.addresses[0], SECRET)
        seen = client.list("a")
        begun = threading.Event()

        def wait() -> None:
            begun.set()
            client.watch("a", seen, 60.0)

        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(wait)
            begun.wait()
            client.close()
            with pytest.raises(Unavailable):
                waiting.result()
        with pytest.raises(Unavailable, match="closed"):
            client.get("a")


@pytest.mark.whole
@needs_openssl
def test_other_hosts_connect_by_tls(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "coordinator")
    tls = TlsConfig(str(cert), str(key), authority=str(cert))
    with CoordinatorService(Core(), SECRET, ["tcp:127.0.0.1:0"], tls) as found:
        config = replace(RunConfig(), coordinator=found.addresses[0], secret=SECRET, tls=tls)
        client = open_coordinator(config)
        assert client.put_if("a", b"1", 0).version == 1
        with pytest.raises(Conflict):
            client.put_if("a", b"1", 0)
        client.close()


def test_beyond_this_host_the_network_has_to_be_trusted() -> None:
    config = replace(RunConfig(), coordinator="tcp:10.255.255.1:9", secret=SECRET)
    client = open_coordinator(config)
    with pytest.raises(BadInput, match="in the clear"):
        client.get("a")
    client.close()
