"""A group on one host: its collectives run natively through shared memory.

    all_reduce    up to 16 KB: everybody reads all; 1 round of flags
                  above: in chunks; everybody reduces a share of a chunk and takes the others'
    the others    everybody writes what others need into its slot and reads what it needs

Results of a reduction are the same bits on every rank: contributions go in the order of ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.comm.group import Op, check_all_to_all, check_pieces, check_root, check_subgroup
from shoal.comm.native import (
    KIND,
    PLAIN,
    UNEVEN,
    NativeWork,
    Pieces,
    Side,
    TracedWork,
    moved_as,
    reduced_as,
)
from shoal.comm.objects import all_gather_bytes
from shoal.comm.operator import fill_identity
from shoal.comm.work_queue import Lane, LaneWork, OnLane
from shoal.errors import BadInput, ShoalError
from shoal.observe.trace import OFF, Tracer
from shoal.transport.shm.messages import ShmTransport, ShmWork
from shoal.transport.shm.segment import Segment, join

_ALL_REDUCE = KIND["all_reduce"]
_SUM = PLAIN[torch.float32, "sum"]
_PLUS = Op.SUM
_FLOAT = torch.float32


class ShmGroup(OnLane):
    """Collectives through a segment. Until they are waited for their tensors must be left alone."""

    def __init__(self, segment: Segment, tracer: Tracer = OFF):
        self.segment = segment
        self.rank = segment.rank
        self.size = segment.size
        self.transport = ShmTransport(segment)
        self._lane = Lane("shoal collectives")
        self._children: list[ShmGroup] = []
        self.tracer = tracer

    @property
    def timeout_s(self) -> float:
        """How long an operation waits for the other ranks."""
        return self.segment.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self.segment.timeout_s = timeout_s
        self.segment.timeout_ns = int(timeout_s * 1e9)

    def within(self, timeout_s: float) -> ShmGroup:
        """This group for a call with a timeout of its own; it is not to be kept."""
        other = copy.copy(self)
        other.segment = self.segment.within(timeout_s)
        return other

    def send(self, data: Tensor, dst: int, tag: int = 0) -> ShmWork:
        return self.transport.send(Side(data).host, dst, tag)

    def recv(self, into: Tensor, src: int, tag: int = 0) -> ShmWork:
        """`src` may be `ANY_SOURCE` of `shoal.transport.shm.messages`."""
        side = Side(into)
        return self.transport.recv(side.host, src, tag, side.store)

    def broadcast(self, data: Tensor, root: int = 0) -> LaneWork:
        return self._move("broadcast", data, data, data.numel(), root)

    def reduce(self, data: Tensor, root: int = 0, op: Op = Op.SUM) -> LaneWork:
        """The result at the root; the other ranks' tensors are left as they were."""
        return self.combine("reduce", data, data, data.numel(), op.value, root)

    def all_reduce(self, data: Tensor, op: Op = Op.SUM, out: Tensor | None = None) -> LaneWork:
        """Everybody's `data` combined, in its place or in `out`."""
        if out is None and op is _PLUS and data.dtype is _FLOAT:
            lane = self._lane
            segment = self.segment
            plain = data.is_cpu and data.is_contiguous() and not segment.closed
            if plain and not lane.tracer.enabled:  # the shortest way for the most common call
                at = data.data_ptr()
                work = NativeWork(
                    lane, segment, (_ALL_REDUCE, at, at, data.numel(), *_SUM, 0), data
                )
                lane.submit(work)
                return work
        return self.combine(
            "all_reduce", data, data if out is None else out, data.numel(), op.value
        )

    def gather(self, out: Tensor | None, data: Tensor, root: int = 0) -> LaneWork:
        if self.rank == root:
            if out is None:
                raise BadInput(f"rank {root} is the root of a gather and has not given the whole")
            check_pieces("gather", out, data, self.size)
        return self._move("gather", data, out if self.rank == root else None, data.numel(), root)

    def scatter(self, out: Tensor, data: Tensor | None, root: int = 0) -> LaneWork:
        if self.rank == root:
            if data is None:
                raise BadInput(f"rank {root} is the root of a scatter and has not given the whole")
            check_pieces("scatter", data, out, self.size)
        source = out if data is None or self.rank != root else data
        return self._move("scatter", source, out, out.numel(), root)

    def all_gather(self, out: Tensor, data: Tensor) -> LaneWork:
        check_pieces("all_gather", out, data, self.size)
        return self._move("all_gather", data, out, data.numel())

    def reduce_scatter(self, out: Tensor, data: Tensor, op: Op = Op.SUM) -> LaneWork:
        check_pieces("reduce_scatter", data, out, self.size)
        return self.combine("reduce_scatter", data, out, out.numel(), op.value)

    def all_to_all(self, out: Tensor, data: Tensor) -> LaneWork:
        check_all_to_all(out, data, self.size)
        return self._move("all_to_all", data, out, data.numel() // self.size)

    def all_to_all_uneven(
        self, out: Tensor, data: Tensor, taken: Sequence[int], given: Sequence[int]
    ) -> LaneWork:
        """Flat tensors; `given[r]` elements go to rank r and `taken[r]` come from it."""
        longest = torch.tensor([max([*given, *taken, 0])])
        self.all_reduce(longest, Op.MAX).wait()
        code, scale = moved_as(data)
        unit = data.element_size()
        table = torch.tensor([_offsets(given, unit), given, _offsets(taken, unit), taken])
        table[1::2] *= unit
        source = Side(data)
        target = Side(out)
        args = (UNEVEN, source.host.data_ptr(), target.host.data_ptr(),
                int(longest) * scale, code, 0, 0)  # fmt: skip
        flat = table.t().contiguous()
        return self._submit("all_to_all", data.nbytes, args, (source, target), target.store, flat)

    def in_pieces(
        self,
        kind: str,
        given: Sequence[Tensor],
        taken: Sequence[Tensor],
        op: str = "",
        root: int = 0,
    ) -> LaneWork:
        """gather, scatter, all_gather, reduce_scatter, all_to_all between lists of tensors.

        A list of one tensor is the rank's own piece; pieces may lie anywhere.
        """
        check_root(root, self.size)
        like = given[0] if given else taken[0]
        for piece in (*given, *taken):
            if piece.numel() != like.numel() or piece.dtype != like.dtype:
                raise BadInput(f"{kind} needs pieces of one size and type")
        code, scale, operator = reduced_as(like, op) if op else (*moved_as(like), 0)
        source = Pieces(given)
        target = Pieces(taken)
        listed = {"all_to_all": (source, target), "scatter": (source,), "reduce_scatter": (source,)}
        addresses = [a for side in listed.get(kind, (target,)) for a in side.addresses()]
        own = [(*side.addresses(), 0)[0] for side in (source, target)]
        args = (KIND[kind], own[0], own[1], like.numel() * scale, code, operator, root)
        table = torch.tensor(addresses) if addresses else None
        num_bytes = like.nbytes * max(len(given), len(taken))
        return self._submit(kind, num_bytes, args, (source, target), target.store, table)

    def scan(
        self, data: Tensor, op: Op = Op.SUM, exclusive: bool = False, out: Tensor | None = None
    ) -> LaneWork:
        """Ranks 0 to r combined at rank r; exclusive: 0 to r-1, and at rank 0 nothing (0, 1, …)."""
        into = data if out is None else out
        kind = "exclusive_scan" if exclusive else "scan"
        empty = exclusive and self.rank == 0
        after = (lambda: fill_identity(into.detach(), op)) if empty else None
        return self.combine(kind, data, into, data.numel(), op.value, after=after)

    def barrier(self) -> LaneWork:
        return self._submit("barrier", 0, (0, 0, 0, 0, 0, 0, 0))

    def duplicate(self) -> ShmGroup:
        found = self.subgroup(range(self.size))
        assert found is not None
        return found

    def subgroup(self, ranks: Sequence[int]) -> ShmGroup | None:
        ranks = list(ranks)
        check_subgroup(ranks, self.size)
        if self.rank not in ranks:
            for _ in range(2):
                all_gather_bytes(self, b"")
            return None

        def exchange(said: bytes) -> list[bytes]:
            everything = all_gather_bytes(self, said)
            return [everything[rank] for rank in ranks]

        segment = join(
            exchange,
            ranks.index(self.rank), len(ranks), self.segment.timeout_s,
        )  # fmt: skip
        if segment is None:
            raise BadInput("there is no memory left for another group of these ranks")
        child = ShmGroup(segment, self.tracer)
        self._children.append(child)
        return child

    def close(self) -> None:
        """Leave. Operations that nobody has waited for are given up; safe to call twice."""
        for child in self._children:
            child.close()
        if not self.segment.closed:
            self.segment.leave()
            self._lane.close()
            self.transport.close()
            self.segment.close()

    def combine(
        self,
        kind: str,
        data: Tensor,
        out: Tensor,
        count: int,
        op: str,
        root: int = 0,
        after: Callable[[], None] | None = None,
    ) -> LaneWork:
        """A reduction by the name of its operator, which may also be and, or, xor."""
        plain = PLAIN.get((data.dtype, op))
        easy = plain and out is data and root == 0 and not self.tracer.enabled
        if plain and easy and data.is_cpu and data.is_contiguous() and not self.segment.closed:
            at = data.data_ptr()
            args = (KIND[kind], at, at, count, *plain, 0)
            work = NativeWork(self._lane, self.segment, args, data, after)
            self._lane.submit(work)
            return work
        check_root(root, self.size)
        code, scale, operator = reduced_as(data, op)
        args, keep, store = self._sides(kind, data, out, count * scale, code, operator, root)
        return self._submit(kind, data.nbytes, args, keep, after or store)

    def _move(
        self, kind: str, data: Tensor, out: Tensor | None, count: int, root: int = 0
    ) -> LaneWork:
        check_root(root, self.size)
        code, scale = moved_as(data)
        args, keep, store = self._sides(kind, data, out, count * scale, code, 0, root)
        return self._submit(kind, data.nbytes, args, keep, store)

    def _sides(
        self, kind: str, data: Tensor, out: Tensor | None, count: int, code: int, op: int, root: int
    ) -> tuple[tuple[int, int, int, int, int, int, int], object, Callable[[], None] | None]:
        """The numbers of a call, what it must keep, and what brings back a result."""
        number = KIND[kind]
        if out is data and data.is_cpu and data.is_contiguous():
            at = data.data_ptr()
            return (number, at, at, count, code, op, root), data, None
        source = Side(data, copy=out is not None and out is not data and _overlap(out, data))
        if out is None:
            return (number, source.host.data_ptr(), 0, count, code, op, root), source, None
        target = source if out is data else Side(out)
        at = source.host.data_ptr()
        to = target.host.data_ptr()
        return (number, at, to, count, code, op, root), (source, target), target.store

    def _submit(
        self,
        kind: str,
        num_bytes: int,
        args: tuple[int, int, int, int, int, int, int],
        keep: object = None,
        after: Callable[[], None] | None = None,
        table: Tensor | None = None,
    ) -> LaneWork:
        if self.segment.closed:
            raise ShoalError(f"rank {self.rank} has closed this group")
        if self.tracer.enabled:
            traced = TracedWork(self._lane, self.segment, args, keep, after, table)
            traced.detail = f"{kind} shared memory {num_bytes} bytes"
            self._lane.submit(traced)
            return traced
        work = NativeWork(self._lane, self.segment, args, keep, after, table)
        self._lane.submit(work)
        return work


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Parts of one storage that are not the same place; reading and writing could cross."""
    if one.device.type != "cpu" or one.data_ptr() == other.data_ptr():
        return False
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _offsets(counts: Sequence[int], unit: int) -> list[int]:
    return [sum(counts[:rank]) * unit for rank in range(len(counts))]
