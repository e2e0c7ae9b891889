"""Where the channels of a worker lead when a shard has copies.

    control, push         to the head of the chain
    pull, rows            to the member that serves this worker's pulls; what they set, to the head
    control, idle         to each other member, which maps the worker's memory (`ChainWatch`)

A connection that breaks, or a server that says `Moved`, makes a worker look for the head: it asks
one copy after the other which epoch it is in, until the head of the latest one takes SETUP. Other
members answer, too, and are not taken for the head. What was not answered is sent again; servers
count a push once. Every frame has the epoch that the worker knows, and what a copy of an earlier
epoch says has no effect.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from shoal.errors import PeerLost
from shoal.runtime import clock
from shoal.runtime.trace import server_name
from shoal.server.client import route
from shoal.server.client.chain_view import ChainView, ChainWatch, CopyAddresses, Interruptions
from shoal.server.messages import SetUp, Stats
from shoal.server.protocol import Channel, FrameKind, Moved, Refused, decode, encode
from shoal.server.protocol.connection import Connection

FIND_HEAD_S = 10.0  # how long a shard may be without a head
FIRST_ASK_S = 0.5  # how long a copy has to answer; twice as long in every round
LONGEST_ASK_S = 8.0
_READS = {  # every member serves them
    *(FrameKind.PULL, FrameKind.STATE_GET, FrameKind.RESIDUAL_GET),
    *(FrameKind.TABLE_PULL, FrameKind.TABLE_GET),
}
_OF_READERS = {"pull", "rows"}  # channels


class ChainRoute(route.Route):
    """To one shard, wherever its head is. All threads of the worker share one search for it."""

    def __init__(self, caller: route.Caller, index: int, addresses: Sequence[str]):
        super().__init__(caller, index, addresses[0])
        if not isinstance(addresses, CopyAddresses):
            addresses = CopyAddresses(addresses)
        self.addresses = addresses
        self.copies = len(addresses)
        self.is_unix = all(address.startswith("unix:") for address in addresses)
        first = index * self.copies
        self.whom = f"shard {index} (servers {first} to {first + self.copies - 1})"
        self.view = ChainView(self.copies, caller.header.worker)
        self.find_head_s = FIND_HEAD_S
        self._interruptions = Interruptions(self.view)
        self._viewing = clock.Lock()
        # where a channel leads, and how many heads had been found when it was connected
        self._led: dict[Channel, tuple[int, int]] = {}
        self._unreachable: set[int] = set()  # readers, in this epoch
        self._reading: dict[Channel, bool] = {}  # whether the latest request of a channel reads
        self._spec = b""
        self._descriptor: int | None = None
        self._answer = SetUp()
        self._acknowledged = (0, 0)  # sequence and step of the latest push
        self._watch = ChainWatch(self)
        self._searching = clock.Lock()
        self._heads_found = 0
        self._found_at: int | None = None  # the head that was found last
        self._control: Connection | None = None  # to it, from the thread that found it

    def server(self, channel: Channel) -> str:
        return server_name(self.index, self._led[channel][0])

    def join(self, spec: bytes, descriptor: int | None) -> SetUp:
        self._spec = spec
        if descriptor is not None:
            self._descriptor = os.dup(descriptor)
        self._ensure_head(0, route.START_TIMEOUT_S)
        self._use_fresh_control()
        if not self._answer.is_over:
            self._interruptions = Interruptions(self.view)
            self._watch.attach_members(LONGEST_ASK_S)
            self._watch.looks.start()
        return self._answer

    def open(self, channel: Channel) -> None:
        self._connect(channel, channel == "pull", None, route.START_TIMEOUT_S)

    def close(self) -> None:
        self.is_closing = True
        self._watch.close()
        self.addresses.close()
        with self._searching:
            self.former += [] if self._control is None else [self._control]
            self._control = None
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        super().close()

    # ------------------------------------------------------------------ one request

    def aim(self, channel: Channel, request: route.Request) -> None:
        """Move a channel that leads to another copy than the one for the next request."""
        is_read = self._reading[channel] = request.kind in _READS
        if channel == "control":
            self._use_fresh_control()
        else:
            target = next(iter(self._targets(is_read)), None) if is_read else self.view.head
            if target != self._led[channel][0]:
                self._move(channel, is_read, None)
        if request.is_answered:
            self._watch.since_s[channel] = clock.monotonic()

    def answered(self, channel: Channel, request: route.Request, began_s: float) -> None:
        self._watch.since_s.pop(channel, None)
        is_push = request.kind is FrameKind.COMMIT
        if is_push:
            self._acknowledged = (request.sequence, request.argument)
        self._interruptions.answered(channel, began_s, is_push)

    def reconnect(self, channel: Channel, broken: route.Broken) -> None:
        """Raises if no head is found in time."""
        self._watch.since_s.pop(channel, None)
        self.check_retry(broken)
        self._interruptions.broken(channel)
        if isinstance(broken, route.MovedAway):
            self.learn(broken.moved)
        is_read = self._reading.get(channel, False)
        if is_read:
            with self._viewing:
                self._unreachable.add(self._led[channel][0])
        self._move(channel, is_read, broken)
        self._watch.since_s[channel] = clock.monotonic()

    def other_stats(self) -> list[bytes]:
        return self._watch.final_stats(LONGEST_ASK_S)

    def interruptions_s(self) -> list[float]:
        return self._interruptions.seconds()

    # ------------------------------------------------------------------ where channels lead

    def learn(self, moved: Moved) -> bool:
        """Whether it is new. Then connections that lead to a wrong copy now are ended."""
        with self._viewing:
            if not self.view.learn(moved):
                return False
            self.epoch = self.view.epoch
            self._unreachable.clear()
            heads = {self.view.head}
            members = set(self.view.members) | heads
        for channel, (copy, _) in list(self._led.items()):
            if copy not in (members if channel in _OF_READERS else heads):
                self.current[channel].abort()
        return True

    def _targets(self, is_read: bool) -> list[int]:
        """Copies in the order in which to connect to them."""
        with self._viewing:
            heads = [] if self.view.head is None else [self.view.head]
            if not is_read:
                return heads
            readers = [r for r in self.view.readers() if r not in self._unreachable]
            return list(dict.fromkeys([*readers, *heads]))

    def _move(self, channel: Channel, is_read: bool, broken: route.Broken | None) -> None:
        _, found = self._led[channel]
        try:
            if channel == "control":
                self._ensure_head(found, self.find_head_s)
                self._use_fresh_control()
            else:
                lost = None if broken is None or is_read else found
                self._connect(channel, is_read, lost, self.find_head_s)
        except PeerLost as error:
            raise self.fail(error) from broken

    def _connect(self, channel: Channel, is_read: bool, lost: int | None, timeout_s: float) -> None:
        """`lost`: the head that was found as this one may be lost."""

        def candidates(left_s: float) -> list[int]:
            nonlocal lost
            if lost is not None:
                self._ensure_head(lost, left_s)
            lost = self._heads_found
            return self._targets(is_read)

        copy, connection = self._search(
            timeout_s, candidates, lambda copy, ask_s: self.connect_copy(copy, channel, ask_s)
        )
        self._lead(channel, connection, copy)

    def _lead(self, channel: Channel, connection: Connection, copy: int) -> None:
        self.put(channel, connection)
        self._led[channel] = copy, self._heads_found

    def connect_copy(self, copy: int, channel: Channel, timeout_s: float) -> Connection:
        """To a copy that knows this worker."""
        if copy != self._found_at:
            self._watch.attach(copy, timeout_s)
        connection = self._reach(copy, channel, timeout_s)
        connection.sock.settimeout(None)
        return connection

    def _reach(self, copy: int, channel: Channel, timeout_s: float) -> Connection:
        try:
            return self.dial(self.addresses[copy], channel, timeout_s)
        except (OSError, route.Broken):
            if not self.is_closing:
                self.addresses.look_again()
            raise

    def _search(
        self,
        timeout_s: float,
        candidates: Callable[[float], list[int]],
        attempt: Callable[[int, float], Connection | None],
    ) -> tuple[int, Connection]:
        """The first copy with a connection; PeerLost after `timeout_s`."""
        began_s = clock.monotonic()
        ask_s = FIRST_ASK_S
        reason: Exception | None = None
        while not self.is_closing:
            has_learned = False
            for copy in candidates(began_s + timeout_s - clock.monotonic()):
                try:
                    connection = attempt(copy, ask_s)
                    if connection is not None:
                        return copy, connection
                except route.MovedAway as moved:
                    reason = moved
                    has_learned = self.learn(moved.moved)
                    if has_learned:
                        break
                except (OSError, route.Broken, Refused) as error:
                    reason = error
            if clock.monotonic() - began_s > timeout_s:
                break
            if not has_learned:
                clock.sleep(route.RETRY_S)
                ask_s = min(2 * ask_s, LONGEST_ASK_S)
        after_s = round(clock.monotonic() - began_s, 1)
        why = reason.doing if isinstance(reason, PeerLost) else reason or "no copy answers"
        raise PeerLost(self.rank, None, f"looking for the head of {self.whom} ({why})", after_s)

    # ------------------------------------------------------------------ finding the head

    def _ensure_head(self, lost: int, timeout_s: float) -> None:
        """Find the head, unless another thread has done so since `lost` had been found."""
        with self._searching:
            if lost != self._heads_found:
                return
            copy, connection = self.find_head(timeout_s)
            self._watch.detach(copy)
            self._found_at = copy
            if self._control is not None:
                self.former.append(self._control)
            self._control = connection
            self._heads_found += 1
        if "control" in self._led:
            self.current["control"].abort()

    def _use_fresh_control(self) -> None:
        """Lead over the connection to a new head, the first time that this is asked."""
        with self._searching:
            fresh = self._control
            self._control = None
        if fresh is not None:
            self._lead("control", fresh, self._found_at or 0)

    def find_head(self, timeout_s: float) -> tuple[int, Connection]:
        """The head, and a control connection to it."""
        return self._search(timeout_s, lambda _: self.view.to_ask(), self._ask_head)

    def _ask_head(self, copy: int, timeout_s: float) -> Connection | None:
        """A connection, if this is the head; raises if it does not answer, or has moved."""
        if copy != self.view.head:
            self._watch.ask(copy, timeout_s)
            return None
        connection = self.set_up(copy, timeout_s)
        if copy == self.view.head:  # also after SETUP, which has the latest epoch
            return connection
        self.former.append(connection)
        return None

    def greet_head(self) -> None:
        """Say at a new head where this worker is: others may wait for that."""
        with self._viewing:
            is_known = self.view.head in (None, self._found_at)
        if not is_known and not self.is_closing:
            self._ensure_head(self._heads_found, self.find_head_s)

    def set_up(self, copy: int, timeout_s: float) -> Connection:
        """A control connection to a copy that knows this worker and its memory."""
        connection = self._reach(copy, "control", timeout_s)
        request = route.Request(FrameKind.SETUP, self._spec, (), (), *self._acknowledged)
        request = replace(request, descriptor=self._descriptor)
        try:
            self._answer = decode(self.ask(connection, request), SetUp)
            connection.sock.settimeout(None)
        except BaseException:
            connection.close()
            raise
        return connection

    def ask(self, connection: Connection, request: route.Request) -> bytes:
        """The metadata of the answer on such a connection; its payload is skipped."""
        self.send(connection, request)
        answer, meta = self.receive(connection, request.kind)
        connection.skip(answer.payload_bytes)
        return meta

    def probe(self, connection: Connection, timeout_s: float, is_final: bool = False) -> bytes:
        """Ask a member that is not the head; MovedAway says in which epoch it is."""
        connection.sock.settimeout(timeout_s)
        return self.ask(connection, route.Request(FrameKind.STATS, encode(Stats(is_final))))
