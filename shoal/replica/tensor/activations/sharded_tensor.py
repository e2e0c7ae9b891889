"""Activations of which every rank of a tp group has a shard; full ones are alike on all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.comm.group import Group
from shoal.pytree import Tree
from shoal.replica import sharded_tensor
from shoal.replica.sharded_tensor import ShardedCall, ShardedTensor
from shoal.replica.tensor.activations.shard_spec import ShardSpec


class ShardedActivation(ShardedTensor):
    """Gathered once. What changes the full tensor in place is seen by all later operations."""

    group: Group
    spec: ShardSpec
    is_modified = False  # in place, after it was gathered

    @property
    def local(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            if self.is_modified:
                return self.shard_of(self.full())
            return self.as_subclass(Tensor)

    def full(self) -> Tensor:
        if self.full_value is None:
            self.full_value = self.gather_full()
        return self.full_value

    def gather_full(self) -> Tensor:
        raise NotImplementedError

    def shard_of(self, full: Tensor) -> Tensor:
        raise NotImplementedError

    @classmethod
    def compute_in_full(cls, call: ShardedCall) -> Any:
        changed = call.args[0] if call.args else None
        sets = call.is_in_place or call.name.startswith("__set")
        if isinstance(changed, ShardedActivation) and sets:
            changed.full()
            changed.is_modified = True
        return super().compute_in_full(call)


def full_tensors(tree: Tree) -> Tree:
    """The same tree with activations of tp gathered; positions of cp stay as they are."""
    return sharded_tensor.full_tensors(tree, ShardedActivation)
