"""Tensor-parallel layers: every rank of a tp group has a slice of the weight.

    y = x Aᵗ      column: some rows of A, which are some features of y
                  row:    some columns of A, for some features of x; results are added up

Parameters keep their names, and hold this rank's slice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm.group import Group
from shoal.replica.context.sequence_shard import SequenceShard
from shoal.replica.microbatch_context import TensorParallelRng
from shoal.replica.split.mapping import ShardSpec, copy, even_ranges, gather, reduce, scatter
from shoal.replica.split.sharded_tensor import full_activations
from shoal.replica.tensor.activations import SequenceParallelTensor, VocabParallelLogits


@dataclass(frozen=True)
class LinearLike:
    """How the weight of such a layer lies."""

    inputs: int
    outputs: int
    is_transposed: bool = False

    @property
    def output_dim(self) -> int:
        return 1 if self.is_transposed else 0

    def for_linear(self, weight: Tensor) -> Tensor:
        """The weight as F.linear takes it."""
        return weight.t() if self.is_transposed else weight


def linear_like(module: nn.Module | None) -> LinearLike | None:
    """None for a layer of another kind, or one whose weight is computed from others."""
    if module is None or set(module._parameters) != {"weight", "bias"}:
        return None
    is_plain = type(module).forward is nn.Linear.forward or is_transformers(module, "FalconLinear")
    if isinstance(module, nn.Linear) and is_plain:
        return LinearLike(module.in_features, module.out_features)
    if is_transformers(module, "Conv1D"):
        weight = module._parameters["weight"]
        assert weight is not None
        return LinearLike(weight.shape[0], weight.shape[1], is_transposed=True)
    return None


def is_transformers(module: nn.Module, name: str) -> bool:
    """Whether it is of that class of transformers, which need not be installed."""
    kind = type(module)
    return kind.__name__ == name and kind.__module__.startswith("transformers.")


ColumnOutput = Literal["sharded", "full", "logits"]


class TensorParallelLayer(nn.Module):
    """A layer that replaces another, whose hooks and mode it takes over.

    `specs` says how each of its parameters is sharded; one that is not named is complete on every
    rank. With `is_sequence_parallel`, sums over ranks stay sharded: each rank has some positions
    (see `activations.py`).
    """

    is_sequence_parallel = False

    def __init__(self, original: nn.Module, group: Group, rng: TensorParallelRng):
        super().__init__()
        self.group = group
        self.rng = rng
        self.training = original.training
        self.specs: dict[str, ShardSpec] = {}
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            getattr(self, name).update(getattr(original, name))

    def register(
        self, name: str, parameter: Tensor | nn.Module | None, spec: ShardSpec | None = None
    ) -> None:
        assert parameter is None or isinstance(parameter, nn.Parameter)
        self.register_parameter(name, parameter)
        if spec is not None and parameter is not None:
            self.specs[name] = spec

    def reduce_output(self, partial: Tensor, bias: Tensor | None = None) -> Tensor:
        """The sum over ranks of `partial`, (…, features); `bias` is added once."""
        if self.is_sequence_parallel and partial.dim() > 1:
            rows = SequenceParallelTensor.summed(partial, self.group, self.rng)
            return rows if bias is None else rows + bias.to(partial.dtype)
        out = reduce(partial, self.group)
        return out if bias is None else out + bias.to(out.dtype)


class TensorParallelLinear(TensorParallelLayer):
    """Has the sizes of the whole layer, whatever part of its weight is here."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, original: nn.Module, group: Group, rng: TensorParallelRng, spec: ShardSpec):
        super().__init__(original, group, rng)
        linear = linear_like(original)
        assert linear is not None
        self.linear: LinearLike = linear
        self.in_features = linear.inputs
        self.out_features = linear.outputs
        self.spec = spec
        self.register("weight", original.weight)
        self.register("bias", original.bias)


class ColumnLinear(TensorParallelLinear):
    """`output` is "sharded" for a row layer, "full", or "logits": sharded until it is used."""

    def __init__(
        self,
        original: nn.Module,
        group: Group,
        rng: TensorParallelRng,
        spec: ShardSpec,
        output: ColumnOutput = "sharded",
    ):
        super().__init__(original, group, rng, spec)
        self.output = output
        self.specs["weight"] = replace(spec, dim=self.linear.output_dim)
        if self.bias is not None:
            self.specs["bias"] = spec

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.for_linear(self.weight)
        if isinstance(x, SequenceParallelTensor):
            out = x.linear(weight, self.bias)
        else:
            out = F.linear(copy(x, self.group), weight, self.bias)
        if self.output == "sharded":
            if self.training:
                self.rng.fork(x)
            return out
        is_lazy = self.output == "logits" and not torch.compiler.is_compiling()  # by a subclass
        if is_lazy and not isinstance(out, SequenceShard):
            return VocabParallelLogits.of(out, self.spec, self.group)
        return gather(out, ShardSpec(out.dim() - 1, self.spec.ranges), self.group)


class SelectedColumns(TensorParallelLinear):
    """A column layer whose weight is complete on every rank, which computes some of its features.

    For keys and values with fewer heads than ranks. Gradients of the weight are added up.
    """

    def forward(self, x: Tensor) -> Tensor:
        rank = self.group.rank
        weight = self.linear.for_linear(copy(self.weight, self.group))
        rows = self.spec.take_shard(weight, rank)
        bias = None
        if self.bias is not None:
            bias = self.spec.take_shard(copy(self.bias, self.group), rank)
        if isinstance(x, SequenceParallelTensor):
            return x.linear(rows, bias)
        return F.linear(copy(full_activations(x), self.group), rows, bias)


class RowLinear(TensorParallelLinear):
    """`input_is_sharded` says whether a column layer stands before it."""

    def __init__(
        self,
        original: nn.Module,
        group: Group,
        rng: TensorParallelRng,
        spec: ShardSpec,
        input_is_sharded: bool,
    ):
        super().__init__(original, group, rng, spec)
        self.input_is_sharded = input_is_sharded
        self.spec = self.specs["weight"] = replace(spec, dim=1 - self.linear.output_dim)

    def forward(self, x: Tensor) -> Tensor:
        if self.input_is_sharded:
            self.rng.restore(x)
        else:
            x = full_activations(x)
            x = scatter(x, ShardSpec(x.dim() - 1, self.spec.ranges), self.group)
        return self.reduce_output(F.linear(x, self.linear.for_linear(self.weight)), self.bias)


class VocabularyEmbedding(nn.Embedding, TensorParallelLayer):
    """Every rank looks up the ids that it has; the others give 0, and results are added up."""

    spec: ShardSpec

    @staticmethod
    def become(table: nn.Embedding, group: Group, rng: TensorParallelRng) -> VocabularyEmbedding:
        """`table` itself; a subclass keeps its own forward, which calls this one."""
        kind = type(table)
        is_plain = kind is nn.Embedding
        table.__class__ = (
            VocabularyEmbedding
            if is_plain
            else type(kind.__name__, (kind, VocabularyEmbedding), {})
        )
        assert isinstance(table, VocabularyEmbedding)
        table.group = group
        table.rng = rng
        table.spec = ShardSpec.even(0, table.num_embeddings, group.size)
        table.specs = {"weight": table.spec}
        return table

    def forward(self, ids: Tensor) -> Tensor:
        is_checked = ids.device.type == "cpu" and not torch.compiler.is_compiling()
        if is_checked and ((ids < 0) | (ids >= self.num_embeddings)).any():
            raise IndexError(f"an id is outside of the {self.num_embeddings} of the embedding")
        local_ids = self.spec.ranges[self.group.rank][0]
        is_local = (ids >= local_ids.start) & (ids < local_ids.stop)
        rows = F.embedding((ids - local_ids.start).where(is_local, 0), self.weight)
        kept = rows.where(is_local[..., None], 0)
        if self.padding_idx is not None:  # a row that is looked up and not trained
            kept = kept.where((ids != self.padding_idx)[..., None], kept.detach())
        return self.reduce_output(kept)


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
            products = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
            weights = (products if mask is None else products + mask).softmax(-1)
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
        self, q: Tensor, padding: Tensor | None, mask: Tensor | None, is_batched: bool
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
