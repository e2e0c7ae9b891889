"""The norm of a gradient whose parts are on several workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from shoal.comm.group import Group
from shoal.replica.tensor.parallelize import TensorSplit


class NormOverParts:
    """The norm of every tensor in its place among those of the whole model, then the norm of these.

    That is how torch computes the norm of a whole model, so the bits are the same. A tensor that
    several stages hold counts on one of them. An all-reduce of a number a parameter each over the
    replicas, where each has a shard; over the workers of tp, where the squares of the slices of a
    tensor are added up; and over the stages.
    """

    def __init__(
        self,
        places: Mapping[nn.Parameter, int],
        num_parameters: int,
        is_counted_here: Callable[[nn.Parameter], bool],
        *,
        shards: Group | None = None,
        tensor: TensorSplit | None = None,
        stages: Group | None = None,
    ):
        self._places = places
        self._num = num_parameters
        self._shards = shards
        self._tensor = tensor
        self._stages = stages
        self._like = next(iter(places)).detach()
        self._counts = is_counted_here

    @torch.no_grad()
    def __call__(self, params: Sequence[nn.Parameter]) -> Tensor:
        mine = [p for p in params if p.grad is not None and self._counts(p)]
        found = torch._foreach_norm([p.grad for p in mine if p.grad is not None]) if mine else []
        return self.of(dict(zip(mine, found, strict=True)))

    @torch.no_grad()
    def of(self, found: Mapping[nn.Parameter, Tensor]) -> Tensor:
        """The same from the norm of each gradient that is here."""
        mine = [p for p in found if self._counts(p)]
        norms = self._like.new_zeros(self._num)
        if mine:
            places = torch.tensor([self._places[p] for p in mine], device=norms.device)
            norms[places] = torch.stack([found[p] for p in mine]).to(norms)
        if self._shards is not None:
            self._shards.all_reduce(norms).wait()
        if self._tensor is not None:
            norms = self._join_slices(norms, self._tensor)
        if self._stages is not None:
            self._stages.all_reduce(norms).wait()
        total: Tensor = torch.linalg.vector_norm(norms)
        return total

    def _join_slices(self, norms: Tensor, tensor: TensorSplit) -> Tensor:
        places = [
            place for p, place in self._places.items() if tensor.is_slice(p) and self._counts(p)
        ]
        is_slice = torch.zeros_like(norms, dtype=torch.bool)
        is_slice[places] = True
        squares = norms.square().where(is_slice, 0)
        tensor.group.all_reduce(squares).wait()
        return squares.sqrt().where(is_slice, norms)
