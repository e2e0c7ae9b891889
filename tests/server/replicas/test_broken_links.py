"""Connections between replicas that break while all processes live are made again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from shoal.protocol.endpoint import PLAIN
from shoal.server.chain import ChainConfig
from shoal.server.chain.manager import Fetch
from shoal.server.chain.messages import Ask, Confirm
from shoal.server.consistency import Rule
from shoal.server.member.peer_link import PeerLink
from shoal.server.member.place import AddressBook, ChainPlace
from shoal.server.member.runtime import ChainRuntime
from shoal.server.member.start import ChainSettings
from shoal.server.process.model_host import ModelHost
from shoal.server.process.server import Server
from tests.server.cutting import CuttingProxy
from tests.server.helpers import SECRET
from tests.server.replicas.world import TTL_S, World, pulled, push_one_hot, world

ASYNC = Rule(1, asynchronous=True)


@dataclass
class Proxies:
    """Between replicas; each breaks `cuts` connections, after up to `most_bytes`."""

    seed: int
    cuts: int
    most_bytes: int
    stack: ExitStack
    made: dict[str, CuttingProxy] = field(default_factory=dict)

    def to(self, address: str) -> str:
        if address not in self.made:
            seed = self.seed + len(self.made)
            proxy = CuttingProxy(address, seed, self.cuts, self.most_bytes)
            self.stack.callback(proxy.close)
            self.made[address] = proxy
        return self.made[address].address

    @property
    def cut(self) -> int:
        return sum(proxy.cut for proxy in self.made.values())


@dataclass(frozen=True)
class ProxiedSettings(ChainSettings):
    proxies: Proxies | None = None

    def book(self) -> AddressBook:
        proxies = self.proxies
        assert proxies is not None

        class Book(AddressBook):
            def of(self, process: int) -> str | None:
                address = super().of(process)
                return None if address is None else proxies.to(address)

        return Book()


class ProxiedWorld(World):
    """Over TCP; replicas reach each other through proxies, and clients do not."""

    def __init__(self, proxies: Proxies, *arguments: Any):
        self.proxies = proxies
        super().__init__(*arguments)

    def start(self, shard: int, replica: int) -> Server:
        place = ChainPlace(shard, replica, self.replicas, self.consistency)
        settings = ProxiedSettings(place, {}, self.coordinator, TTL_S, proxies=self.proxies)
        server = Server("tcp:127.0.0.1:0", SECRET, tls=PLAIN, chain=settings)
        self.addresses[shard][replica] = server.address
        self.servers[shard, replica] = server
        return server


@contextmanager
def proxied_world(seed: int, cuts: int, most_bytes: int) -> Iterator[ProxiedWorld]:
    with ExitStack() as stack:
        proxies = Proxies(seed, cuts, most_bytes, stack)
        made = ProxiedWorld(proxies, None, 3, 1, "strong", PLAIN)
        stack.callback(made.close)
        yield made


@pytest.mark.parametrize(
    ("seed", "pushes", "cuts"),
    [
        (1, 24, 3),
        *(pytest.param(seed, 60, 20, marks=pytest.mark.whole) for seed in range(20, 200, 20)),
    ],
)
def test_pushes_count_once_though_connections_between_replicas_break(
    seed: int, pushes: int, cuts: int
) -> None:
    with proxied_world(seed, cuts, most_bytes=2_000) as made:
        client = made.client(0, ASYNC)
        for step in range(pushes):
            push_one_hot(client, step % 8, step)
        weights = pulled(client)
        assert sum(weights) == -pushes
        assert min(weights[:8]) >= -(pushes // 8 + 1)
        assert made.copies_are_equal()
        assert made.proxies.cut >= 2


def test_unix_sockets_between_replicas_are_opened_again() -> None:
    with world() as made:
        client = made.client(0, ASYNC)
        for step in range(12):
            for server in made.servers.values():
                assert server.chain is not None
                for link in server.chain.runtime.links.values():
                    link.reconnect()
            push_one_hot(client, step % 8, step)
        assert sum(pulled(client)) == -12
        assert made.members() == (0, 1, 2)
        assert made.copies_are_equal()


class _ForgetfulPeer:
    """A link to a member whose first answer is lost; `changed` is notified all the time."""

    def __init__(self, runtime: ChainRuntime):
        self.runtime = runtime
        self.asks = 0

    def post(self, message: object) -> None:
        if isinstance(message, Ask):
            self.asks += 1
            if self.asks > 1:
                answer = Confirm(message.epoch, message.number)
                threading.Thread(target=self.runtime.deliver, args=(1, answer)).start()


def test_a_question_whose_answer_was_lost_is_repeated_while_others_are_busy() -> None:
    """The keeper looks at the coordinator, and other workers push, many times a second."""
    runtime = ChainRuntime(ChainPlace(0, 0, 2), ModelHost(SECRET, 1 << 20, dict), lambda: None)
    peer = _ForgetfulPeer(runtime)
    runtime.links = {1: cast(PeerLink, peer)}
    config = ChainConfig(1, (0, 1), (runtime.node.incarnation, 7))
    runtime.reconfigure(lambda manager: manager.fetched(Fetch(1), config, 1, {}))
    is_over = threading.Event()

    def keep_busy() -> None:
        while not is_over.wait(0.01):
            runtime.reconfigure(lambda manager: [])

    busy = threading.Thread(target=keep_busy)
    busy.start()
    try:
        runtime.confirm(runtime.node)
    finally:
        is_over.set()
        busy.join()
    assert peer.asks == 2
