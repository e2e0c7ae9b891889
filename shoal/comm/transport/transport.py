"""How bytes move between two ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import PeerLost, ShoalError, tells_of_lost_peer
from shoal.runtime.waits import waiting


class Work(Protocol):
    """An operation in progress. `wait` returns when it is done, or raises its error."""

    def wait(self) -> None: ...


class Transport(Protocol):
    """Ranks 0..size-1. Messages with the same (source, destination, tag) arrive in order."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def send(self, data: Tensor, dst: int, tag: int) -> Work:
        """Send `data` (contiguous); it may be changed again once the work is done."""

    def recv(self, into: Tensor, src: int, tag: int) -> Work:
        """Receive into `into` (contiguous, of the same size and dtype as what was sent)."""


class Works(NamedTuple):
    """Several operations as one."""

    works: Sequence[Work]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@runtime_checkable
class ReducingTransport(Transport, Protocol):
    """A transport that can combine what arrives with what is there; operators by their names."""

    def can_reduce(self, dtype: torch.dtype, op: str) -> bool: ...
    def recv_reduce(self, into: Tensor, src: int, tag: int, op: str) -> Work:
        """`into` = `into` (op) the message; a mean is summed."""


class SubsetTransport:
    """`ranks[i]` of `transport` is rank i here; `ranks` must include this rank."""

    def __init__(self, transport: Transport, ranks: Sequence[int]):
        self._transport = transport
        self._ranks = tuple(ranks)
        self.rank = self._ranks.index(transport.rank)
        self.size = len(self._ranks)

    def send(self, data: Tensor, dst: int, tag: int) -> Work:
        return self._transport.send(data, self._ranks[dst], tag)

    def recv(self, into: Tensor, src: int, tag: int) -> Work:
        return self._transport.recv(into, self._ranks[src], tag)

    def can_reduce(self, dtype: torch.dtype, op: str) -> bool:
        inner = self._transport
        return isinstance(inner, ReducingTransport) and inner.can_reduce(dtype, op)

    def recv_reduce(self, into: Tensor, src: int, tag: int, op: str) -> Work:
        assert isinstance(self._transport, ReducingTransport)
        return self._transport.recv_reduce(into, self._ranks[src], tag, op)


@dataclass(eq=False)
class TorchWork:
    """A work of torch's; a lost connection becomes a `PeerLost` that names the operation.

    `finish` is done by the first wait, once the work has ended.
    """

    of_torch: Any
    _rank: int
    _peer: int | None  # None: all ranks
    doing: str
    _finish: Callable[[], None] | None = None
    _timeout_s: float | None = None
    times: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self._is_done = self.of_torch is None

    def wait(self) -> None:
        if not self._is_done:
            limit_s = self._timeout_s
            whom = "the other ranks" if self._peer is None else f"rank {self._peer}"
            try:
                with waiting(f"rank {self._rank}", whom, self.doing):
                    self.of_torch.wait(*(() if limit_s is None else (timedelta(seconds=limit_s),)))
            except RuntimeError as error:
                if self._peer is not None and "Timed out waiting" in str(error):
                    raise PeerLost(self._rank, self._peer, self.doing, limit_s) from error
                raise as_shoal_error(error, self._rank, self.doing, self._peer) from error
        self._is_done = True
        finish = self._finish
        self._finish = None
        if finish is not None:
            finish()

    def time_from(self, start_ns: int) -> None:
        """Note the times when torch tells of the end; some works carry no future for it."""

        def done(_: Any) -> None:
            self.times = (start_ns, time.monotonic_ns())

        with suppress(AttributeError, RuntimeError):
            self.of_torch.get_future().add_done_callback(done)


def as_shoal_error(
    error: RuntimeError, rank: int, doing: str, peer: int | None = None
) -> ShoalError:
    """An error of torch as one of ours, which names the rank and the operation."""
    text = str(error).strip()
    reason = text.splitlines()[0][:200] if text else type(error).__name__
    if tells_of_lost_peer(str(error)):
        return PeerLost(rank, peer, f"{doing} ({reason})")
    return ShoalError(f"rank {rank} failed in {doing}: {reason}")


class TorchTransport:
    """Ranks are those of `group` (default: the world). For Gloo and tensors on the CPU."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def send(self, data: Tensor, dst: int, tag: int) -> Work:
        request = dist.isend(data, group=self._group, group_dst=dst, tag=short_tag(tag))
        return TorchWork(request, self.rank, dst, f"send tag {tag}")

    def recv(self, into: Tensor, src: int, tag: int) -> Work:
        request = dist.irecv(into, group=self._group, group_src=src, tag=short_tag(tag))
        return TorchWork(request, self.rank, src, f"recv tag {tag}")


def short_tag(tag: int) -> int:
    """Gloo's tags have 31 bits: 20 of the number, 1 for collectives, 10 of the tag space.

    Messages whose tags become equal here are distinguished by their order only, so they must not
    be in flight together; that would take a million operations at once.
    """
    number = tag & 0xFFFFF
    collective = tag >> 39 & 1
    space = 0
    spaces = tag >> 40
    while spaces:  # 20 bits for each group from which this one was split
        space = 37 * space + (spaces & 0xFFFFF)
        spaces >>= 20
    return number | collective << 20 | space % 1024 << 21


class DoneWork:
    """Work that was finished before it was returned."""

    def wait(self) -> None:
        return None


class PendingWork:
    """Work that the waiting thread executes, once; an error is raised by every later wait too."""

    def __init__(self, run: Callable[[], None]):
        self._run: Callable[[], None] | None = run
        self._error: Exception | None = None

    def wait(self) -> None:
        run = self._run
        self._run = None
        if self._error is not None:
            raise self._error
        try:
            if run is not None:
                run()
        except Exception as error:
            self._error = error
            raise
