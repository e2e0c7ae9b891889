"""Tensors of which every rank of a tp group has a part, and that are what they stand for.

Operations that a kind of them knows are computed on the parts. To any other operation they are
whole: they are gathered first, once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from shoal.comm.group import Group
from shoal.pytree import Tree, map_tensors
from shoal.replica.tensor.shard_spec import Share

Known = dict[Any, Callable[..., Any]]


class SplitTensor(Tensor):
    """Its memory is this rank's part; `shape` is that of the whole.

    `known` are the operations that need no gathering; one that answers None needs it after all.
    """

    known: ClassVar[Known] = {}
    group: Group
    share: Share
    gathered: Tensor | None = None
    is_altered = False  # in place, after it was gathered

    @property
    def local(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            if self.is_altered:
                return self.part_of(self.whole())
            return self.as_subclass(Tensor)

    def whole(self) -> Tensor:
        if self.gathered is None:
            self.gathered = self.join()
        return self.gathered

    def join(self) -> Tensor:
        raise NotImplementedError

    def part_of(self, whole: Tensor) -> Tensor:
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in cls.known and any(isinstance(arg, cls) for arg in args[:2]):
                found = cls.known[func](*args, **kwargs)
                if found is not None:
                    return found
            if func in HERE:
                return func(*args, **kwargs)
            if isinstance(args[0], SplitTensor) and _is_in_place(func, kwargs):
                args[0].whole()
                args[0].is_altered = True
            return func(*whole_tensors(args), **whole_tensors(kwargs))


def whole_tensors(tree: Tree) -> Tree:
    """The same tree with whole tensors."""
    return map_tensors(lambda t: t.whole() if isinstance(t, SplitTensor) else t, tree)


def reshaped(shape: Sequence[int], arguments: Sequence[Any]) -> torch.Size | None:
    """What `view` and `reshape` with these arguments make of a shape; None if that is not plain."""
    is_one = len(arguments) == 1 and not isinstance(arguments[0], int)
    wanted = list(arguments[0] if is_one else arguments)
    if not all(isinstance(size, int) for size in wanted):
        return None
    return torch.empty(shape, device="meta").reshape(wanted).shape


def _is_in_place(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    plain = name.endswith("_") and not name.endswith("__")
    return plain or name.startswith(("__i", "__set")) or bool(kwargs.get("inplace"))


# what is known without the other ranks' parts
HERE = {
    getattr(Tensor, name).__get__
    for name in ("dtype", "device", "requires_grad", "ndim", "is_cuda", "layout", "is_leaf")
} | {Tensor.dim, Tensor.is_floating_point, Tensor.as_subclass}
