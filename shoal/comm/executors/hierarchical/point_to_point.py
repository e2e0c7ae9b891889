"""Messages among ranks of several hosts: shared memory on a host, TCP or Gloo between hosts."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import Tensor

from shoal.comm.executors.hierarchical.any_source import AnySource, Message
from shoal.comm.executors.hierarchical.collectives import RemotePeerLost
from shoal.comm.executors.hierarchical.topology import Topology
from shoal.comm.executors.shared_memory import SharedMemory
from shoal.comm.executors.torch import as_shoal_error
from shoal.comm.staging import FlatTensor, on_host
from shoal.errors import BadInput, Desync, PeerLost, ShoalError
from shoal.runtime.waits import waiting
from shoal.transport.shm.messages import ANY_SOURCE, ShmWork

# Gloo's tags have 31 bits
_USER_TAGS = 1 << 30
_RESERVED = 1 << 62  # tags from here on belong to the group itself, on every transport
_SHORT = (1 << 29) - 1


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
    """A message from or to another host."""

    def __init__(self, work: Any, rank: int, peer: int, doing: str, target: FlatTensor | None):
        self._work = work
        self._rank = rank
        self.source = peer
        self._doing = doing
        self._target = target
        self._done = False

    def poll(self) -> bool:
        return bool(self._done or self._work.is_completed())

    def wait(self, timeout_s: float | None = None) -> None:
        if self._done:
            return
        try:
            with waiting(f"rank {self._rank}", f"rank {self.source}", self._doing):
                if timeout_s is None:
                    self._work.wait()
                else:
                    self._work.wait(timedelta(seconds=timeout_s))
        except PeerLost:
            raise
        except RuntimeError as error:
            if "Timed out waiting" in str(error):
                raise PeerLost(self._rank, self.source, self._doing, timeout_s) from error
            raise as_shoal_error(error, self._rank, self._doing) from error
        self._done = True
        if self._target is not None:
            self._target.store()


class PointToPoint:
    """Sends and receives between any two ranks."""

    def __init__(self, topology: Topology, shared_memory: SharedMemory, mesh: Any):
        self._topology = topology
        self._shared_memory = shared_memory
        self._open = mesh  # see HostLinks.mesh
        self._any_source = AnySource(topology, shared_memory, self._post_any_source)

    @property
    def _mesh(self) -> Any:
        if self._open is None:
            raise ShoalError(f"rank {self._topology.rank} has closed this group")
        return self._open

    def set_timeout(self, timeout_s: float) -> None:
        self._mesh.set_timeout(timedelta(seconds=timeout_s))

    def close(self) -> None:
        """Without a reference Gloo closes its connections, which wakes up the other side."""
        if hasattr(self._open, "close"):
            self._open.close()
        self._open = None

    def send(self, data: Tensor, dst: int, tag: int) -> Message:
        if dst in self._topology.local:
            return IntraHostMessage(
                self._shared_memory.send(data, self._index(dst), tag), self._topology
            )
        flat = on_host(data).flat
        post = lambda: self._mesh.send([flat], dst, short_tag(tag))  # noqa: E731
        return self._between_hosts(dst, post, "send to", tag)

    def recv(self, into: Tensor, src: int, tag: int) -> Message:
        if src == ANY_SOURCE:
            return self._any_source.recv(into, tag)
        if src in self._topology.local:
            return IntraHostMessage(
                self._shared_memory.recv(into, self._index(src), tag), self._topology
            )
        target = on_host(into)

        def post() -> Message:
            call = lambda: self._mesh.recv([target.flat], src, short_tag(tag))  # noqa: E731
            return self._between_hosts(src, call, "recv from", tag, target)

        return self._any_source.claim(target, src, tag, post) or post()

    def _between_hosts(
        self,
        peer: int,
        post: Callable[[], Any],
        verb: str,
        tag: int,
        target: FlatTensor | None = None,
    ) -> Message:
        doing = f"{verb} {peer}, tag {tag}"
        rank = self._topology.rank
        try:
            return InterHostMessage(post(), rank, peer, doing, target)
        except RuntimeError as error:
            raise as_shoal_error(error, rank, doing) from error

    def _post_any_source(self, into: Tensor, tag: int) -> Any:
        return self._mesh.recv_anysource([into], short_tag(tag))

    def _index(self, rank: int) -> int:
        return self._topology.local.index(rank)


def reserved_tag(number: int) -> int:
    return _RESERVED + number


def short_tag(tag: int) -> int:
    if tag >= _RESERVED:
        return _USER_TAGS | (tag & _SHORT)
    if not 0 <= tag < _USER_TAGS:
        raise BadInput(f"between hosts tags go from 0 to {_USER_TAGS - 1}, not {tag}")
    return tag


def with_global_ranks(error: Exception, topology: Topology, doing: str = "") -> Exception:
    """An error that names ranks of one host, with their ranks in the whole group."""
    within = f"{doing}, " if doing else ""
    if isinstance(error, RemotePeerLost):
        return PeerLost(error.rank, error.peer, within + error.doing, error.after_s)
    if isinstance(error, PeerLost) and error.peer is not None:
        peer = topology.local[error.peer]
        what = within + error.doing
        return PeerLost(topology.rank, peer, what, error.after_s, error.exit_status)
    if isinstance(error, Desync):
        rank = topology.local[error.rank]
        peer = topology.local[error.peer]
        return Desync(rank, within + error.call, peer, within + error.peer_call)
    return error
