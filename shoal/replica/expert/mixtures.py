"""Finds the mixtures of experts of a model, from its structure.

stacked   one module has the parameters of all experts, stacked: (experts, …, …), and its
          forward takes tokens, the indices of their experts, and weights
          (Mixtral, Qwen-MoE, DeepSeek and others of transformers 5); or it is called experts
          and its forward takes one tensor: (experts, tokens, width)
listed    a block has an nn.ModuleList or nn.ModuleDict of like experts, beside a router that
          has an output for each, and calls `experts[i](tokens)`
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import Tensor, nn

from shoal.errors import BadInput
from shoal.replica.deferred_init import full_name
from shoal.strategy.split_terms import Ep

_ROUTER_NAMES = ("gate", "gating", "router", "route", "switch")
_LISTS = (nn.ModuleList, nn.ModuleDict)


class RoutedArguments(NamedTuple):
    """The names of arguments of a forward that gets tokens, and which experts they go to."""

    tokens: str
    indices: str
    weights: str


@dataclass(frozen=True)
class StackedMixture:
    """Without `routed` its forward takes the tokens of all experts: (experts, tokens, width)."""

    name: str
    module: nn.Module
    num_experts: int
    routed: RoutedArguments | None

    @property
    def stacked(self) -> dict[str, Tensor]:
        """Its tensors that have a slice for each expert, by their names in the model."""
        own = [*self.module._parameters.items(), *self.module._buffers.items()]
        return {
            full_name(self.name, key): tensor
            for key, tensor in own
            if tensor is not None and tensor.dim() and tensor.shape[0] == self.num_experts
        }

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [tensor for tensor in self.stacked.values() if isinstance(tensor, nn.Parameter)]


@dataclass(frozen=True)
class ListedMixture:
    """`block` calls the experts; `experts` is the list, by their names in the model."""

    name: str
    block: nn.Module
    experts: dict[str, nn.Module]

    @property
    def num_experts(self) -> int:
        return len(self.experts)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for expert in self.experts.values() for p in expert.parameters()]


Mixture = StackedMixture | ListedMixture


def mixtures_of(model: nn.Module, patterns: Sequence[str] | None = None) -> list[Mixture]:
    """All of them, in the order of modules, or those whose experts have such names."""
    found: list[Mixture] = []
    for name, module in model.named_modules():
        if not any(_is_inside(name, mixture) for mixture in found):
            found += _mixtures_at(name, module, patterns)
    return found


def mixtures_for(model: nn.Module, ep: Ep) -> list[Mixture]:
    """Those that `ep` splits; `BadInput` where there is none or one that it cannot split."""
    found = mixtures_of(model, ep.experts)
    for mixture in found:
        if mixture.num_experts < ep.size:
            where = mixture.name or type(model).__name__
            raise BadInput(
                f"{ep} needs at least {ep.size} experts, and {where} has {mixture.num_experts}"
            )
    if found:
        return found
    raise BadInput(
        f"{ep} finds no mixture of experts in {type(model).__name__}{_unknown_experts(model)}: it "
        "splits an nn.ModuleList of like experts beside a router, called as experts[i](tokens), "
        "and modules with stacked parameters whose forward takes tokens, expert indices and "
        "weights, or, called experts, (experts, tokens, width); name other lists as "
        'ep(n, experts=["blocks.*.mlps"])'
    )


def in_listed_expert(name: str, mixtures: Sequence[Mixture]) -> bool:
    """Whether a module is, or is inside, an expert that is whole on one worker."""
    return any(isinstance(m, ListedMixture) and _is_inside(name, m) for m in mixtures)


def _mixtures_at(name: str, module: nn.Module, patterns: Sequence[str] | None) -> Iterator[Mixture]:
    """The stacked experts that a module is, or the lists of experts that it has."""
    stacked = _as_stacked(name, module)
    if stacked is not None and _is_named(name, patterns):
        yield stacked
    for key, child in module.named_children():
        child_name = full_name(name, key)
        if not isinstance(child, _LISTS) or not _are_alike(list(child.children())):
            continue
        if _is_named(child_name, patterns) if patterns else _is_mixture(module, key, child):
            experts = {full_name(child_name, k): e for k, e in child.named_children()}
            if type(child).forward in (nn.Module.forward, *(kind.forward for kind in _LISTS)):
                yield ListedMixture(name, module, experts)
            else:  # a list with a forward of its own, which calls them
                yield ListedMixture(child_name, child, experts)


def _as_stacked(name: str, module: nn.Module) -> StackedMixture | None:
    sizes = {p.shape[0] for p in module._parameters.values() if p is not None and p.dim() >= 3}
    if len(sizes) != 1 or isinstance(module, nn.modules.conv._ConvNd):
        return None
    num_experts = sizes.pop()
    arguments = list(inspect.signature(module.forward).parameters)
    indices = [a for a in arguments if any(w in a for w in ("ind", "selected", "expert"))]
    weights = [a for a in arguments if any(w in a for w in ("weight", "score", "prob"))]
    if num_experts < 2:
        return None
    if len(arguments) == 1 and _is_batched(name, module, num_experts):
        return StackedMixture(name, module, num_experts, None)
    if len(indices) != 1 or len(weights) != 1 or indices == weights:
        return None
    others = [a for a in arguments if a not in (*indices, *weights)]
    routed = RoutedArguments(others[0], indices[0], weights[0])
    return StackedMixture(name, module, num_experts, routed)


def _is_batched(name: str, module: nn.Module, num_experts: int) -> bool:
    """Whether a module of one argument is called experts, and all it has is stacked."""
    called = f"{name.rpartition('.')[2]} {type(module).__name__}".lower()
    tensors = [*module.parameters(), *module.buffers()]
    return "expert" in called and all(t.dim() and t.shape[0] == num_experts for t in tensors)


def _is_mixture(parent: nn.Module, key: str, experts: nn.Module) -> bool:
    """Whether like modules are experts: by their name, or by a router beside them."""
    called = f"{key} {type(experts).__name__}".lower()
    if "expert" in called:
        return "shared" not in called
    size = len(list(experts.children()))
    return any(_is_router(k, c, size) for k, c in parent.named_children() if c is not experts)


def _is_router(key: str, module: nn.Module, num_experts: int) -> bool:
    """A module that is called a gate or router, and has an output for each expert."""
    called = f"{key} {type(module).__name__}".lower()
    return any(word in called for word in _ROUTER_NAMES) and any(
        num_experts in p.shape for p in module.parameters()
    )


def _are_alike(modules: Sequence[nn.Module]) -> bool:
    forms = [
        (type(m), [(n, p.shape, p.dtype) for n, p in [*m.named_parameters(), *m.named_buffers()]])
        for m in modules
    ]
    return len(forms) > 1 and bool(forms[0][1]) and all(form == forms[0] for form in forms)


def _is_named(name: str, patterns: Sequence[str] | None) -> bool:
    return patterns is None or any(fnmatchcase(name, pattern) for pattern in patterns)


def _is_inside(name: str, mixture: Mixture) -> bool:
    if isinstance(mixture, StackedMixture):
        return name.startswith(mixture.name + ".")
    return any(name == expert or name.startswith(expert + ".") for expert in mixture.experts)


def _unknown_experts(model: nn.Module) -> str:
    """What looks like experts, for an error."""
    for name, module in model.named_modules():
        if "expert" in type(module).__name__.lower() and list(module.parameters()):
            arguments = ", ".join(inspect.signature(module.forward).parameters)
            return f" ({name} is a {type(module).__name__} that takes ({arguments}))"
    return ""
