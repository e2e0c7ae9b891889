"""Replicated servers as threads of one process, and clients that push one-hot gradients."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch
from torch import Tensor

from shoal.runtime.config import TlsConfig
from shoal.server.chain import ChainConfig
from shoal.server.chain.node import ChainConsistency
from shoal.server.client.client import Client
from shoal.server.consistency import Rule
from shoal.server.coordinator import Lease, forget
from shoal.server.member import start
from shoal.server.member.place import ChainPlace
from shoal.server.member.start import ChainSettings
from shoal.server.messages import Commit
from shoal.server.process.server import Server
from shoal.server.protocol.endpoint import PLAIN
from tests.folders import socket_folder
from tests.server.coordinator.helpers import LocalCoordinator
from tests.server.helpers import MODEL, SECRET, client_at

TTL_S = 0.5  # the servers look at the coordinator 5 times in this time


class SharedCoordinator(LocalCoordinator):
    """Of all servers of a world: none of them closes it.

    Leases last longer than any test, so that threads that get no core lose none.
    """

    def grant(self, ttl_s: float, holder: str) -> Lease:
        return Lease(super().grant(600.0, holder).id, ttl_s)

    def close(self) -> None:
        return None


class World:
    """`shards` chains of `replicas` servers each."""

    def __init__(
        self,
        folder: Path,
        replicas: int,
        shards: int = 1,
        consistency: ChainConsistency = "strong",
        tls: TlsConfig | None = None,
    ):
        """With `tls`, which may be plain, over TCP: the coordinator says where servers listen."""
        self.replicas = replicas
        self.shards = shards
        self.consistency: ChainConsistency = consistency
        self.tls = tls
        self.coordinator = SharedCoordinator()
        self.clients: list[Client] = []
        self.addresses = [
            [f"unix:{folder}/server-{s * replicas + r}.sock" for r in range(replicas)]
            for s in range(shards)
        ]
        self.servers: dict[tuple[int, int], Server] = {}
        for shard in range(shards):
            for replica in range(replicas):
                self.start(shard, replica)

    def start(self, shard: int, replica: int) -> Server:
        place = ChainPlace(shard, replica, self.replicas, self.consistency)
        settings = ChainSettings(place, self.coordinator, TTL_S)
        if self.tls is None:
            server = Server(self.addresses[shard][replica], SECRET, chain=settings)
        else:
            server = Server("tcp:127.0.0.1:0", SECRET, tls=self.tls, chain=settings)
            self.addresses[shard][replica] = server.address
        self.servers[shard, replica] = server
        return server

    def crash_with(self, shard: int, replica: int, operations: int) -> None:
        """From now on no other copy gets what this head does; after so many operations it ends."""
        parts = self.servers[shard, replica].chain
        assert parts is not None
        runtime = parts.runtime
        with runtime.changed:
            links, runtime.links = runtime.links, {}
            upto = runtime.node.position + operations

        def end() -> None:
            with runtime.changed:
                assert runtime.changed.wait_for(lambda: runtime.node.position >= upto, 60.0)
            for link in links.values():
                link.close()
            self.crash(shard, replica)

        threading.Thread(target=end).start()

    def crash(self, shard: int, replica: int) -> None:
        """All of its connections end; the launcher notices, so that its lease ends."""
        self.servers.pop((shard, replica)).close()
        forget(self.coordinator, shard * self.replicas + replica, os.getpid())

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for server in list(self.servers.values()):
            server.close()

    def copies_are_equal(self) -> bool:
        """Of each shard."""
        return all(
            torch.equal(self.weights_of(shard, members[0]), self.weights_of(shard, other))
            for shard in range(self.shards)
            for members in [self.members(shard)]
            for other in members[1:]
        )

    def head(self, shard: int = 0) -> int:
        """As the coordinator knows it."""
        return self.members(shard)[0]

    def members(self, shard: int = 0) -> tuple[int, ...]:
        stored = self.coordinator.get(f"chain/{shard}")
        assert stored is not None
        return msgspec.msgpack.decode(stored.value, type=ChainConfig).members

    def client(self, rank: int, rule: Rule, **options: Any) -> Client:
        client = client_at(self.addresses, rank, rule, tls=self.tls or PLAIN, **options)
        self.clients.append(client)
        return client

    def weights_of(self, shard: int, replica: int) -> Tensor:
        """When all that the replica has logged is applied there."""
        server = self.servers[shard, replica]
        assert server.chain is not None
        server.chain.runtime.catch_up()
        return server.models[MODEL].state.shard.data


@contextmanager
def world(
    replicas: int = 3,
    shards: int = 1,
    consistency: ChainConsistency = "strong",
    tls: TlsConfig | None = None,
) -> Iterator[World]:
    with socket_folder() as folder, patch.object(start, "_APART_OF_TTL", 1000):
        made = World(folder, replicas, shards, consistency, tls)
        try:
            yield made
        finally:
            made.close()


def push_one_hot(client: Client, element: int, step: int, save: int | None = None) -> str:
    """Subtract 1 from one weight (SGD with lr=1)."""
    client.out.zero_()
    client.out[0, element_of(client, element)] = 1.0
    client.push(slice(0, client.size))
    heads = torch.ones(1, 1 + client.specs[0].parameters)
    ack = client.commit(Commit(step, 0, 1.0, save=save), heads)
    client.settle(ack.position)
    client.wait_settled()
    return ack.verdict


def element_of(client: Client, element: int) -> int:
    """Where the element of a parameter is in the flat buffer."""
    places = [
        held.start + i
        for spec in client.specs
        for held in spec.slices
        for i in range(math.prod(held.shape))
    ]
    return places[element]


def pulled(client: Client, version: int = 0) -> list[float]:
    """All elements of all parameters."""
    client.pull(None, version).wait()
    count = sum(math.prod(held.shape) for spec in client.specs for held in spec.slices)
    return [float(client.inbox[element_of(client, i)]) for i in range(count)]
