"""Two hosts and a stranger without the key, who cannot join, read or disturb."""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shoal.comm.store.client import GuardedStore
from shoal.errors import ShoalError
from shoal.runtime.secret import new_secret
from tests.cluster import Cluster, finish, free_port, pieces_of, start_rank
from tests.namespaces import Sniffer, two_hosts, why_not

pytestmark = [
    pytest.mark.whole,
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl"),
]
Attack = Callable[[tuple[str, int]], None]


def start_ranks(cluster: Cluster, port: int, **changes: str) -> list[subprocess.Popen[str]]:
    return [start_rank(cluster, rank, port, **changes) for rank in range(2)]


def garbage(address: tuple[str, int]) -> None:
    with socket.create_connection(address, 2.0) as sock:
        sock.sendall(random.Random(0).randbytes(4096))


def wrong_key(address: tuple[str, int]) -> None:
    GuardedStore(*address, new_secret(), timeout_s=1.0).set("key", "value")
    pytest.fail("it got in")


def torch_client(address: tuple[str, int]) -> None:
    limit = timedelta(seconds=0.5)
    store = TCPStore(*address, None, False, limit, wait_for_workers=False)
    store.set("hello/1", "stranger")
    pytest.fail("it got in")


class Replay:
    """Sends what the first bytes of a handshake of a rank were, as a sniffer has them."""

    def __init__(self, sniffer: Sniffer):
        self._sniffer = sniffer

    def __call__(self, address: tuple[str, int]) -> None:
        with socket.create_connection(address, 2.0) as sock:
            for packet in self._sniffer.packets[:200]:
                payload = packet[66:]  # behind Ethernet, IP and TCP with timestamps
                if len(payload) == 64:
                    sock.sendall(payload)


def half_open(address: tuple[str, int], held: list[socket.socket]) -> None:
    for _ in range(200):
        held.append(socket.create_connection(address, 2.0))
    while len(held) > 600:
        held.pop(0).close()


def disturb(cluster: Cluster, port: int, attacks: list[Attack], ending: threading.Event) -> int:
    """On the second host, until the end; how often."""

    def body() -> int:
        held: list[socket.socket] = []
        tried = 0
        address = (cluster.hosts[0].address, port)
        while not ending.is_set():
            for attack in (*attacks, lambda a: half_open(a, held)):
                with suppress(ShoalError, OSError, RuntimeError):
                    attack(address)
                    tried += 1
            time.sleep(0.02)
        for sock in held:
            sock.close()
        return tried

    return cluster.hosts[1].call(body)


def test_a_stranger_at_the_rendezvous_changes_nothing(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    with two_hosts() as hosts:
        cluster = Cluster(hosts, tmp_path)
        alone = finish(start_ranks(cluster, free_port(hosts[0])))
        assert alone.statuses == (0, 0), alone.output[-3000:]
        sniffer = Sniffer(hosts[0])
        port = free_port(hosts[0])
        ending = threading.Event()
        counts: list[int] = []
        attacks: list[Attack] = [garbage, wrong_key, torch_client, Replay(sniffer)]
        stranger = threading.Thread(
            target=lambda: counts.append(disturb(cluster, port, attacks, ending))
        )
        stranger.start()
        try:
            ended = finish(start_ranks(cluster, port))
        finally:
            ending.set()
            stranger.join()
            sniffer.close()
        assert ended.statuses == (0, 0), ended.output[-3000:]
        assert ended.weights == alone.weights and len(ended.weights) == 1
        assert counts[0] > 0
        everything = b"\n".join(sniffer.packets)
        assert b"shoal-store-1" in everything
        assert not any(piece in everything for piece in pieces_of(cluster.secret))
        assert not any(
            piece.decode("latin1") in ended.output for piece in pieces_of(cluster.secret)
        )


@pytest.mark.parametrize("trusted", ["0", "1"])
def test_several_hosts_without_a_key_need_a_trusted_network(tmp_path: Path, trusted: str) -> None:
    if reason := why_not():
        pytest.skip(reason)
    with two_hosts() as hosts:
        cluster = Cluster(hosts, tmp_path)
        changes = {"SHOAL_SECRET": "", "SHOAL_TRUSTED_NETWORK": trusted}
        changes["XDG_CONFIG_HOME"] = str(tmp_path)
        port = free_port(hosts[0])
        ended = finish(start_ranks(cluster, port, **changes))
        if trusted == "1":
            assert ended.statuses == (0, 0), ended.output[-3000:]
            assert "lets in every process that reaches it" in ended.output
        else:
            assert 0 not in ended.statuses
            assert "`shoal keys new`" in ended.output, ended.output[-3000:]


def test_a_rank_with_another_key_cannot_join(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    with two_hosts() as hosts:
        cluster = Cluster(hosts, tmp_path)
        port = free_port(hosts[0])
        first = start_rank(cluster, 0, port)
        other = start_rank(cluster, 1, port, SHOAL_SECRET=new_secret().hex())
        text = other.communicate(timeout=120)[0]
        first.kill()
        first.communicate()
        assert other.returncode != 0
        assert "is not the rendezvous of this run" in text
