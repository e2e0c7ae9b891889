"""The norm of a gradient whose parts are on several workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from shoal.group.group import Group
from shoal.replica.tensor import TensorSplit


class NormOverParts:
    """The norm of every tensor in its place among those of the whole model, then the norm of these.

    That is how torch computes the norm of a whole model, so the bits are the same. A tensor that
    several stages hold counts on one of them. One all-reduce of a number a parameter; another one
    over the workers of tp, where the squares of the slices of a tensor are added up first.
    """

    def __init__(
        self,
        places: Mapping[nn.Parameter, int],
        num_parameters: int,
        group: Group,
        is_counted_here: Callable[[nn.Parameter], bool],
    ):
        self.tensor: TensorSplit | None = None
        self._places, self._num, self._group = places, num_parameters, group
        self._counts = is_counted_here

    @torch.no_grad()
    def __call__(self, params: Sequence[nn.Parameter]) -> Tensor:
        mine = [p for p in params if p.grad is not None and self._counts(p)]
        norms = torch.zeros(self._num, dtype=params[0].dtype, device=params[0].device)
        if mine:
            found = torch._foreach_norm([p.grad for p in mine if p.grad is not None])
            places = torch.tensor([self._places[p] for p in mine], device=norms.device)
            norms[places] = torch.stack(list(found)).to(norms.dtype)
        if self.tensor is not None:
            norms = self._join_slices(norms, self.tensor)
        self._group.all_reduce(norms).wait()
        total: Tensor = torch.linalg.vector_norm(norms)
        return total

    def _join_slices(self, norms: Tensor, tensor: TensorSplit) -> Tensor:
        places = [place for p, place in self._places.items() if tensor.is_slice(p)]
        is_slice = torch.zeros_like(norms, dtype=torch.bool)
        is_slice[places] = True
        squares = norms.square().where(is_slice, 0)
        tensor.group.all_reduce(squares).wait()
        return squares.sqrt().where(is_slice, norms)
