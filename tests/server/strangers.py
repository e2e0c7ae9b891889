"""What a stranger does who reaches the store and the servers of a run, and has no secret."""

from __future__ import annotations

import random
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shoal.errors import ShoalError
from shoal.protocol.endpoint import connect
from shoal.protocol.frames import FrameKind, Header
from shoal.protocol.handshake import authenticate
from shoal.runtime.config import TlsConfig
from shoal.runtime.secret import new_secret
from tests.cluster import Cluster
from tests.namespaces import Host

Stranger = Callable[[TCPStore, random.Random, list[str]], None]


def overwrite(store: TCPStore, chance: random.Random, keys: list[str]) -> None:
    """Garbage for every value that ranks read."""
    for key in keys:
        _put(store, key, chance.randbytes(chance.choice([0, 5, 40, 200])))


def swap(store: TCPStore, chance: random.Random, keys: list[str]) -> None:
    """The value of another key: the address of another rank, for example."""
    for key in keys:
        _put(store, key, store.get(chance.choice(keys)))


def impersonate(store: TCPStore, chance: random.Random, keys: list[str]) -> None:
    """The same value with another address in it, as text or as four bytes."""
    for key in keys:
        value = store.get(key).replace(b"10.77.0.1", b"10.77.0.9")
        _put(store, key, value.replace(bytes([10, 77, 0, 1]), bytes([10, 77, 0, 9])))


STRANGERS: dict[str, Stranger] = {"overwrite": overwrite, "swap": swap, "impersonate": impersonate}


def _put(store: TCPStore, key: str, value: bytes) -> None:
    store.set(key, value)


def at_the_store(
    cluster: Cluster, port: int, name: str, ending: threading.Event, chance: random.Random
) -> int:
    """Write over every value of the ranks, once each; the number of values."""
    seen: set[str] = set()

    def act(store: TCPStore) -> None:
        keys = [key for key in store.list_keys() if "run " in key and key not in seen]
        seen.update(keys)
        STRANGERS[name](store, chance, keys)
        time.sleep(0.002)

    def body() -> int:
        master = cluster.hosts[0].address
        limit = timedelta(seconds=2)
        while not ending.is_set():
            with suppress(Exception):  # it is not there yet, or not any longer
                socket.create_connection((master, port), 1.0).close()  # torch would log it
                store = TCPStore(master, port, None, False, limit, wait_for_workers=False)
                while not ending.is_set():
                    act(store)
            time.sleep(0.05)
        return len(seen)

    return cluster.hosts[1].call(body)


def at_the_servers(cluster: Cluster, ending: threading.Event) -> int:
    """Connect to every port of the first host with TLS and a wrong secret; how often."""
    victim, host = cluster.hosts
    tls = TlsConfig(authority=str(cluster.cert))

    def body() -> int:
        tried = 0
        while not ending.is_set():
            for port in _listening(victim):
                with suppress(ShoalError, OSError):
                    _knock(f"tcp:{victim.address}:{port}", tls)
                tried += 1
            time.sleep(0.05)
        return tried

    return host.call(body)


def _knock(address: str, tls: TlsConfig) -> None:
    connection = connect(address, tls, 1.0)
    try:
        connection.sock.settimeout(1.0)
        authenticate(connection, new_secret(), "control", Header(FrameKind.HELLO, 0, 7, 1))
    finally:
        connection.close()


def _listening(host: Host) -> list[int]:
    """All ports that listen on this host."""
    command = ["ip", "netns", "exec", host.name, "cat", "/proc/net/tcp"]
    text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    lines = [line.split() for line in text.splitlines()[1:]]
    return [int(words[1].split(":")[1], 16) for words in lines if words[3] == "0A"]
