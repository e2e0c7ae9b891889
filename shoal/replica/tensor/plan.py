"""Which layers of a model tp splits, and how.

Without a plan: the layers of `blocks.py`, nn.MultiheadAttention, experts in one tensor, an
nn.Embedding whose weight is also that of an nn.Linear (the head), and what a model of Hugging Face
calls its embeddings. A module's own `split_plan()` says

    {"qkv": ("column", 3 * head_width), "out": ("row", head_width)}

where the number is the run of features that has to stay on one rank. By the user's plan: any
nn.Linear, by "column" or "row", and any nn.Embedding, by "row" (its vocabulary).
Other layers, such as convolutions and nn.LSTM, are complete on every rank.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shoal.errors import BadInput
from shoal.replica.deferred_init import full_name, is_in
from shoal.replica.split.attributes import attributes_kept, copy_structure
from shoal.replica.split.mapping import ShardSpec
from shoal.replica.tensor.blocks import (
    GATHERED_COLUMN,
    SCATTERED_ROW,
    VOCABULARY,
    SplitBlock,
    carried_blocks,
    carried_styles,
    expert_shards,
    find_blocks,
    known_blocks,
)
from shoal.replica.tensor.linear import LinearLike, linear_like
from shoal.replica.tensor.roles import HeadSplit, Role, Roles, read_heads
from shoal.runtime.pytree import tensors_of
from shoal.strategy.split_terms import Tp

_LEADING = ((2, 3), (2, 4, 4), (2, 2, 4, 4))  # (batch, time), (batch, height, width), videos


def plan_of(model: nn.Module, tp: Tp) -> Roles:
    """The role of every module that is split; the others are complete on every rank."""
    return _Planner(model, tp).roles


class _Planner:
    def __init__(self, model: nn.Module, tp: Tp):
        self.model = model
        self.tp = tp
        self.ranks = tp.size
        self.roles = Roles()
        self.modules = dict(model.named_modules())
        self._holders = Counter(
            id(p) for m in self.modules.values() for p in m._parameters.values() if p is not None
        )
        self._apply_plan(tp.plan or {})
        styles = carried_styles(self.modules)
        for name, module in self.modules.items():
            if type(module) is nn.MultiheadAttention:
                self._plan_attention(name, module)
            for block in known_blocks(name, module):
                self._plan_block(block)
        for block in [*carried_blocks(styles), *find_blocks(self.modules)]:
            self._plan_block(block)
        for name, module in self.modules.items():
            shards = expert_shards(module, self.ranks)
            if shards is not None:
                self._add({name: Role("experts", shards=shards)})
        for name, style in styles.items():
            self._plan_style(name, style)
        self._plan_embeddings()
        self._plan_tied_heads()

    # ------------------------------------------------------------------ the user's plan

    def _apply_plan(self, plan: Mapping[str, str]) -> None:
        for pattern in plan:
            if not any(fnmatchcase(name, pattern) for name in self.modules):
                raise BadInput(
                    f"the plan of tp names {pattern!r}, and {type(self.model).__name__} has no "
                    "such module"
                )
        planned = {
            name: kind
            for name in self.modules
            for pattern, kind in plan.items()
            if fnmatchcase(name, pattern)
        }
        self._whole = {name for name, kind in planned.items() if kind == "whole"}
        names = [name for name in planned if name not in self._whole]
        for i, name in enumerate(names):
            self.roles[name] = self._planned_role(name, planned[name])
            if self.roles[name].kind == "row":
                self._connect(names[:i], name)
        for name in names:
            self._check(name, self.roles[name])

    def _planned_role(self, name: str, kind: str) -> Role:
        module = self.modules[name]
        if kind == "row" and isinstance(module, nn.Embedding):
            return Role("vocabulary")
        if linear_like(module) is None:
            allowed = ' (an nn.Embedding is split by "row")' if is_lookup(module) else ""
            raise BadInput(
                f'the plan of tp splits {name} by "{kind}", and it is a {type(module).__name__}: '
                f"layers that can be split are of class nn.Linear{allowed}"
            )
        if isinstance(self.modules.get(name.rpartition(".")[0]), nn.MultiheadAttention):
            raise BadInput(
                f"the plan of tp cannot split {name}, which belongs to an nn.MultiheadAttention: "
                "leave it out, and the attention is split by heads"
            )
        if kind == "row":
            return Role("row", input_is_sharded=False)
        is_last = name == list(self.modules)[-1]
        return Role("column", output="logits" if is_last else "full")

    def _connect(self, before: list[str], row: str) -> None:
        """The column layers right before a row layer hand their features over without a gather.

        That is the last one, and those beside it that read the same input (q, k, v; gate, up).
        """
        features = None
        parent = row.rpartition(".")[0]
        for name in reversed(before):
            module = self.modules[name]
            linear = linear_like(module)
            if self.roles[name].kind != "column" or linear is None:
                return
            beside = name.rpartition(".")[0] == parent and linear.inputs == features
            if features is not None and not beside:
                return
            features = linear.inputs
            self.roles[name] = replace(self.roles[name], output="sharded")
            self.roles[row] = replace(self.roles[row], input_is_sharded=True)

    def _check(self, name: str, role: Role) -> None:
        features = _features(self.modules[name], role)
        if features < self.tp.size:
            raise BadInput(
                f"{self.tp} cannot split {name}: it has {features} features for "
                f"{self.tp.size} ranks"
            )
        if self._is_shared(name) and role.kind != "vocabulary":
            raise BadInput(
                f"{self.tp} cannot split {name}: another layer has the same weight; leave it out "
                "of the plan"
            )

    # ------------------------------------------------------------------ without a plan

    def _add(self, roles: Roles | None) -> None:
        if roles is not None and all(map(self._is_free, roles)):
            self.roles.update(roles)

    def _plan_attention(self, name: str, module: nn.MultiheadAttention) -> None:
        is_plain = module.bias_k is None and module.bias_v is None and not module.add_zero_attn
        is_plain = is_plain and linear_like(module.out_proj) is not None
        has_role_inside = any(is_in(role, name) for role in self.roles)
        if is_plain and not has_role_inside and module.num_heads >= self.ranks:
            self._add({name: Role("attention")})

    def _plan_block(self, block: SplitBlock) -> None:
        found = {name: linear_like(self.modules.get(name)) for name in block.columns}
        columns = {name: linear for name, linear in found.items() if linear is not None}
        row = linear_like(self.modules.get(block.row))
        if row is not None and len(columns) == len(found):
            make = self._heads if block.is_attention else self._pair
            self._add(make(block, columns, row))

    def _pair(
        self, block: SplitBlock, columns: dict[str, LinearLike], row: LinearLike
    ) -> Roles | None:
        units, rest = divmod(row.inputs, block.row_unit)
        if rest or units < self.ranks:
            return None
        roles = {block.row: Role("row", block.row_unit)}
        for name, linear in columns.items():
            blocks, rest = divmod(linear.outputs, units * block.column_unit)
            if rest or blocks not in block.blocks:
                return None
            roles[name] = Role("column", block.column_unit, blocks)
        return roles

    def _heads(
        self, block: SplitBlock, columns: dict[str, LinearLike], row: LinearLike
    ) -> Roles | None:
        module = self.modules[block.around]
        counts = read_heads(module, row.inputs)
        if counts is None or _takes_bias_of_all_heads(module):
            return None
        heads, key_heads, head_dim = counts
        if len(columns) > 1:
            narrowest = min(linear.outputs for linear in columns.values())
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
        roles |= {block.row: Role("row", ranges=split.query_features(row.inputs)), **inside}
        return roles if self._can_run(block, {**columns, block.row: row}, roles) else None

    def _can_run(self, block: SplitBlock, layers: dict[str, LinearLike], roles: Roles) -> bool:
        """False if the module runs on an input alone, and the share of rank 0 does not."""
        if any(role.kind == "sharded" for role in roles.values()):
            return True  # a table would have to be made smaller, too
        module = self.modules[block.around]
        share = copy_structure(module)
        heads = roles[block.around].heads
        assert heads is not None
        heads.set_local_counts(share, 0)
        for name, linear in layers.items():
            if is_in(name, block.around):
                is_row = roles[name].kind == "row"
                features = linear.inputs if is_row else linear.outputs
                local = roles[name].spec(features, self.ranks).length(0)
                sizes = (local, linear.outputs) if is_row else (linear.inputs, local)
                has_bias = self.modules[name].bias is not None
                inner = name[len(block.around) + 1 :] if block.around else name
                parent, _, key = inner.rpartition(".")
                share.get_submodule(parent)._modules[key] = nn.Linear(
                    *sizes, bias=has_bias, device="meta"
                )
        for leading in _LEADING:
            x = torch.empty(*leading, next(iter(layers.values())).inputs, device="meta")
            expected = _shape(module, x)
            if expected is not None:
                found = _shape(share, x)
                has_row = is_in(block.row, block.around)
                return found == expected if has_row else found is not None
        return True

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

    def _plan_tied_heads(self) -> None:
        """Embeddings and the layer that turns features into logits with the same weight."""
        for name, module in self.modules.items():
            if not is_lookup(module):
                continue
            weights = {n: m._parameters.get("weight") for n, m in self.modules.items()}
            weight = weights[name]
            same = {n: m for n, m in self.modules.items() if weights[n] is weight}
            is_known = len(same) == self._holders[id(weight)] and all(
                is_lookup(m) or linear_like(m) is not None for m in same.values()
            )
            if name in self.roles and len(same) > 1 and not is_known:
                raise BadInput(f"{self.tp} cannot split {name}: other layers have the same weight")
            if any(map(self._is_whole, same)):
                continue
            if is_known and len(same) > 1 and is_lookup(module, self.tp.size):
                for other, layer in same.items():
                    is_table = is_lookup(layer)
                    role = Role("vocabulary") if is_table else Role("column", output="logits")
                    self.roles[other] = role

    def _is_free(self, name: str) -> bool:
        return not (name in self.roles or self._is_shared(name) or self._is_whole(name))

    def _is_whole(self, name: str) -> bool:
        """Whether the plan keeps it, or what it is in, or what is in it, as it is."""
        return any(is_in(name, whole) or is_in(whole, name) for whole in self._whole)

    def _is_shared(self, name: str) -> bool:
        return any(self._holders[id(p)] > 1 for p in self.modules[name].parameters())


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
    own = list(child.parameters(recurse=False))
    is_norm = len(own) == len(list(child.parameters())) and "norm" in type(child).__name__.lower()
    if is_norm and all(p.numel() in (1, split.head_dim) for p in own):
        return Role("summed")
    return None


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


def _features(module: nn.Module, role: Role) -> int:
    if isinstance(module, nn.Embedding):
        return module.num_embeddings
    linear = linear_like(module)
    assert linear is not None
    return linear.outputs if role.kind == "column" else linear.inputs
