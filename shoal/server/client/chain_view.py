"""What a worker knows of the chain of one shard: its epoch and members, where they listen, and how
long it got no service of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from shoal.errors import ShoalError
from shoal.runtime import clock
from shoal.runtime.config import RunConfig
from shoal.runtime.decoders import msgpack_decoder
from shoal.runtime.waits import Periodic
from shoal.server.client.route import MovedAway
from shoal.server.coordinator import Alive, Coordinator, CoordinatorError, alive_key
from shoal.server.coordinator.client import open_coordinator
from shoal.server.protocol import Channel, Moved
from shoal.server.protocol.connection import Connection

if TYPE_CHECKING:
    from shoal.server.client.chain_route import ChainRoute


@dataclass
class ChainView:
    """The latest epoch that a member has announced, with its head and members.

    Epochs only grow: what a copy of an earlier epoch says, such as a head that was stopped and
    goes on, has no effect.
    """

    copies: int
    worker: int
    epoch: int = 0  # none is known
    head: int | None = None
    members: tuple[int, ...] = ()

    def learn(self, moved: Moved) -> bool:
        """Whether it says something that was not known."""
        head = moved.head if moved.head is not None and moved.head < self.copies else None
        is_new = moved.epoch > self.epoch
        completes = moved.epoch == self.epoch and self.head is None and head is not None
        if not is_new and not completes:
            return False
        self.epoch = moved.epoch
        self.head = head
        self.members = tuple(member for member in moved.members if member < self.copies)
        return True

    def to_ask(self) -> list[int]:
        """All copies, in the order in which to look for the head."""
        first = () if self.head is None else (self.head,)
        return list(dict.fromkeys((*first, *self.members, *range(self.copies))))

    def readers(self) -> list[int]:
        """Members in the order in which this worker pulls from them; the head if none is known."""
        if not self.members:
            return [] if self.head is None else [self.head]
        first = self.worker % len(self.members)
        return [*self.members[first:], *self.members[:first]]


class Interruptions:
    """The longest of what waited between two epochs: a push, or a request sent again.

    A worker learns of a new epoch by the push after the one that had to wait, so the time belongs
    to the change that ends the interval.
    """

    def __init__(self, view: ChainView):
        self._view = view
        self._lock = clock.Lock()
        self._epoch = view.epoch
        self._longest_s = 0.0
        self._broken_s: dict[Channel, float] = {}
        self._found_s: list[float] = []

    def broken(self, channel: Channel) -> None:
        """A request was not answered, and is sent again."""
        self._broken_s.setdefault(channel, clock.monotonic())

    def answered(self, channel: Channel, began_s: float, is_push: bool) -> None:
        broken_s = self._broken_s.pop(channel, None)
        since_s = began_s if is_push else broken_s
        with self._lock:
            if since_s is not None:
                self._longest_s = max(self._longest_s, clock.monotonic() - since_s)
            if is_push:
                self._close()

    def seconds(self) -> list[float]:
        """One for each change of the chain."""
        with self._lock:
            self._close()
            return list(self._found_s)

    def _close(self) -> None:
        if self._epoch != self._view.epoch:
            self._found_s.append(round(self._longest_s, 4))
            self._longest_s = 0.0
            self._epoch = self._view.epoch


class CopyAddresses(list[str]):
    """Where each copy of a shard listens; `first` is the number of the first among all servers.

    A copy that is started again on another host listens elsewhere. Each says at the coordinator
    where it is; a worker that cannot reach one asks there, in the background.
    """

    def __init__(self, addresses: Sequence[str], first: int = 0, config: RunConfig | None = None):
        """Without a `config` that names a coordinator they stay as they are."""
        super().__init__(addresses)
        self._first = first
        may_move = any(address.startswith("tcp:") for address in addresses)
        has_coordinator = config is not None and config.coordinator is not None
        self._config = config if may_move and has_coordinator else None
        self._asking = clock.Lock()
        self._coordinator: Coordinator | None = None  # that is asked

    def look_again(self) -> None:
        """One of them does not answer."""
        if self._config is None or not self._asking.acquire(blocking=False):
            return
        try:
            asked = self._coordinator = open_coordinator(self._config, "a worker")
            name = "shoal-ps-addresses"
            clock.Thread(target=self._ask, args=(asked,), name=name, daemon=True).start()
        except (CoordinatorError, OSError, RuntimeError):  # RuntimeError: the interpreter ends
            self._asking.release()

    def close(self) -> None:
        """End a question that waits: a coordinator that was never reached has 30 s to start."""
        if self._coordinator is not None:
            self._coordinator.close()

    def _ask(self, coordinator: Coordinator) -> None:
        try:
            with suppress(CoordinatorError, OSError), coordinator:
                for copy in range(len(self)):
                    found = coordinator.get(alive_key(self._first + copy))
                    if found is None:
                        continue
                    with suppress(msgspec.MsgspecError):
                        alive = msgpack_decoder(Alive).decode(found.value)
                        address = alive.remote or alive.address
                        if address.startswith("tcp:"):  # a Unix socket is for its host alone
                            self[copy] = address
        finally:
            self._asking.release()


PROBE_S = 0.25
_IDLE_PROBE_S = 1.0
_ATTACH_S = 0.5
_JOIN_S = 5.0


class ChainWatch:
    """A thread, and one idle connection to each member but the head."""

    def __init__(self, chain: ChainRoute):
        self._chain = chain
        self._attached: dict[int, Connection] = {}
        self._detached: list[Connection] = []  # closed at the end: a thread may read from them
        self._attaching = [clock.Lock() for _ in range(chain.view.copies)]
        self.since_s: dict[Channel, float] = {}  # when they began to wait for an answer
        self._is_over = False
        self._probed_s = clock.monotonic()
        self.looks = Periodic(f"shoal-ps-watch-{chain.index}", PROBE_S, self._look)

    def close(self) -> None:
        self._is_over = True
        for connection in list(self._attached.values()):
            connection.abort()
        self.looks.close(_JOIN_S)
        for connection in [*self._attached.values(), *self._detached]:
            connection.close()

    # ------------------------------------------------------------------ members

    def attach(self, copy: int, timeout_s: float) -> None:
        """Let a member know this worker and its memory; raises if it does not answer."""
        with self._attaching[copy]:
            if copy not in self._attached:
                self._attached[copy] = self._chain.set_up(copy, timeout_s)

    def ask(self, copy: int, timeout_s: float) -> None:
        """MovedAway if a copy is in another epoch than this worker; raises if it is silent."""
        self.attach(copy, timeout_s)
        try:
            with self._attaching[copy]:
                connection = self._attached.get(copy)
                if connection is not None:
                    self._chain.probe(connection, timeout_s)
        except MovedAway:
            raise
        except (OSError, ShoalError):
            self.detach(copy)
            raise

    def attach_members(self, timeout_s: float) -> None:
        """Those that can be reached; the others are tried again later."""
        view = self._chain.view
        for copy in view.members:
            if copy == view.head or copy in self._attached or self._is_over:
                continue
            self._learns(self.attach, copy, timeout_s)

    def _learns(self, ask: Callable[[int, float], None], copy: int, timeout_s: float) -> bool:
        """Whether a copy says that there is a newer epoch."""
        try:
            ask(copy, timeout_s)
        except MovedAway as moved:
            return self._chain.learn(moved.moved)
        except (OSError, ShoalError):
            pass
        return False

    def final_stats(self, timeout_s: float) -> list[bytes]:
        """The counters of each member but the head, when all workers have left."""
        found = []
        for copy, connection in list(self._attached.items()):
            with self._attaching[copy], suppress(OSError, ShoalError):
                found.append(self._chain.probe(connection, timeout_s, is_final=True))
        return found

    def detach(self, copy: int) -> None:
        """It is the head now, or was lost."""
        connection = self._attached.pop(copy, None)
        if connection is not None:
            connection.abort()
            self._detached.append(connection)

    def _look(self) -> None:
        """In the thread."""
        self.attach_members(_ATTACH_S)
        now_s = clock.monotonic()
        since_s = min(list(self.since_s.values()), default=now_s)
        if now_s - since_s > PROBE_S or now_s - self._probed_s > _IDLE_PROBE_S:
            # until one says that there is a newer epoch
            any(self._learns(self.ask, copy, _ATTACH_S) for copy in list(self._attached))
            self._probed_s = now_s
        with suppress(OSError, ShoalError):
            self._chain.greet_head()
