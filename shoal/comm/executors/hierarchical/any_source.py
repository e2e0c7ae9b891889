"""Receives from any source, where sources are on this host and on others.

Such a receive is posted twice: in the host's memory, where it can be taken back, and at Gloo,
where it cannot. So what Gloo brings goes to the first of these that there is:

    a receive from that very rank, asked for since (a claim)
    a receive from anybody that memory has nothing for: it is taken back there
    else it is kept for the next receive that fits
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.comm.executors.hierarchical.topology import Places
from shoal.comm.executors.shared_memory import ShmGroup
from shoal.comm.executors.torch import told
from shoal.comm.native import Side
from shoal.errors import PeerLost, ShoalError
from shoal.runtime.backoff import Pauses
from shoal.transport.shm.messages import ANY_SOURCE

_PAUSES_S = (0.00002, 0.001)


class Message(Protocol):
    """A message under way."""

    @property
    def source(self) -> int:
        """Where a received one came from; known when it is done."""
        ...

    def poll(self) -> bool: ...
    def wait(self, timeout_s: float | None = None) -> None: ...


class Awaited:
    """A receive that `Anybody` may fulfil. `look` is called with the lock of `changed` held."""

    def __init__(
        self, side: Side, rank: int, doing: str, limit_s: float, changed: threading.Condition
    ):
        self.side = side
        self.source = ANY_SOURCE
        self.error: ShoalError | None = None
        self._rank = rank
        self._doing = doing
        self._limit_s = limit_s
        self._changed = changed
        self._done = False

    def deliver(self, source: int, data: Tensor) -> None:
        self.side.host.view(-1).view(torch.uint8).copy_(data)
        self.side.store()
        self.source = source
        self._done = True

    def look(self) -> bool:
        return self._done

    def poll(self) -> bool:
        with self._changed:
            self._done = self._done or self.error is not None or self.look()
            return self._done

    def wait(self, timeout_s: float | None = None) -> None:
        limit_s = self._limit_s if timeout_s is None else timeout_s
        if not self._settles_within(limit_s):
            raise PeerLost(self._rank, None, self._doing, limit_s)
        if self.error is not None:
            raise self.error

    def _settles_within(self, limit_s: float) -> bool:
        raise NotImplementedError


class FromAnybody(Awaited):
    """Posted in memory as well; `withdraw` takes that back."""

    def post(self, inner: ShmGroup, tag: int, places: Places) -> None:
        self._transport = inner.transport
        self._local = places.local
        self._work = inner.transport.recv(self.side.host, ANY_SOURCE, tag, self.side.store)

    def withdraw(self) -> bool:
        return not self._done and self._transport.withdraw(self._work)

    def look(self) -> bool:
        try:
            if self._work.poll():
                self.source = self._local[self._work.source]
        except ShoalError as error:
            self.error = error
        return self._work.is_done

    def _settles_within(self, limit_s: float) -> bool:
        """By looking: it may come through memory as well, of which nothing tells."""
        deadline_s = time.monotonic() + limit_s
        pause = Pauses(*_PAUSES_S)
        while not self.poll():
            if time.monotonic() > deadline_s:
                return False
            pause()
        return True


class Claim(Awaited):
    """A receive from one rank while Gloo may bring its message to the receive from anybody."""

    def __init__(self, src: int, post: Callable[[], Message], *rest: Any):
        super().__init__(*rest)
        self.src = src
        self._post = post
        self._message: Message | None = None

    def give_up(self) -> None:
        """Its message did not come that way: ask for it as usual."""
        try:
            self._message = self._post()
        except ShoalError as error:
            self.error = error

    def look(self) -> bool:
        return self._message is not None and self._message.poll()

    def wait(self, timeout_s: float | None = None) -> None:
        super().wait(timeout_s)
        if self._message is not None:
            self._message.wait(timeout_s)
        self.source = self.src

    def _settles_within(self, limit_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._message is not None or self.poll(), limit_s)


class Anybody:
    """The receives from anybody of one group, by tag."""

    def __init__(self, places: Places, inner: ShmGroup, post: Callable[[Tensor, int], Any]):
        self._places = places
        self._inner = inner
        self._post = post
        self._changed = threading.Condition()
        self._waiting: dict[int, list[FromAnybody]] = defaultdict(list)
        self._claims: dict[int, list[Claim]] = {}  # for every tag that Gloo has been asked for
        self._kept: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)

    def recv(self, into: Tensor, tag: int) -> Message:
        message = FromAnybody(*self._about(Side(into), f"recv from anybody, tag {tag}"))
        with self._changed:
            if self._kept[tag]:
                message.deliver(*self._kept[tag].pop(0))
                return message
            message.post(self._inner, tag, self._places)
            self._waiting[tag] = [*self._open(tag), message]
            if tag not in self._claims:
                self._ask(tag, message.side.host.nbytes)
        return message

    def claim(self, side: Side, src: int, tag: int, post: Callable[[], Message]) -> Message | None:
        """A receive from one rank of another host; None where nothing is in its way."""
        with self._changed:
            kept = [entry for entry in self._kept.get(tag, ()) if entry[0] == src]
            if not kept and tag not in self._claims:
                return None
            claim = Claim(src, post, *self._about(side, f"recv from {src}, tag {tag}"))
            if kept:
                self._kept[tag].remove(kept[0])
                claim.deliver(*kept[0])
            else:
                self._claims[tag].append(claim)
            return claim

    def _about(self, side: Side, doing: str) -> tuple[Side, int, str, float, threading.Condition]:
        return side, self._places.rank, doing, self._inner.timeout_s, self._changed

    def _ask(self, tag: int, num_bytes: int) -> None:
        """Nothing can interrupt the thread that waits for it, so it does not hold up the end."""
        data = torch.empty(num_bytes, dtype=torch.uint8)
        self._claims[tag] = []
        work = self._post(data, tag)
        threading.Thread(
            target=self._await, args=(tag, work, data), daemon=True, name="shoal any source"
        ).start()

    def _await(self, tag: int, work: Any, data: Tensor) -> None:
        error = None
        try:
            work.wait()
        except RuntimeError as cause:
            error = told(cause, self._places.rank, f"recv from anybody, tag {tag}")
        with self._changed:
            claims = self._claims.pop(tag)
            if not self._inner.segment.closed:
                self._settle(tag, claims, work, data, error)
                self._changed.notify_all()

    def _settle(
        self, tag: int, claims: list[Claim], work: Any, data: Tensor, error: ShoalError | None
    ) -> None:
        self._waiting[tag] = self._open(tag)
        if error is not None:
            for message in (*claims, *self._waiting.pop(tag)):
                message.error = error
            return
        taken = self._hand_over(tag, claims, work._source_rank(), data)
        for claim in claims:
            if claim is not taken:
                claim.give_up()
        if self._waiting[tag]:
            self._ask(tag, self._waiting[tag][0].side.host.nbytes)

    def _open(self, tag: int) -> list[FromAnybody]:
        return [message for message in self._waiting[tag] if not message.look()]

    def _hand_over(
        self, tag: int, claims: list[Claim], source: int, data: Tensor
    ) -> Awaited | None:
        for claim in claims:
            if claim.src == source:
                claim.deliver(source, data)
                return claim
        for message in self._waiting[tag]:
            if message.withdraw():
                message.deliver(source, data)
                self._waiting[tag].remove(message)
                return message
        self._kept[tag].append((source, data))
        return None
