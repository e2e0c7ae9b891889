"""How the tensors of a call become the slots of a schedule, and what is done after it.

A `Call` knows three things that the interpreter does not: which tensor holds which unit, what
is copied before, and what is divided or copied back after. Everything else is the schedule's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from shoal.comm.executors.scheduled.buffers import Memory
from shoal.comm.group import Op, check_all_to_all, check_pieces
from shoal.comm.operator import check_operator, divide, fill_identity
from shoal.errors import BadInput


@dataclass(frozen=True)
class Place:
    """Who calls: a rank among `size`, and the root where there is one."""

    rank: int
    size: int
    root: int = 0

    @property
    def is_root(self) -> bool:
        return self.rank == self.root


@dataclass(frozen=True)
class Call:
    """One call of a collective on one rank; `num_bytes` is V of the price."""

    kind: str
    like: Tensor
    unit_numel: int
    num_bytes: int
    bind: Callable[[Memory], None]
    finish: Callable[[], None]
    root: int = 0
    op: Op = Op.SUM


class Flat:
    """A tensor as a flat one: a view where it is contiguous, otherwise a copy to be put back."""

    def __init__(self, tensor: Tensor):
        self._tensor = tensor.detach()
        self.data = self._tensor.new_empty(0)

    def load(self, copy: bool = False) -> Tensor:
        whole = self._tensor.clone() if copy else self._tensor
        self.data = whole.contiguous().view(-1)
        return self.data

    def store(self) -> None:
        if self.data.data_ptr() != self._tensor.data_ptr():
            self._tensor.copy_(self.data.view(self._tensor.shape))


def whole(kind: str, data: Tensor, op: Op, place: Place, out: Tensor | None = None) -> Call:
    """broadcast, reduce, all_reduce, scan, barrier: the vector is changed where it lies."""
    check_operator(op, data.dtype)
    target = Flat(data if out is None else out)
    keeps = kind == "reduce" and not place.is_root

    def bind(memory: Memory) -> None:
        if out is not None:
            out.detach().copy_(data.detach().reshape(out.shape))
        memory.bind(0, target.load(copy=keeps))

    def finish() -> None:
        if keeps:
            return
        if kind == "exclusive_scan" and place.rank == 0:
            fill_identity(target.data, op)
        elif op is Op.MEAN:
            divide(target.data, _contributions(kind, place))
        target.store()

    return Call(kind, data, data.numel(), _bytes(data), bind, finish, place.root, op)


def _contributions(kind: str, place: Place) -> int:
    return {"scan": place.rank + 1, "exclusive_scan": place.rank, "broadcast": 1}.get(
        kind, place.size
    )


def gather(out: Tensor | None, data: Tensor, place: Place) -> Call:
    target = Flat(_root_has("gather", out, data, place))

    def bind(memory: Memory) -> None:
        own = Flat(data).load()
        if place.is_root:
            _bind_all(memory, target.load(), place.size)[place.rank].copy_(own)
        else:
            memory.bind(place.rank, own)

    def finish() -> None:
        if place.is_root:
            target.store()

    return _pieces("gather", data, place, bind, finish)


def scatter(out: Tensor, data: Tensor | None, place: Place) -> Call:
    source = Flat(_root_has("scatter", data, out, place))
    target = Flat(out)

    def bind(memory: Memory) -> None:
        flat = target.load()
        if place.is_root:
            flat.copy_(_bind_all(memory, source.load(), place.size)[place.rank])
        else:
            memory.bind(place.rank, flat)

    return _pieces("scatter", out, place, bind, target.store)


def all_gather(out: Tensor, data: Tensor, place: Place) -> Call:
    check_pieces("all_gather", out, data, place.size)
    target = Flat(out)

    def bind(memory: Memory) -> None:
        own = Flat(data).load()
        _bind_all(memory, target.load(), place.size)[place.rank].copy_(own)

    return _pieces("all_gather", data, place, bind, target.store)


def reduce_scatter(out: Tensor, data: Tensor, op: Op, place: Place) -> Call:
    """`data` is left as it was: the sums grow in a copy of it."""
    check_operator(op, data.dtype)
    check_pieces("reduce_scatter", data, out, place.size)
    source = Flat(data)

    def bind(memory: Memory) -> None:
        _bind_all(memory, source.load(copy=True), place.size)

    def finish() -> None:
        own = _rows(source.data, place.size)[place.rank]
        if op is Op.MEAN:
            divide(own, place.size)
        out.detach().copy_(own.view(out.shape))

    return _pieces("reduce_scatter", out, place, bind, finish, op)


def all_to_all(out: Tensor, data: Tensor, place: Place) -> Call:
    check_all_to_all(out, data, place.size)
    source = Flat(data)
    target = Flat(out)

    def bind(memory: Memory) -> None:
        given = _rows(source.load(copy=_overlap(out, data)), place.size)
        taken = _rows(target.load(), place.size)
        for peer in range(place.size):
            memory.bind(place.rank * place.size + peer, given[peer])
            if peer != place.rank:
                memory.bind(peer * place.size + place.rank, taken[peer])
        taken[place.rank].copy_(given[place.rank])

    unit = data.numel() // place.size
    return Call("all_to_all", data, unit, _bytes(data), bind, target.store)


def _pieces(
    kind: str,
    piece: Tensor,
    place: Place,
    bind: Callable[[Memory], None],
    finish: Callable[[], None],
    op: Op = Op.SUM,
) -> Call:
    num_bytes = _bytes(piece) * place.size
    return Call(kind, piece, piece.numel(), num_bytes, bind, finish, place.root, op)


def _bind_all(memory: Memory, flat: Tensor, size: int) -> Tensor:
    """Piece r of `flat` is unit r; gives back the pieces as rows."""
    pieces = _rows(flat, size)
    for rank in range(size):
        memory.bind(rank, pieces[rank])
    return pieces


def _rows(flat: Tensor, size: int) -> Tensor:
    return flat.view(size, flat.numel() // size)


def _root_has(kind: str, whole: Tensor | None, piece: Tensor, place: Place) -> Tensor:
    if not place.is_root:
        return piece
    if whole is None:
        raise BadInput(f"rank {place.rank} is the root of a {kind} and has not given the whole")
    check_pieces(kind, whole, piece, place.size)
    return whole


def _overlap(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
