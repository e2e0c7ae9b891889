"""Connections that break at random places, TLS, and clients that several threads close and use."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.coordinator.client import RemoteCoordinator, open_coordinator
from shoal.coordinator.interface import Conflict, Unavailable, Versioned
from shoal.coordinator.service import CoordinatorService, Core
from shoal.coordinator.store import Store
from shoal.errors import BadInput
from shoal.runtime.config import RunConfig, TlsConfig
from tests.coordinator.helpers import SECRET, service
from tests.server.cutting import proxied
from tests.server.test_tls import certificate, needs_openssl


@pytest.mark.whole
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_each_change_is_made_once_however_often_connections_break(seed: int) -> None:
    """Without a Conflict: there is no other client, so each one would be of a change of its own."""
    with service(tcp=True) as found, proxied([found.addresses[0]], seed, 25, 900) as (proxy,):
        with RemoteCoordinator(proxy.address, SECRET, call_s=30.0) as client:
            entry = Versioned(b"", 0)
            seen = []
            for number in range(60):
                lease = client.grant(60.0, "x")
                entry = client.put_if("a", b"%d" % number, entry.version, lease.id)
                seen.append(entry.version)
                if number % 10 == 9:
                    client.delete_if("a", entry.version)
                    entry = Versioned(b"", 0)
        assert proxy.cut > 5
        assert seen == sorted(set(seen))
        with RemoteCoordinator(found.addresses[0], SECRET) as direct:
            changes = direct.watch("a", 0, 0.0).changes
        assert [change.revision for change in changes if change.value is not None] == seen
        assert len(changes) == 66


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
