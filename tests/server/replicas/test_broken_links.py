"""Connections between replicas that break while all processes live are made again."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from shoal.server.consistency import Rule
from shoal.server.member.place import AddressBook
from shoal.server.protocol.endpoint import PLAIN
from tests.server.cutting import CuttingProxy
from tests.server.replicas.world import pulled, push_one_hot, world

ASYNC = Rule(1, asynchronous=True)


@pytest.mark.parametrize(
    ("seed", "pushes", "cuts"),
    [
        (1, 24, 3),
        *(pytest.param(seed, 60, 20, marks=pytest.mark.whole) for seed in range(20, 200, 20)),
    ],
)
def test_pushes_count_once_though_connections_between_replicas_break(
    monkeypatch: pytest.MonkeyPatch, seed: int, pushes: int, cuts: int
) -> None:
    """Replicas reach each other through proxies, and clients do not."""
    proxies: dict[str, CuttingProxy] = {}

    def proxied(book: AddressBook, process: int, address: str) -> None:
        if address not in proxies:
            proxies[address] = CuttingProxy(address, seed + len(proxies), cuts, 2_000)
            stack.callback(proxies[address].close)
        dict.__setitem__(book, process, proxies[address].address)

    monkeypatch.setattr(AddressBook, "__setitem__", proxied)
    with ExitStack() as stack:
        made = stack.enter_context(world(tls=PLAIN))
        client = made.client(0, ASYNC)
        for step in range(pushes):
            push_one_hot(client, step % 8, step)
        weights = pulled(client)
        assert sum(weights) == -pushes
        assert min(weights[:8]) >= -(pushes // 8 + 1)
        assert made.copies_are_equal()
        assert sum(proxy.cut for proxy in proxies.values()) >= 2
        made.close()  # before its proxies


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
