"""Attention of some queries over some keys, with the logarithm of its normalizer.

    scores = q kᵀ · scale + mask        lse = log Σ exp(scores)        out = exp(scores - lse) v

Two blocks of keys are merged by their `lse`. Scores exist for a tile of queries at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TILE_ELEMENTS = 1 << 22  # of scores that exist at a time


@dataclass(frozen=True)
class AttentionBlock:
    """Queries and keys that meet. `mask` is added to scores, or False where a key is left out.

    On the `diagonal` a query sees the keys up to its own place. `keep` is a dropout mask that is
    scaled already.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    mask: Tensor | None = None
    diagonal: bool = False
    keep: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    def tiles(self) -> list[slice]:
        """Ranges of queries."""
        queries = self.q.shape[-2]
        heads = self.q.numel() // max(1, queries * self.q.shape[-1])
        rows = max(1, TILE_ELEMENTS // max(1, heads * self.k.shape[-2]))
        return [slice(i, min(i + rows, queries)) for i in range(0, queries, rows)]

    def scores(self, rows: slice) -> Tensor:
        q = self.q[..., rows, :].to(self.dtype)
        scores = q @ self.k.to(self.dtype).transpose(-1, -2) * self.scale
        if self.mask is not None:
            mask = self.mask if self.mask.shape[-2] == 1 else self.mask[..., rows, :]
            if mask.dtype == torch.bool:
                scores.masked_fill_(~mask, -torch.inf)
            else:
                scores = scores + mask
        if self.diagonal:
            queries = torch.arange(rows.start, rows.stop, device=q.device)
            keys = torch.arange(self.k.shape[-2], device=q.device)
            scores.masked_fill_(keys > queries[:, None], -torch.inf)
        return scores

    def kept(self, rows: slice, probabilities: Tensor) -> Tensor:
        return probabilities if self.keep is None else probabilities * self.keep[..., rows, :]


def forward(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    """(out, lse), where lse has no last dimension; a query without keys has out 0 and lse -inf."""
    outs = []
    normalizers = []
    values = block.v.to(block.dtype)
    for rows in block.tiles():
        scores = block.scores(rows)
        lse = scores.logsumexp(-1)
        probabilities = (scores - _finite(lse)[..., None]).exp_()
        outs.append(block.kept(rows, probabilities) @ values)
        normalizers.append(lse)
    return torch.cat(outs, -2), torch.cat(normalizers, -1)


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both."""
    total = torch.logaddexp(lse, more_lse)
    finite = _finite(total)
    ours = (lse - finite).exp()[..., None]
    theirs = (more_lse - finite).exp()[..., None]
    return out * ours + more * theirs, total


def backward(
    block: AttentionBlock, grad: Tensor, lse: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by q, k and v; `lse` is that over all keys, `delta` the sum of grad · out."""
    dtype = block.dtype
    keys = block.k.to(dtype)
    values = block.v.to(dtype)
    dk = torch.zeros_like(keys)
    dv = torch.zeros_like(values)
    dqs = []
    for rows in block.tiles():
        probabilities = (block.scores(rows) - _finite(lse[..., rows])[..., None]).exp_()
        of_rows = grad[..., rows, :]
        dv += _sum_to(block.kept(rows, probabilities).transpose(-1, -2) @ of_rows, dv)
        dp = block.kept(rows, of_rows @ values.transpose(-1, -2))
        ds = probabilities * (dp - delta[..., rows, None]) * block.scale
        dqs.append(ds @ keys)
        dk += _sum_to(ds.transpose(-1, -2) @ block.q[..., rows, :].to(dtype), dk)
    return torch.cat(dqs, -2), dk, dv


def _finite(lse: Tensor) -> Tensor:
    """A query without any key has no normalizer: its probabilities are 0."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def _sum_to(grad: Tensor, like: Tensor) -> Tensor:
    """Several heads of queries may share a head of keys."""
    return grad if grad.shape == like.shape else grad.sum_to_size(like.shape)
