"""Messages among ranks of several hosts: shared memory on a host, TCP between hosts."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.comm.executors.hierarchical.topology import RemotePeerLost, Topology
from shoal.comm.executors.shared_memory import SharedMemory
from shoal.comm.staging import FlatTensor, on_host
from shoal.comm.transport.shm.messages import ANY_SOURCE, ShmWork
from shoal.comm.transport.tcp.transport import TcpTransport
from shoal.errors import Desync, PeerLost, ShoalError
from shoal.runtime.waits import Backoff

_FIRST_PAUSE_S = 0.00002
_LONGEST_PAUSE_S = 0.001


class Message(Protocol):
    """A message under way."""

    @property
    def source(self) -> int:
        """Where a received one came from; known when it is done."""

    def poll(self) -> bool: ...
    def is_lost(self) -> bool:
        """Whether its peer has gone without it, where `poll` does not tell."""

    def wait(self, timeout_s: float | None = None) -> None: ...


class AnySourceReceive:
    """A receive from any rank, which waits in the memory of this host.

    Where a message of another host is there, it is withdrawn from memory, and takes that one.
    """

    def __init__(self, into: Tensor, tag: int, owner: PointToPoint):
        self._into = into
        self._tag = tag
        self._owner = owner
        self._work = owner.shared_memory.recv(into, ANY_SOURCE, tag)
        self._message: Message = IntraHostMessage(self._work, owner.topology)
        self._error: Exception | None = None
        self._is_elsewhere = False  # it has a message of another host

    @property
    def source(self) -> int:
        return self._message.source

    def look(self) -> bool:
        """Whether it has a message, or has failed."""
        try:
            return self._is_elsewhere or self._error is not None or self._work.poll()
        except ShoalError as error:
            self._error = with_global_ranks(error, self._owner.topology)
            return True

    def take(self, mesh: TcpTransport) -> bool:
        """Have a message of another host, of which one is there, unless it has one in memory."""
        if self._owner.shared_memory.transport.withdraw(self._work):
            self._message = receive_bytes(mesh, self._into, ANY_SOURCE, self._tag)
            self._is_elsewhere = True
        return self._is_elsewhere

    def is_lost(self) -> bool:
        return False

    def poll(self) -> bool:
        self._owner.match(self._tag)
        return self.look() and (self._error is not None or self._message.poll())

    def wait(self, timeout_s: float | None = None) -> None:
        """By polling: a message in memory wakes no thread."""
        limit_s = self._owner.shared_memory.timeout_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + limit_s
        pause = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while not self.poll():
            if time.monotonic() > deadline_s:
                doing = f"recv from any source, tag {self._tag}"
                raise PeerLost(self._owner.topology.rank, None, doing, limit_s)
            pause()
        if self._error is not None:
            raise self._error
        self._message.wait()


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

    def is_lost(self) -> bool:
        return self._work.is_lost()

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

    def is_lost(self) -> bool:
        return False

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

    def __init__(self, topology: Topology, shared_memory: SharedMemory, mesh: TcpTransport):
        self.topology = topology
        self.shared_memory = shared_memory
        self._open: TcpTransport | None = mesh
        self._from_any: dict[int, list[AnySourceReceive]] = defaultdict(list)  # by tag, in order
        self._matching = threading.Lock()

    @property
    def mesh(self) -> TcpTransport:
        if self._open is None:
            raise ShoalError(f"rank {self.topology.rank} has closed this group")
        return self._open

    def close(self) -> None:
        """Ranks that wait for this one get an error at once."""
        if self._open is not None:
            self._open.abort()
        self._open = None

    def send(self, data: Tensor, dst: int, tag: int) -> Message:
        if dst not in self.topology.local:
            sent: Any = self.mesh.send(as_bytes(on_host(data).flat), dst, tag)  # a TcpWork
            return InterHostMessage(sent)
        index = self.topology.local.index(dst)
        return IntraHostMessage(self.shared_memory.send(data, index, tag), self.topology)

    def recv(self, into: Tensor, src: int, tag: int) -> Message:
        if src in self.topology.local:
            index = self.topology.local.index(src)
            return IntraHostMessage(self.shared_memory.recv(into, index, tag), self.topology)
        with self._matching:
            if src != ANY_SOURCE:
                return receive_bytes(self.mesh, into, src, tag)
            receive = AnySourceReceive(into, tag, self)
            self._from_any[tag].append(receive)
            return receive

    def match(self, tag: int) -> None:
        """Hand what has come from other hosts to receives from any source, in their order."""
        with self._matching:
            waiting = self._from_any.pop(tag, [])
            for receive in waiting:
                if not receive.look() and self.mesh.has_any(tag):
                    receive.take(self.mesh)
            left = [receive for receive in waiting if not receive.look()]
            if left:
                self._from_any[tag] = left


def receive_bytes(mesh: TcpTransport, into: Tensor, src: int, tag: int) -> InterHostMessage:
    target = on_host(into)
    work: Any = mesh.recv(as_bytes(target.flat), src, tag)  # a TcpWork
    return InterHostMessage(work, target)


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
