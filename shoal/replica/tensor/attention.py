"""nn.MultiheadAttention of which every rank of a tp group has some heads."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm.group import Group
from shoal.replica.split.mapping import copy, gather, reduce
from shoal.replica.tensor.activations import SequenceParallelTensor
from shoal.replica.tensor.linear import RowLinear, TensorParallelLayer
from shoal.replica.tensor.rng import TensorParallelRng
from shoal.replica.tensor.shard_spec import ShardSpec, even_ranges


class ParallelAttention(TensorParallelLayer):
    """Called as nn.MultiheadAttention.

    It costs one all-reduce in forward, and one per input in backward.
    """

    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    q_proj_weight: Tensor
    k_proj_weight: Tensor
    v_proj_weight: Tensor
    _qkv_same_embed_dim = False  # what torch's layers ask before they take a path of their own

    def __init__(self, original: nn.MultiheadAttention, group: Group, rng: TensorParallelRng):
        super().__init__(original, group, rng)
        self.embed_dim = original.embed_dim
        self.num_heads = original.num_heads
        self.head_dim = original.head_dim
        self.dropout = original.dropout
        self.batch_first = original.batch_first
        self.heads = even_ranges(original.num_heads, group.size)[group.rank]
        each_of_qkv = ShardSpec.of_blocks(0, 3, original.embed_dim, group.size, original.head_dim)
        single = ShardSpec.even(0, original.embed_dim, group.size, original.head_dim)
        self.register("in_proj_weight", original.in_proj_weight, each_of_qkv)
        for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
            self.register(name, getattr(original, name), single)
        self.register("in_proj_bias", original.in_proj_bias, each_of_qkv)
        self.out_proj = RowLinear(original.out_proj, group, rng, single, True)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        is_batched = query.dim() == 3
        q, k, v = self._project(query, key, value, is_batched)
        if self.training:
            self.rng.fork(query)
        mask = self._mask(q, key_padding_mask, attn_mask, is_batched)
        drop = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            weights = _weights(q, k, mask)
            attended = F.dropout(weights, drop) @ v
        else:
            causal = is_causal and mask is None
            attended = F.scaled_dot_product_attention(q, k, v, mask, drop, is_causal=causal)
        features = attended.transpose(1, 2).flatten(2)
        out = self.out_proj(self._batched(features, is_batched) if is_batched else features[0])
        return out, self._returned_weights(weights, average_attn_weights, is_batched)

    def _project(self, query: Tensor, key: Tensor, value: Tensor, is_batched: bool) -> list[Tensor]:
        """Queries, keys and values as (batch, heads, time, head)."""
        weight = self.in_proj_weight
        is_self_attention = query is key and key is value
        if isinstance(query, SequenceParallelTensor) and is_self_attention and weight is not None:
            projected = query.linear(weight, self.in_proj_bias).chunk(3, -1)
            return [self._by_head(self._batched(x, is_batched)) for x in projected]
        given = (query, key, value)
        inputs = {id(t): self._batched(self._gathered(t), is_batched) for t in given}
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = [None] * 3 if self.in_proj_bias is None else list(self.in_proj_bias.chunk(3))
        return [
            self._by_head(F.linear(inputs[id(x)], w, b))
            for x, w, b in zip(given, weights, biases, strict=True)
        ]

    def _gathered(self, x: Tensor) -> Tensor:
        """The same on all ranks, with gradients that come from all heads."""
        return x.gather_sequence() if isinstance(x, SequenceParallelTensor) else copy(x, self.group)

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)

    def _batched(self, x: Tensor, is_batched: bool) -> Tensor:
        """(batch, time, features), and back where it is batched."""
        if not is_batched:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _mask(
        self,
        q: Tensor,
        padding: Tensor | None,
        mask: Tensor | None,
        is_batched: bool,
    ) -> Tensor | None:
        """What is added to the products of queries and keys."""
        total: Tensor | None = None
        if mask is not None:
            total = _added(mask, q.dtype)
            if total.dim() == 3:  # (batch * heads, queries, keys)
                total = total.view(-1, self.num_heads, *total.shape[1:])[
                    :, self.heads.start : self.heads.stop
                ]
        if padding is not None:
            hidden = _added(padding if is_batched else padding[None], q.dtype)[:, None, None]
            total = hidden if total is None else total + hidden
        return total

    def _returned_weights(
        self, weights: Tensor | None, average: bool, is_batched: bool
    ) -> Tensor | None:
        if weights is None:
            return None
        if average:
            weights = reduce(weights.sum(1), self.group) / self.num_heads
        else:
            heads = ShardSpec.even(1, self.num_heads, self.group.size)
            weights = gather(weights, heads, self.group)
        return weights if is_batched else weights[0]


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)


def _weights(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    products = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
    return (products if mask is None else products + mask).softmax(-1)
