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

from shoal.observe.grouped_mm import grouped_mm
from shoal.train.step import Step

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
        widen = _wide if _is_mixed([*args, *kwargs.values()]) else _same
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
        step.model.forward = _in_double(step.model.forward)
    around = step.engine.autocast

    @contextmanager
    def both() -> Iterator[None]:
        with around(), DoublePrecision():
            yield

    step.engine.autocast = both


def _in_double(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def computed(*args: Any, **kwargs: Any) -> Any:
        with DoublePrecision():
            return function(*args, **kwargs)

    return computed


def _writes(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether its first argument is written to, and has to stay what it is."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or name.startswith("__i")


def _is_mixed(values: Sequence[Any]) -> bool:
    dtypes = {t.dtype for t in _tensors(values)}
    return torch.float64 in dtypes and any(narrow in dtypes for narrow in _NARROW)


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _replaced(value: Any, widen: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return widen(value)
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _NARROW else value
    if type(value) in (list, tuple):
        return type(value)(_replaced(item, widen) for item in value)
    return value


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.dtype in _NARROW else tensor


def _same(tensor: Tensor) -> Tensor:
    return tensor
