"""Messages among ranks of several hosts: through memory on a host, over Gloo between hosts."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import Tensor

from shoal.comm.executors.hierarchical.any_source import Anybody, Message
from shoal.comm.executors.hierarchical.topology import Places
from shoal.comm.executors.shared_memory import ShmGroup
from shoal.comm.executors.torch import told
from shoal.comm.native import Side
from shoal.errors import BadInput, Desync, PeerLost, ShoalError
from shoal.transport.shm.messages import ANY_SOURCE, ShmWork

# Gloo's tags have 31 bits
_USER_TAGS = 1 << 30
_RESERVED = 1 << 62  # tags from here on are the group's own, on every transport
_SHORT = (1 << 29) - 1


class LocalMessage:
    """A message on this host, told with the ranks of the whole group."""

    def __init__(self, work: ShmWork, places: Places):
        self._work = work
        self._places = places

    @property
    def source(self) -> int:
        return self._places.local[self._work.source]

    def poll(self) -> bool:
        return self._work.poll()

    def wait(self, timeout_s: float | None = None) -> None:
        try:
            self._work.wait(timeout_s)
        except ShoalError as error:
            raise as_global(error, self._places) from error


class FarMessage:
    """A message from or to another host."""

    def __init__(self, work: Any, rank: int, peer: int, doing: str, side: Side | None):
        self._work = work
        self._rank = rank
        self.source = peer
        self._doing = doing
        self._side = side
        self._done = False

    def poll(self) -> bool:
        return bool(self._done or self._work.is_completed())

    def wait(self, timeout_s: float | None = None) -> None:
        if self._done:
            return
        try:
            if timeout_s is None:
                self._work.wait()
            else:
                self._work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            if "Timed out waiting" in str(error):
                raise PeerLost(self._rank, self.source, self._doing, timeout_s) from error
            raise told(error, self._rank, self._doing) from error
        self._done = True
        if self._side is not None:
            self._side.store()


class Mail:
    """Sends and receives by the ranks of the whole group."""

    def __init__(self, places: Places, inner: ShmGroup, mesh: Any):
        self._places = places
        self._inner = inner
        self._open = mesh  # a ProcessGroupGloo of all ranks
        self._anybody = Anybody(places, inner, self._post_for_anybody)

    @property
    def _mesh(self) -> Any:
        if self._open is None:
            raise ShoalError(f"rank {self._places.rank} has closed this group")
        return self._open

    def set_timeout(self, timeout_s: float) -> None:
        self._mesh.set_timeout(timedelta(seconds=timeout_s))

    def close(self) -> None:
        self._open = None

    def send(self, data: Tensor, dst: int, tag: int) -> Message:
        if dst in self._places.local:
            return LocalMessage(self._inner.send(data, self._index(dst), tag), self._places)
        host = Side(data).host
        return self._far(dst, lambda: self._mesh.send([host], dst, short_tag(tag)), "send to", tag)

    def recv(self, into: Tensor, src: int, tag: int) -> Message:
        if src == ANY_SOURCE:
            return self._anybody.recv(into, tag)
        if src in self._places.local:
            return LocalMessage(self._inner.recv(into, self._index(src), tag), self._places)
        side = Side(into)

        def post() -> Message:
            call = lambda: self._mesh.recv([side.host], src, short_tag(tag))  # noqa: E731
            return self._far(src, call, "recv from", tag, side)

        return self._anybody.claim(side, src, tag, post) or post()

    def _far(
        self, peer: int, post: Callable[[], Any], verb: str, tag: int, side: Side | None = None
    ) -> Message:
        doing = f"{verb} {peer}, tag {tag}"
        rank = self._places.rank
        try:
            return FarMessage(post(), rank, peer, doing, side)
        except RuntimeError as error:
            raise told(error, rank, doing) from error

    def _post_for_anybody(self, into: Tensor, tag: int) -> Any:
        return self._mesh.recv_anysource([into], short_tag(tag))

    def _index(self, rank: int) -> int:
        return self._places.local.index(rank)


def reserved_tag(number: int) -> int:
    return _RESERVED + number


def short_tag(tag: int) -> int:
    if tag >= _RESERVED:
        return _USER_TAGS | (tag & _SHORT)
    if not 0 <= tag < _USER_TAGS:
        raise BadInput(f"between hosts tags go from 0 to {_USER_TAGS - 1}, not {tag}")
    return tag


def as_global(error: Exception, places: Places, doing: str = "") -> Exception:
    """An error of the ranks of one host, with their ranks in the whole group."""
    within = f"{doing}, " if doing else ""
    if isinstance(error, PeerLost) and error.peer is not None:
        peer = places.local[error.peer]
        what = within + error.doing
        return PeerLost(places.rank, peer, what, error.after_s, error.exit_status)
    if isinstance(error, Desync):
        rank = places.local[error.rank]
        peer = places.local[error.peer]
        return Desync(rank, within + error.call, peer, within + error.peer_call)
    return error
