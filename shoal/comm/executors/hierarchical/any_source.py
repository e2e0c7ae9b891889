"""Receives from any source, where sources are on this host and on others.

Such a receive is posted twice: in the host's memory, where it can be withdrawn, and at Gloo,
where it cannot. So a message that arrives over Gloo goes to the first of these:

    a receive from that very rank that was posted since (a claim)
    a receive from any source that can be withdrawn from memory
    otherwise it is kept for the next receive that matches
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.comm.executors.hierarchical.topology import Topology
from shoal.comm.executors.shared_memory import SharedMemory
from shoal.comm.executors.torch import as_shoal_error
from shoal.comm.staging import FlatTensor, on_host
from shoal.errors import PeerLost, ShoalError
from shoal.runtime.waits import Backoff
from shoal.transport.shm.messages import ANY_SOURCE, ShmTransport

_FIRST_PAUSE_S = 0.00002
_LONGEST_PAUSE_S = 0.001


class Message(Protocol):
    """A message under way."""

    @property
    def source(self) -> int:
        """Where a received one came from; known when it is done."""
        ...

    def poll(self) -> bool: ...
    def wait(self, timeout_s: float | None = None) -> None: ...


@dataclass(frozen=True)
class ReceiveContext:
    """What all receives of one group share."""

    rank: int
    timeout_s: float
    changed: threading.Condition


class PendingReceive:
    """A receive that `AnySource` may fulfil. `look` is called with the lock of `changed` held."""

    def __init__(self, target: FlatTensor, doing: str, context: ReceiveContext):
        self.target = target
        self.source = ANY_SOURCE
        self.error: ShoalError | None = None
        self._doing = doing
        self._context = context
        self._changed = context.changed
        self._done = False

    def deliver(self, source: int, data: Tensor) -> None:
        self.target.flat.view(torch.uint8).copy_(data)
        self.target.store()
        self.source = source
        self._done = True

    def look(self) -> bool:
        return self._done

    def poll(self) -> bool:
        with self._changed:
            self._done = self._done or self.error is not None or self.look()
            return self._done

    def wait(self, timeout_s: float | None = None) -> None:
        limit_s = self._context.timeout_s if timeout_s is None else timeout_s
        if not self._settles_within(limit_s):
            raise PeerLost(self._context.rank, None, self._doing, limit_s)
        if self.error is not None:
            raise self.error

    def _settles_within(self, limit_s: float) -> bool:
        raise NotImplementedError


class AnySourceReceive(PendingReceive):
    """Posted in memory as well; `withdraw` takes that back."""

    def post(self, transport: ShmTransport, tag: int, topology: Topology) -> None:
        self._transport = transport
        self._local = topology.local
        self._work = transport.recv(self.target.flat, ANY_SOURCE, tag, self.target.store)

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
        """By polling: a message in memory wakes no thread."""
        deadline_s = time.monotonic() + limit_s
        pause = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while not self.poll():
            if time.monotonic() > deadline_s:
                return False
            pause()
        return True


class ClaimReceive(PendingReceive):
    """A receive from one rank while its message may arrive at a receive from any source."""

    def __init__(
        self,
        src: int,
        post: Callable[[], Message],
        target: FlatTensor,
        doing: str,
        context: ReceiveContext,
    ):
        super().__init__(target, doing, context)
        self.src = src
        self._post = post
        self._message: Message | None = None

    def give_up(self) -> None:
        """Its message did not arrive there: post an ordinary receive."""
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


class AnySource:
    """The receives from any source of one group, by tag."""

    def __init__(
        self,
        topology: Topology,
        shared_memory: SharedMemory,
        post: Callable[[Tensor, int], Any],
    ):
        self._topology = topology
        self._shared_memory = shared_memory
        self._post = post
        self._changed = threading.Condition()
        self._waiting: dict[int, list[AnySourceReceive]] = defaultdict(list)
        self._claims: dict[int, list[ClaimReceive]] = {}  # for every tag that is posted at Gloo
        self._kept: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)

    def recv(self, into: Tensor, tag: int) -> Message:
        doing = f"recv from any source, tag {tag}"
        message = AnySourceReceive(on_host(into), doing, self._context())
        with self._changed:
            if self._kept[tag]:
                source, data = self._kept[tag].pop(0)
                message.deliver(source, data)
                return message
            message.post(self._shared_memory.transport, tag, self._topology)
            self._waiting[tag] = [*self._open(tag), message]
            if tag not in self._claims:
                self._post_at_gloo(tag, message.target.flat.nbytes)
        return message

    def claim(
        self, target: FlatTensor, src: int, tag: int, post: Callable[[], Message]
    ) -> Message | None:
        """A receive from one rank of another host; None where an ordinary one will do."""
        with self._changed:
            kept = [entry for entry in self._kept.get(tag, ()) if entry[0] == src]
            if not kept and tag not in self._claims:
                return None
            doing = f"recv from {src}, tag {tag}"
            claim = ClaimReceive(src, post, target, doing, self._context())
            if kept:
                self._kept[tag].remove(kept[0])
                claim.deliver(src, kept[0][1])
            else:
                self._claims[tag].append(claim)
            return claim

    def _context(self) -> ReceiveContext:
        return ReceiveContext(self._topology.rank, self._shared_memory.timeout_s, self._changed)

    def _post_at_gloo(self, tag: int, num_bytes: int) -> None:
        """Nothing can interrupt the thread that waits for it, so it is a daemon."""
        data = torch.empty(num_bytes, dtype=torch.uint8)
        self._claims[tag] = []
        work = self._post(data, tag)
        threading.Thread(
            target=self._await, args=(tag, work, data), daemon=True, name="shoal any source"
        ).start()

    def _await(self, tag: int, work: Any, data: Tensor) -> None:
        error: ShoalError | None = None
        try:
            work.wait()
        except PeerLost as lost:
            error = lost
        except RuntimeError as cause:
            doing = f"recv from any source, tag {tag}"
            error = as_shoal_error(cause, self._topology.rank, doing)
        with self._changed:
            claims = self._claims.pop(tag)
            if not self._shared_memory.segment.closed:
                self._settle(tag, claims, work, data, error)
                self._changed.notify_all()

    def _settle(
        self,
        tag: int,
        claims: list[ClaimReceive],
        work: Any,
        data: Tensor,
        error: ShoalError | None,
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
            self._post_at_gloo(tag, self._waiting[tag][0].target.flat.nbytes)

    def _open(self, tag: int) -> list[AnySourceReceive]:
        return [message for message in self._waiting[tag] if not message.look()]

    def _hand_over(
        self, tag: int, claims: list[ClaimReceive], source: int, data: Tensor
    ) -> PendingReceive | None:
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
