"""Layers of which every rank of a tp group has a slice.

    y = x Aᵗ      column: some rows of A, which are some features of y
                  row:    some columns of A, for some features of x; results are added up

Parameters keep their names, and hold this rank's slice.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm.group import Group
from shoal.replica.tensor.linear_like import Matrix, matrix_of
from shoal.replica.tensor.mappings import copy, gather, reduce, scatter
from shoal.replica.tensor.rng import Streams
from shoal.replica.tensor.sequence_parallel import SplitSequence
from shoal.replica.tensor.shard_spec import Share
from shoal.replica.tensor.sharded_tensor import whole_tensors
from shoal.replica.tensor.vocab_parallel import SplitLogits


class SplitLayer(nn.Module):
    """A layer in the place of another, whose hooks and mode it takes over.

    `shares` tells how each of its parameters is dealt out; one that is not named is whole. With
    `in_rows`, sums over ranks are left with the ranks, each with some positions (see `sequence`).
    """

    in_rows = False

    def __init__(self, whole: nn.Module, group: Group, streams: Streams):
        super().__init__()
        self.group = group
        self.streams = streams
        self.training = whole.training
        self.shares: dict[str, Share] = {}
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            getattr(self, name).update(getattr(whole, name))

    def hold(
        self, name: str, parameter: Tensor | nn.Module | None, share: Share | None = None
    ) -> None:
        assert parameter is None or isinstance(parameter, nn.Parameter)
        self.register_parameter(name, parameter)
        if share is not None and parameter is not None:
            self.shares[name] = share

    def sum(self, parts: Tensor, bias: Tensor | None = None) -> Tensor:
        """What the ranks have terms of, (…, features); `bias` is added once."""
        if self.in_rows and parts.dim() > 1:
            rows = SplitSequence.summed(parts, self.group, self.streams)
            return rows if bias is None else rows + bias.to(parts.dtype)
        out = reduce(parts, self.group)
        return out if bias is None else out + bias.to(out.dtype)


def matrix(layer: nn.Module) -> Matrix:
    found = matrix_of(layer)
    assert found is not None
    return found


class ColumnLinear(SplitLayer):
    """`output` is "split" for a row layer, "whole", or "logits": split until it is looked at."""

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        whole: nn.Module,
        group: Group,
        streams: Streams,
        unit: int,
        output: str = "split",
        blocks: int = 1,
    ):
        super().__init__(whole, group, streams)
        self.matrix = matrix(whole)
        self.output = output
        self.in_features = self.matrix.inputs
        self.out_features = self.matrix.outputs
        size = self.out_features // blocks
        self.share = Share.of_each(0, blocks, size, group.size, unit)
        self.hold("weight", whole.weight, replace(self.share, dim=self.matrix.dim_of_outputs))
        self.hold("bias", whole.bias, self.share)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.matrix.upright(self.weight)
        if isinstance(x, SplitSequence):
            out = x.linear(weight, self.bias)
        else:
            out = F.linear(copy(x, self.group), weight, self.bias)
        if self.output == "split":
            if self.training:
                self.streams.part(x)
            return out
        if self.output == "logits":
            return SplitLogits.of(out, self.share, self.group)
        return gather(out, Share(out.dim() - 1, self.share.ranges), self.group)


class RowLinear(SplitLayer):
    """`input_is_split` tells whether a column layer stands before it."""

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, whole: nn.Module, group: Group, streams: Streams, unit: int, input_is_split: bool
    ):
        super().__init__(whole, group, streams)
        self.matrix = matrix(whole)
        self.input_is_split = input_is_split
        self.in_features = self.matrix.inputs
        self.out_features = self.matrix.outputs
        dim = self.matrix.dim_of_inputs
        self.share = Share.even(dim, self.in_features, group.size, unit)
        self.hold("weight", whole.weight, self.share)
        self.hold("bias", whole.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.input_is_split:
            self.streams.meet(x)
        else:
            x = whole_tensors(x)
            x = scatter(x, Share(x.dim() - 1, self.share.ranges), self.group)
        return self.sum(F.linear(x, self.matrix.upright(self.weight)), self.bias)


class VocabularyEmbedding(SplitLayer):
    """Every rank looks up the ids that it has; the others give 0, and results are added up."""

    weight: Tensor

    def __init__(self, whole: nn.Embedding, group: Group, streams: Streams):
        super().__init__(whole, group, streams)
        self.num_embeddings = whole.num_embeddings
        self.embedding_dim = whole.embedding_dim
        self.padding_idx = whole.padding_idx
        self.share = Share.even(0, whole.num_embeddings, group.size)
        self.hold("weight", whole.weight, self.share)

    def forward(self, ids: Tensor) -> Tensor:
        if ids.device.type == "cpu" and ((ids < 0) | (ids >= self.num_embeddings)).any():
            raise IndexError(f"an id is outside of the {self.num_embeddings} of the embedding")
        mine = self.share.ranges[self.group.rank][0]
        here = (ids >= mine.start) & (ids < mine.stop)
        rows = F.embedding((ids - mine.start).where(here, 0), self.weight)
        kept = rows.where(here[..., None], 0)
        if self.padding_idx is not None:  # a row that is looked up and not trained
            kept = kept.where((ids != self.padding_idx)[..., None], kept.detach())
        return self.sum(kept)
