"""Sequence parallelism: between tensor-parallel layers every rank has some positions.

    RowLinear ─ reduce-scatter ─ + bias ─ dropout ─ + residual ─ norm ─ all-gather ─ ColumnLinear
                └──────────────── each rank: its positions ─────────┘

Positions of a (batch, time, features) tensor are its batch * time rows, sharded evenly, whatever
their number. Norms, dropout, sums and elementwise functions are computed on the rows; other
operations gather them first. A parameter that is used on rows has the sum of the ranks' gradients.
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
from shoal.replica.tensor.activations.shard_spec import ShardSpec
from shoal.replica.tensor.activations.sharded_tensor import ShardedActivation, reshaped
from shoal.replica.tensor.mappings import (
    copy,
    gather,
    gather_sequence,
    reduce_scatter,
    scatter,
)
from shoal.replica.tensor.rng import TensorParallelRng


class SequenceParallelTensor(ShardedActivation):
    """`local` is (rows, features); `leading` are the dimensions before the features."""

    leading: torch.Size
    rng: TensorParallelRng

    @classmethod
    def of(
        cls, local: Tensor, leading: torch.Size, group: Group, rng: TensorParallelRng
    ) -> SequenceParallelTensor:
        rows: SequenceParallelTensor = local.as_subclass(cls)
        rows.leading = leading
        rows.rng = rng
        rows.group = group
        rows.spec = ShardSpec.even(0, math.prod(leading), group.size)
        return rows

    @classmethod
    def summed(
        cls, partial: Tensor, group: Group, rng: TensorParallelRng
    ) -> SequenceParallelTensor:
        """The sum over ranks of `partial`, (…, features)."""
        rows = partial.flatten(0, -2)
        spec = ShardSpec.even(0, len(rows), group.size)
        return cls.of(reduce_scatter(rows, spec, group), partial.shape[:-1], group, rng)

    def like(self, local: Tensor) -> SequenceParallelTensor:
        return SequenceParallelTensor.of(local, self.leading, self.group, self.rng)

    def gather_full(self) -> Tensor:
        return self._shaped(gather(self.local, self.spec, self.group))

    def shard_of(self, full: Tensor) -> Tensor:
        return scatter(full.flatten(0, -2), self.spec, self.group)

    def gather_sequence(self) -> Tensor:
        """All positions, for computations that differ from rank to rank."""
        return self._shaped(gather_sequence(self.local, self.spec, self.group))

    def linear(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A column-parallel layer. Its input is not kept: backward gathers it again."""
        local = _as_autocast_does(self.local)
        rows = gather_sequence(local, self.spec, self.group)
        with _saving_local(local.detach(), rows, self.spec, self.group):
            out = F.linear(rows, weight, bias)
        return self._shaped(out)

    def _shaped(self, rows: Tensor) -> Tensor:
        return rows.view(*self.leading, rows.shape[-1])

    def rows_of(self, other: Any) -> Any:
        """Another operand of an elementwise function, for these rows; None if it has other ones."""
        if isinstance(other, SequenceParallelTensor):
            return other.local if other.leading == self.leading else None
        if not isinstance(other, Tensor):
            return other
        if other.dim() <= 1:
            return copy(other, self.group)
        if other.dim() - 1 > len(self.leading):
            return None
        try:
            full = other.expand(*self.leading, other.shape[-1])
        except RuntimeError:
            return None
        return scatter(full.flatten(0, -2), self.spec, self.group)


class _Saved(NamedTuple):
    """What is kept: `rows` of this rank, or something else as it is."""

    value: Any
    is_rows: bool


@contextmanager
def _saving_local(local: Tensor, rows: Tensor, spec: ShardSpec, group: Group) -> Iterator[None]:
    """What autograd saves of `rows` is `local`, of which all ranks have one; they gather again."""
    outer_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack, unpack = outer_hooks or (lambda x: x, lambda x: x)
    address = rows.untyped_storage().data_ptr()

    def save(tensor: Tensor) -> _Saved:
        is_rows = tensor.untyped_storage().data_ptr() == address and tensor.shape == rows.shape
        return _Saved(pack(local if is_rows else tensor), is_rows)

    def load(saved: _Saved) -> Tensor:
        value: Tensor = unpack(saved.value)
        return spec.all_gather(value, group) if saved.is_rows else value

    with saved_tensors_hooks(save, load):
        yield


def _as_autocast_does(x: Tensor) -> Tensor:
    """Cast before it is gathered, which halves the bytes."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


# ------------------------------------------------------------------ computed on the rows


def _shape(x: SequenceParallelTensor) -> torch.Size:
    return torch.Size([*x.leading, x.local.shape[-1]])


def _size(x: SequenceParallelTensor, dim: int | None = None) -> Any:
    return _shape(x) if dim is None else _shape(x)[dim]


def _reshape(x: SequenceParallelTensor, *shape: Any) -> Tensor | None:
    """Rows stay rows as long as the features are a dimension of their own."""
    full = reshaped(_shape(x), shape)
    if full is None or len(full) < 2 or full[-1] != x.local.shape[-1]:
        return None
    return SequenceParallelTensor.of(x.local, full[:-1], x.group, x.rng)


def _dim(x: SequenceParallelTensor) -> int:
    return len(x.leading) + 1


def _layer_norm(
    x: Any,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:
    if not isinstance(x, SequenceParallelTensor) or list(normalized_shape) != [x.local.shape[-1]]:
        return None
    scale, shift = (None if p is None else copy(p, x.group) for p in (weight, bias))
    return x.like(F.layer_norm(x.local, normalized_shape, scale, shift, eps))


def _rms_norm(
    x: Any, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor | None:
    if not isinstance(x, SequenceParallelTensor) or list(normalized_shape) != [x.local.shape[-1]]:
        return None
    scale = None if weight is None else copy(weight, x.group)
    return x.like(F.rms_norm(x.local, normalized_shape, scale, eps))


def _dropout(
    x: SequenceParallelTensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor | None:
    if inplace:
        return None
    if not training or p == 0.0:
        return x
    with x.rng.forked(x.local):
        return x.like(F.dropout(x.local, p))


def _elementwise(function: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
    """Of one tensor; its other arguments are plain."""

    def apply(x: Any, *args: Any, **kwargs: Any) -> Tensor | None:
        if kwargs.get("inplace") or not isinstance(x, SequenceParallelTensor):
            return None
        return x.like(function(x.local, *args, **kwargs))

    return apply


def _binary(function: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
    """Of two, either of which may be sharded, plain, or a number."""

    def apply(a: Any, b: Any, **kwargs: Any) -> Tensor | None:
        sharded = a if isinstance(a, SequenceParallelTensor) else b
        left = sharded.rows_of(a)
        right = sharded.rows_of(b)
        if left is None or right is None or "out" in kwargs:
            return None
        return sharded.like(function(left, right, **kwargs))

    return apply


def _in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
    """`x += y` of rows that were not modified through the full tensor before."""

    def apply(x: Any, other: Any, **kwargs: Any) -> Tensor | None:
        if not isinstance(x, SequenceParallelTensor) or x.is_modified:
            return None
        rows = x.rows_of(other)
        if rows is None:
            return None
        local = x.local
        local.copy_(function(local, rows, **kwargs))
        x.gathered = None
        return x

    return apply


def _cast(x: SequenceParallelTensor, *args: Any, **kwargs: Any) -> Tensor | None:
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
_REFLECTED = {
    Tensor.__rsub__: lambda a, b: b - a,
    Tensor.__rdiv__: lambda a, b: b / a,
}

SequenceParallelTensor.sharded_ops = {
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
    **{getattr(torch, name): _binary(function) for name, function in _BINARY.items()},
    **{getattr(Tensor, name): _binary(function) for name, function in _BINARY.items()},
    **{getattr(Tensor, f"{name}_"): _in_place(function) for name, function in _BINARY.items()},
    **{method: _binary(function) for method, function in _REFLECTED.items()},
}
