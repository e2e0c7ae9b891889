"""Receives from any source, where sources are on this host and on others.

Such a receive is posted twice: in the host's memory, where it can be withdrawn, and between hosts,
where it cannot. So a message that arrives from another host goes to the first of these:

    a receive from that very rank that was posted since
    a receive from any source that can be withdrawn from memory
    otherwise it is kept for the next receive that matches
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from shoal.comm.executors.hierarchical.topology import Topology
from shoal.comm.executors.shared_memory import SharedMemory
from shoal.comm.staging import on_host
from shoal.errors import PeerLost, ShoalError
from shoal.runtime.waits import Backoff
from shoal.transport.shm.messages import ANY_SOURCE, ShmWork

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


# what a rank receives with a tag, from another host: (into, source, tag)
Post = Callable[[Tensor, int, int], Message]


class PendingReceive:
    """A receive that `AnySource` may fulfil. `look` is called with the lock of `changed` held."""

    def __init__(self, into: Tensor, src: int, tag: int, owner: AnySource):
        self.target = on_host(into)
        self.src = self.source = src
        self.error: ShoalError | None = None
        self._tag = tag
        self._owner = owner
        self._local: ShmWork | None = None  # from any source on this host
        self._message: Message | None = None  # from `src` alone
        self._is_done = False

    def post(self) -> None:
        """In memory from any source, or, once no other receive can take its message, from `src`."""
        owner = self._owner
        try:
            if self.src == ANY_SOURCE:
                transport = owner.shared_memory.transport
                self._local = transport.recv(self.target.flat, self.src, self._tag)
            else:
                self._message = owner.post(self.target.flat, self.src, self._tag)
        except ShoalError as error:
            self.error = error

    def deliver(self, source: int, data: Tensor) -> None:
        self.target.flat.view(torch.uint8).copy_(data)
        self._end(source)

    def withdraw(self) -> bool:
        transport = self._owner.shared_memory.transport
        return self._local is not None and transport.withdraw(self._local)

    def look(self) -> bool:
        """Whether it is done, or has failed."""
        work = self._local or self._message
        try:
            if not self._is_done and work is not None and work.poll():
                work.wait()
                local = self._owner.topology.local
                self._end(local[work.source] if self._local is not None else self.src)
        except ShoalError as error:
            self.error = error
        return self._is_done or self.error is not None

    def _end(self, source: int) -> None:
        self.target.store()
        self.source = source
        self._is_done = True

    def poll(self) -> bool:
        with self._owner.changed:
            return self.look()

    def wait(self, timeout_s: float | None = None) -> None:
        """By polling: a message in memory wakes no thread."""
        limit_s = self._owner.shared_memory.timeout_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + limit_s
        pause = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while not self.poll():
            if time.monotonic() > deadline_s:
                whom = "any source" if self.src == ANY_SOURCE else self.src
                doing = f"recv from {whom}, tag {self._tag}"
                raise PeerLost(self._owner.topology.rank, None, doing, limit_s)
            pause()
        if self.error is not None:
            raise self.error


class AnySource:
    """The receives from any source of one group, by tag."""

    def __init__(self, topology: Topology, shared_memory: SharedMemory, post: Post):
        self.topology = topology
        self.shared_memory = shared_memory
        self.post = post
        self.changed = threading.Lock()
        self._waiting: dict[int, list[PendingReceive]] = defaultdict(list)
        self._posted: set[int] = set()  # tags that are received between hosts from any source
        self._kept: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)

    def recv(self, into: Tensor, src: int, tag: int) -> Message | None:
        """From any source, or a rank of another host; None where no other receive can take it."""
        with self.changed:
            kept = [m for m in self._kept[tag] if src in (ANY_SOURCE, m[0])]
            if src != ANY_SOURCE and not kept and tag not in self._posted:
                return None
            pending = PendingReceive(into, src, tag, self)
            if kept:
                self._kept[tag] = [m for m in self._kept[tag] if m is not kept[0]]
                pending.deliver(*kept[0])
                return pending
            if src == ANY_SOURCE:
                pending.post()
            self._waiting[tag] = [*self._open(tag), pending]
            if tag not in self._posted:
                self._post_from_any(tag, pending.target.flat.nbytes)
            return pending

    def _post_from_any(self, tag: int, num_bytes: int) -> None:
        """Nothing can interrupt the thread that waits for it, so it is a daemon."""
        data = torch.empty(num_bytes, dtype=torch.uint8)
        self._posted.add(tag)
        message = self.post(data, ANY_SOURCE, tag)
        threading.Thread(
            target=self._await, args=(tag, message, data), daemon=True, name="shoal any source"
        ).start()

    def _await(self, tag: int, message: Message, data: Tensor) -> None:
        error: ShoalError | None = None
        try:
            message.wait()
        except ShoalError as lost:
            error = lost
        with self.changed:
            self._posted.discard(tag)
            if self.shared_memory.segment.closed:
                return
            if error is None:
                self._hand_over(tag, message.source, data)
            for receive in self._open(tag) if error is not None else ():
                receive.error = error

    def _open(self, tag: int) -> list[PendingReceive]:
        return [receive for receive in self._waiting[tag] if not receive.look()]

    def _hand_over(self, tag: int, source: int, data: Tensor) -> None:
        still = self._open(tag)
        by_rank = [receive for receive in still if receive.src != ANY_SOURCE]
        from_any = [receive for receive in still if receive.src == ANY_SOURCE]
        taker = next((receive for receive in by_rank if receive.src == source), None)
        taker = taker or next((receive for receive in from_any if receive.withdraw()), None)
        if taker is None:
            self._kept[tag].append((source, data))
        else:
            taker.deliver(source, data)
        for receive in by_rank:
            if receive is not taker:
                receive.post()
        self._waiting[tag] = [receive for receive in from_any if receive is not taker]
        if self._waiting[tag]:
            self._post_from_any(tag, self._waiting[tag][0].target.flat.nbytes)
