"""Messages among ranks of several hosts: shared memory on a host, TCP or Gloo between hosts."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm.executors.hierarchical.any_source import AnySource, Message
from shoal.comm.executors.hierarchical.collectives import HostMessages, RemotePeerLost
from shoal.comm.executors.hierarchical.topology import Topology
from shoal.comm.executors.shared_memory import SharedMemory
from shoal.comm.staging import FlatTensor, on_host
from shoal.errors import Desync, PeerLost, ShoalError
from shoal.transport.shm.messages import ShmWork

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
