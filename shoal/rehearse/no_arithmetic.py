"""Tensors without arithmetic: operations on large ones give zeros of the right shape.

In a rehearsal without training the code of worker and servers runs as it is, with all its messages.
What it computes with 4,096 numbers or more at once is left out: forward, backward, sums, updates.
Memory that nothing has written into takes no room. Counts, flags and indices are real.

    view                 as it is
    in place             nothing happens
    a new large tensor   zeros
    topk of a large one  of random numbers: tokens are spread over experts
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

LARGE = 4096  # numbers
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # neighbours are one entry of the kernel's list
_CHOOSE = (torch.ops.aten.topk.default, torch.ops.aten.sort.default)


class _Shape(NamedTuple):
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_large(self) -> bool:
        return self.dtype.is_floating_point and math.prod(self.size) >= LARGE

    def on_meta(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")

    def zeros(self) -> Tensor:
        """Pages that nothing has written into take no memory."""
        if math.prod(self.size) < LARGE:
            return torch.zeros(self.size, dtype=self.dtype)
        last = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        pages = mmap.mmap(-1, (last + 1) * self.dtype.itemsize, _PRIVATE)
        return torch.frombuffer(pages, dtype=self.dtype).as_strided(self.size, self.stride)


class _Given(NamedTuple):
    """An argument, which is written in place."""

    place: int | str


Answer = Callable[[Sequence[Any], Mapping[str, Any]], Any]  # from the arguments


class NoArithmetic(TorchDispatchMode):
    """While it is entered, in one thread."""

    def __init__(self, known: dict[Any, Answer | None]):
        """`known`: what each operation comes to, shared by all threads; None: it is computed."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            key = (func, _seen(args), _seen(tuple(kwargs.items())))
            if key not in self._known:
                self._known[key] = _answer_of(func, args, kwargs)
            answer = self._known[key]
        except TypeError:  # of an argument that is no key
            answer = _answer_of(func, args, kwargs)
        if answer is not None:
            return answer(args, kwargs)
        if func in _CHOOSE and _shape_of(args[0]).is_large:
            args = (torch.rand(args[0].shape, dtype=args[0].dtype), *args[1:])
        return func(*args, **kwargs)


def _shape_of(tensor: Tensor) -> _Shape:
    return _Shape(tensor.shape, tensor.stride(), tensor.dtype)


def _seen(one: Any) -> Any:
    """What of an argument counts for the shape of the answer; numbers such as factors do not."""
    if isinstance(one, Tensor):
        return _shape_of(one)
    if isinstance(one, list | tuple):
        return tuple(map(_seen, one))
    return float if isinstance(one, float) else one


def _answer_of(func: Any, args: Any, kwargs: Any) -> Answer | None:
    aliases = [one.alias_info for one in func._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    if func in _CHOOSE or is_view:
        return None
    meta_args, meta = tree_map(_on_meta, (tuple(args), dict(kwargs)))
    given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    if "device" in meta or not given:
        meta["device"] = torch.device("meta")
    try:
        found = func(*meta_args, **meta)
    except (RuntimeError, NotImplementedError, TypeError, IndexError):  # its shape is in its data
        return None
    made = [one for one in tree_leaves(found) if isinstance(one, Tensor)]
    makes_numbers = func._schema.is_mutable or any(one.is_floating_point() for one in made)
    if not makes_numbers or not any(_shape_of(one).is_large for one in (*given, *made)):
        return None
    places = {id(one): _Given(place) for place, one in enumerate(meta_args)}
    places |= {id(one): _Given(name) for name, one in meta.items()}
    recipe = tree_map_only(Tensor, lambda one: places.get(id(one), _shape_of(one)), found)
    return partial(_follow, recipe)


def _follow(recipe: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    match recipe:
        case _Given(int(place)):
            return args[place]
        case _Given(str(name)):
            return kwargs[name]
        case _Shape():
            return recipe.zeros()
        case list() | tuple():
            return type(recipe)(_follow(one, args, kwargs) for one in recipe)
    return recipe


def _on_meta(one: Any) -> Any:
    if isinstance(one, Tensor):
        return _shape_of(one).on_meta()
    return None if isinstance(one, torch.Generator) else one
