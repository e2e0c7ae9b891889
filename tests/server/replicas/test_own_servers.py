"""Server processes that are started by hand on hosts of their own, and found by their addresses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.runtime.config import RunConfig, ServerConfig, TlsConfig
from shoal.runtime.run_dir import RunDir
from shoal.server.client.client import Client
from shoal.server.consistency import Rule
from tests.coordinator.helpers import until
from tests.namespaces import Host, Lan, lan, why_not
from tests.server.helpers import SECRET, client_at
from tests.server.replicas.world import pulled, push_one_hot

TRUSTED = TlsConfig(trusted_network=True)
REPLICAS = 3


class OwnServers:
    """Hosts 0 to 2 have a server each, host 3 the coordinator and the worker."""

    def __init__(self, net: Lan, folder: Path):
        self.net = net
        self.run_dir = RunDir(folder)
        self.run_dir.write_secret(SECRET)
        self.processes: list[subprocess.Popen[str]] = []
        there = net.hosts[REPLICAS]
        base = RunConfig(tls=TRUSTED, environ=dict(os.environ))
        beyond = replace(base, run_dir=self.run_dir, coordinator_beyond=f"tcp:{there.address}:0")
        self._start(there, "shoal.coordinator.main", beyond)
        coordinator = self._address_of_coordinator()
        self.addresses = []
        for index in range(REPLICAS):
            host = net.hosts[index]
            address = f"tcp:{host.address}:7001"  # all ports of the namespace are free
            server = ServerConfig(index, address, replicas=REPLICAS, parent_pid=os.getpid())
            config = replace(base, coordinator=coordinator, secret=SECRET, server=server)
            self._start(host, "shoal.server.main", config)
            self.addresses.append(address)

    def _start(self, host: Host, module: str, config: RunConfig) -> None:
        process = host.run([sys.executable, "-m", module], config.to_environment())
        self.processes.append(process)

    def _address_of_coordinator(self) -> str:
        file = self.run_dir.coordinator_address
        until(file.exists, "the coordinator starts")
        return file.read_text()

    def client(self) -> Client:
        return client_at([self.addresses], 0, Rule(1, asynchronous=True), tls=TRUSTED)

    def close(self) -> None:
        self.net.heal()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.communicate()


@contextmanager
def own_servers(folder: Path) -> Iterator[OwnServers]:
    with lan(REPLICAS + 1) as net:
        made = OwnServers(net, folder)
        try:
            yield made
        finally:
            made.close()


@pytest.mark.whole
@pytest.mark.timeout(200)
def test_server_processes_on_three_hosts_outlive_a_cut_and_a_kill(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    with own_servers(tmp_path) as made:

        def work() -> list[float]:
            client = made.client()
            for step in range(24):
                if step == 8:
                    made.net.isolate(0)
                if step == 16:
                    made.processes[2].kill()  # server 1
                push_one_hot(client, step % 8, step)
            found = pulled(client)
            client.close()
            return found

        weights = made.net.hosts[REPLICAS].call(work)
        assert weights[:9] == [-3.0] * 8 + [0.0]
