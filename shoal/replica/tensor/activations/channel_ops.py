"""What a `ChannelShardedTensor` computes on its shards: see `ShardedActivation.sharded_ops`.

A function returns None where the tensor has to be gathered after all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.replica.tensor.activations.channel_tensor import ChannelShardedTensor
from shoal.replica.tensor.activations.channel_views import VIEWS
from shoal.replica.tensor.activations.sharded_tensor import ShardedOps

Op = Callable[..., Any]


def _is_sharded(x: Any) -> bool:
    return isinstance(x, ChannelShardedTensor)


def _changed_in_place(x: ChannelShardedTensor, function: Op, *args: Any, **kwargs: Any) -> Any:
    """Computed in the memory that `x` has; None after a change of the full tensor."""
    if x.is_modified:
        return None
    function(x.local, *args, **kwargs)
    x.gathered = None
    return x


# ------------------------------------------------------------------ elementwise


def _unary(function: Op) -> Op:
    in_place = getattr(function, "__name__", "").endswith("_")

    def apply(x: Any, *args: Any, **kwargs: Any) -> Any:
        others = (*args, *kwargs.values())
        if not _is_sharded(x) or any(isinstance(value, Tensor) for value in others):
            return None
        if in_place or kwargs.get("inplace"):
            return _changed_in_place(x, function, *args, **kwargs)
        return x.like(function(x.local, *args, **kwargs))

    return apply


def _binary(function: Op) -> Op:
    def apply(a: Any, b: Any, **kwargs: Any) -> Any:
        x = a if _is_sharded(a) and not (_is_sharded(b) and b.dim() > a.dim()) else b
        left = x.operand(a)
        right = x.operand(b)
        if left is None or right is None or "out" in kwargs:
            return None
        out = function(left, right, **kwargs)
        return x.at(out, out.dim() - x.from_right)

    return apply


def _binary_in_place(function: Op) -> Op:
    def apply(x: Any, other: Any, **kwargs: Any) -> Any:
        if not _is_sharded(x):
            return None
        right = x.operand(other)
        return None if right is None else _changed_in_place(x, function, right, **kwargs)

    return apply


def _random(function: Op) -> Op:
    """Dropout and the like: each rank draws for its own channels."""

    def apply(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if not training or p == 0.0:
            return x
        if inplace and x.is_modified:
            return None
        with x.rng.forked(x.local):
            out = function(x.local, p, True, inplace)
        x.gathered = None if inplace else x.gathered
        return x if inplace else x.like(out)

    return apply


# ------------------------------------------------------------------ along other dimensions


def _spatial(function: Op, dims: int | None = None) -> Op:
    """Pooling and resizing of the last `dims` dimensions, all behind the channels if None."""

    def apply(x: Any, *args: Any, **kwargs: Any) -> Any:
        last = x.local.dim() - 2 if dims is None else dims
        if x.from_right <= last:
            return None
        out = function(x.local, *args, **kwargs)
        return x.like(out) if isinstance(out, Tensor) else None

    return apply


def _pad(x: Any, pad: Any, *args: Any, **kwargs: Any) -> Any:
    if x.from_right <= len(pad) // 2:
        return None
    return x.like(F.pad(x.local, pad, *args, **kwargs))


def _along(function: Op) -> Op:
    """Softmax and the like, along one dimension."""

    def apply(x: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(dim, int) or dim % x.local.dim() == x.spec.dim:
            return None
        return x.like(function(x.local, dim, *args, **kwargs))

    return apply


def _normalize(x: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None) -> Any:
    if dim % x.local.dim() == x.spec.dim or out is not None:
        return None
    return x.like(F.normalize(x.local, p, dim, eps))


def _reduction(function: Op) -> Op:
    """A mean or sum along dimensions that are not sharded."""

    def apply(x: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
        if dim is None or isinstance(dim, bool):
            return None
        dims = {d % x.local.dim() for d in ((dim,) if isinstance(dim, int) else dim)}
        if x.spec.dim in dims or not dims:
            return None
        out = function(x.local, dim, keepdim, **kwargs)
        before = 0 if keepdim else sum(d < x.spec.dim for d in dims)
        return x.at(out, x.spec.dim - before)

    return apply


def _norm(function: Op) -> Op:
    """Over trailing dimensions; the weights serve the channels of all ranks."""

    def apply(x: Any, normalized_shape: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_sharded(x) or x.from_right <= len(normalized_shape):
            return None
        args = tuple(x.operand(value) for value in args)
        kwargs = {key: x.operand(value) for key, value in kwargs.items()}
        return x.like(function(x.local, normalized_shape, *args, **kwargs))

    return apply


def _matmul(a: Any, b: Any) -> Any:
    """Of matrices, one for each index of the sharded dimension."""
    x = a if _is_sharded(a) else b
    if x.from_right <= 2 or a.dim() != b.dim():
        return None
    left = x.operand(a)
    right = x.operand(b)
    return None if left is None or right is None else x.like(torch.matmul(left, right))


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Any:
    """By heads."""
    given = (query, key, value)
    if not all(_is_sharded(t) and t.spec == query.spec for t in given) or query.from_right <= 2:
        return None
    mask = query.operand(attn_mask)
    if mask is None and attn_mask is not None:
        return None
    local = [t.local for t in given]
    function: Op = F.scaled_dot_product_attention
    if dropout_p == 0.0:
        return query.like(function(*local, mask, 0.0, is_causal, **kwargs))
    with query.rng.forked(local[0]):
        return query.like(function(*local, mask, dropout_p, is_causal, **kwargs))


# ------------------------------------------------------------------ the table

_FUNCTIONS = (
    *("relu", "relu6", "gelu", "silu", "mish", "elu", "selu", "celu", "leaky_relu", "softplus"),
    *("hardtanh", "hardswish", "hardsigmoid", "softsign", "logsigmoid", "tanhshrink", "threshold"),
)
_NAMES = (
    *("relu", "sigmoid", "tanh", "exp", "log", "log1p", "expm1", "sqrt", "rsqrt", "square", "abs"),
    *("neg", "sin", "cos", "erf", "clamp", "clamp_min", "clamp_max", "sign", "reciprocal"),
)
_METHODS = ("float", "double", "half", "bfloat16", "contiguous", "to", "type_as", "clone", "detach")
_ARITHMETIC = ("add", "sub", "mul", "div", "true_divide", "pow", "maximum", "minimum")
_REFLECTED: dict[Any, Op] = {
    Tensor.__rsub__: lambda a, b: b - a,
    Tensor.__rdiv__: lambda a, b: b / a,
    Tensor.__rpow__: lambda a, b: b**a,
}
_POOLS = ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "lp_pool")


def _named(owner: Any, names: Any, make: Callable[[Op], Op]) -> ShardedOps:
    functions = [getattr(owner, name) for name in names if hasattr(owner, name)]
    return {function: make(function) for function in functions}


def _elementwise_ops() -> ShardedOps:
    ops: ShardedOps = {}
    for owner in (torch, Tensor):
        ops |= _named(owner, _NAMES, _unary)
        ops |= _named(owner, [f"{name}_" for name in _NAMES], _unary)
        ops |= _named(owner, _ARITHMETIC, _binary)
        ops |= _named(owner, [f"{name}_" for name in _ARITHMETIC], _binary_in_place)
    ops |= _named(F, _FUNCTIONS, _unary)
    ops |= _named(F, [f"{name}_" for name in _FUNCTIONS], _unary)
    ops |= _named(F, ("tanh", "sigmoid"), _unary)
    ops |= _named(Tensor, ("__neg__", "__abs__", *_METHODS), _unary)
    ops |= _named(Tensor, ("__iadd__", "__isub__", "__imul__", "__itruediv__"), _binary_in_place)
    ops |= _named(Tensor, ("__pow__", "__truediv__"), _binary)
    ops |= _named(F, ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"), _random)
    return ops | {function: _binary(change) for function, change in _REFLECTED.items()}


def _pooling_ops() -> ShardedOps:
    ops: ShardedOps = {}
    for owner in (F, torch):
        for dims in (1, 2, 3):
            names = [f"{pool}{dims}d" for pool in _POOLS]
            ops |= _named(owner, names, lambda f, dims=dims: _spatial(f, dims))  # type: ignore[misc]
    return ops | {F.interpolate: _spatial(F.interpolate), F.pad: _pad}


def _other_ops() -> ShardedOps:
    ops: ShardedOps = {}
    for owner in (torch, Tensor, F):
        ops |= _named(owner, ("softmax", "log_softmax", "cumsum"), _along)
    for owner in (torch, Tensor):
        ops |= _named(owner, ("mean", "sum", "amax", "amin"), _reduction)
        ops |= _named(owner, ("matmul", "bmm"), lambda _: _matmul)
    ops |= _named(F, ("layer_norm", "rms_norm"), _norm)
    return ops | {
        F.normalize: _normalize,
        Tensor.__matmul__: _matmul,
        F.scaled_dot_product_attention: _attention,
    }


OPS: ShardedOps = {
    **_elementwise_ops(),
    **_pooling_ops(),
    **_other_ops(),
    **VIEWS,
}
