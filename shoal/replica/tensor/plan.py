"""Which layers of a model tp splits, and how.

Without a plan: Linear–activation–Linear in an nn.Sequential, nn.MultiheadAttention, an
nn.Embedding whose weight is also that of an nn.Linear (the head), the layers of `adapters.py`,
attentions and MLPs (`transformer_plan.py`), and the children that a module's own `split_plan()`
names:

    {"qkv": ("column", 3 * head_width), "out": ("row", head_width)}

where the number is the run of features that has to stay on one rank. By the user's plan: any
nn.Linear, by "column" or "row", and any nn.Embedding, by "row" (its vocabulary).
Other layers, such as convolutions and nn.LSTM, are complete on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from shoal.errors import BadInput
from shoal.replica.deferred_init import full_name, is_in
from shoal.replica.tensor.adapters import ELEMENTWISE, LayerPair, known_pairs
from shoal.replica.tensor.linear import linear_like
from shoal.replica.tensor.roles import Role, Roles
from shoal.replica.tensor.transformer_plan import TransformerPlan, is_lookup
from shoal.strategy.split_terms import Tp


def plan_of(model: nn.Module, tp: Tp) -> Roles:
    """The role of every module that is split; the others are complete on every rank."""
    return _Planner(model, tp).roles


class _Planner:
    def __init__(self, model: nn.Module, tp: Tp):
        self.model = model
        self.tp = tp
        self.roles = Roles()
        self.modules = dict(model.named_modules())
        self._holders = Counter(
            id(p) for m in self.modules.values() for p in m._parameters.values() if p is not None
        )
        self._apply_plan(tp.plan or {})
        for name, module in self.modules.items():
            self._plan_module(name, module)
        found = TransformerPlan(self.modules, tp.size, self._is_free)
        self.roles.update(found.roles)
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

    def _plan_module(self, name: str, module: nn.Module) -> None:
        if type(module) is nn.MultiheadAttention:
            self._plan_attention(name, module)
            return
        for pair in _pairs_in(module):
            self._plan_pair(name, pair)

    def _plan_attention(self, name: str, module: nn.MultiheadAttention) -> None:
        is_plain = module.bias_k is None and module.bias_v is None and not module.add_zero_attn
        is_plain = is_plain and linear_like(module.out_proj) is not None
        is_free = not any(is_in(role, name) for role in self.roles) and not self._is_whole(name)
        if is_plain and is_free and module.num_heads >= self.tp.size and not self._is_shared(name):
            self.roles[name] = Role("attention")

    def _plan_pair(self, name: str, pair: LayerPair) -> None:
        """Split a pair of children of the module `name`, if it can be split."""
        column = full_name(name, pair.column)
        row = full_name(name, pair.row)
        up = linear_like(self.modules.get(column))
        down = linear_like(self.modules.get(row))
        if up is None or down is None or {column, row} & set(self.roles):
            return
        if self._is_whole(column) or self._is_whole(row):
            return
        units = down.inputs // pair.row_unit
        fits = (
            up.outputs == pair.blocks * units * pair.column_unit
            and down.inputs == units * pair.row_unit
        )
        is_shared = self._is_shared(column) or self._is_shared(row)
        if fits and units >= self.tp.size and not is_shared:
            self.roles[column] = Role("column", pair.column_unit, pair.blocks)
            self.roles[row] = Role("row", pair.row_unit)

    def _plan_tied_heads(self) -> None:
        """Embeddings and the layer that turns features into logits with the same weight."""
        for name, module in self.modules.items():
            if not is_lookup(module):
                continue
            weight = _weight(module)
            same = {n: m for n, m in self.modules.items() if _weight(m) is weight}
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
        is_taken = name in self.roles
        return not is_taken and not self._is_shared(name) and not self._is_whole(name)

    def _is_whole(self, name: str) -> bool:
        """Whether the plan keeps it, or what it is in, or what is in it, as it is."""
        return any(is_in(name, whole) or is_in(whole, name) for whole in self._whole)

    def _is_shared(self, name: str) -> bool:
        return any(self._holders[id(p)] > 1 for p in self.modules[name].parameters())


def _pairs_in(module: nn.Module) -> Iterator[LayerPair]:
    """The pairs among the children of a module: of an adapter, a Sequential, or its own plan."""
    adapted = list(known_pairs(module))
    if adapted:
        yield from adapted
    elif isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        yield from _pairs_of_sequential(module)
    elif callable(getattr(module, "split_plan", None)):
        yield from _pairs_of_plan(module.split_plan())  # type: ignore[operator]


def _pairs_of_sequential(container: nn.Sequential) -> Iterator[LayerPair]:
    """Neighbouring nn.Linear with elementwise layers between them, each in one pair."""
    first: str | None = None
    for name, module in container.named_children():
        if linear_like(module) is not None:
            if first is None:
                first = name
            else:
                yield LayerPair(first, name)
                first = None
        elif type(module) not in ELEMENTWISE:
            first = None


def _pairs_of_plan(plan: Mapping[str, tuple[str, int]]) -> Iterator[LayerPair]:
    """Every row layer with the column layer before it."""
    column: tuple[str, int] | None = None
    for name, (kind, unit) in plan.items():
        if kind == "column":
            column = (name, unit)
        elif column is not None:
            yield LayerPair(column[0], name, column[1], unit)


def _features(module: nn.Module, role: Role) -> int:
    if isinstance(module, nn.Embedding):
        return module.num_embeddings
    linear = linear_like(module)
    assert linear is not None
    return linear.outputs if role.kind == "column" else linear.inputs


def _weight(module: nn.Module) -> nn.Parameter | None:
    return module._parameters.get("weight")
