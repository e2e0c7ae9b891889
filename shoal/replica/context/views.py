"""Operations that move dimensions, and those that work along one of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shoal.replica.context.sequence_shard import SequenceShard, of_sequence
from shoal.replica.split.mapping import sum_over_ranks
from shoal.replica.split.sharded_tensor import Rule, ShardedCall, map_results, reshaped
from shoal.runtime.pytree import map_tensors


def _reshape(op: ShardedCall, x: SequenceShard) -> Any:
    """Positions stay together, or are gathered."""
    if any(isinstance(a, torch.dtype) for a in op.args):
        return NotImplemented
    args = [a.full_shape if isinstance(a, SequenceShard) else a for a in op.args[1:]]
    old = x.full_shape
    new = reshaped(op.name, old, args, op.kwargs)
    spec = x.spec.reshaped(old, new)
    if spec is None:
        return NotImplemented
    shape = list(new)
    shape[spec.dim] = spec.outer * spec.count(op.context.rank) * spec.inner
    made = op.context.wrap(x.local.reshape(shape), spec)
    if x.full_value is not None:
        made.full_value = x.full_value.reshape(new)
    return made


def _move(op: ShardedCall, x: SequenceShard) -> Any:
    """Dimensions change places, appear or vanish; sizes do not matter."""
    tags = [1 if size == 1 else 2 + index for index, size in enumerate(x.full_shape)]
    moved = op.function(torch.empty(tags, device="meta"), *op.args[1:], **op.kwargs).shape
    dim = list(moved).index(2 + x.spec.dim)
    made = op.context.wrap(op.function(x.local, *op.args[1:], **op.kwargs), x.spec.at(dim))
    if x.full_value is not None:
        made.full_value = op.function(x.full_value, *op.args[1:], **op.kwargs)
    return made


def _sizes(op: ShardedCall) -> list[int]:
    """Given one by one, as a tuple, or as those of another tensor."""
    given = op.args[1:] or tuple(op.kwargs.values())
    if isinstance(given[0], int):
        return list(given)
    first = given[0].full_shape if isinstance(given[0], SequenceShard) else given[0]
    return list(first.shape if isinstance(first, Tensor) else first)


def _expand(op: ShardedCall, x: SequenceShard) -> Any:
    """`expand` and `repeat`, along other dimensions."""
    sizes = _sizes(op)
    dim = len(sizes) - (x.dim() - x.spec.dim)
    is_repeat = op.name == "repeat"
    if sizes[dim] not in ((1,) if is_repeat else (-1, x.spec.size)):
        return NotImplemented
    if is_repeat:
        return op.context.wrap(x.local.repeat(sizes), x.spec.at(dim))
    sizes[dim] = -1
    return op.context.wrap(x.local.expand(sizes), x.spec.at(dim))


@dataclass(frozen=True)
class Along:
    """An operation along `dim`, which is argument number `index`; `default` if it is not given."""

    index: int = 1
    default: int | None = None

    def __call__(self, op: ShardedCall) -> Any:
        x = op.argument(0, "input")
        given = op.argument(self.index, "dim", op.kwargs.get("axis", self.default))
        is_dim = isinstance(given, (int, tuple, list)) and not isinstance(given, bool)
        if not isinstance(x, SequenceShard) or not is_dim or op.is_in_place or "out" in op.kwargs:
            return NotImplemented
        dims = [d % x.dim() for d in ([given] if isinstance(given, int) else given)]
        if x.spec.dim in dims or not dims:
            return NotImplemented
        # an index or a source has the shape of the first tensor
        args, kwargs = map_tensors(x.align, (op.args, op.kwargs))
        return map_results(lambda t: x.wrap_along(t, dims), op.function(*args, **kwargs))


def _join(op: ShardedCall) -> Any:
    """`cat` and `stack`: the positions are in the same place in all of them."""
    tensors = op.argument(0, "tensors")
    dim = op.argument(1, "dim", 0)
    first = next(t for t in tensors if isinstance(t, SequenceShard))
    is_new = op.name == "stack"
    dim %= first.dim() + int(is_new)
    if (not is_new and dim == first.spec.dim) or any(t.dim() != first.dim() for t in tensors):
        return NotImplemented
    joined = op.function([first.align(t) for t in tensors], dim)
    at = first.spec.dim + int(is_new and dim <= first.spec.dim)
    return op.context.wrap(joined, first.spec.at(at))


# ------------------------------------------------------------------ indexing


def _getitem(op: ShardedCall, x: SequenceShard) -> Any:
    index = op.args[1]
    items = _spread(index if isinstance(index, tuple) else (index,), x.dim())
    if items is None or x.spec.outer * x.spec.inner != 1:
        return NotImplemented
    made = _take(op, x, items)
    if x.full_value is not None:  # of an input all positions are here: no exchange is needed
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
    if not all(item is None or item is ... or type(item) in (int, slice) for item in index):
        return None
    used = sum(item is not None and item is not Ellipsis for item in index)
    items: list[Any] = []
    for item in index:
        items.extend([slice(None)] * (dims - used) if item is Ellipsis else [item])
    given = sum(item is not None for item in items)
    return items + [slice(None)] * (dims - given)


def _index_one(op: ShardedCall, x: SequenceShard) -> Any:
    """`select` and `narrow`, as an index of one dimension."""
    dim = op.argument(1, "dim")
    item = op.argument(2, "index" if op.name == "select" else "start")
    if not isinstance(item, int):
        return NotImplemented
    if op.name == "narrow":
        item %= x.full_shape[dim]
        item = slice(item, item + op.argument(3, "length"))
    index = (slice(None),) * (dim % x.dim()) + (item,)
    return _getitem(replace(op, args=(x, index), kwargs={}), x)


_RESHAPES = "view reshape flatten unflatten view_as reshape_as ravel"
_MOVES = (
    "transpose swapaxes swapdims permute movedim moveaxis unsqueeze squeeze t adjoint "
    "__get__.T __get__.mT __get__.H __get__.mH"
)
_ALONG = {
    "softmax log_softmax softmin cumsum cumprod logcumsumexp gather": Along(1),
    "take_along_dim roll norm linalg_vector_norm vector_norm": Along(2),
    "glu sort argsort": Along(1, -1),
    "normalize": Along(2, 1),
    "topk": Along(2, -1),
    "split chunk tensor_split unsafe_chunk": Along(2, 0),
    "unbind": Along(1, 0),
    "amax amin max min argmax argmin all any prod logsumexp var std median mode nansum nanmean "
    "count_nonzero var_mean std_mean": Along(1),
}
VIEWS: dict[str, Rule] = {
    **dict.fromkeys(_RESHAPES.split(), of_sequence(_reshape)),
    **dict.fromkeys(_MOVES.split(), of_sequence(_move)),
    **dict.fromkeys(["expand", "expand_as", "broadcast_to", "repeat"], of_sequence(_expand)),
    **{name: rule for names, rule in _ALONG.items() for name in names.split()},
    "repeat_interleave": lambda op: (
        Along(2)(op) if isinstance(op.argument(1, "repeats"), int) else NotImplemented
    ),
    **dict.fromkeys(["cat", "concat", "concatenate", "stack"], _join),
    "__getitem__": of_sequence(_getitem),
    **dict.fromkeys(["narrow", "select"], of_sequence(_index_one)),
}
