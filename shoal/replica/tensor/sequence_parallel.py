"""Activations between split layers of which every rank of a tp group has some positions.

    RowLinear ─ reduce-scatter ─ + bias ─ dropout ─ + residual ─ norm ─ all-gather ─ ColumnLinear
                └──────────────── each rank: its positions ─────────┘

Positions of a (batch, time, features) tensor are its batch * time rows, dealt out evenly, whatever
their number. Norms, dropout, sums and elementwise functions stay with the rows; what else looks at
them gets them whole. A parameter that is used on rows has the sum of the ranks' gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from shoal.comm.group import Group
from shoal.pytree import Tree
from shoal.replica.tensor.mappings import copy, enter, gather, leave, scatter
from shoal.replica.tensor.rng import Streams
from shoal.replica.tensor.shard_spec import Share
from shoal.replica.tensor.sharded_tensor import SplitTensor, reshaped

_MARK = "rows of a sequence"


class SplitSequence(SplitTensor):
    """`local` is (rows, features); `lead` are the dimensions that the rows are of."""

    lead: torch.Size
    streams: Streams

    @classmethod
    def of(cls, local: Tensor, lead: torch.Size, group: Group, streams: Streams) -> SplitSequence:
        found: SplitSequence = local.as_subclass(cls)
        found.lead = lead
        found.streams = streams
        found.group = group
        found.share = Share.even(0, math.prod(lead), group.size)
        return found

    @classmethod
    def summed(cls, parts: Tensor, group: Group, streams: Streams) -> SplitSequence:
        """Of what every rank has a term of, (…, features)."""
        lead = parts.shape[:-1]
        rows = parts.flatten(0, -2)
        share = Share.even(0, len(rows), group.size)
        return cls.of(leave(rows, share, group), lead, group, streams)

    def like(self, local: Tensor) -> SplitSequence:
        return SplitSequence.of(local, self.lead, self.group, self.streams)

    def join(self) -> Tensor:
        return self._shaped(gather(self.local, self.share, self.group))

    def part_of(self, whole: Tensor) -> Tensor:
        return scatter(whole.flatten(0, -2), self.share, self.group)

    def enter(self) -> Tensor:
        """All positions, for what differs from rank to rank."""
        return self._shaped(enter(self.local, self.share, self.group))

    def linear(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A layer whose weight is split by column. Its input is not kept: backward gathers it."""
        local = _as_autocast_does(self.local)
        rows = enter(local, self.share, self.group)
        with _keeping(local.detach(), rows, self.share, self.group):
            out = F.linear(rows, weight, bias)
        return self._shaped(out)

    def _shaped(self, rows: Tensor) -> Tensor:
        return rows.view(*self.lead, rows.shape[-1])

    def rows_of(self, other: Any) -> Any:
        """Another operand of an elementwise function, for these rows; None if it has other ones."""
        if isinstance(other, SplitSequence):
            return other.local if other.lead == self.lead else None
        if not isinstance(other, Tensor):
            return other
        if other.dim() <= 1:
            return copy(other, self.group)
        if other.dim() - 1 > len(self.lead):
            return None
        try:
            whole = other.expand(*self.lead, other.shape[-1])
        except RuntimeError:
            return None
        return scatter(whole.flatten(0, -2), self.share, self.group)


class _Saved(NamedTuple):
    """What is kept: `rows` of this rank, or something else as it is."""

    value: Any
    is_rows: bool


@contextmanager
def _keeping(local: Tensor, rows: Tensor, share: Share, group: Group) -> Iterator[None]:
    """What autograd saves of `rows` is `local`, of which all ranks have one; they gather again."""
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack, unpack = outer or (lambda x: x, lambda x: x)
    here = rows.untyped_storage().data_ptr()

    def save(tensor: Tensor) -> _Saved:
        is_rows = tensor.untyped_storage().data_ptr() == here and tensor.shape == rows.shape
        return _Saved(pack(local if is_rows else tensor), is_rows)

    def find(saved: _Saved) -> Tensor:
        value: Tensor = unpack(saved.value)
        return share.gather(value, group) if saved.is_rows else value

    with saved_tensors_hooks(save, find):
        yield


def _as_autocast_does(x: Tensor) -> Tensor:
    """Cast before it is gathered, which halves the bytes."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


# ------------------------------------------------------------------ from stage to stage


def pack(tree: Tree) -> Tree:
    """Rows as a tuple that can be sent to the same rank of another stage."""
    return _map(
        lambda leaf: isinstance(leaf, SplitSequence),
        lambda leaf: (_MARK, leaf.local, list(leaf.lead)),
        tree,
    )


def unpack(tree: Tree, group: Group, streams: Streams) -> Tree:
    return _map(
        _is_packed,
        lambda leaf: SplitSequence.of(leaf[1], torch.Size(leaf[2]), group, streams),
        tree,
    )


def _is_packed(leaf: Any) -> bool:
    match leaf:
        case (str(mark), Tensor(), [*_]):
            return mark == _MARK
    return False


def _map(wanted: Callable[[Any], bool], change: Callable[[Any], Any], tree: Tree) -> Tree:
    if wanted(tree):
        return change(tree)
    if isinstance(tree, dict):
        return {key: _map(wanted, change, value) for key, value in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)(_map(wanted, change, item) for item in tree)
    return tree


# ------------------------------------------------------------------ what stays with the rows


def _shape(x: SplitSequence) -> torch.Size:
    return torch.Size([*x.lead, x.local.shape[-1]])


def _size(x: SplitSequence, dim: int | None = None) -> Any:
    return _shape(x) if dim is None else _shape(x)[dim]


def _reshape(x: SplitSequence, *shape: Any) -> Tensor | None:
    """Rows stay rows as long as the features are a dimension of their own."""
    whole = reshaped(_shape(x), shape)
    if whole is None or len(whole) < 2 or whole[-1] != x.local.shape[-1]:
        return None
    return SplitSequence.of(x.local, whole[:-1], x.group, x.streams)


def _dim(x: SplitSequence) -> int:
    return len(x.lead) + 1


def _layer_norm(
    x: Any,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:
    if not isinstance(x, SplitSequence) or list(normalized_shape) != [x.local.shape[-1]]:
        return None
    scale, shift = (None if p is None else copy(p, x.group) for p in (weight, bias))
    return x.like(F.layer_norm(x.local, normalized_shape, scale, shift, eps))


def _rms_norm(
    x: Any, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor | None:
    if not isinstance(x, SplitSequence) or list(normalized_shape) != [x.local.shape[-1]]:
        return None
    scale = None if weight is None else copy(weight, x.group)
    return x.like(F.rms_norm(x.local, normalized_shape, scale, eps))


def _dropout(
    x: SplitSequence, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor | None:
    if inplace:
        return None
    if not training or p == 0.0:
        return x
    with x.streams.apart(x.local):
        return x.like(F.dropout(x.local, p))


def _elementwise(function: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
    """Of one tensor; its other arguments are plain."""

    def apply(x: Any, *args: Any, **kwargs: Any) -> Tensor | None:
        if kwargs.get("inplace") or not isinstance(x, SplitSequence):
            return None
        return x.like(function(x.local, *args, **kwargs))

    return apply


def _joining(function: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
    """Of two, either of which may be split, plain, or a number."""

    def apply(a: Any, b: Any, **kwargs: Any) -> Tensor | None:
        split = a if isinstance(a, SplitSequence) else b
        left = split.rows_of(a)
        right = split.rows_of(b)
        if left is None or right is None or "out" in kwargs:
            return None
        return split.like(function(left, right, **kwargs))

    return apply


def _in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
    """`x += y` of rows that nobody has looked at as a whole since they were changed that way."""

    def apply(x: Any, other: Any, **kwargs: Any) -> Tensor | None:
        if not isinstance(x, SplitSequence) or x.is_altered:
            return None
        rows = x.rows_of(other)
        if rows is None:
            return None
        local = x.local
        local.copy_(function(local, rows, **kwargs))
        x.gathered = None
        return x

    return apply


def _cast(x: SplitSequence, *args: Any, **kwargs: Any) -> Tensor | None:
    if len(args) == 1 and isinstance(args[0], torch.dtype) and not kwargs:
        return x.like(x.local.to(args[0]))
    return None


_UNARY: tuple[Any, ...] = (
    *(F.gelu, F.relu, F.silu, F.tanh, F.sigmoid, F.elu, F.leaky_relu, F.mish, F.softplus),
    *(torch.relu, torch.tanh, torch.sigmoid, torch.neg, torch.square, torch.exp),
    *(Tensor.relu, Tensor.tanh, Tensor.sigmoid, Tensor.neg, Tensor.square, Tensor.exp),
    *(Tensor.__neg__, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.contiguous),
)
_BINARY: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "true_divide": torch.true_divide,
}
_FROM_THE_RIGHT = {
    Tensor.__rsub__: lambda a, b: b - a,
    Tensor.__rdiv__: lambda a, b: b / a,
}

SplitSequence.known = {
    Tensor.shape.__get__: _shape,  # type: ignore[attr-defined]
    Tensor.ndim.__get__: _dim,  # type: ignore[attr-defined]
    Tensor.size: _size,
    Tensor.dim: _dim,
    Tensor.to: _cast,
    Tensor.view: _reshape,
    Tensor.reshape: _reshape,
    torch.reshape: _reshape,
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    F.dropout: _dropout,
    **{function: _elementwise(function) for function in _UNARY},
    **{getattr(torch, name): _joining(function) for name, function in _BINARY.items()},
    **{getattr(Tensor, name): _joining(function) for name, function in _BINARY.items()},
    **{getattr(Tensor, f"{name}_"): _in_place(function) for name, function in _BINARY.items()},
    **{method: _joining(function) for method, function in _FROM_THE_RIGHT.items()},
}
