"""Many connections that say nothing, and a process without descriptors: servers go on."""

from __future__ import annotations

import gc
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from shoal.runtime.acceptor import MAX_UNAUTHENTICATED, Strangers
from shoal.runtime.config import TlsConfig
from shoal.server.consistency import Rule
from shoal.server.process.server import Server
from shoal.server.protocol.endpoint import PLAIN
from tests.server.coordinator.helpers import until
from tests.server.helpers import SECRET, client_of, fill, weights
from tests.server.test_tls import certificate, needs_openssl


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def silent(server: Server) -> socket.socket:
    host, port = server.address.removeprefix("tcp:").split(":")
    return socket.create_connection((host, int(port)), 20.0)


@pytest.fixture(params=["tcp", pytest.param("tls", marks=needs_openssl)])
def tls(request: pytest.FixtureRequest, tmp_path: Path) -> TlsConfig:
    if request.param == "tcp":
        return PLAIN
    cert, key = certificate(tmp_path, "server")
    return TlsConfig(str(cert), str(key), authority=str(cert))


def test_silent_connections_are_limited_and_workers_are_served(tls: TlsConfig) -> None:
    with Server("tcp:127.0.0.1:0", SECRET, tls=tls) as server:
        gc.collect()  # what earlier tests left
        before = open_descriptors()
        count = 4 * MAX_UNAUTHENTICATED
        strangers = [silent(server) for _ in range(count)]
        until(
            lambda: sum(server.refused.values()) >= 2 * (count - MAX_UNAUTHENTICATED),
            "evicted, and closed by their threads",
        )
        assert len(server.strangers) == MAX_UNAUTHENTICATED
        assert open_descriptors() - before <= count + MAX_UNAUTHENTICATED
        client = client_of([server], 0, Rule(1), tls=tls)
        assert client.commit(*fill(client, 2.0)).verdict == "admitted"
        assert torch.any(weights(client, version=1) == -2.0)
        client.leave()
        client.close()
        for sock in strangers:
            sock.close()
        until(lambda: open_descriptors() <= before, "descriptors are given back")


def test_a_flood_from_one_host_does_not_end_the_connections_of_another() -> None:
    strangers = Strangers()
    pairs = [socket.socketpair() for _ in range(MAX_UNAUTHENTICATED + 5)]
    honest = [ours for ours, _ in pairs[:2]]
    hosts = {ours: f"host {min(i, 2)}" for i, (ours, _) in enumerate(pairs)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.runtime.acceptor.host_of", hosts.__getitem__)
        evicted = sum(strangers.add(ours) for ours, _ in pairs)
    assert evicted == 5
    assert [strangers.remove(ours) for ours in honest] == [True, True]
    assert [strangers.remove(ours) for ours, _ in pairs[2:7]] == [False] * 5
    for pair in pairs:
        for sock in pair:
            sock.close()


def test_a_hello_that_comes_byte_by_byte_is_ended_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.server.protocol.handshake.HANDSHAKE_S", 0.3)
    over = threading.Event()
    with Server("tcp:127.0.0.1:0", SECRET) as server, silent(server) as sock:

        def drip() -> None:
            while not over.wait(0.02):
                with suppress(OSError):
                    sock.send(b"s")

        dripping = threading.Thread(target=drip)
        dripping.start()
        with suppress(ConnectionResetError):
            while sock.recv(4096):
                pass
        over.set()
        dripping.join()
        until(lambda: server.refused["silent or broken before HELLO"] == 1, "counted")
