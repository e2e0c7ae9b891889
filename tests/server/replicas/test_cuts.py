"""Cuts between hosts, in both directions and in one: nothing is lost, nothing counts twice.

Each replica is on a host of its own, the coordinator on another, a worker on a third. Hosts are
network namespaces; all run as threads of one process, with real TCP between them.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.runtime.config import TlsConfig
from shoal.server.chain import ChainConfig
from shoal.server.consistency import Rule
from shoal.server.coordinator.client import RemoteCoordinator
from shoal.server.coordinator.service import CoordinatorService
from shoal.server.member.place import ChainPlace
from shoal.server.member.start import ChainSettings
from shoal.server.process.server import Server
from tests.namespaces import Lan, lan, why_not
from tests.server.coordinator.helpers import until
from tests.server.helpers import SECRET
from tests.server.replicas.world import TTL_S, World, pulled, push_one_hot

TRUSTED = TlsConfig(trusted_network=True)
LIMIT_S = 60.0  # of every wait, on a busy machine
ASYNC = Rule(1, asynchronous=True)
KEYS = 8


class HostWorld(World):
    """Hosts 0 to replicas - 1 have a replica each, then come the coordinator and the worker."""

    def __init__(self, net: Lan, replicas: int = 3):
        self.net = net
        self.acknowledged: Counter[tuple[int, int]] = Counter()  # (epoch, replica)
        self.of_coordinator = replicas
        self.of_worker = replicas + 1
        super().__init__(Path(), replicas, tls=TRUSTED)

    @cached_property
    def service(self) -> CoordinatorService:
        there = self.net.hosts[self.of_coordinator]
        core, address = self.coordinator._core, [f"tcp:{there.address}:0"]
        return there.call(lambda: CoordinatorService(core, SECRET, address, TRUSTED))

    def start(self, shard: int, replica: int) -> Server:
        server = self.net.hosts[replica].call(lambda: self._start(replica))
        self.addresses[shard][replica] = server.address
        self.servers[shard, replica] = server
        return server

    def _start(self, replica: int) -> Server:
        place = ChainPlace(0, replica, self.replicas)
        who = place.in_words()
        coordinator = RemoteCoordinator(self.service.addresses[0], SECRET, who, TRUSTED)
        settings = ChainSettings(place, coordinator, TTL_S)
        listen = f"tcp:{self.net.hosts[replica].address}:0"
        server = Server(listen, SECRET, tls=TRUSTED, chain=settings)
        self._record(server, replica)
        return server

    def _record(self, server: Server, replica: int) -> None:
        """Who acknowledges in which epoch; under the lock in which operations are applied."""
        assert server.chain is not None
        runtime = server.chain.runtime
        apply = runtime._apply

        def recorded(position: int, proposed: Any) -> None:
            if position in runtime.waiters:
                self.acknowledged[runtime.node.epoch, replica] += 1
            apply(position, proposed)

        runtime._apply = recorded  # type: ignore[method-assign]

    @property
    def config(self) -> ChainConfig:
        """As the coordinator has it."""
        stored = self.coordinator.get("chain/0")
        assert stored is not None
        return msgspec.msgpack.decode(stored.value, type=ChainConfig)

    def one_head_an_epoch(self) -> bool:
        return len({epoch for epoch, _ in self.acknowledged}) == len(self.acknowledged)

    def close(self) -> None:
        self.net.heal()
        super().close()
        self.service.close()


class Pusher:
    """A thread on the host of the worker that pushes one-hot integers until it is stopped."""

    def __init__(self, world: HostWorld):
        self._world = world
        self._is_over = threading.Event()
        self.counts = [0] * KEYS  # acknowledged pushes of each element
        self._found = ThreadPoolExecutor(1).submit(self._push)

    def wait(self, is_reached: Callable[[], bool]) -> None:
        until(lambda: is_reached() or self._found.done(), "it is reached while pushes go on")
        if self._found.done():
            self._found.result()

    def wait_more(self, pushes: int = 5) -> None:
        wanted = sum(self.counts) + pushes
        self.wait(lambda: sum(self.counts) >= wanted)

    def stop(self) -> list[float]:
        """What is pulled after the last push."""
        self._is_over.set()
        return self._found.result(LIMIT_S)

    def _push(self) -> list[float]:
        self._world.net.hosts[self._world.of_worker].enter()
        with closing(self._world.client(0, ASYNC)) as client:
            for step in itertools.count():
                if self._is_over.is_set():
                    break
                push_one_hot(client, step % KEYS, step)
                self.counts[step % KEYS] += 1
            return pulled(client)


@contextmanager
def hosts_world(replicas: int = 3) -> Iterator[HostWorld]:
    """Skips the test where there are no namespaces."""
    if reason := why_not():
        pytest.skip(reason)
    with lan(replicas + 2) as net:
        made = HostWorld(net, replicas)
        try:
            yield made
        finally:
            made.close()


pytestmark = pytest.mark.whole
Cut = Callable[[HostWorld], object]


def between(made: HostWorld, member: int, hears: bool, is_heard: bool) -> None:
    """Cut one member from all others, in one direction or in both."""
    here = made.config.members[member]
    for other in range(len(made.net.hosts)):
        if other != here and not hears:
            made.net.cut(other, here)
        if other != here and not is_heard:
            made.net.cut(here, other)


CUTS: dict[str, Cut] = {
    "head from middle": lambda m: m.net.cut_both(*m.config.members[:2]),
    "middle is not heard by tail": lambda m: m.net.cut(*m.config.members[1:]),
    "head from the others": lambda m: [
        m.net.cut_both(m.config.members[0], other) for other in m.config.members[1:]
    ],
    "head alone": lambda m: m.net.isolate(m.config.members[0]),
    "middle alone": lambda m: m.net.isolate(m.config.members[1]),
    "tail alone": lambda m: m.net.isolate(m.config.members[2]),
    "head from coordinator": lambda m: m.net.cut_both(m.config.members[0], m.of_coordinator),
    "head is not heard by coordinator": lambda m: m.net.cut(m.config.members[0], m.of_coordinator),
    "head does not hear coordinator": lambda m: m.net.cut(m.of_coordinator, m.config.members[0]),
    "head is not heard": lambda m: between(m, 0, hears=True, is_heard=False),
    "head does not hear": lambda m: between(m, 0, hears=False, is_heard=True),
    "tail is not heard": lambda m: between(m, 2, hears=True, is_heard=False),
}


@pytest.mark.parametrize("cut", CUTS)
def test_pushes_go_on_beside_a_cut_and_all_copies_agree_after_it(cut: str) -> None:
    with hosts_world() as made:
        pusher = Pusher(made)
        pusher.wait_more()
        epoch = made.config.epoch
        CUTS[cut](made)
        pusher.wait(lambda: made.config.epoch > epoch)
        pusher.wait_more()
        made.net.heal()
        pusher.wait(lambda: len(made.config.members) == 3)
        pusher.wait_more()
        assert pusher.stop()[: len(pusher.counts)] == [-float(n) for n in pusher.counts]
        assert made.one_head_an_epoch()
        assert made.copies_are_equal()


def test_a_worker_that_is_cut_off_with_the_head_goes_on_after_the_cut() -> None:
    with hosts_world() as made:
        pusher = Pusher(made)
        pusher.wait_more()
        before = made.config
        head = made.config.members[0]
        for here in (head, made.of_worker):
            for there in (*made.config.members[1:], made.of_coordinator):
                made.net.cut_both(here, there)
        until(lambda: made.config.epoch > before.epoch, "the others go on")
        assert head not in made.config.members
        made.net.heal()
        pusher.wait_more()
        pusher.wait(lambda: len(made.config.members) == 3)
        assert pusher.stop()[: len(pusher.counts)] == [-float(n) for n in pusher.counts]
        assert made.one_head_an_epoch()
        assert made.copies_are_equal()
