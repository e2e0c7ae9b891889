"""A copy's dealings with the coordinator: its lease, the configuration, the lost workers.

One thread renews the lease, over a connection of its own: it waits for no operation that is being
applied, and for no other request. Another asks what `ChainManager` wants to know, at regular
intervals and when it is poked. While the coordinator is down nothing changes, and the chain goes on
as it is.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from shoal.coordinator.alive import Alive, alive_key
from shoal.coordinator.interface import Conflict, Coordinator, CoordinatorError, Lease, LeaseLost
from shoal.runtime.decoders import msgpack_decoder
from shoal.runtime.failpoints import failpoint
from shoal.server.chain.config import ChainConfig
from shoal.server.chain.manager import Fetch, Swap
from shoal.server.member.place import AddressBook, OwnAddress
from shoal.server.member.runtime import ChainRuntime

_OF_TTL = 5  # renewals, and looks, in the time of a lease
_MAX_REQUESTS = 8  # of one look
_APART_OF_TTL = 2  # a copy without a connection for so many leases is said to be unreachable


class Keeper:
    """Two threads of a server process."""

    def __init__(
        self,
        runtime: ChainRuntime,
        coordinator: Coordinator,
        ttl_s: float,
        own: OwnAddress,
        book: AddressBook,
        leases: Coordinator | None = None,
        unreachable: Callable[[float], tuple[int, ...]] = lambda seconds: (),
    ):
        """What the others say of themselves goes into `book`. `leases` is the same coordinator over
        another connection. `unreachable`: the copies to which there has been no connection for so
        many seconds."""
        self._runtime = runtime
        self._coordinator = coordinator
        self._leases = leases or coordinator
        self._ttl_s = ttl_s
        self._own = own
        self._book = book
        self._unreachable = unreachable
        self._lease: Lease | None = None
        self._registered: tuple[int, tuple[int, ...]] | None = None  # in alive/<process>
        self._poked = threading.Event()
        runtime.poke = self._poked.set
        self._threads = [
            threading.Thread(target=target, name="shoal-keeper", daemon=True)
            for target in (self._renew, self._run)
        ]
        self._over = threading.Event()
        self._registering = threading.Lock()

    @property
    def chain_key(self) -> str:
        return f"chain/{self._runtime.place.shard}"

    @property
    def alive_key(self) -> str:
        return alive_key(self._runtime.place.process)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self, join_s: float) -> None:
        self._over.set()
        self._poked.set()
        for thread in self._threads:
            thread.join(join_s)
        self._coordinator.close()
        self._leases.close()

    # ------------------------------------------------------------------ the threads

    def _renew(self) -> None:
        while not self._over.is_set():
            with suppress(CoordinatorError):
                self._keep_lease()
            self._over.wait(self._ttl_s / _OF_TTL)

    def _run(self) -> None:
        while not self._over.is_set():
            with suppress(CoordinatorError):
                self._look()
            self._poked.wait(self._ttl_s / _OF_TTL)
            self._poked.clear()

    def _keep_lease(self) -> None:
        lease = self._runtime.lease
        asked_s = time.monotonic()
        if self._lease is None or not lease.is_held:
            self._grant()
            return
        try:
            left_s = self._leases.keep_alive(self._lease.id)
        except LeaseLost:
            self._lease = None
            lease.lost()
            self._grant()
            return
        lease.renewed(asked_s, left_s)

    def _grant(self) -> None:
        asked_s = time.monotonic()
        lease = self._leases.grant(self._ttl_s, self._runtime.place.in_words())
        self._register(lease, self._leases)
        self._runtime.lease.granted(asked_s, lease.ttl_s)
        self._lease = lease
        self._poked.set()

    def _register(self, lease: Lease, coordinator: Coordinator) -> None:
        """Say that this life of the replica is there, in the place of an earlier one."""
        with self._registering:
            self._put_alive(lease, coordinator)

    def _put_alive(self, lease: Lease, coordinator: Coordinator) -> None:
        state = self._own_state()
        value = msgspec.msgpack.encode(self._own.alive(state[0], os.getpid(), state[1]))
        known = coordinator.get(self.alive_key)
        version = 0 if known is None else known.version
        coordinator.put_if(self.alive_key, value, version, lease.id)
        self._registered = state

    def _own_state(self) -> tuple[int, tuple[int, ...]]:
        """The incarnation, and whom it does not reach."""
        return self._runtime.node.incarnation, self._unreachable(_APART_OF_TTL * self._ttl_s)

    def _look(self) -> None:
        runtime = self._runtime
        with runtime.changed:
            runtime.manager.look()
        for _ in range(_MAX_REQUESTS):
            lease = self._lease
            if lease is None:
                return
            if self._registered != self._own_state():
                self._register(lease, self._coordinator)
            with runtime.changed:
                request = runtime.manager.next_request(time.monotonic())
            if isinstance(request, Fetch):
                self._fetch(request)
            elif request is not None:
                self._swap(request)
            else:
                return

    def _fetch(self, request: Fetch) -> None:
        stored = self._coordinator.get(self.chain_key)
        config = None if stored is None else msgpack_decoder(ChainConfig).decode(stored.value)
        version = 0 if stored is None else stored.version
        found = self._alive()
        alive = {replica: each.incarnation for replica, each in found.items()}
        unreachable = {replica: each.unreachable for replica, each in found.items()}
        self._runtime.reconfigure(
            lambda manager: manager.fetched(request, config, version, alive, unreachable)
        )

    def _alive(self) -> dict[int, Alive]:
        """What each copy of this shard that has a lease says of itself."""
        place = self._runtime.place
        found = {}
        for key, stored in self._coordinator.live("alive/").items():
            number = key.removeprefix("alive/")
            if not number.isdigit():
                continue
            with suppress(msgspec.MsgspecError):
                alive = msgpack_decoder(Alive).decode(stored.value)
                self._book.saw(int(number), alive)
                if int(number) // place.copies == place.shard:
                    found[int(number) % place.copies] = alive
        return found

    def _swap(self, request: Swap) -> None:
        failpoint("election.before")
        value = msgspec.msgpack.encode(request.config)
        try:
            stored = self._coordinator.put_if(self.chain_key, value, request.version)
        except Conflict:
            with self._runtime.changed:
                self._runtime.manager.conflicted()
            return
        failpoint("election.after")
        self._runtime.reconfigure(lambda manager: manager.swapped(request, stored.version))
