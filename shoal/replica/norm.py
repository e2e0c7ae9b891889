"""The norm of a gradient whose parts are on several stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from shoal.group.group import Group


class NormOverStages:
    """The norm of every tensor in its place among those of the whole model, then the norm of these.

    That is how torch computes the norm of a whole model, so the bits are the same. A tensor that
    several stages hold counts on one of them. An all-reduce of a number a parameter, over each of
    `groups`: the stages, and before them the replicas where each has a shard.
    """

    def __init__(
        self,
        places: Mapping[nn.Parameter, int],
        num_parameters: int,
        groups: Sequence[Group],
        is_counted_here: Callable[[nn.Parameter], bool],
    ):
        self._places, self._num, self._groups = places, num_parameters, groups
        self._like = next(iter(places)).detach()
        self._counts = is_counted_here

    @torch.no_grad()
    def __call__(self, params: Sequence[nn.Parameter]) -> Tensor:
        mine = [p for p in params if p.grad is not None and self._counts(p)]
        norms = self._like.new_zeros(self._num)
        if mine:
            found = torch._foreach_norm([p.grad for p in mine if p.grad is not None])
            places = torch.tensor([self._places[p] for p in mine], device=norms.device)
            norms[places] = torch.stack(list(found)).to(norms.dtype)
        for group in self._groups:
            group.all_reduce(norms).wait()
        total: Tensor = torch.linalg.vector_norm(norms)
        return total
