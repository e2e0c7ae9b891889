"""The product of groups of matrices in any precision; the kernels of torch refuse float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: Any = None,
) -> Tensor:
    """What `torch._grouped_mm` computes; `offs` are the ends of the groups of a 2D matrix.

    Which dimension of a and b has the groups depends on whether the other one is 3D.
    """
    if offs is None:
        out = torch.bmm(a, b)
    elif a.dim() == 2 and b.dim() == 3:
        pieces = zip(_groups(a, offs, 0), b, strict=True)
        out = _padded(torch.cat([x @ y for x, y in pieces]), len(a), 0)
    elif a.dim() == 3:
        pieces = zip(a, _groups(b, offs, 1), strict=True)
        out = _padded(torch.cat([x @ y for x, y in pieces], 1), b.shape[1], 1)
    else:
        pieces = zip(_groups(a, offs, 1), _groups(b, offs, 0), strict=True)
        out = torch.stack([x @ y for x, y in pieces])
    return out if bias is None else out + bias


def _groups(tensor: Tensor, offs: Tensor, dim: int) -> list[Tensor]:
    ends = offs.tolist()
    starts = [0, *ends[:-1]]
    return [tensor.narrow(dim, start, end - start) for start, end in zip(starts, ends, strict=True)]


def _padded(out: Tensor, size: int, dim: int) -> Tensor:
    """With zeros for what stands behind the last group."""
    rest = list(out.shape)
    rest[dim] = size - out.shape[dim]
    return torch.cat([out, out.new_zeros(rest)], dim) if rest[dim] else out
