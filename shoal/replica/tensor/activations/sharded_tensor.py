"""Activations of which every rank of a tp group has a shard, used as if they were complete.

Operations that a subclass knows are computed on the shards. For any other operation the
activation is gathered first, once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from shoal.comm.group import Group
from shoal.pytree import Tree, map_tensors
from shoal.replica.tensor.activations.shard_spec import ShardSpec

ShardedOps = dict[Any, Callable[..., Any]]

# what a tensor knows of itself without the shards of other ranks
LOCAL_METADATA = {
    getattr(Tensor, name).__get__
    for name in ("dtype", "device", "requires_grad", "ndim", "is_cuda", "layout", "is_leaf")
} | {Tensor.dim, Tensor.is_floating_point, Tensor.as_subclass}


class ShardedActivation(Tensor):
    """Its memory is this rank's shard; `shape` is that of the full tensor.

    `sharded_ops` need no gathering; one that returns None needs it after all.
    """

    sharded_ops: ClassVar[ShardedOps] = {}
    group: Group
    spec: ShardSpec
    gathered: Tensor | None = None
    is_modified = False  # in place, after it was gathered

    @property
    def local(self) -> Tensor:
        """This rank's shard as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            if self.is_modified:
                return self.shard_of(self.full())
            return self.as_subclass(Tensor)

    def full(self) -> Tensor:
        """The full tensor; gathered once."""
        if self.gathered is None:
            self.gathered = self.gather_full()
        return self.gathered

    def gather_full(self) -> Tensor:
        raise NotImplementedError

    def shard_of(self, full: Tensor) -> Tensor:
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
            if func in cls.sharded_ops and _is_among(cls, args[:2]):
                result = cls.sharded_ops[func](*args, **kwargs)
                if result is not None:
                    return result
            if func in LOCAL_METADATA:
                return func(*args, **kwargs)
            if isinstance(args[0], ShardedActivation) and _is_in_place(func, kwargs):
                args[0].full()
                args[0].is_modified = True
            return func(*full_tensors(args), **full_tensors(kwargs))


def _is_among(cls: type[Tensor], args: tuple[Any, ...]) -> bool:
    """Whether one of them is of that class, or one of the first one's items (torch.cat)."""
    items = args[0] if args and isinstance(args[0], (list, tuple)) else ()
    return any(isinstance(arg, cls) for arg in (*args, *items))


def full_tensors(tree: Tree) -> Tree:
    """The same tree with sharded activations gathered."""
    return map_tensors(lambda t: t.full() if isinstance(t, ShardedActivation) else t, tree)


def reshaped(shape: Sequence[int], arguments: Sequence[Any]) -> torch.Size | None:
    """What `view` and `reshape` with these arguments make of a shape; None if that is not plain."""
    is_one = len(arguments) == 1 and not isinstance(arguments[0], int)
    wanted = list(arguments[0] if is_one else arguments)
    if not all(isinstance(size, int) for size in wanted):
        return None
    return torch.empty(shape, device="meta").reshape(wanted).shape


def _is_in_place(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    is_method = name.endswith("_") and not name.endswith("__")
    return is_method or name.startswith(("__i", "__set")) or bool(kwargs.get("inplace"))
