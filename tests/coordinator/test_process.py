"""The coordinator as a process: killed while it writes, stopped, without room on the disk."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.coordinator import Conflict, Unavailable
from shoal.coordinator.client import RemoteCoordinator, open_coordinator
from shoal.coordinator.service import CoordinatorService, Core
from shoal.coordinator.store import Store
from shoal.errors import BadInput
from shoal.runtime.config import RunConfig, TlsConfig
from tests.coordinator.helpers import (
    SECRET,
    CoordinatorProcess,
    assert_changed_once,
    changed,
    count,
    incremented,
    process,
    service,
    until,
)
from tests.server.cutting import proxied
from tests.server.test_tls import certificate, needs_openssl

APPEND = ["log.append.before", "log.append.partial", "log.append.written", "log.append.synced"]
COMPACT = [
    "log.compact.begin",
    "log.compact.temporary",
    "log.compact.fsync",
    "log.compact.renamed",
    "log.compact.done",
]


def restarting(found: CoordinatorProcess, ending: threading.Event) -> int:
    """Start it again whenever it dies; how often that was."""
    restarts = 0
    while not ending.is_set():
        if found.process is not None and found.process.poll() is not None:
            found.start()
            restarts += 1
        ending.wait(0.01)
    return restarts


@pytest.mark.whole
@pytest.mark.parametrize("name", [*APPEND, *COMPACT])
@pytest.mark.parametrize("passage", [1, 2])
def test_killed_while_it_writes_it_loses_nothing_and_counts_nothing_twice(
    name: str, passage: int
) -> None:
    """Two clients go on through the kill; what was answered is there, once."""
    if name.startswith("log.compact"):
        passage += 1  # the first one makes the file
    each = 30
    with process() as found:
        found.start([f"{name}:kill@{passage}"])
        ending = threading.Event()
        with ThreadPoolExecutor(3) as pool:
            restarts = pool.submit(restarting, found, ending)
            try:
                clients = [found.client() for _ in range(2)]
                made = [
                    pool.submit(incremented, c, lambda v: len(v) == each, bytes(60_000))
                    for c in clients
                ]
                versions = [version for several in made for version in several.result()]
            finally:
                ending.set()
        assert restarts.result() == 1
        assert len(set(versions)) == 2 * each
        assert count(clients[0]) == 2 * each
        found.kill()
        found.start()
        assert count(clients[1]) == 2 * each


@pytest.mark.whole
def test_a_fresh_coordinator_that_is_killed_while_it_makes_its_log_starts_again() -> None:
    for name in COMPACT:
        with process() as found:
            found.start([f"{name}:kill"])
            assert found.wait() == -signal.SIGKILL
            found.start()
            assert found.client().put_if("a", b"", 0).version == 1


@pytest.mark.whole
def test_leases_have_their_whole_time_after_a_restart() -> None:
    with process() as found:
        found.start()
        client = found.client()
        lease = client.grant(60.0, "server 1")
        bound = client.put_if("alive/1", b"address", 0, lease.id)
        found.kill()
        found.start()
        assert client.live("alive/") == {"alive/1": bound}
        assert client.keep_alive(lease.id) > 50.0
        assert client.grant(60.0, "server 2").id > lease.id
        assert client.put_if("alive/1", b"", bound.version).version > bound.version


@pytest.mark.whole
def test_a_coordinator_that_was_stopped_ends_no_lease_for_it() -> None:
    with process() as found:
        found.start()
        client = found.client()
        lease = client.grant(1.0, "server 1")
        client.put_if("alive/1", b"address", 0, lease.id)
        found.signal(signal.SIGSTOP)
        impatient = found.client(call_s=1.5)
        impatient._start_s = 0.0
        with pytest.raises(
            Unavailable,
            match=r"this process: the coord.*not answered List alive/1",
        ):
            impatient.get("alive/1")
        found.signal(signal.SIGCONT)
        assert client.keep_alive(lease.id) > 0


def limited_files(limit_bytes: int) -> Callable[[], None]:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))

    return limit


@pytest.mark.whole
def test_a_full_disk_refuses_changes_until_there_is_room() -> None:
    with process() as found:
        found.limits = limited_files(100_000)
        found.start()
        client = found.client()
        first = client.put_if("a", bytes(60_000), 0)
        for _ in range(3):
            with pytest.raises(Unavailable, match=r"could not write its log .*nothing was changed"):
                client.put_if("a", bytes(50_000), first.version)
            assert client.get("a") == first
        small = client.put_if("b", b"small", 0)
        limit = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(found.pid, resource.RLIMIT_FSIZE, limit)
        second = client.put_if("a", bytes(50_000), first.version)
        assert second.version > small.version
        found.limits = None
        found.kill()
        found.start()
        assert (client.get("a"), client.get("b")) == (second, small)


@pytest.mark.whole
def test_it_ends_with_its_launcher_and_leaves_no_socket() -> None:
    with process() as found:
        found.start()
        client = found.client()
        client.get("a")
        client.close()
        found.signal(signal.SIGTERM)
        assert found.wait() == 0
        until(lambda: not (found.run_dir.path / "coordinator.sock").exists(), "the end")


@pytest.mark.whole
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_each_change_is_made_once_however_often_connections_break(seed: int) -> None:
    """Without a Conflict: there is no other client, so each one would be of a change of its own."""
    with service(tcp=True) as found, proxied([found.addresses[0]], seed, 25, 900) as (proxy,):
        with RemoteCoordinator(proxy.address, SECRET, call_s=30.0) as client:
            seen = changed(client, 60, leases=True)
        assert proxy.cut > 5
        assert seen == sorted(set(seen))
        with RemoteCoordinator(found.addresses[0], SECRET) as direct:
            assert_changed_once(direct, seen)


def test_a_client_that_is_closed_ends_the_waits_of_other_threads() -> None:
    with service() as found:
        client = RemoteCoordinator(found.addresses[0], SECRET)
        client.get("a")
        begun = threading.Event()

        def wait() -> None:
            begun.set()
            client.watch("a", 0, 60.0)

        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(wait)
            begun.wait()
            client.close()
            with pytest.raises(Unavailable):
                waiting.result()
        with pytest.raises(Unavailable, match="closed"):
            client.get("a")


def test_a_coordinator_that_is_closed_ends_watches() -> None:
    with service() as found:
        client = RemoteCoordinator(found.addresses[0], SECRET, call_s=0.2)
        client.get("a")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.watch, "a", 0, 1.0)
            found.close()
            waiting.exception()
        client.close()


@pytest.mark.whole
@needs_openssl
def test_other_hosts_connect_by_tls(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "coordinator")
    tls = TlsConfig(str(cert), str(key), authority=str(cert))
    with CoordinatorService(Core(Store()), SECRET, ["tcp:127.0.0.1:0"], tls) as found:
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
