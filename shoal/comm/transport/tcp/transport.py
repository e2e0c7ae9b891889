"""A transport over TCP: large messages go from tensor to tensor, over several streams at once."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import struct
import zlib
from collections import defaultdict
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from shoal.comm.transport.shm.flight_recorder import DTYPES, OPS
from shoal.comm.transport.tcp.connect import Exchange, TcpSpec, connect_all
from shoal.comm.transport.tcp.tls import TlsPump
from shoal.comm.transport.transport import DoneWork, PendingWork, Work
from shoal.errors import PeerLost, ShoalError
from shoal.runtime.waits import waiting

try:
    from shoal.comm.transport.tcp import _tcp
except ImportError:  # no compiler when it was installed
    _tcp = None  # type: ignore[assignment]

FINE, LOST, LATE, MISMATCH, CLOSED = range(5)
ANY_SOURCE = -1
_WRONG_FRAME = -1
_COPY = -1
_MAX_UNSWEPT = 256
_TLS_END_S = 2.0
_TAG_BITS = 64
_NUMBER_TYPES = {getattr(torch, name): code for code, name in enumerate(DTYPES[1:], 1)}
_NUMBER_TYPES[torch.uint8] = 0
_TYPES = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16),
    *(torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.complex64, torch.complex128),
]
_TYPE_CODES = {dtype: code for code, dtype in enumerate(_TYPES)}
_MAX_DIMS = 8


def is_built() -> bool:
    return _tcp is not None


class TcpWork:
    """A message in flight. It holds its tensor until it is done."""

    def __init__(self, transport: TcpTransport, op: int, data: Tensor, peer: int, doing: str):
        self._engine = transport.engine
        self.op = op
        self.data = data
        self._rank = transport.rank
        self._ranks = transport.ranks  # of the subset, for errors
        self._peer = self.source = peer
        self._doing = doing
        self._limit_s = transport.timeout_s
        self._outcome: tuple[int, int, int, bytes] | None = None

    def poll(self) -> bool:
        return self._outcome is not None or self._engine.state(self.op) >= 0

    def wait(self, timeout_s: float | None = None) -> None:
        if self._outcome is None:
            if timeout_s is not None:
                self._limit_s = timeout_s
            with waiting(f"rank {self._rank}", f"rank {self._peer}", self._doing):
                self._outcome = self._engine.wait(self, self._limit_s)
        outcome, peer, why, descriptor = self._outcome
        self.source = self._ranks.index(peer) if peer in self._ranks else peer
        if outcome != FINE:
            raise self._error(outcome, why, descriptor)

    def _error(self, outcome: int, why: int, descriptor: bytes) -> ShoalError:
        if outcome == MISMATCH:
            return ShoalError(
                f"rank {self._rank} expected {_described(descriptor_of(self.data))} from rank "
                f"{self.source} in {self._doing}, got {_described(descriptor)}"
            )
        if outcome == CLOSED:
            return ShoalError(f"rank {self._rank} has closed this group, in {self._doing}")
        doing = self._doing
        if outcome == LOST and why == _WRONG_FRAME:
            doing += " (a frame of it does not fit the protocol, so the connection was closed)"
        elif outcome == LOST and why:
            doing += f" ({errno.errorcode.get(why, why)}: {os.strerror(why)})"
        after_s = self._limit_s if outcome == LATE else None
        return PeerLost(self._rank, self.source if self.source >= 0 else None, doing, after_s)


class TcpEngine:
    """The connections of one rank, and the native thread that serves them."""

    def __init__(self, spec: TcpSpec, exchange: Exchange):
        self.rank = spec.rank
        self.size = spec.size
        self._in_flight: dict[int, TcpWork] = {}
        self._pumps: list[TlsPump] = []
        self._is_open = True
        streams = connect_all(spec, exchange)
        self._handle: Any = _tcp.create(spec.rank, spec.size)
        for peer, socks in streams.items():
            _tcp.add_peer(self._handle, peer, tuple(self._descriptor(sock) for sock in socks))

    def _descriptor(self, sock: socket.socket) -> int:
        if isinstance(sock, ssl.SSLSocket):
            pump = TlsPump(sock)
            self._pumps.append(pump)
            sock = pump.inner
        sock.setblocking(False)
        return sock.detach()

    def post(self, *args: Any) -> int:
        if len(self._in_flight) >= _MAX_UNSWEPT:
            self._sweep()
        return _tcp.post(self._handle, *args)

    def keep(self, work: TcpWork) -> None:
        """Until it is done."""
        self._in_flight[work.op] = work

    def state(self, op: int) -> int:
        return _tcp.state(self._handle, op) if op in self._in_flight else FINE

    def wait(self, work: TcpWork, timeout_s: float) -> tuple[int, int, int, bytes]:
        outcome = _tcp.wait(self._handle, work.op, int(timeout_s * 1e9))
        if self._in_flight.pop(work.op, None) is not None:
            _tcp.forget(self._handle, work.op)
        return outcome

    def abort(self, space: int) -> None:
        """This rank leaves a group: operations of it fail here, and with this rank elsewhere."""
        _tcp.abort(self._handle, space)

    def has_any(self, space: int, tag: int) -> bool:
        return _tcp.has_any(self._handle, space, tag)

    def lose(self, peer: int) -> None:
        """Operations with this rank fail: its host is silent, and no connection shows it yet."""
        if self._is_open:
            _tcp.lose(self._handle, peer)

    def close(self) -> None:
        """What was sent before still arrives; every operation that is not done fails."""
        if not self._is_open:
            return
        self._is_open = False
        _tcp.stop(self._handle)
        for pump in self._pumps:
            pump.join(_TLS_END_S)

    def _sweep(self) -> None:
        """Release what is done and was not waited for: such work has been dropped or waits yet."""
        for work in list(self._in_flight.values()):
            if _tcp.state(self._handle, work.op) == FINE:
                work.wait()


class TcpTransport:
    """Messages among `ranks` of an engine, numbered in their order; a space keeps groups apart.

    `timeout_s` is how long an operation waits.
    """

    def __init__(
        self,
        engine: TcpEngine,
        ranks: Sequence[int] | None = None,
        space: str = "",
        timeout_s: float = 60.0,
    ):
        self.engine = engine
        self.ranks = tuple(range(engine.size)) if ranks is None else tuple(ranks)
        self.rank = self.ranks.index(engine.rank)
        self.size = len(self.ranks)
        self.timeout_s = timeout_s
        self.space = zlib.crc32(space.encode())
        self._own = defaultdict[int, SimpleQueue[Tensor]](SimpleQueue)  # to this rank, by tag

    def send(self, data: Tensor, dst: int, tag: int) -> Work:
        data = data.detach()
        if dst == self.rank:
            self._own[tag].put(data.clone())
            return DoneWork()
        return self._post(1, data, dst, tag, _COPY, f"send to {dst}, tag {tag}")

    def recv(self, into: Tensor, src: int, tag: int) -> Work:
        into = into.detach()
        if src == self.rank:
            return PendingWork(lambda: self._take_own(into, tag))
        whom = "any source" if src == ANY_SOURCE else src
        return self._post(0, into, src, tag, _COPY, f"recv from {whom}, tag {tag}")

    def has_any(self, tag: int) -> bool:
        """Whether a receive from any source would have its message now, or fail at once."""
        return self.engine.has_any(self.space, folded(tag))

    def can_reduce(self, dtype: torch.dtype, op: str) -> bool:
        return dtype in _NUMBER_TYPES and op in OPS

    def recv_reduce(self, into: Tensor, src: int, tag: int, op: str) -> Work:
        """Receive, and combine with `into` piece by piece while the next ones arrive."""
        code = OPS.index("sum" if op == "mean" else op)
        return self._post(0, into.detach(), src, tag, code, f"recv from {src}, tag {tag}")

    def abort(self) -> None:
        self.engine.abort(self.space)

    def close(self) -> None:
        self.engine.close()

    def _post(
        self, is_send: int, data: Tensor, peer: int, tag: int, op: int, doing: str
    ) -> TcpWork:
        whom = ANY_SOURCE if peer == ANY_SOURCE else self.ranks[peer]
        dtype = _NUMBER_TYPES.get(data.dtype, 0)
        number = self.engine.post(
            is_send,
            data,
            data.nbytes,
            whom,
            self.space,
            folded(tag),
            descriptor_of(data),
            dtype,
            op,
        )
        work = TcpWork(self, number, data, peer, doing)
        self.engine.keep(work)
        return work

    def _take_own(self, into: Tensor, tag: int) -> None:
        try:
            data = self._own[tag].get(timeout=self.timeout_s)
        except Empty:
            raise PeerLost(self.rank, self.rank, f"recv tag {tag}", self.timeout_s) from None
        if data.shape != into.shape or data.dtype != into.dtype:
            got, expected = (_described(descriptor_of(tensor)) for tensor in (data, into))
            raise ShoalError(f"rank {self.rank} sent itself {got} with tag {tag}, not {expected}")
        into.copy_(data)


def folded(tag: int) -> int:
    """Tags of nested groups have more than 64 bits."""
    while tag >> _TAG_BITS:
        tag = (tag >> _TAG_BITS) * 0x9E3779B97F4A7C15 ^ tag & (1 << _TAG_BITS) - 1
    return tag


def descriptor_of(data: Tensor) -> bytes:
    """What both sides of a message must agree about: number type and shape."""
    shape = data.shape
    if len(shape) > _MAX_DIMS:
        shape = torch.Size([data.numel()])
    return struct.pack(f"<B{len(shape)}q", _TYPE_CODES[data.dtype], *shape)


def _described(descriptor: bytes) -> str:
    if not descriptor:
        return "a message without number type and shape"
    code = descriptor[0]
    dims = descriptor[1:]
    shape = struct.unpack(f"<{len(dims) // 8}q", dims[: len(dims) // 8 * 8])
    dtype = _TYPES[code] if code < len(_TYPES) else "an unknown type"
    return f"{tuple(shape)} {dtype}"
