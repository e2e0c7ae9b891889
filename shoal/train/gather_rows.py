"""Rows of all replicas in the order of the global batch, with gradient.

    forward     rows of this replica  ─▶ all rows, on every replica            all-gather
    backward    gradient of all rows  ─▶ summed over replicas, own rows of it  reduce-scatter

Every replica's loss is weighted by its fraction of the global batch, and these sum up to 1. So the
sum over replicas is the gradient of one device, both where all replicas compute the loss of the
whole batch and where each computes that of its own rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.comm.group import Group


def gather_rows(x: Tensor, group: Group, is_placeholder: bool = False) -> Tensor:
    """All ranks call it; they may have different numbers of rows. A placeholder counts as none."""
    if group.size == 1:
        return x
    counts = torch.zeros(group.size, dtype=torch.int64, device=x.device)
    counts[group.rank] = 0 if is_placeholder else len(x)
    group.all_reduce(counts).wait()
    rows = Rows(group, counts.tolist())
    if not x.requires_grad:
        return rows.gather(x.detach())
    gathered: Tensor = _Gather.apply(x, rows)  # type: ignore[no-untyped-call]
    return gathered


class Rows:
    """How many rows each rank has of a tensor."""

    def __init__(self, group: Group, counts: list[int]):
        self.group = group
        self.counts = counts
        self.most = max(1, *counts)
        self.here = counts[group.rank]

    def gather(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        sent = x.to(torch.uint8) if dtype == torch.bool else x
        mine = _padded(sent[: self.here], self.most).contiguous()
        everything = mine.new_empty(self.group.size, *mine.shape)
        self.group.all_gather(everything, mine).wait()
        pieces = [everything[r, :count] for r, count in enumerate(self.counts)]
        return torch.cat(pieces).to(dtype)

    def scatter_sum(self, grad: Tensor, rows_here: int) -> Tensor:
        """The sum over ranks, of which this rank gets its rows; zeros for a placeholder."""
        pieces = [_padded(piece, self.most) for piece in torch.split(grad, self.counts)]
        everything = torch.stack(pieces).contiguous()
        mine = torch.empty_like(everything[0])
        self.group.reduce_scatter(mine, everything).wait()
        return _padded(mine[: self.here], rows_here)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        ctx.rows_here = len(x)
        return rows.gather(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _ScatterSum.apply(grads[0], ctx.rows, ctx.rows_here), None  # type: ignore[no-untyped-call]


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, rows: Rows, rows_here: int) -> Tensor:
        ctx.rows = rows
        return rows.scatter_sum(grad, rows_here)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _Gather.apply(grads[0], ctx.rows), None, None  # type: ignore[no-untyped-call]


def _padded(x: Tensor, rows: int) -> Tensor:
    return F.pad(x, [0, 0] * (x.dim() - 1) + [0, rows - len(x)])
