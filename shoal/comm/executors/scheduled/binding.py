"""How the tensors of a call become the slots of a schedule, and what is done after it.

A `Binding` knows what the interpreter does not: which tensor holds which unit, what is copied
before, and what is divided or copied back after.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm.call import Call, Op, Operand, divide, fill_identity, num_bytes
from shoal.comm.staging import FlatTensor, share_storage
from shoal.schedules.collectives.collective import Collective


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


class Binding:
    """One call on one rank; `num_bytes` is V of the price.

    `load` gives the tensors of the call to the slots, `store` takes the result from them. Both
    run when the operation is carried out, not when it is called.
    """

    def __init__(self, call: Call, rank: int, size: int):
        self.call = call
        self.rank = rank
        self.size = size
        self.like = self._piece()
        self.unit_numel = self.like.numel()
        self.num_bytes = self.like.nbytes * size

    def load(self, slots: SlotBuffers) -> None:
        raise NotImplementedError

    def store(self) -> None:
        raise NotImplementedError

    def _piece(self) -> Tensor:
        """What one rank gives or gets."""
        piece = self.call.out if self.call.data is None else self.call.data
        return _tensor(piece)

    @property
    def _is_root(self) -> bool:
        return self.rank == self.call.root

    def _bind_rows(self, slots: SlotBuffers, buffer: FlatTensor) -> Tensor:
        """Piece r of the buffer is unit r; returns the pieces as rows."""
        rows = buffer.rows(self.size)
        for rank in range(self.size):
            slots.bind(rank, rows[rank])
        return rows


class VectorBinding(Binding):
    """broadcast, reduce, all_reduce, scan: the vector is changed where it lies."""

    def __init__(self, call: Call, rank: int, size: int):
        super().__init__(call, rank, size)
        self.num_bytes = self.like.nbytes
        self._is_input_kept = call.kind == "reduce" and not self._is_root

    def load(self, slots: SlotBuffers) -> None:
        out = _tensor(self.call.out)
        if self.call.out is not self.call.data:
            out.detach().copy_(self.like.detach().reshape(out.shape))
        self._target = FlatTensor(out, copy=self._is_input_kept)
        slots.bind(0, self._target.flat)

    def store(self) -> None:
        if self._is_input_kept:
            return
        kind = self.call.kind
        if kind == "exclusive_scan" and self.rank == 0:
            fill_identity(self._target.flat, self.call.op)
        elif self.call.op is Op.MEAN:
            counts = {"scan": self.rank + 1, "exclusive_scan": self.rank, "broadcast": 1}
            divide(self._target.flat, counts.get(kind, self.size))
        self._target.store()


class GatherBinding(Binding):
    def load(self, slots: SlotBuffers) -> None:
        given = FlatTensor(self.like).flat
        if self.call.out is None:
            slots.bind(self.rank, given)
            return
        self._target = FlatTensor(self.call.out)
        self._bind_rows(slots, self._target)[self.rank].copy_(given)

    def store(self) -> None:
        if self.call.out is not None:
            self._target.store()


class ScatterBinding(Binding):
    def load(self, slots: SlotBuffers) -> None:
        self._target = FlatTensor(self.like)
        if self.call.data is None:
            slots.bind(self.rank, self._target.flat)
        else:
            rows = self._bind_rows(slots, FlatTensor(self.call.data))
            self._target.flat.copy_(rows[self.rank])

    def store(self) -> None:
        self._target.store()

    def _piece(self) -> Tensor:
        return _tensor(self.call.out)


class ReduceScatterBinding(Binding):
    """`data` is left as it was: the sums grow in a copy of it."""

    def load(self, slots: SlotBuffers) -> None:
        assert self.call.data is not None
        self._rows = self._bind_rows(slots, FlatTensor(self.call.data, copy=True))

    def store(self) -> None:
        total = self._rows[self.rank]
        if self.call.op is Op.MEAN:
            divide(total, self.size)
        self.like.detach().copy_(total.view(self.like.shape))

    def _piece(self) -> Tensor:
        return _tensor(self.call.out)


class AllToAllBinding(Binding):
    def __init__(self, call: Call, rank: int, size: int):
        super().__init__(call, rank, size)
        self.num_bytes = num_bytes(call.data)
        self.unit_numel = self.num_bytes // self.like.element_size() // size

    def load(self, slots: SlotBuffers) -> None:
        assert self.call.data is not None and self.call.out is not None
        copy = _share_storage(self.call.out, self.call.data)
        given = FlatTensor(self.call.data, copy).rows(self.size)
        self._target = FlatTensor(self.call.out)
        taken = self._target.rows(self.size)
        for peer in range(self.size):
            slots.bind(self.rank * self.size + peer, given[peer])
            if peer != self.rank:
                slots.bind(peer * self.size + self.rank, taken[peer])
        taken[self.rank].copy_(given[self.rank])

    def store(self) -> None:
        self._target.store()

    def _piece(self) -> Tensor:
        data = self.call.data
        return data if isinstance(data, Tensor) else _tensor(data[0] if data else None)


_BINDINGS: dict[str, type[Binding]] = {
    "gather": GatherBinding,
    "all_gather": GatherBinding,
    "scatter": ScatterBinding,
    "reduce_scatter": ReduceScatterBinding,
    "all_to_all": AllToAllBinding,
}


def bind(call: Call, rank: int, size: int) -> Binding:
    return _BINDINGS.get(call.kind, VectorBinding)(call, rank, size)


def _tensor(operand: Operand | None) -> Tensor:
    assert isinstance(operand, Tensor)
    return operand


def _share_storage(out: Operand, data: Operand) -> bool:
    if isinstance(out, Tensor) and isinstance(data, Tensor):
        return share_storage(out, data)
    return False  # lists are copied in any case
