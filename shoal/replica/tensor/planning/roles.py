"""What becomes of a module under tp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shoal.replica.tensor.activations.shard_spec import ShardSpec
from shoal.replica.tensor.layers.linear import ColumnOutput
from shoal.replica.tensor.planning.heads import HeadSplit, Ranges

Kind = Literal[
    "column",  # some outputs of a layer
    "row",  # some inputs of a layer
    "vocabulary",  # some rows of an embedding
    "attention",  # some heads of an nn.MultiheadAttention
    "selected",  # a column layer whose weight is complete, and of which each rank uses some rows
    "heads",  # the module around the layers of an attention, which counts heads
    "sharded",  # a module whose own parameters are sharded by `shards`, and nothing else
    "summed",  # complete, and used on the shards of an activation: gradients are added up
    "experts",  # own parameters are sharded by `shards`; the results of all ranks are added up
]
IN_PLACE = ("heads", "sharded", "summed", "experts")


@dataclass(frozen=True)
class Role:
    kind: Kind
    unit: int = 1  # features that stay together
    blocks: int = 1  # of a column layer: queries, keys and values stand one after the other
    output: ColumnOutput = "sharded"  # of a column layer
    input_is_sharded: bool = True  # of a row layer
    ranges: Ranges | None = None  # of features, by rank, where units do not say it
    heads: HeadSplit | None = None
    shards: Mapping[str, ShardSpec] | None = None  # by the name of a parameter

    def spec(self, features: int, ranks: int) -> ShardSpec:
        """How the features of a layer are sharded; its dimension is 0."""
        if self.ranges is not None:
            return ShardSpec(0, self.ranges)
        return ShardSpec.of_blocks(0, self.blocks, features // self.blocks, ranks, self.unit)


Roles = dict[str, Role]
