"""What becomes of a module under tp."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from shoal.replica.split.mapping import ShardSpec, even_ranges
from shoal.replica.tensor.linear import ColumnOutput

Ranges = tuple[tuple[range, ...], ...]

HEAD_DIM = (
    *("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "d_kv", "d_head"),
    *("dim_head", "dim_per_head", "size_per_head", "hidden_size_per_attention_head"),
)
HEADS = (
    *("num_heads", "num_attention_heads", "n_heads", "n_head", "num_head", "nhead", "heads"),
    *("num_q_heads", "encoder_attention_heads", "decoder_attention_heads", "h"),
)
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
GROUPS = ("num_key_value_groups", "n_rep", "num_queries_per_kv", "repeats")
WIDTHS = (
    *("all_head_size", "inner_dim", "embed_dim", "hidden_size", "split_size", "inner_size"),
    *("n_embd", "d_model", "dim", "hidden_dim", "embed_size", "attention_dim"),
    *("attn_dim", "d_attn"),
)


@dataclass(frozen=True)
class HeadSplit:
    """Heads of queries, and of keys and values, by rank."""

    head_dim: int
    heads: int
    key_heads: int
    queries: tuple[range, ...]
    keys: tuple[range, ...]

    @classmethod
    def of(cls, heads: int, key_heads: int, head_dim: int, ranks: int) -> HeadSplit | None:
        """None where there are fewer heads than ranks."""
        if heads % key_heads:
            return None
        repeats = heads // key_heads
        keys = even_ranges(key_heads, ranks)
        queries = [range(r.start * repeats, r.stop * repeats) for r in keys]
        if key_heads < ranks:
            sharing = even_ranges(ranks, key_heads)  # the ranks of each key head
            if repeats < len(sharing[0]):
                return None
            keys = [range(key, key + 1) for key, those in enumerate(sharing) for _ in those]
            queries = [
                range(key * repeats + r.start, key * repeats + r.stop)
                for key, those in enumerate(sharing)
                for r in even_ranges(repeats, len(those))
            ]
        return cls(head_dim, heads, key_heads, tuple(queries), tuple(keys))

    @property
    def shares_keys(self) -> bool:
        """Whether several ranks have the same key head."""
        return self.key_heads < len(self.keys)

    def query_features(self, features: int) -> Ranges:
        return _features(self.queries, features // self.heads)

    def key_features(self, features: int) -> Ranges:
        return _features(self.keys, features // self.key_heads)

    def set_local_counts(self, module: nn.Module, rank: int) -> None:
        """Let an attention count the heads that are on this rank."""
        heads = len(self.queries[rank])
        key_heads = len(self.keys[rank])
        width = self.heads * self.head_dim
        changes = [
            (HEADS, self.heads, heads),
            (KEY_HEADS, self.key_heads, key_heads),
            (GROUPS, self.heads // self.key_heads, heads // key_heads),
            (WIDTHS, width, heads * self.head_dim),
        ]
        for names, full, local in changes:
            _replace_ints(module, names, full, local)
        config = getattr(module, "config", None)
        if config is not None and not isinstance(config, (nn.Module, dict)):
            module.config = copy.copy(config)
            for names, full, local in changes[:2]:
                _replace_ints(module.config, names, full, local)


def read_heads(module: nn.Module, width: int) -> tuple[int, int, int] | None:
    """Heads, key heads and features of a head of an attention whose output has `width` features."""
    sources = [module, getattr(module, "config", None)]
    head_dim = _first_int(sources[:1], HEAD_DIM)
    if head_dim is None:
        heads = _first_int(sources, HEADS)
        head_dim = width // heads if heads and width % heads == 0 else None
    if not head_dim or width % head_dim:
        return None
    key_heads = _first_int(sources[:1], KEY_HEADS)
    repeats = _first_int(sources[:1], GROUPS)
    count = width // head_dim
    if key_heads is None:
        key_heads = count // repeats if repeats and count % repeats == 0 else count
    return count, key_heads, head_dim


def _features(heads: tuple[range, ...], unit: int) -> Ranges:
    return tuple((range(r.start * unit, r.stop * unit),) for r in heads)


def _first_int(sources: list[Any], names: tuple[str, ...]) -> int | None:
    for source in sources:
        for name in names:
            value = getattr(source, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _replace_ints(owner: Any, names: tuple[str, ...], full: int, local: int) -> None:
    for name in names:
        value = getattr(owner, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value == full:
            setattr(owner, name, local)


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
