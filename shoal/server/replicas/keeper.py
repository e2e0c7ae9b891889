"""A replica's dealings with the coordinator: its lease, the configuration, the lost workers.

A thread asks what `ChainManager` wants to know, at regular intervals and when it is poked. While
the coordinator is down nothing changes, and the chain goes on as it is.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import msgspec

from shoal.coordinator.interface import Conflict, Coordinator, CoordinatorError, Lease, LeaseLost
from shoal.runtime.failpoints import failpoint
from shoal.server.chain.config import ChainConfig
from shoal.server.chain.manager import Fetch, Swap
from shoal.server.replicas.runtime import ChainRuntime

_OF_TTL = 5  # renewals, and looks, in the time of a lease
_MAX_REQUESTS = 8  # of one look


class Alive(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The value of alive/<process>: which life of the replica it is, and where it listens."""

    incarnation: int
    address: str = ""


class Keeper:
    """One thread of a server process."""

    def __init__(
        self, runtime: ChainRuntime, coordinator: Coordinator, ttl_s: float, address: str = ""
    ):
        self._runtime = runtime
        self._coordinator = coordinator
        self._ttl_s = ttl_s
        self._address = address
        self._lease: Lease | None = None
        self._registered: int | None = None  # the incarnation in alive/<process>
        self._poked = threading.Event()
        self._closed = False
        runtime.poke = self._poked.set
        self._thread = threading.Thread(target=self._run, name="shoal-keeper", daemon=True)

    @property
    def chain_key(self) -> str:
        return f"chain/{self._runtime.place.shard}"

    @property
    def alive_key(self) -> str:
        return f"alive/{self._runtime.place.process}"

    def start(self) -> None:
        self._thread.start()

    def close(self, join_s: float, revoke: bool = False) -> None:
        self._closed = True
        self._poked.set()
        if self._thread is not threading.current_thread():
            self._thread.join(join_s)
        if revoke and self._lease is not None:
            with suppress(CoordinatorError):
                self._coordinator.revoke(self._lease.id)
        self._coordinator.close()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        renewed_s = float("-inf")
        while not self._closed:
            is_due = time.monotonic() - renewed_s >= self._ttl_s / _OF_TTL
            with suppress(CoordinatorError):
                if is_due:
                    renewed_s = time.monotonic()
                    self._keep_lease()
                self._look()
            self._poked.wait(self._ttl_s / _OF_TTL)
            self._poked.clear()

    def _keep_lease(self) -> None:
        runtime = self._runtime
        asked_s = time.monotonic()
        if self._lease is None:
            self._grant()
            return
        try:
            left_s = self._coordinator.keep_alive(self._lease.id)
        except LeaseLost:
            self._lease = None
            with runtime.changed:
                runtime.lease.lost()
            self._grant()
            return
        with runtime.changed:
            runtime.lease.renewed(asked_s, left_s)
        if self._registered != runtime.node.incarnation:
            self._register()

    def _grant(self) -> None:
        asked_s = time.monotonic()
        lease = self._coordinator.grant(self._ttl_s, self._runtime.place.in_words())
        self._lease = lease
        self._register()
        with self._runtime.changed:
            self._runtime.lease.granted(asked_s, lease.ttl_s)

    def _register(self) -> None:
        """Say that this life of the replica is there, in the place of an earlier one."""
        assert self._lease is not None
        incarnation = self._runtime.node.incarnation
        value = msgspec.msgpack.encode(Alive(incarnation, self._address))
        known = self._coordinator.get(self.alive_key)
        version = 0 if known is None else known.version
        try:
            self._coordinator.put_if(self.alive_key, value, version, self._lease.id)
        except LeaseLost:
            self._lease = None
            raise
        self._registered = incarnation

    def _look(self) -> None:
        runtime = self._runtime
        with runtime.changed:
            runtime.manager.look()
        for _ in range(_MAX_REQUESTS):
            if self._registered != runtime.node.incarnation:
                if self._lease is None:
                    return
                self._register()
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
        config = None if stored is None else msgspec.msgpack.decode(stored.value, type=ChainConfig)
        version = 0 if stored is None else stored.version
        alive = self._alive()
        self._runtime.reconfigure(lambda manager: manager.fetched(request, config, version, alive))

    def _alive(self) -> dict[int, int]:
        """The incarnation of each replica of this shard that has a lease."""
        place = self._runtime.place
        found = {}
        for key, stored in self._coordinator.live("alive/").items():
            number = key.removeprefix("alive/")
            if number.isdigit() and int(number) // place.replicas == place.shard:
                with suppress(msgspec.MsgspecError):
                    alive = msgspec.msgpack.decode(stored.value, type=Alive)
                    found[int(number) % place.replicas] = alive.incarnation
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
