"""How the tensors of a call become the slots of a schedule, and what is done after it.

A `Binding` knows what the interpreter does not: which tensor holds which unit, what is copied
before, and what is divided or copied back after.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.comm.call import Call, Op, Operand, divide, fill_identity, num_bytes
from shoal.comm.staging import FlatTensor, share_storage
from shoal.schedules.collectives import Collective


class SlotBuffers:
    """Slots as flat views. Slots that belong to no tensor of the caller are made when needed.

    Every unit has `unit_numel` elements and is divided as evenly as possible: chunk i of k begins
    at element i * n // k.
    """

    def __init__(self, collective: Collective, unit_numel: int, like: Tensor):
        self._chunks = collective.chunks
        self._per_unit = collective.chunks_per_unit
        self._unit_numel = unit_numel
        self._like = like
        self._bound: dict[int, Tensor] = {}
        self._made: dict[int, Tensor] = {}

    @property
    def dtype(self) -> torch.dtype:
        return self._like.dtype

    def bind(self, unit: int, flat: Tensor) -> None:
        """Unit `unit` lies in `flat`: its chunks are views of it."""
        for chunk in range(self._per_unit):
            first, last = self._bounds(chunk)
            self._bound[unit * self._per_unit + chunk] = flat[first:last]

    def slot(self, slot: int) -> Tensor:
        view = self._bound.get(slot)
        if view is None:
            view = self._made.get(slot)
        if view is None:
            first, last = self._bounds(slot % self._chunks % self._per_unit)
            view = self._like.new_empty(last - first)
            self._made[slot] = view
        return view

    def segment(self, slot: int, index: int, segments: int) -> Tensor:
        """One of the segments into which a slot is divided."""
        view = self.slot(slot)
        if segments == 1:
            return view
        numel = view.numel()
        return view[index * numel // segments : (index + 1) * numel // segments]

    def joined(self, slots: list[int], index: int, segments: int) -> Tensor:
        """That segment of several slots as one flat tensor: a view if they are adjacent."""
        views = [self.segment(slot, index, segments) for slot in slots]
        if len(views) == 1:
            return views[0]
        return _joined(views)

    def release(self, slots: list[int]) -> None:
        """Free the memory of slots that were made here and are not needed any more."""
        for slot in slots:
            self._made.pop(slot, None)

    def _bounds(self, chunk: int) -> tuple[int, int]:
        numel = self._unit_numel
        count = self._per_unit
        return chunk * numel // count, (chunk + 1) * numel // count


def _joined(views: list[Tensor]) -> Tensor:
    views = [view for view in views if view.numel()] or views[:1]
    first = views[0]
    total = sum(view.numel() for view in views)
    expected = first.data_ptr()
    for view in views:
        if view.data_ptr() != expected or not share_storage(view, first):
            return torch.cat(views)
        expected += view.numel() * view.element_size()
    return first.as_strided((total,), (1,))


class Binding(NamedTuple):
    """One call on one rank; `num_bytes` is V of the price, `like` what one rank gives or gets."""

    call: Call
    rank: int
    size: int
    like: Tensor
    unit_numel: int
    num_bytes: int

    def load(self, slots: SlotBuffers) -> Callable[[], None]:
        """Give the tensors of the call to the slots; returns what takes the result from them.

        Both are done when the operation is carried out, not when it is called.
        """
        if self.call.kind in ("gather", "all_gather"):
            return self._gather(slots)
        if self.call.kind == "scatter":
            return self._scatter(slots)
        if self.call.kind == "reduce_scatter":
            return self._reduce_scatter(slots)
        return (self._all_to_all if self.call.kind == "all_to_all" else self._vector)(slots)

    def _vector(self, slots: SlotBuffers) -> Callable[[], None]:
        """broadcast, reduce, all_reduce, scan: the vector is changed where it lies."""
        kind, op, out = self.call.kind, self.call.op, _tensor(self.call.out)
        is_input_kept = kind == "reduce" and self.rank != self.call.root
        if self.call.out is not self.call.data:
            out.detach().copy_(self.like.detach().reshape(out.shape))
        target = FlatTensor(out, copy=is_input_kept)
        slots.bind(0, target.flat)

        def store() -> None:
            if kind == "exclusive_scan" and self.rank == 0:
                fill_identity(target.flat, op)
            elif op is Op.MEAN:
                counts = {"scan": self.rank + 1, "exclusive_scan": self.rank, "broadcast": 1}
                divide(target.flat, counts.get(kind, self.size))
            target.store()

        return _nothing if is_input_kept else store

    def _gather(self, slots: SlotBuffers) -> Callable[[], None]:
        given = FlatTensor(self.like).flat
        if self.call.out is None:
            slots.bind(self.rank, given)
            return _nothing
        target = FlatTensor(self.call.out)
        self._bind_rows(slots, target)[self.rank].copy_(given)
        return target.store

    def _scatter(self, slots: SlotBuffers) -> Callable[[], None]:
        target = FlatTensor(self.like)
        if self.call.data is None:
            slots.bind(self.rank, target.flat)
        else:
            rows = self._bind_rows(slots, FlatTensor(self.call.data))
            target.flat.copy_(rows[self.rank])
        return target.store

    def _reduce_scatter(self, slots: SlotBuffers) -> Callable[[], None]:
        """`data` is left as it was: the sums grow in a copy of it."""
        assert self.call.data is not None
        total = self._bind_rows(slots, FlatTensor(self.call.data, copy=True))[self.rank]

        def store() -> None:
            if self.call.op is Op.MEAN:
                divide(total, self.size)
            self.like.detach().copy_(total.view(self.like.shape))

        return store

    def _all_to_all(self, slots: SlotBuffers) -> Callable[[], None]:
        data, out = self.call.data, self.call.out
        assert data is not None and out is not None
        tensors = isinstance(data, Tensor) and isinstance(out, Tensor)  # lists are copied anyway
        copy = tensors and share_storage(_tensor(out), _tensor(data))
        given = FlatTensor(data, copy).rows(self.size)
        target = FlatTensor(out)
        taken = target.rows(self.size)
        for peer in range(self.size):
            slots.bind(self.rank * self.size + peer, given[peer])
            if peer != self.rank:
                slots.bind(peer * self.size + self.rank, taken[peer])
        taken[self.rank].copy_(given[self.rank])
        return target.store

    def _bind_rows(self, slots: SlotBuffers, buffer: FlatTensor) -> Tensor:
        """Piece r of the buffer is unit r; returns the pieces as rows."""
        rows = buffer.rows(self.size)
        for rank in range(self.size):
            slots.bind(rank, rows[rank])
        return rows


def bind(call: Call, rank: int, size: int) -> Binding:
    is_taken = call.data is None or call.kind in ("scatter", "reduce_scatter")
    operand = call.out if is_taken else call.data
    like = _tensor(operand[0] if isinstance(operand, list) else operand)
    if call.kind == "all_to_all":
        whole = num_bytes(call.data)
        return Binding(call, rank, size, like, whole // like.element_size() // size, whole)
    is_vector = call.kind not in ("gather", "all_gather", "scatter", "reduce_scatter")
    whole = like.nbytes if is_vector else like.nbytes * size
    return Binding(call, rank, size, like, like.numel(), whole)


def _tensor(operand: Operand | None) -> Tensor:
    assert isinstance(operand, Tensor)
    return operand


def _nothing() -> None:
    return None
