"""A server as one copy of its shard: the parts that take part in the chain.

Keeper    its lease and the configuration of the chain, at the coordinator. One thread renews the
          lease over a connection of its own: it waits for no operation that is being applied, and
          for no other request. While the coordinator is down the chain goes on as it is.
Leading   the head closes steps that wait for norms, follows the leader's log, and reports lost
          workers. A copy that becomes the head finds the work that the head before it has left.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from shoal.errors import ShoalError
from shoal.runtime import clock
from shoal.runtime.config import TlsConfig
from shoal.runtime.decoders import msgpack_decoder
from shoal.runtime.waits import Periodic
from shoal.server.chain import ChainConfig
from shoal.server.chain.manager import Fetch, Swap
from shoal.server.coordinator import (
    Alive,
    Conflict,
    Coordinator,
    CoordinatorError,
    Lease,
    LeaseLost,
    alive_key,
)
from shoal.server.member.operations import Decided, Lost, StepClosed
from shoal.server.member.peer_link import PeerLink
from shoal.server.member.place import AddressBook, ChainPlace, Elsewhere, own_address
from shoal.server.member.runtime import ChainRuntime
from shoal.server.messages import LogEntry
from shoal.server.model.membership import ModelFailure
from shoal.server.model.served_model import ServedModel
from shoal.server.process.log_stream import Follower
from shoal.server.process.model_host import ModelHost
from shoal.server.protocol import FrameKind, Header

_OF_TTL = 5  # renewals, and looks, in the time of a lease
_MAX_REQUESTS = 8  # of one look
_APART_OF_TTL = 2  # a copy without a connection for so many leases is said to be unreachable
_POLL_S = 0.25
ABSENT_S = 10.0  # a worker that has not come to a new head after so long is lost


class Keeper:
    """What one copy asks of the coordinator, and says to it."""

    def __init__(
        self, runtime: ChainRuntime, settings: ChainSettings, own: Alive, book: AddressBook
    ):
        """What others say of themselves goes into `book`."""
        self._runtime = runtime
        self._coordinator = settings.coordinator
        self._leases = settings.leases or settings.coordinator
        self._ttl_s = ttl_s = settings.ttl_s
        self._own = own
        self._book = book
        self._lease: Lease | None = None
        self._registered: Alive | None = None  # in alive/<process>
        self._looks = Periodic("shoal-keeper", ttl_s / _OF_TTL, self._look)
        self._renewals = Periodic("shoal-keeper", ttl_s / _OF_TTL, self._renew)
        runtime.poke = self._looks.poke
        self._registering = clock.Lock()
        self._chain_key = f"chain/{runtime.place.shard}"
        self._alive_key = alive_key(runtime.place.process)

    def start(self) -> None:
        for each in (self._renewals, self._looks):
            each.start()
            each.poke()

    def close(self, join_s: float) -> None:
        self._renewals.close(join_s)
        self._looks.close(join_s)
        self._coordinator.close()
        self._leases.close()

    def _renew(self) -> None:
        lease = self._runtime.lease
        asked_s = clock.monotonic()
        with suppress(CoordinatorError):
            if self._lease is not None and lease.is_held:
                try:
                    lease.renewed(asked_s, self._leases.keep_alive(self._lease.id))
                    return
                except LeaseLost:
                    self._lease = None
                    lease.lost()
            asked_s = clock.monotonic()
            granted = self._leases.grant(self._ttl_s, self._runtime.place.in_words())
            self._register(granted, self._leases)
            lease.granted(asked_s, granted.ttl_s)
            self._lease = granted
            self._looks.poke()

    def _register(self, lease: Lease, coordinator: Coordinator) -> None:
        """Announce this incarnation of the copy, in the place of an earlier one."""
        with self._registering:
            alive = self._alive_now()
            known = coordinator.get(self._alive_key)
            version = 0 if known is None else known.version
            coordinator.put_if(self._alive_key, msgspec.msgpack.encode(alive), version, lease.id)
            self._registered = alive

    def _alive_now(self) -> Alive:
        links = self._runtime.links
        node = self._runtime.node
        apart_s = _APART_OF_TTL * self._ttl_s
        apart = tuple(peer for peer, link in links.items() if link.down_s > apart_s)
        life = {"incarnation": node.incarnation, "pid": os.getpid()}
        return msgspec.structs.replace(self._own, **life, unreachable=apart)

    def _look(self) -> None:
        runtime = self._runtime
        with runtime.changed:
            runtime.manager.look()
        with suppress(CoordinatorError):
            for _ in range(_MAX_REQUESTS):
                lease = self._lease
                if lease is None:
                    return
                if self._registered != self._alive_now():
                    self._register(lease, self._coordinator)
                with runtime.changed:
                    request = runtime.manager.next_request(clock.monotonic())
                if isinstance(request, Fetch):
                    self._fetch(request)
                elif request is not None:
                    self._swap(request)
                else:
                    return

    def _fetch(self, request: Fetch) -> None:
        stored = self._coordinator.get(self._chain_key)
        config = None if stored is None else msgpack_decoder(ChainConfig).decode(stored.value)
        version = 0 if stored is None else stored.version
        place = self._runtime.place
        # what each copy of this shard that has a lease says of itself
        alive: dict[int, int] = {}
        unreachable: dict[int, tuple[int, ...]] = {}
        for key, leased in self._coordinator.live("alive/").items():
            with suppress(ValueError, msgspec.MsgspecError):
                process = int(key.removeprefix("alive/"))
                said = msgpack_decoder(Alive).decode(leased.value)
                self._book.saw(process, said)
                if process // place.copies == place.shard:
                    copy = process % place.copies
                    alive[copy], unreachable[copy] = said.incarnation, said.unreachable
        self._runtime.reconfigure(
            lambda manager: manager.fetched(request, config, version, alive, unreachable)
        )

    def _swap(self, request: Swap) -> None:
        value = msgspec.msgpack.encode(request.config)
        try:
            stored = self._coordinator.put_if(self._chain_key, value, request.version)
        except Conflict:
            with self._runtime.changed:
                self._runtime.manager.look()
            return
        self._runtime.reconfigure(lambda manager: manager.know(request.config, stored.version))


@dataclass(eq=False, repr=False)
class Leading:
    """One thread, and one more for each model that is followed, or whose step is being closed."""

    _runtime: ChainRuntime
    _address: Callable[[int], str | None]  # of a process; those of shard 0 come first
    _secret: bytes
    _tls: TlsConfig

    def __post_init__(self) -> None:
        self._following: dict[int, tuple[ServedModel, Follower]] = {}
        self._closing: dict[int, threading.Thread] = {}
        self._absent: dict[tuple[int, int], float] = {}  # (model, worker) -> since when
        self._looks = Periodic("shoal-leading", _POLL_S, self._look)
        self.start = self._looks.start
        self._runtime.on_applied = self._note_applied
        self._runtime.on_loss = self._looks.poke

    def close(self, join_s: float) -> None:
        self._looks.close(join_s)
        for _, follower in self._following.values():
            follower.close()
        for _, follower in self._following.values():
            follower.join(join_s)
        for thread in self._closing.values():
            thread.join(join_s)

    def _look(self) -> None:
        runtime = self._runtime
        self._note_absent()
        for number, model in list(runtime.host.models.items()) if runtime.node.is_head else ():
            if not model.is_leader:
                self._follow(number, model)
            elif model.state.open_step is not None:
                closing = self._closing.get(number)
                if closing is None or not closing.is_alive():
                    closing = clock.Thread(target=self._close_step, args=(number, model))
                    closing.daemon = True
                    closing.start()
                    self._closing[number] = closing
        for lost, reason in list(runtime.losses.items()):
            with suppress(Elsewhere, ModelFailure, ShoalError):
                if runtime.node.is_head:
                    runtime.execute(Lost(*lost, reason))
            runtime.losses.pop(lost, None)

    def _note_absent(self) -> None:
        """Workers that do not connect to a head that is new to them."""
        runtime = self._runtime
        absent = {
            (number, worker)
            for number, model in list(runtime.host.models.items() if runtime.node.is_head else ())
            for worker, member in list(model.membership.members.items())
            if not member.channels and worker not in model.membership.departed
        }
        now_s = clock.monotonic()
        self._absent = {key: self._absent.get(key, now_s) for key in absent}
        for (number, worker), since_s in self._absent.items():
            if now_s - since_s > ABSENT_S:
                reason = f"worker {worker} was lost: it has not come to the new head"
                runtime.losses.setdefault((number, worker), reason)

    def _note_applied(self) -> None:
        """Called after every operation: the thread is woken only where it has something to do."""
        for number, model in self._runtime.host.models.items():
            is_new = not model.is_leader and number not in self._following
            if is_new or model.state.open_step is not None:
                self._looks.poke()

    def _close_step(self, number: int, model: ServedModel) -> None:
        with suppress(ShoalError, ModelFailure, Elsewhere):
            while True:
                with model.lock:
                    step = model.log.open_step()
                if step is None:
                    return
                self._runtime.execute(StepClosed(number, step))

    def _follow(self, number: int, model: ServedModel) -> None:
        known = self._following.get(number)
        if known is not None and known[0] is model and known[1].is_alive:
            return
        if known is not None:
            known[1].close()
        runtime = self._runtime

        def replay(entry: LogEntry) -> None:
            if entry.position > model.log.position:
                runtime.execute(Decided(number, entry))

        follower = Follower(
            model,
            number,
            self._secret,
            self._tls,
            replay,
            lambda attempt: self._address(attempt % runtime.place.copies),
            lambda: runtime.node.is_head and runtime.host.models.get(number) is model,
        )
        self._following[number] = (model, follower)


@dataclass(frozen=True)
class ChainSettings:
    """Who a copy is, and the coordinator, which says where others listen."""

    place: ChainPlace
    coordinator: Coordinator
    ttl_s: float
    leases: Coordinator | None = None  # the same coordinator over another connection
    host: str = ""  # what tells this host from others
    hostname: str = ""  # by which others reach it


class ChainParts:
    """The chain, its links and its keeper, of one server."""

    def __init__(
        self,
        settings: ChainSettings,
        host: ModelHost,
        secret: bytes,
        on_reset: Callable[[], None],
        listens: tuple[str, str],
        tls: TlsConfig,
    ):
        """It `listens` at these two addresses; the second, for other hosts, may be empty."""
        place = settings.place
        # the first optimizer of a process loads modules for seconds: before others wait for it
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0).step()
        self.runtime = ChainRuntime(place, host, on_reset)
        header = Header(FrameKind.HELLO, place.copy, place.shard)
        book = AddressBook(settings.host)
        first = place.shard * place.copies
        self.runtime.links = {
            peer: PeerLink(self.runtime, peer, partial(book.get, first + peer), secret, header, tls)
            for peer in range(place.copies)
            if peer != place.copy
        }
        self.leading = Leading(self.runtime, book.get, secret, tls)
        own = own_address(*listens, settings.host, settings.hostname)
        self.keeper = Keeper(self.runtime, settings, own, book)

    def start(self) -> None:
        """Once the server listens."""
        for link in self.runtime.links.values():
            link.start()
        self.keeper.start()
        self.leading.start()

    def close(self, join_s: float) -> None:
        self.keeper.close(join_s)
        self.runtime.close(join_s)
        self.leading.close(join_s)
