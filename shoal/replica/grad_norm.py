"""The norm of a gradient that is spread over shards, tensor-parallel slices and stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shoal.comm.group import Group

if TYPE_CHECKING:
    from shoal.replica.expert.split import ExpertSplit
    from shoal.replica.tensor.parallelize import TensorSplit


class ReplicaGradNorm:
    """The norm of every tensor, at its index in the whole model, then the norm of these.

    That is how torch computes the norm of a whole model, so the bits are the same. A tensor that
    several stages hold counts on one of them. It costs an all-reduce of one number per parameter
    over the replicas, where each has a shard; over tp and ep, where the squares of the slices of
    a tensor are added up; and over the stages.
    """

    def __init__(
        self,
        index_of: Mapping[nn.Parameter, int],
        num_parameters: int,
        is_counted_here: Callable[[nn.Parameter], bool],
        *,
        shards: Group | None = None,
        tensor: TensorSplit | None = None,
        experts: ExpertSplit | None = None,
        stages: Group | None = None,
    ):
        self._index_of = index_of
        self._num = num_parameters
        self._is_counted_here = is_counted_here
        self._shards = shards
        self._tensor = tensor
        self._experts = experts
        self._stages = stages
        self._like = next(iter(index_of)).detach()

    @torch.no_grad()
    def __call__(self, params: Sequence[nn.Parameter]) -> Tensor:
        """The total norm; `params` are those of this worker."""
        counted = [p for p in params if p.grad is not None and self._is_counted_here(p)]
        grads = [p.grad for p in counted if p.grad is not None]
        norms = torch._foreach_norm(grads) if grads else []
        return self.of(dict(zip(counted, norms, strict=True)))

    @torch.no_grad()
    def of(self, norm_of: Mapping[nn.Parameter, Tensor]) -> Tensor:
        """The total norm from the norm of each gradient of this worker."""
        counted = [p for p in norm_of if self._is_counted_here(p)]
        norms = self._like.new_zeros(self._num)
        if counted:
            indices = torch.tensor([self._index_of[p] for p in counted], device=norms.device)
            norms[indices] = torch.stack([norm_of[p] for p in counted]).to(norms)
        if self._shards is not None:
            self._shards.all_reduce(norms).wait()
        if self._tensor is not None:
            norms = self._combine_slices(norms, self._tensor)
        if self._experts is not None:
            norms = _combine(norms, self._experts.slice_indices, self._experts.group)
        if self._stages is not None:
            self._stages.all_reduce(norms).wait()
        total: Tensor = torch.linalg.vector_norm(norms)
        return total

    def _combine_slices(self, norms: Tensor, tensor: TensorSplit) -> Tensor:
        indices = [
            index
            for p, index in self._index_of.items()
            if tensor.is_slice(p) and self._is_counted_here(p)
        ]
        return _combine(norms, indices, tensor.group)


def _combine(norms: Tensor, indices: Sequence[int], group: Group) -> Tensor:
    """The norms of tensors that are spread over a group, from those of their slices."""
    is_slice = torch.zeros_like(norms, dtype=torch.bool)
    is_slice[indices] = True
    squares = norms.square().where(is_slice, 0)
    group.all_reduce(squares).wait()
    return squares.sqrt().where(is_slice, norms)
