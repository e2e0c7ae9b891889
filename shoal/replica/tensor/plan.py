"""Which layers of a model tp splits, and how.

By themselves: Linear–activation–Linear in an nn.Sequential, nn.MultiheadAttention, the layers of
nn.Transformer, GPT-2 of Hugging Face's transformers, an nn.Embedding whose weight is also that of
an nn.Linear (the head), and what a module's own `split_plan()` tells of its children:

    {"qkv": ("column", 3 * head_width), "out": ("row", head_width)}

where the number is the run of features that has to stay in one piece. By the user's plan: any
nn.Linear, by "column" or "row", and any nn.Embedding, by "row" (its vocabulary).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn
from torch.nn import functional as F

from shoal.errors import BadInput
from shoal.replica.deferred_init import full_name
from shoal.replica.tensor.linear_like import is_transformers, matrix_of
from shoal.strategy.terms import Tp

_ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.GELU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.ELU, nn.SELU, nn.CELU),
    *(nn.LeakyReLU, nn.Mish, nn.Softplus, nn.Hardtanh, nn.Hardswish, nn.Dropout, nn.Identity),
)
Kind = Literal["column", "row", "vocabulary", "attention"]


@dataclass(frozen=True)
class Role:
    kind: Kind
    unit: int = 1  # features that stay together
    blocks: int = 1  # of a column layer: queries, keys and values stand one after the other
    output: str = "split"  # of a column layer: "split", "whole" or "logits"
    input_is_split: bool = True  # of a row layer


Roles = dict[str, Role]


def plan_of(model: nn.Module, tp: Tp) -> Roles:
    """The role of every module that is split; the others are whole on every rank."""
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
        self._follow(tp.plan or {})
        for name, module in self.modules.items():
            self._find(name, module)
        self._find_heads()
        if not self.roles:
            raise BadInput(
                f"{tp} finds nothing to split in {type(model).__name__}: name its layers, as in "
                f'tp({tp.size}, plan={{"blocks.*.up": "column", "blocks.*.down": "row"}})'
            )

    # ------------------------------------------------------------------ the user's plan

    def _follow(self, plan: Mapping[str, str]) -> None:
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
        names = list(planned)
        for i, name in enumerate(names):
            self.roles[name] = self._planned(name, planned[name])
            if self.roles[name].kind == "row":
                self._join(names[:i], name)
        for name in names:
            self._check(name, self.roles[name])

    def _planned(self, name: str, kind: str) -> Role:
        module = self.modules[name]
        if kind == "row" and isinstance(module, nn.Embedding):
            return Role("vocabulary")
        if matrix_of(module) is None:
            allowed = ' (an nn.Embedding is split by "row")' if _is_embedding(module) else ""
            raise BadInput(
                f'the plan of tp splits {name} by "{kind}", and it is a {type(module).__name__}: '
                f"layers that can be split are of class nn.Linear{allowed}"
            )
        if isinstance(self.modules.get(name.rpartition(".")[0]), nn.MultiheadAttention):
            raise BadInput(
                f"the plan of tp cannot split {name}, a part of an nn.MultiheadAttention: leave it "
                "out, and the attention is split by heads"
            )
        if kind == "row":
            return Role("row", input_is_split=False)
        is_last = name == list(self.modules)[-1]
        return Role("column", output="logits" if is_last else "whole")

    def _join(self, before: list[str], row: str) -> None:
        """The column layers right before a row layer hand their features over without a gather.

        That is the last one, and those beside it that read the same input (q, k, v; gate, up).
        """
        features = None
        parent = row.rpartition(".")[0]
        for name in reversed(before):
            module = self.modules[name]
            matrix = matrix_of(module)
            if self.roles[name].kind != "column" or matrix is None:
                return
            beside = name.rpartition(".")[0] == parent and matrix.inputs == features
            if features is not None and not beside:
                return
            features = matrix.inputs
            self.roles[name] = replace(self.roles[name], output="split")
            self.roles[row] = replace(self.roles[row], input_is_split=True)

    def _check(self, name: str, role: Role) -> None:
        features = _features(self.modules[name], role)
        if features < self.tp.size:
            raise BadInput(f"{self.tp} cannot split {name}: it has {features} features to deal out")
        if self._is_shared(name) and role.kind != "vocabulary":
            raise BadInput(
                f"{self.tp} cannot split {name}: another layer has the same weight; leave it out "
                "of the plan"
            )

    # ------------------------------------------------------------------ what is found by itself

    def _find(self, name: str, module: nn.Module) -> None:
        if type(module) is nn.MultiheadAttention:
            self._find_attention(name, module)
        elif isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
            if module.activation in (F.relu, F.gelu) or isinstance(module.activation, _ELEMENTWISE):
                self._pair(full_name(name, "linear1"), full_name(name, "linear2"))
        elif isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
            for first, second in _pairs(module):
                self._pair(full_name(name, first), full_name(name, second))
        elif is_transformers(module, "GPT2MLP"):
            self._pair(full_name(name, "c_fc"), full_name(name, "c_proj"))
        elif is_transformers(module, "GPT2Attention"):
            self._find_gpt2_attention(name, module)
        elif callable(getattr(module, "split_plan", None)):
            self._follow_module(name, module)

    def _find_attention(self, name: str, module: nn.MultiheadAttention) -> None:
        is_plain = module.bias_k is None and module.bias_v is None and not module.add_zero_attn
        is_plain = is_plain and matrix_of(module.out_proj) is not None
        free = not any(_is_in(role, name) for role in self.roles)
        if is_plain and free and module.num_heads >= self.tp.size and not self._is_shared(name):
            self.roles[name] = Role("attention")

    def _find_gpt2_attention(self, name: str, module: nn.Module) -> None:
        if not getattr(module, "is_cross_attention", True):
            unit = int(module.head_dim)  # type: ignore[arg-type]
            self._pair(full_name(name, "c_attn"), full_name(name, "c_proj"), (unit, unit), blocks=3)

    def _pair(
        self, first: str, second: str, units: tuple[int, int] = (1, 1), blocks: int = 1
    ) -> None:
        """A column and a row layer with elementwise operations, or heads, between them."""
        up = matrix_of(self.modules.get(first))
        down = matrix_of(self.modules.get(second))
        if up is None or down is None or {first, second} & set(self.roles):
            return
        num = down.inputs // units[1]
        fits = up.outputs == blocks * num * units[0] and down.inputs == num * units[1]
        if fits and num >= self.tp.size and not (self._is_shared(first) or self._is_shared(second)):
            self.roles[first] = Role("column", units[0], blocks)
            self.roles[second] = Role("row", units[1])

    def _follow_module(self, name: str, module: nn.Module) -> None:
        told: Mapping[str, tuple[str, int]] = module.split_plan()  # type: ignore[operator]
        column: tuple[str, int] | None = None
        for own, (kind, unit) in told.items():
            if kind == "column":
                column = (own, unit)
            elif column is not None:
                self._pair(full_name(name, column[0]), full_name(name, own), (column[1], unit))

    def _find_heads(self) -> None:
        """An embedding and the layer that turns features into logits with the same weight."""
        for name, module in self.modules.items():
            if not (_is_embedding(module) and isinstance(module, nn.Embedding)):
                continue
            heads = [
                n for n, m in self.modules.items() if n != name and _weight(m) is module.weight
            ]
            known = len(heads) == 1 and self._holders[id(module.weight)] == 2
            if name in self.roles and heads and not known:
                raise BadInput(f"{self.tp} cannot split {name}: other layers have the same weight")
            if not known or matrix_of(self.modules[heads[0]]) is None:
                continue
            if module.num_embeddings >= self.tp.size:
                self.roles[name] = Role("vocabulary")
                self.roles[heads[0]] = Role("column", output="logits")

    def _is_shared(self, name: str) -> bool:
        return any(self._holders[id(p)] > 1 for p in self.modules[name].parameters())


def _pairs(container: nn.Sequential) -> Iterator[tuple[str, str]]:
    """Neighbouring nn.Linear with elementwise layers between them, each in one pair."""
    first: str | None = None
    for name, module in container.named_children():
        if matrix_of(module) is not None:
            if first is None:
                first = name
            else:
                yield first, name
                first = None
        elif type(module) not in _ELEMENTWISE:
            first = None


def _features(module: nn.Module, role: Role) -> int:
    if isinstance(module, nn.Embedding):
        return module.num_embeddings
    matrix = matrix_of(module)
    assert matrix is not None
    return matrix.outputs if role.kind == "column" else matrix.inputs


def _weight(module: nn.Module) -> nn.Parameter | None:
    return module._parameters.get("weight")


def _is_embedding(module: nn.Module) -> bool:
    is_plain = type(module) is nn.Embedding
    return (
        is_plain and module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
    )


def _is_in(name: str, module: str) -> bool:
    return name == module or not module or name.startswith(module + ".")
