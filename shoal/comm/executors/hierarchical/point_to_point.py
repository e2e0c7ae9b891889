"""Messages among ranks of several hosts: shared memory on a host, TCP between hosts."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from shoal.comm.executors.hierarchical.topology import RemotePeerLost, Topology
from shoal.comm.executors.shared_memory import SharedMemory
from shoal.comm.staging import FlatTensor, on_host
from shoal.errors import Desync, PeerLost, ShoalError
from shoal.runtime.waits import Backoff
from shoal.transport.shm.messages import ANY_SOURCE, ShmWork

_FIRST_PAUSE_S = 0.00002
_LONGEST_PAUSE_S = 0.001


class Message(Protocol):
    """A message under way."""

    @property
    def source(self) -> int:
        """Where a received one came from; known when it is done."""

    def poll(self) -> bool: ...
    def wait(self, timeout_s: float | None = None) -> None: ...


class HostMessages(Protocol):
    """Messages of bytes between ranks of different hosts; `src` may be ANY_SOURCE."""

    timeout_s: float  # of a message

    def send(self, data: Tensor, dst: int, tag: int) -> Message: ...
    def recv(self, into: Tensor, src: int, tag: int) -> Message: ...
    def abort(self) -> None:
        """Ranks that wait for this one get an error at once."""


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
    """The receives from any source of one group, by tag.

    Such a receive is posted twice: in the host's memory, where it can be withdrawn, and between
    hosts, where it cannot. So a message that arrives from another host goes to the first of these:

        a receive from that very rank that was posted since
        a receive from any source that can be withdrawn from memory
        otherwise it is kept for the next receive that matches
    """

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


_RESERVED = 1 << 62  # tags from here on belong to the group itself


class IntraHostMessage:
    """A message on this host; its errors name the ranks of the whole group."""

    def __init__(self, work: ShmWork, topology: Topology):
        self._work = work
        self._topology = topology

    @property
    def source(self) -> int:
        return self._topology.local[self._work.source]

    def poll(self) -> bool:
        return self._work.poll()

    def wait(self, timeout_s: float | None = None) -> None:
        try:
            self._work.wait(timeout_s)
        except ShoalError as error:
            raise with_global_ranks(error, self._topology) from error


class InterHostMessage:
    """A message to or from another host, which is copied to `target` when it has arrived."""

    def __init__(self, message: Message, target: FlatTensor | None = None):
        self._message = message
        self._target = target

    @property
    def source(self) -> int:
        return self._message.source

    def poll(self) -> bool:
        return self._message.poll()

    def wait(self, timeout_s: float | None = None) -> None:
        try:
            self._message.wait(timeout_s)
        except PeerLost as lost:
            raise RemotePeerLost(lost.rank, lost.peer, lost.doing, lost.after_s) from lost
        if self._target is not None:
            self._target.store()
        self._target = None


class PointToPoint:
    """Sends and receives between any two ranks."""

    def __init__(self, topology: Topology, shared_memory: SharedMemory, mesh: HostMessages):
        self._topology = topology
        self._shared_memory = shared_memory
        self._open: HostMessages | None = mesh
        self._any_source = AnySource(topology, shared_memory, self._recv_bytes)

    @property
    def mesh(self) -> HostMessages:
        if self._open is None:
            raise ShoalError(f"rank {self._topology.rank} has closed this group")
        return self._open

    def close(self) -> None:
        """Ranks that wait for this one get an error at once."""
        if self._open is not None:
            self._open.abort()
        self._open = None

    def send(self, data: Tensor, dst: int, tag: int) -> Message:
        if dst not in self._topology.local:
            return InterHostMessage(self.mesh.send(as_bytes(on_host(data).flat), dst, tag))
        index = self._topology.local.index(dst)
        return IntraHostMessage(self._shared_memory.send(data, index, tag), self._topology)

    def recv(self, into: Tensor, src: int, tag: int) -> Message:
        if src in self._topology.local:
            index = self._topology.local.index(src)
            return IntraHostMessage(self._shared_memory.recv(into, index, tag), self._topology)
        pending = self._any_source.recv(into, src, tag)
        if pending is not None:
            return pending
        target = on_host(into)
        return InterHostMessage(self._recv_bytes(target.flat, src, tag), target)

    def _recv_bytes(self, into: Tensor, src: int, tag: int) -> Message:
        return self.mesh.recv(as_bytes(into), src, tag)


def as_bytes(data: Tensor) -> Tensor:
    return data.detach().reshape(-1).view(torch.uint8)


def reserved_tag(number: int) -> int:
    return _RESERVED + number


def with_global_ranks(error: Exception, topology: Topology, doing: str = "") -> Exception:
    """An error that names ranks of one host, with their ranks in the whole group."""
    within = f"{doing}, " if doing else ""
    if isinstance(error, PeerLost) and error.peer is not None:
        is_local = not isinstance(error, RemotePeerLost)
        peer = topology.local[error.peer] if is_local else error.peer
        what = within + error.doing
        return RemotePeerLost(topology.rank, peer, what, error.after_s, error.exit_status)
    if isinstance(error, Desync):
        rank = topology.local[error.rank]
        peer = topology.local[error.peer]
        return Desync(rank, within + error.call, peer, within + error.peer_call)
    return error
