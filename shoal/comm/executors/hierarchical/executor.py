"""A group over several hosts: shared memory inside a host, Gloo between hosts.

Collectives run one after the other on a lane; `across` says how each goes. Where nothing is to be
combined or copied for many (gather, scatter, all_to_all) every piece goes straight to its rank.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from shoal.comm.executors.hierarchical.any_source import Message
from shoal.comm.executors.hierarchical.collectives import Across
from shoal.comm.executors.hierarchical.inter_host import Between
from shoal.comm.executors.hierarchical.point_to_point import Mail, as_global, reserved_tag
from shoal.comm.executors.hierarchical.topology import Places
from shoal.comm.executors.shared_memory import ShmGroup
from shoal.comm.executors.torch import told
from shoal.comm.group import Group, Op, check_all_to_all, check_pieces, check_root, check_subgroup
from shoal.comm.native import Side, reduced_as
from shoal.comm.operator import divide
from shoal.comm.work_queue import Lane, LaneWork, OnLane
from shoal.errors import BadInput, ShoalError
from shoal.observe.trace import OFF, Tracer

_OF_BOOL = {"sum": "max", "or": "max", "max": "max", "prod": "min", "and": "min", "min": "min"}
_COLLECTIVES = 1 << 28  # reserved tags from here on
_PATIENCE_S = 1.0


class HostsGroup(OnLane):
    """Made on all ranks together; `inner` are those of this host, `store` is common to all."""

    def __init__(
        self,
        places: Places,
        inner: ShmGroup,
        store: Store,
        timeout_s: float,
        tracer: Tracer = OFF,
    ):
        self.places = places
        self.inner = inner
        self._store = store
        self.rank = places.rank
        self.size = places.size
        self._timeout_s = timeout_s
        self._column = _column(places, store, timeout_s)
        self._across = Across(places, inner, self._column)
        self._mail = Mail(places, inner, _gloo("mesh", store, self.rank, self.size, timeout_s))
        self._calls = itertools.count(1)
        self._failures = list[Exception]()
        self._children: list[HostsGroup] = []
        self._parts: list[HostsGroup] = []
        self._subgroups = itertools.count()
        self._lane = Lane("shoal collectives over hosts")
        self.tracer = tracer

    @property
    def timeout_s(self) -> float:
        """How long an operation waits for the other ranks."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._timeout_s = self.inner.timeout_s = timeout_s
        self._mail.set_timeout(timeout_s)
        if self._column is not None:
            self._column.set_timeout(timeout_s)

    def within(self, timeout_s: float) -> HostsGroup:
        """This group for a call with a timeout of its own; it is not to be kept."""
        other = copy.copy(self)
        other._across = self._across.within(timeout_s)
        other._timeout_s = timeout_s
        return other

    def send(self, data: Tensor, dst: int, tag: int = 0) -> Message:
        self._check_open()
        return self._mail.send(data, dst, tag)

    def recv(self, into: Tensor, src: int, tag: int = 0) -> Message:
        self._check_open()
        return self._mail.recv(into, src, tag)

    def barrier(self) -> LaneWork:
        return self._submit("barrier", 0, self._across.barrier)

    def broadcast(self, data: Tensor, root: int = 0) -> LaneWork:
        check_root(root, self.size)
        side = Side(data)
        across = self._across
        flat = side.host.view(-1)
        return self._submit(
            "broadcast", data.nbytes, lambda: across.broadcast(flat, root), side.store
        )

    def reduce(self, data: Tensor, root: int = 0, op: Op = Op.SUM) -> LaneWork:
        """The result at the root; the other ranks' tensors are left as they were."""
        return self.combine("reduce", data, data, data.numel(), op.value, root)

    def all_reduce(self, data: Tensor, op: Op = Op.SUM, out: Tensor | None = None) -> LaneWork:
        """Everybody's `data` combined, in its place or in `out`."""
        into = data if out is None else out
        return self.combine("all_reduce", data, into, data.numel(), op.value)

    def reduce_scatter(self, out: Tensor, data: Tensor, op: Op = Op.SUM) -> LaneWork:
        check_pieces("reduce_scatter", data, out, self.size)
        return self.combine("reduce_scatter", data, out, out.numel(), op.value)

    def combine(
        self, kind: str, data: Tensor, out: Tensor, count: int, op: str, root: int = 0
    ) -> LaneWork:
        """A reduction by the name of its operator, which may also be and, or, xor."""
        check_root(root, self.size)
        reduced_as(data, op)  # refuses what cannot be
        target = Side(out)
        across = self._across
        in_place = kind == "all_reduce" and out is data
        given = target.host if in_place else Side(data, copy=True).host
        numbers, step = _numbers(given, op)

        steps: dict[str, Callable[[], None]] = {
            "all_reduce": lambda: across.all_reduce(numbers, step),
            "reduce": lambda: across.reduce(numbers, root, step),
            "reduce_scatter": lambda: across.reduce_scatter(
                _numbers(target.host, op)[0], numbers.view(self.size, -1), step
            ),
        }

        def finish() -> None:
            if kind == "reduce" and self.rank != root:
                return
            if kind != "reduce_scatter" and not in_place:
                target.host.copy_(given.view(target.host.shape))
            target.store()

        return self._submit(kind, data.nbytes, steps[kind], finish)

    def all_gather(self, out: Tensor, data: Tensor) -> LaneWork:
        check_pieces("all_gather", out, data, self.size)
        source = Side(data, copy=True)
        target = Side(out)
        across = self._across
        rows = target.host.view(self.size, -1)
        flat = source.host.view(-1)
        return self._submit(
            "all_gather", out.nbytes, lambda: across.all_gather(rows, flat), target.store
        )

    def gather(self, out: Tensor | None, data: Tensor, root: int = 0) -> LaneWork:
        check_root(root, self.size)
        given = {root: Side(data, copy=True).host.view(-1)}
        if self.rank != root:
            return self._exchange("gather", given, {})
        if out is None:
            raise BadInput(f"rank {root} is the root of a gather and has not given the whole")
        check_pieces("gather", out, data, self.size)
        target = Side(out)
        return self._exchange("gather", given, self._rows(target), target)

    def scatter(self, out: Tensor, data: Tensor | None, root: int = 0) -> LaneWork:
        check_root(root, self.size)
        target = Side(out)
        given = dict[int, Tensor]()
        if self.rank == root:
            if data is None:
                raise BadInput(f"rank {root} is the root of a scatter and has not given the whole")
            check_pieces("scatter", data, out, self.size)
            given = self._rows(Side(data, copy=True))
        return self._exchange("scatter", given, {root: target.host.view(-1)}, target)

    def all_to_all(self, out: Tensor, data: Tensor) -> LaneWork:
        check_all_to_all(out, data, self.size)
        source = Side(data, copy=True)
        target = Side(out)
        return self._exchange("all_to_all", self._rows(source), self._rows(target), target)

    def all_to_all_uneven(
        self, out: Tensor, data: Tensor, taken: Sequence[int], given: Sequence[int]
    ) -> LaneWork:
        """Flat tensors; `given[r]` elements go to rank r and `taken[r]` come from it."""
        source = Side(data, copy=True)
        target = Side(out)
        sent = dict(enumerate(torch.split(source.host.view(-1), list(given))))
        got = dict(enumerate(torch.split(target.host.view(-1), list(taken))))
        return self._exchange("all_to_all", sent, got, target)

    def in_pieces(
        self,
        kind: str,
        given: Sequence[Tensor],
        taken: Sequence[Tensor],
        op: str = "",
        root: int = 0,
    ) -> LaneWork:
        """gather, scatter, all_gather, reduce_scatter, all_to_all between lists of tensors."""
        like = given[0] if given else taken[0]
        for piece in (*given, *taken):
            if piece.numel() != like.numel() or piece.dtype != like.dtype:
                raise BadInput(f"{kind} needs pieces of one size and type")
        data = torch.cat([Side(piece).host.reshape(-1) for piece in given]) if given else None
        out = torch.empty(like.numel() * len(taken), dtype=like.dtype)
        self._flat(kind, out, data, op, root)

        def hand_out() -> None:
            self._check_open()
            for piece, part in zip(taken, torch.split(out, max(like.numel(), 1)), strict=False):
                piece.detach().copy_(part.view(piece.shape))

        return self._start(hand_out)

    def _flat(self, kind: str, out: Tensor, data: Tensor | None, op: str, root: int) -> None:
        if kind == "scatter":
            self.scatter(out, data, root)
            return
        assert data is not None
        if kind == "gather":
            self.gather(out if self.rank == root else None, data, root)
        elif kind == "all_gather":
            self.all_gather(out, data)
        elif kind == "reduce_scatter":
            self.combine(kind, data, out, out.numel(), op)
        else:
            self.all_to_all(out, data)

    def scan(self, data: Tensor, op: Op = Op.SUM) -> LaneWork:
        """Ranks 0 to r combined at rank r."""
        reduced_as(data, op.value)
        everything = torch.empty(self.size, data.numel(), dtype=data.dtype)
        source = Side(data)
        across = self._across
        flat = source.host.view(-1)

        def steps() -> None:
            across.all_gather(everything, flat)
            flat.copy_(_combined(everything[: self.rank + 1], op))

        return self._submit("scan", data.nbytes, steps, source.store)

    def duplicate(self) -> HostsGroup:
        store = PrefixStore(f"duplicate {len(self._children)}", self._store)
        child = HostsGroup(self.places, self.inner.duplicate(), store, self._timeout_s, self.tracer)
        self._children.append(child)
        return child

    def subgroup(self, ranks: Sequence[int]) -> Group | None:
        """The memory of a host where all are on it; else a group of hosts again."""
        check_subgroup(ranks, self.size)
        name = f"subgroup {next(self._subgroups)}"
        hosts = [[r for r in ranks if r in host] for host in self.places.hosts]
        here = [r for r in ranks if r in self.places.local]
        local = self.places.local
        inner = self.inner.subgroup([local.index(r) for r in here]) if here else None
        if inner is None or len(here) == len(ranks):
            return inner
        numbers = tuple(tuple(map(list(ranks).index, host)) for host in hosts if host)
        places = Places(numbers, list(ranks).index(self.rank))
        store = PrefixStore(name, self._store)
        child = HostsGroup(places, inner, store, self._timeout_s, self.tracer)
        self._parts.append(child)
        return child

    def close(self) -> None:
        """Leave. Operations that nobody has waited for are given up; safe to call twice."""
        for child in [*self._children, *self._parts]:
            child.close()
        self._let_go()
        self._lane.close(_PATIENCE_S)
        self.inner.close()
        self._failures.append(ShoalError(f"rank {self.rank} has closed this group"))

    def _let_go(self) -> None:
        """Ranks that wait for this one, here or elsewhere, are told that it has gone."""
        if not self.inner.segment.closed:
            self.inner.segment.leave()
        if self._column is not None:
            self._column.close()
        self._mail.close()

    def _exchange(
        self,
        kind: str,
        given: Mapping[int, Tensor],
        taken: Mapping[int, Tensor],
        target: Side | None = None,
    ) -> LaneWork:
        """Each piece to its rank, as a message."""
        number = next(self._calls)
        limit_s = self._timeout_s
        tag = reserved_tag(_COLLECTIVES + number % _COLLECTIVES)

        def steps() -> None:
            coming = [self._mail.recv(t, peer, tag) for peer, t in _others(taken, self.rank)]
            going = [self._mail.send(t, peer, tag) for peer, t in _others(given, self.rank)]
            if self.rank in taken:
                taken[self.rank].copy_(given[self.rank])
            for message in (*coming, *going):
                message.wait(limit_s)

        num_bytes = sum(piece.nbytes for piece in given.values())
        return self._submit(kind, num_bytes, steps, target.store if target else None, number)

    def _submit(
        self,
        kind: str,
        num_bytes: int,
        steps: Callable[[], None],
        after: Callable[[], None] | None = None,
        number: int = 0,
    ) -> LaneWork:
        self._check_open()
        doing = f"{kind} #{number or next(self._calls)} over {len(self.places.hosts)} hosts"

        def run() -> None:
            start_ns = time.monotonic_ns()
            try:
                self._check_open()
                steps()
            except RuntimeError as error:
                raise self._failed(error, doing) from error
            if after is not None:
                after()
            if self.tracer.enabled:
                detail = f"{kind} over hosts {num_bytes} bytes"
                self.tracer.add("reduce", start_ns, time.monotonic_ns(), "comm", detail)

        return self._start(run)

    def _start(self, run: Callable[[], None]) -> LaneWork:
        work = _Steps(self._lane, run)
        self._lane.submit(work)
        return work

    def _failed(self, error: RuntimeError, doing: str) -> Exception:
        """The group ends with its first failure, so that nobody waits for this rank in vain."""
        if isinstance(error, ShoalError):
            failure = as_global(error, self.places, doing)
        else:
            failure = told(error, self.rank, doing)
        self._failures.append(failure)
        self._let_go()
        return failure

    def _check_open(self) -> None:
        if self._failures:
            raise self._failures[0]

    def _rows(self, side: Side) -> dict[int, Tensor]:
        return dict(enumerate(side.host.view(self.size, -1)))


class _Steps(LaneWork):
    """What a collective does, as an operation of the lane."""

    __slots__ = ("_steps",)

    def __init__(self, lane: Lane, steps: Callable[[], None]):
        super().__init__(lane)
        self._steps = steps

    def run(self) -> None:
        self._steps()


def _numbers(host: Tensor, op: str) -> tuple[Tensor, str]:
    """Flat, as numbers that Gloo knows, and the operator for them."""
    flat = host.view(-1)
    if flat.dtype == torch.bool:
        return flat.view(torch.uint8), _OF_BOOL.get(op, op)
    return (torch.view_as_real(flat).view(-1) if flat.is_complex() else flat), op


def _combined(rows: Tensor, op: Op) -> Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        op.combine(total, row)
    if op is Op.MEAN:
        divide(total, len(rows))
    return total


def _others(pieces: Mapping[int, Tensor], rank: int) -> list[tuple[int, Tensor]]:
    return [(peer, piece) for peer, piece in pieces.items() if peer != rank and piece.numel()]


def _column(places: Places, store: Store, timeout_s: float) -> Between | None:
    """The ranks of the same index on all hosts; if these differ in size, the first ones only."""
    if places.index and not places.is_even:
        return None
    name = f"column {places.index}"
    hosts = len(places.hosts)
    return Between(_gloo(name, store, places.host, hosts, timeout_s))


def _gloo(name: str, store: Store, rank: int, size: int, timeout_s: float) -> Any:
    prefixed = PrefixStore(name, store)
    return dist.ProcessGroupGloo(prefixed, rank, size, timedelta(seconds=timeout_s))
