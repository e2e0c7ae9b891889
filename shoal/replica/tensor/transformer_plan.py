"""Roles of the layers of transformers: by the plan a model carries, or found from structure."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shoal.pytree import tensors_of
from shoal.replica.deferred_init import full_name, is_in
from shoal.replica.split.attributes import attributes_kept, copy_structure
from shoal.replica.tensor.blocks import (
    GATHERED_COLUMN,
    SCATTERED_ROW,
    VOCABULARY,
    SplitBlock,
    carried_blocks,
    carried_styles,
    find_blocks,
)
from shoal.replica.tensor.linear import LinearLike, linear_like
from shoal.replica.tensor.roles import HeadSplit, Role, Roles, read_heads
from shoal.replica.tensor.shard_spec import ShardSpec

_LEADING = ((2, 3), (2, 4, 4), (2, 2, 4, 4))  # (batch, time), (batch, height, width), videos


def can_run(
    module: nn.Module, layers: Mapping[str, LinearLike], roles: Mapping[str, Role], ranks: int
) -> bool:
    """False if the module runs on an input alone, and its share on one rank does not.

    `layers` are its linear layers that have a role, by their name in it; `roles` has them and ""
    for the module itself.
    """
    inputs = next(iter(layers.values())).inputs
    for leading in _LEADING:
        x = torch.empty(*leading, inputs, device="meta")
        expected = _shape(module, x)
        if expected is not None:
            found = _shape(_share(module, layers, roles, ranks), x)
            has_row = any(roles[name].kind == "row" for name in layers)
            return found == expected if has_row else found is not None
    return True


def _share(
    module: nn.Module, layers: Mapping[str, LinearLike], roles: Mapping[str, Role], ranks: int
) -> nn.Module:
    """What rank 0 has, with layers of its own sizes; values do not matter."""
    share = copy_structure(module)
    heads = roles[""].heads
    if heads is not None:
        heads.set_local_counts(share, 0)
    for name, linear in layers.items():
        is_row = roles[name].kind == "row"
        local = roles[name].spec(linear.inputs if is_row else linear.outputs, ranks).length(0)
        sizes = (local, linear.outputs) if is_row else (linear.inputs, local)
        original: Any = module.get_submodule(name)
        layer = nn.Linear(*sizes, bias=original.bias is not None, device="meta")
        parent, _, key = name.rpartition(".")
        share.get_submodule(parent)._modules[key] = layer
    return share


@torch.no_grad()
def _shape(module: nn.Module, x: Tensor) -> torch.Size | None:
    """Of the first output; None if it does not run."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    values = {name: torch.empty_like(t, device="meta") for name, t in tensors}
    try:
        with attributes_kept(list(module.modules())):
            outputs = tensors_of(functional_call(module, values, (x,)))
    except Exception:  # of any kind: it is the module's own code
        return None
    return outputs[0].shape if outputs else None


class TransformerPlan:
    """Roles of modules that have none yet, and whose weights no other layer shares."""

    def __init__(
        self, modules: Mapping[str, nn.Module], ranks: int, is_free: Callable[[str], bool]
    ):
        self.modules = modules
        self.ranks = ranks
        self.is_free = is_free
        self.roles = Roles()
        styles = carried_styles(modules)
        for block in [*carried_blocks(styles), *find_blocks(modules)]:
            self._plan_block(block)
        for name, module in modules.items():
            self._plan_experts(name, module)
        for name, style in styles.items():
            self._plan_style(name, style)
        self._plan_embeddings()

    def _add(self, roles: Roles) -> None:
        if all(name not in self.roles and self.is_free(name) for name in roles):
            self.roles.update(roles)

    def _plan_block(self, block: SplitBlock) -> None:
        columns = {name: linear_like(self.modules[name]) for name in block.columns}
        row = linear_like(self.modules[block.row])
        known = {name: linear for name, linear in columns.items() if linear is not None}
        if row is None or len(known) != len(columns):
            return
        roles = (
            self._attention(block, known, row)
            if block.is_attention
            else self._mlp(block, known, row)
        )
        if roles is not None:
            self._add(roles)

    # ------------------------------------------------------------------ MLPs

    def _mlp(
        self, block: SplitBlock, columns: dict[str, LinearLike], row: LinearLike
    ) -> Roles | None:
        roles = {block.row: Role("row")}
        for name, linear in columns.items():
            blocks, rest = divmod(linear.outputs, row.inputs)
            if rest or blocks > 2 or row.inputs < self.ranks:
                return None
            roles[name] = Role("column", blocks=blocks)
        return roles

    # ------------------------------------------------------------------ attention

    def _attention(
        self, block: SplitBlock, columns: dict[str, LinearLike], row: LinearLike
    ) -> Roles | None:
        module = self.modules[block.around]
        counts = read_heads(module, row.inputs)
        if counts is None or _takes_bias_of_all_heads(module):
            return None
        heads, key_heads, head_dim = counts
        widths = {linear.outputs for linear in columns.values()}
        if len(columns) > 1:
            narrowest = min(widths)
            key_heads = narrowest // head_dim if narrowest < heads * head_dim else heads
        split = HeadSplit.of(heads, key_heads, head_dim, self.ranks) if key_heads else None
        if split is None:
            return None
        roles = (
            self._fused(block, columns, split) if len(columns) == 1 else _separate(columns, split)
        )
        inside = self._inside(block, split)
        if roles is None or inside is None:
            return None
        roles[block.row] = Role("row", ranges=split.query_features(row.inputs))
        roles.update(inside)
        return roles if self._can_run(block, {**columns, block.row: row}, roles) else None

    def _can_run(self, block: SplitBlock, layers: dict[str, LinearLike], roles: Roles) -> bool:
        start = len(block.around) + 1 if block.around else 0
        inside = {n[start:]: linear for n, linear in layers.items() if is_in(n, block.around)}
        own = {n[start:]: role for n, role in roles.items() if is_in(n, block.around)}
        has_tables = any(role.kind == "sharded" for role in roles.values())
        if has_tables:  # which would have to be made smaller, too
            return True
        return can_run(self.modules[block.around], inside, own, self.ranks)

    def _fused(
        self, block: SplitBlock, columns: dict[str, LinearLike], split: HeadSplit
    ) -> Roles | None:
        """One layer for queries, keys and values."""
        ((name, linear),) = columns.items()
        head = split.head_dim
        sizes = [split.heads * head, split.key_heads * head, split.key_heads * head]
        if linear.outputs != sum(sizes) or split.shares_keys:
            return None
        if block.is_interleaved:
            return {name: Role("column", ranges=split.key_features(linear.outputs))}
        spec = ShardSpec.of_sections(0, sizes, split.key_heads, self.ranks)
        return {name: Role("column", ranges=spec.ranges)}

    def _inside(self, block: SplitBlock, split: HeadSplit) -> Roles | None:
        """The module around the layers, and what else is in it; None if that is not understood."""
        module = self.modules[block.around]
        shards = _sharded_by_heads(module, split)
        roles = {block.around: Role("heads", heads=split, shards=shards)}
        for key, child in module._modules.items():
            name = full_name(block.around, key)
            is_split = name in block.columns or is_in(block.row, name)
            if child is None or is_split or not any(True for _ in child.parameters()):
                continue
            role = _role_inside(child, split)
            if role is None:
                return None
            roles[name] = role
        return roles

    # ------------------------------------------------------------------ experts, embeddings, heads

    def _plan_experts(self, name: str, module: nn.Module) -> None:
        shards = _expert_shards(module, self.ranks)
        if shards is not None:
            self._add({name: Role("experts", shards=shards)})

    def _plan_style(self, name: str, style: str) -> None:
        """Layers that a model's plan splits alone."""
        module = self.modules[name]
        linear = linear_like(module)
        if linear is not None and style in GATHERED_COLUMN and linear.outputs >= self.ranks:
            is_head = name.rpartition(".")[2] in ("lm_head", "embed_out", "head", "score")
            self._add({name: Role("column", output="logits" if is_head else "full")})
        elif linear is not None and style in SCATTERED_ROW and linear.inputs >= self.ranks:
            self._add({name: Role("row", input_is_sharded=False)})
        elif style in VOCABULARY and is_lookup(module, self.ranks):
            self._add({name: Role("vocabulary")})

    def _plan_embeddings(self) -> None:
        """What a Hugging Face model calls its input and output embeddings."""
        names = {module: name for name, module in self.modules.items()}
        for module in self.modules.values():
            table = _called(module, "get_input_embeddings")
            if table in names and is_lookup(table, self.ranks):
                self._add({names[table]: Role("vocabulary")})
            head = _called(module, "get_output_embeddings")
            linear = linear_like(head)
            if head in names and linear is not None and linear.outputs >= self.ranks:
                self._add({names[head]: Role("column", output="logits")})


def _called(module: nn.Module, method: str) -> nn.Module | None:
    found = getattr(module, method, None)
    try:
        result = found() if callable(found) else None
    except (NotImplementedError, AttributeError):
        return None
    return result if isinstance(result, nn.Module) else None


def _separate(columns: dict[str, LinearLike], split: HeadSplit) -> Roles | None:
    """Layers for queries, keys and values of their own."""
    roles = Roles()
    width = split.heads * split.head_dim
    for name, linear in columns.items():
        if linear.outputs >= width and linear.outputs % width == 0:
            roles[name] = Role("column", ranges=split.query_features(linear.outputs))
        elif linear.outputs == split.key_heads * split.head_dim:
            kind = "selected" if split.shares_keys else "column"
            roles[name] = Role(kind, ranges=split.key_features(linear.outputs))  # type: ignore[arg-type]
        else:
            return None
    return roles


def _takes_bias_of_all_heads(module: nn.Module) -> bool:
    """ALiBi, which the model computes for all heads, outside of the attention."""
    arguments = inspect.signature(module.forward).parameters
    if "alibi" in arguments:
        return bool(getattr(getattr(module, "config", None), "alibi", True))
    return "position_bias" in arguments and not hasattr(module, "has_relative_attention_bias")


def _sharded_by_heads(module: nn.Module, split: HeadSplit) -> dict[str, ShardSpec]:
    """The module's own parameters that have a dimension of heads."""
    shards = {}
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        dims = [d for d, size in enumerate(parameter.shape) if size == split.heads]
        if len(dims) == 1:
            shards[name] = ShardSpec(dims[0], split.query_features(split.heads))
    return shards


def _role_inside(child: nn.Module, split: HeadSplit) -> Role | None:
    """A table of a bias per head, or a norm of the features of one head."""
    if type(child) is nn.Embedding and child.embedding_dim == split.heads:
        return Role("sharded", shards={"weight": ShardSpec(1, split.query_features(split.heads))})
    own = [p for p in child.parameters(recurse=False)]
    is_norm = len(own) == len(list(child.parameters())) and "norm" in type(child).__name__.lower()
    if is_norm and all(p.numel() in (1, split.head_dim) for p in own):
        return Role("summed")
    return None


def _expert_shards(module: nn.Module, ranks: int) -> dict[str, ShardSpec] | None:
    """Experts as one tensor per layer: (experts, features, features).

    Kernels for groups of matrices want rows of a multiple of 16 bytes.
    """
    up = module._parameters.get("gate_up_proj")
    blocks = 2
    if up is None:
        up = module._parameters.get("up_proj")
        blocks = 1
    down = module._parameters.get("down_proj")
    if up is None or down is None or up.dim() != 3 or down.dim() != 3 or len(up) != len(down):
        return None
    if sum(p is not None for p in module._parameters.values()) != 2:
        return None
    transposed = bool(getattr(module, "is_transposed", up.shape[1] == down.shape[2]))
    width = down.shape[1 if transposed else 2]
    if up.shape[2 if transposed else 1] != blocks * width or width < ranks:
        return None
    if blocks == 2 and not getattr(module, "is_concatenated", True):
        return None
    name = "gate_up_proj" if blocks == 2 else "up_proj"
    unit = next(u for u in (8, 4, 2, 1) if width % u == 0 and width // u >= ranks)
    return {
        name: ShardSpec.of_blocks(2 if transposed else 1, blocks, width, ranks, unit),
        "down_proj": ShardSpec.even(1 if transposed else 2, width, ranks, unit),
    }


def is_lookup(module: nn.Module | None, ranks: int = 1) -> bool:
    """An nn.Embedding, or a subclass that looks rows up as it does (and scales them, say)."""
    if not isinstance(module, nn.Embedding) or set(module._parameters) != {"weight"}:
        return False
    if module.num_embeddings < ranks:
        return False
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        return False
    forward = type(module).forward
    code = forward.__code__
    calls_super = "__class__" in code.co_freevars and "embedding" not in code.co_names
    return forward is nn.Embedding.forward or calls_super
