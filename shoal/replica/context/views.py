"""Operations that move dimensions, and those that work along one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shoal.replica.context.sequence_shard import SequenceAlignment, SequenceShard
from shoal.replica.split.mapping import sum_over_ranks
from shoal.replica.split.sharded_tensor import NotAligned, ShardedCall, map_results, reshaped


def _reshape(op: ShardedCall) -> Any:
    """Positions stay together, or are gathered."""
    x = op.args[0]
    if not isinstance(x, SequenceShard) or any(isinstance(a, torch.dtype) for a in op.args):
        return NotImplemented
    args = [a.full_shape if isinstance(a, SequenceShard) else a for a in op.args[1:]]
    old = x.full_shape
    new = reshaped(op.name, old, args, op.kwargs)
    spec = x.spec.reshaped(old, new)
    if spec is None:
        return NotImplemented
    shape = list(new)
    shape[spec.dim] = spec.local_size(op.context.rank)
    made = op.context.wrap(x.local.reshape(shape), spec)
    if x.full_value is not None:
        made.full_value = x.full_value.reshape(new)
    return made


def _move(op: ShardedCall) -> Any:
    """Dimensions change places, appear or vanish; sizes do not matter."""
    x = op.args[0]
    if not isinstance(x, SequenceShard) or x.spec.size == 1:
        return NotImplemented
    shape = x.full_shape
    tags = [1 if size == 1 else 2 + index for index, size in enumerate(shape)]
    moved = op.function(torch.empty(tags, device="meta"), *op.args[1:], **op.kwargs).shape
    dim = list(moved).index(2 + x.spec.dim)
    made = op.context.wrap(op.function(x.local, *op.args[1:], **op.kwargs), x.spec.at(dim))
    if x.full_value is not None:
        made.full_value = op.function(x.full_value, *op.args[1:], **op.kwargs)
    return made


def _expand(op: ShardedCall) -> Any:
    x = op.args[0]
    if not isinstance(x, SequenceShard):
        return NotImplemented
    wanted = op.args[1:] or tuple(op.kwargs.values())
    if isinstance(wanted[0], SequenceShard):
        sizes = list(wanted[0].full_shape)
    elif isinstance(wanted[0], Tensor):
        sizes = list(wanted[0].shape)
    else:
        sizes = list(wanted if isinstance(wanted[0], int) else wanted[0])
    dim = len(sizes) - (x.dim() - x.spec.dim)
    if sizes[dim] not in (-1, x.spec.size) or x.spec.size == 1:
        return NotImplemented
    sizes[dim] = -1
    return op.context.wrap(x.local.expand(sizes), x.spec.at(dim))


@dataclass(frozen=True)
class _Along:
    """An operation along `dim`, which is argument number `index`; `default` if it is not given."""

    index: int = 1
    default: int | None = None

    def __call__(self, op: ShardedCall) -> Any:
        x = op.args[0] if op.args else op.kwargs.get("input")
        dim = op.argument(self.index, "dim", self.default)
        if not isinstance(x, SequenceShard) or not isinstance(dim, int) or op.is_in_place:
            return NotImplemented
        dim %= x.dim()
        if dim == x.spec.dim:
            return NotImplemented
        alignment = SequenceAlignment(x)
        try:  # an index or a source has the shape of the first tensor
            result = op.function(*alignment.locals(op.args), **alignment.locals(op.kwargs))
        except NotAligned:
            return NotImplemented
        return map_results(lambda t: op.context.wrap(t, self._spec(x, t, dim)), result)

    def _spec(self, x: SequenceShard, result: Tensor, dim: int) -> Any:
        is_removed = result.dim() < x.dim()
        return replace(x.spec, dim=x.spec.dim - int(is_removed and dim < x.spec.dim))


def _index_select(op: ShardedCall) -> Any:
    x = op.args[0]
    dim = op.argument(1, "dim")
    index = op.argument(2, "index")
    if not isinstance(x, SequenceShard) or isinstance(index, SequenceShard):
        return NotImplemented
    if dim % x.dim() == x.spec.dim:
        return NotImplemented
    return op.context.wrap(op.function(x.local, dim, index), x.spec)


def _join(op: ShardedCall) -> Any:
    """`cat` and `stack`: the positions are in the same place in all of them."""
    tensors = op.argument(0, "tensors")
    dim = op.argument(1, "dim", 0)
    first = next(t for t in tensors if isinstance(t, SequenceShard))
    is_new = op.name == "stack"
    dim %= first.dim() + int(is_new)
    if (not is_new and dim == first.spec.dim) or any(t.dim() != first.dim() for t in tensors):
        return NotImplemented
    alignment = SequenceAlignment(first)
    try:
        joined = op.function([alignment.local(t) for t in tensors], dim)
    except NotAligned:
        return NotImplemented
    at = first.spec.dim + int(is_new and dim <= first.spec.dim)
    return op.context.wrap(joined, first.spec.at(at))


def _repeat(op: ShardedCall) -> Any:
    x = op.args[0]
    given = op.args[1:] or tuple(op.kwargs.values())
    repeats = list(given if isinstance(given[0], int) else given[0])
    if not isinstance(x, SequenceShard):
        return NotImplemented
    dim = len(repeats) - (x.dim() - x.spec.dim)
    if dim < 0 or repeats[dim] != 1:
        return NotImplemented
    return op.context.wrap(x.local.repeat(repeats), x.spec.at(dim))


def _repeat_interleave(op: ShardedCall) -> Any:
    is_plain = isinstance(op.argument(1, "repeats"), int)
    return _Along(2)(op) if is_plain else NotImplemented


_RESHAPES = "view reshape flatten unflatten view_as reshape_as ravel"
_MOVES = (
    "transpose swapaxes swapdims permute movedim moveaxis unsqueeze squeeze t adjoint "
    "__get__.T __get__.mT __get__.H __get__.mH"
)
RULES: dict[str, Callable[[ShardedCall], Any]] = {
    **dict.fromkeys(_RESHAPES.split(), _reshape),
    **dict.fromkeys(_MOVES.split(), _move),
    **dict.fromkeys(["expand", "expand_as", "broadcast_to"], _expand),
    **dict.fromkeys(["softmax", "log_softmax", "softmin", "cumsum", "cumprod"], _Along(1)),
    "logcumsumexp": _Along(1),
    "gather": _Along(1),
    "take_along_dim": _Along(2),
    "glu": _Along(1, -1),
    "normalize": _Along(2, 1),
    "sort": _Along(1, -1),
    "argsort": _Along(1, -1),
    "topk": _Along(2, -1),
    "split": _Along(2, 0),
    "chunk": _Along(2, 0),
    "tensor_split": _Along(2, 0),
    "unsafe_chunk": _Along(2, 0),
    "unbind": _Along(1, 0),
    "repeat_interleave": _repeat_interleave,
    "roll": _Along(2),
    "index_select": _index_select,
    **dict.fromkeys(["cat", "concat", "concatenate", "stack"], _join),
    "repeat": _repeat,
}


def _getitem(op: ShardedCall) -> Any:
    x, index = op.args
    if not isinstance(x, SequenceShard):
        return NotImplemented  # a plain tensor that is indexed by positions
    items = _spread(index if isinstance(index, tuple) else (index,), x.dim())
    if items is None or x.spec.outer * x.spec.inner != 1:
        return NotImplemented
    if x.full_value is not None:
        return _of_known(op, x, index, items)
    return _take(op, x, items)


def _of_known(op: ShardedCall, x: SequenceShard, index: Any, items: list[Any]) -> Any:
    """Of an input all positions are here: no exchange is needed."""
    assert x.full_value is not None
    made = _take(op, x, items)
    full: Tensor = x.full_value[index]
    if not isinstance(made, SequenceShard):
        return full
    made.full_value = full
    return made


def _take(op: ShardedCall, x: SequenceShard, items: list[Any]) -> Any:
    at = [i for i, item in enumerate(items) if item is not None][x.spec.dim]
    wanted = items[at]
    items[at] = slice(None)
    dim = sum(not isinstance(item, int) for item in items[:at])
    if isinstance(wanted, int):
        return _one_position(op, x, wanted, tuple(items), dim)
    start, stop, step = wanted.indices(x.spec.positions)
    if step != 1:
        return NotImplemented
    if stop - start <= 1:
        if stop <= start:
            return NotImplemented
        return _one_position(op, x, start, tuple(items), dim).unsqueeze(dim)
    local = _range(op, x, range(start, stop))[tuple(items)]
    first = x.spec.start
    spec = replace(x.spec, dim=dim, start=first + start, stop=first + stop)
    return op.context.wrap(local, spec)


def _range(op: ShardedCall, x: SequenceShard, kept: range) -> Tensor:
    """The local positions of a range of positions."""
    local = x.local
    if len(kept) == x.spec.positions:
        return local
    before = x.spec.ranges(op.context.rank)
    parts = []
    offset = 0
    for r in before:
        first = min(max(kept.start - r.start, 0), len(r))
        last = max(min(kept.stop - r.start, len(r)), first)
        parts.append(local.narrow(x.spec.dim, offset + first, last - first))
        offset += len(r)
    return torch.cat(parts, x.spec.dim)


def _one_position(
    op: ShardedCall, x: SequenceShard, position: int, items: tuple[Any, ...], dim: int
) -> Tensor:
    """One position, on all ranks: its owner's, and zeros of the others, added up."""
    position %= x.spec.positions
    part = _range(op, x, range(position, position + 1))[items]
    return sum_over_ranks(part.sum(dim, dtype=part.dtype), op.context.group)


def _spread(index: tuple[Any, ...], dims: int) -> list[Any] | None:
    """One item per dimension, and None for each new one; None where an index is a tensor."""
    if not all(
        item is None
        or item is Ellipsis
        or (isinstance(item, (int, slice)) and not isinstance(item, bool))
        for item in index
    ):
        return None
    used = sum(item is not None and item is not Ellipsis for item in index)
    items: list[Any] = []
    for item in index:
        items.extend([slice(None)] * (dims - used) if item is Ellipsis else [item])
    given = sum(item is not None for item in items)
    return items + [slice(None)] * (dims - given)


def _narrow(op: ShardedCall) -> Any:
    x = op.args[0]
    dim = op.argument(1, "dim")
    start = op.argument(2, "start")
    length = op.argument(3, "length")
    if not isinstance(x, SequenceShard) or not isinstance(start, int):
        return NotImplemented
    start %= x.full_shape[dim]
    return _index_one(op, dim, slice(start, start + length))


def _select(op: ShardedCall) -> Any:
    return _index_one(op, op.argument(1, "dim"), op.argument(2, "index"))


def _index_one(op: ShardedCall, dim: int, item: Any) -> Any:
    x = op.args[0]
    if not isinstance(x, SequenceShard):
        return NotImplemented
    index = (slice(None),) * (dim % x.dim()) + (item,)
    return _getitem(replace(op, args=(x, index), kwargs={}))


INDEXING = {"__getitem__": _getitem, "narrow": _narrow, "select": _select}
