"""A script's model in float64, without a change of the script.

Rounding becomes 2²⁹ times smaller in double precision, and an error does not: that is how
`shoal verify` tells one from the other.

The parameters and buffers become float64 before a step is built. While the model and the loss
compute, a function that gets tensors of both types gets float64, and a place that names float32
(`x.float()`, `softmax(…, dtype=torch.float32)`) means float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.train.step.step import Step


def grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: Any = None,
) -> Tensor:
    """What `torch._grouped_mm` computes; `offs` are the ends of the groups of a 2D matrix."""
    if offs is None:
        out = torch.bmm(a, b)
    elif a.dim() == 2 and b.dim() == 3:
        pieces = zip(_groups(a, offs, 0), b, strict=True)
        out = _padded(torch.cat([x @ y for x, y in pieces]), len(a), 0)
    elif a.dim() == 3:
        pieces = zip(a, _groups(b, offs, 1), strict=True)
        out = _padded(torch.cat([x @ y for x, y in pieces], 1), b.shape[1], 1)
    else:
        pieces = zip(_groups(a, offs, 1), _groups(b, offs, 0), strict=True)
        out = torch.stack([x @ y for x, y in pieces])
    return out if bias is None else out + bias


def _groups(tensor: Tensor, offs: Tensor, dim: int) -> list[Tensor]:
    ends = offs.tolist()
    starts = [0, *ends[:-1]]
    return [tensor.narrow(dim, start, end - start) for start, end in zip(starts, ends, strict=True)]


def _padded(out: Tensor, size: int, dim: int) -> Tensor:
    """With zeros for what stands behind the last group."""
    rest = list(out.shape)
    rest[dim] = size - out.shape[dim]
    return torch.cat([out, out.new_zeros(rest)], dim) if rest[dim] else out


_NARROW = (torch.float16, torch.bfloat16, torch.float32)
_GROUPED_MM = getattr(torch, "_grouped_mm", grouped_mm)  # F.grouped_mm calls it, too


class DoublePrecision(TorchFunctionMode):
    """Inside the block functions of torch compute in float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            return args[0].double()
        if func is _GROUPED_MM:
            func = grouped_mm
        dtypes = {t.dtype for t in _tensors([*args, *kwargs.values()])}
        widen = torch.float64 in dtypes  # and then float32 beside it
        first = args[:1] if _writes(func, kwargs) else ()
        rest = [_replaced(value, widen) for value in args[len(first) :]]
        named = {key: _replaced(value, widen) for key, value in kwargs.items() if key != "out"}
        return func(*first, *rest, **named, **{k: v for k, v in kwargs.items() if k == "out"})


def convert(model: nn.Module) -> None:
    """Floating-point parameters and buffers become float64; integers and complex numbers stay."""
    model.double()


def compute_in_double(step: Step) -> None:
    """Model and loss of a step whose parameters are float64 compute in float64."""
    step.cutter.widens = True
    step.shard.precision = DoublePrecision
    if step.is_own_loop:  # the script computes the loss from what these return
        forward = step.model.forward

        @functools.wraps(forward)
        def computed(*args: Any, **kwargs: Any) -> Any:
            with DoublePrecision():
                return forward(*args, **kwargs)

        step.model.forward = computed
    around = step.engine.autocast

    @contextmanager
    def both() -> Iterator[None]:
        with around(), DoublePrecision():
            yield

    step.engine.autocast = both


def _writes(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether its first argument is written to, and has to stay what it is."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or name.startswith("__i")


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _replaced(value: Any, widen: bool) -> Any:
    if isinstance(value, Tensor):
        return value.double() if widen and value.dtype in _NARROW else value
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _NARROW else value
    if type(value) in (list, tuple):
        return type(value)(_replaced(item, widen) for item in value)
    return value
