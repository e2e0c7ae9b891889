"""An etcd cluster on free ports of this host, whose members can be killed and stopped."""

from __future__ import annotations

import json
import os
import platform
import random
import shutil
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.folders import socket_folder
from tests.server.coordinator.helpers import until

NEEDS_ETCD = pytest.mark.skipif(
    shutil.which("etcd") is None, reason="there is no etcd: apt-get install etcd-server"
)


@dataclass
class EtcdMember:
    client_port: int
    peer_port: int
    process: subprocess.Popen[bytes] | None = None


@dataclass
class EtcdCluster:
    folder: Path
    members: list[EtcdMember]
    tls: Sequence[str] = ()  # options
    scheme: str = "http"
    running: set[int] = field(default_factory=set)

    @property
    def hosts(self) -> str:
        return ",".join(f"127.0.0.1:{member.client_port}" for member in self.members)

    def start(self, number: int) -> None:
        member = self.members[number]
        client = f"{self.scheme}://127.0.0.1:{member.client_port}"
        peer = f"http://127.0.0.1:{member.peer_port}"
        peers = [f"n{i}=http://127.0.0.1:{m.peer_port}" for i, m in enumerate(self.members)]
        command = [
            *("etcd", "--name", f"n{number}", "--data-dir", str(self.folder / f"n{number}")),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", ",".join(peers), *self.tls),
        ]
        environ = {**os.environ, "ETCD_UNSUPPORTED_ARCH": _architecture()}
        with open(self.folder / f"n{number}.log", "ab") as log:
            member.process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
        self.running.add(number)

    def leader(self) -> int:
        """The number of the member that leads; waits until one does."""
        found: list[int] = []

        def is_known() -> bool:
            for number in self.running:
                with suppress(OSError, ValueError, KeyError):
                    status = self._status(number)
                    if status["leader"] == status["header"]["member_id"]:
                        found.append(number)
                        return True
            return False

        until(is_known, "a leader of etcd")
        return found[0]

    def _status(self, number: int) -> Any:
        url = f"http://127.0.0.1:{self.members[number].client_port}/v3/maintenance/status"
        request = urllib.request.Request(url, b"{}", {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=2.0) as answer:
            return json.loads(answer.read())

    def signal(self, member: int, number: signal.Signals) -> None:
        process = self.members[member].process
        assert process is not None
        process.send_signal(number)
        if number is signal.SIGKILL:
            process.wait()
            self.running.discard(member)

    def close(self) -> None:
        for member in self.members:
            if member.process is not None:
                member.process.kill()
                member.process.wait()


@contextmanager
def etcd_cluster(
    size: int = 1, tls: Sequence[str] = (), scheme: str = "http"
) -> Iterator[EtcdCluster]:
    with socket_folder() as folder:
        ports = _free_ports(2 * size)
        members = [EtcdMember(ports[2 * i], ports[2 * i + 1]) for i in range(size)]
        cluster = EtcdCluster(folder, members, tls, scheme)
        try:
            for number in range(size):
                cluster.start(number)
            yield cluster
        finally:
            cluster.close()


def _free_ports(count: int) -> list[int]:
    """Below those that the kernel gives out: no other process takes one meanwhile."""
    text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    end = int(text.split()[0])
    found: set[int] = set()
    while len(found) < count:
        port = random.randrange(end // 2, end)
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            found.add(port)
    return list(found)


def _architecture() -> str:
    return {"aarch64": "arm64", "armv7l": "arm"}.get(platform.machine(), "")
