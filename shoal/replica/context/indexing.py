"""`x[...]`, `narrow` and `select`: ranges of positions, single positions, other dimensions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shoal.replica.context.sequence_shard import SequenceShard
from shoal.replica.mapping import sum_over_ranks
from shoal.replica.sharded_tensor import ShardedCall


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


RULES = {"__getitem__": _getitem, "narrow": _narrow, "select": _select}
