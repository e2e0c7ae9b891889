"""Activations of which every rank of a tp group has some channels, or some heads.

Operations that act on each channel by itself, and views, are computed on the shards; for others
the activation is gathered first. So the result is right whatever a model does with it, and the
plan decides only what it costs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.comm.group import Group
from shoal.replica.tensor.activations.shard_spec import ShardSpec
from shoal.replica.tensor.activations.sharded_tensor import ShardedActivation, full_tensors
from shoal.replica.tensor.activations.spec_views import merged
from shoal.replica.tensor.mappings import copy, gather, scatter
from shoal.replica.tensor.rng import TensorParallelRng


class ChannelShardedTensor(ShardedActivation):
    """`spec` says which dimension is sharded, and how."""

    rng: TensorParallelRng

    @classmethod
    def of(
        cls, local: Tensor, spec: ShardSpec, group: Group, rng: TensorParallelRng
    ) -> ChannelShardedTensor:
        x: ChannelShardedTensor = local.as_subclass(cls)
        x.group = group
        x.rng = rng
        x.spec = merged(spec)
        return x

    def like(self, local: Tensor, spec: ShardSpec | None = None) -> ChannelShardedTensor:
        return ChannelShardedTensor.of(local, spec or self.spec, self.group, self.rng)

    def at(self, local: Tensor, dim: int) -> ChannelShardedTensor:
        """The same channels, which are another dimension now."""
        return self.like(local, ShardSpec(dim, self.spec.ranges))

    @property
    def full_shape(self) -> torch.Size:
        return self.spec.full_shape(self.local.shape)

    @property
    def from_right(self) -> int:
        """The sharded dimension, counted from the right: 1 is the last."""
        return self.local.dim() - self.spec.dim

    def gather_full(self) -> Tensor:
        return gather(self.local, self.spec, self.group)

    def shard_of(self, full: Tensor) -> Tensor:
        return scatter(full, self.spec, self.group)

    def operand(self, other: Any) -> Any:
        """Another operand of an elementwise function, for these channels; None: it does not fit."""
        if isinstance(other, ChannelShardedTensor):
            aligned = other.from_right == self.from_right
            if aligned and other.spec.ranges == self.spec.ranges:
                return other.local
        if not isinstance(other, Tensor):
            return other
        other = full_tensors(other)
        dim = other.dim() - self.from_right
        if dim < 0 or other.shape[dim] == 1:
            return copy(other, self.group)
        if other.shape[dim] != self.spec.size:
            return None
        return scatter(other, ShardSpec(dim, self.spec.ranges), self.group)


def local_shard(x: Tensor, spec: ShardSpec, group: Group) -> Tensor:
    """This rank's shard of an activation that is sharded so, or full, or sharded otherwise."""
    if isinstance(x, ChannelShardedTensor) and x.spec == merged(spec):
        return x.local
    return scatter(full_tensors(x), spec, group)
