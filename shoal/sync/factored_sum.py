"""Compressed sums by PowerSGD: all-reduces of P and of Q."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shoal.comm.group import Group
from shoal.compress.powersgd import PowerSgd
from shoal.replica.flat_params import FlatParams
from shoal.sync.compressed_sum import CompressedSum, SliceMemory
from shoal.sync.residuals import is_alike, new_residual
from shoal.transport.transport import Work


class FactoredSum(CompressedSum):
    """PowerSGD: the projections of all replicas are added up, P is made orthogonal, and so on.

    A replica keeps what its own matrices have outside of the space that P spans.
    """

    def __init__(
        self,
        flat: FlatParams,
        group: Group,
        factors: dict[int, PowerSgd],
        unused: Tensor,
    ):
        self.group = group
        self.factors = factors
        self.under_way = []
        self.residual = new_residual(flat, flat.size)
        self.unused = unused

    def stages(self, x: Tensor, at: slice) -> Iterator[Work]:
        factors = self.factors[at.start]
        wanted = x + self.residual[at]
        left = factors.project(wanted)
        rest = left[factors.num_left :].clone()
        yield self.group.all_reduce(left)
        factors.orthogonalise(left)
        right = factors.correlate(wanted, left)
        if self.feedback:
            sent = torch.cat([left[: factors.num_left], rest])
            torch.sub(wanted, factors.expand(sent, right), out=self.residual[at])
            del sent
        del wanted, rest
        if factors.num_right:
            yield self.group.all_reduce(right)
        factors.continue_from(right)
        x.copy_(factors.expand(left, right))

    def state(self) -> dict[str, Tensor]:
        bases = {f"basis/{start}": f.basis for start, f in self.factors.items() if f.num_right}
        return {**super().state(), **bases}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Bases of other buckets are of no use: the iteration then starts again."""
        super().load_state(tensors)
        for start, factors in self.factors.items():
            basis = tensors.get(f"basis/{start}")
            if basis is not None and is_alike(basis, factors.basis):
                factors.basis = basis.to(self.residual.device)


def factored_memory(factors: PowerSgd, width: int) -> SliceMemory:
    """`width` is that of an element of the residual."""
    left = 4 * (factors.num_left + factors.num_rest)
    right = 4 * factors.num_right
    first = factors.numel * width + left + 4 * factors.num_rest
    return SliceMemory(kept=right, first=first, second=left + right if right else 0)
