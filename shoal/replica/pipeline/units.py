"""The modules that a forward is split between, in the order in which it probably calls them.

Modules that only hold others are opened: containers, and modules around a row of like blocks.
What is inside of them and has parameters is a unit. The order is that of calls in the source of
each forward, or else that of registration; the first batch shows whether it is so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from shoal.replica.deferred_init import full_name
from shoal.replica.pipeline.call_order import (
    calls_in_order,
    calls_input_embeddings,
    names_in_order,
    open_weights,
)
from shoal.replica.pipeline.traced_forward import modules_to_open, weights_of


@dataclass(frozen=True, eq=False)
class SplitUnit:
    name: str
    module: nn.Module
    is_repeated: bool = False  # it was called before, and other units since

    @property
    def is_trained(self) -> bool:
        return any(p.requires_grad and p.numel() for p in self.module.parameters())

    def cost(self, seconds: Mapping[str, float] | None) -> float:
        if self.is_repeated:  # counted where it is first; the source may name it in vain
            return 0.0
        if seconds is not None:
            return seconds.get(self.name, 0.0)
        return float(sum(weights_of(self.module)))


def find_units(model: nn.Module, cuts: Sequence[str] = (), deeper: int = 0) -> list[SplitUnit]:
    """A module with several names (a shared embedding) is a unit at each of them.

    One that a forward calls again behind others (an embedding of sources and of targets) is a unit
    at each call: every stage with one of them holds it.
    """
    opened = modules_to_open(model, cuts, deeper, torch_too=True)
    return _units_in(model, "", opened)


def _units_in(module: nn.Module, name: str, opened: set[str]) -> list[SplitUnit]:
    weights = open_weights(module)
    units: list[SplitUnit] = []
    for key, child in ordered_children(module):
        child_name = full_name(name, key)
        if child_name in opened and _has_units(child):
            units += _units_in(child, child_name, opened)
        elif any(True for _ in child.parameters()) and key not in weights:
            units.append(SplitUnit(child_name, child))
    if calls_input_embeddings(module):
        embedding = module.get_input_embeddings()  # type: ignore[operator]
        units.sort(key=lambda unit: unit.module is not embedding)
    return _with_repeated(module, name, units)


def _has_units(module: nn.Module) -> bool:
    """Whether children have parameters; a norm with an activation in it is one unit."""
    return any(True for child in module.children() for _ in child.parameters())


def _with_repeated(module: nn.Module, name: str, units: list[SplitUnit]) -> list[SplitUnit]:
    """The same units, and those that the forward calls again behind others."""
    by_name = {unit.name: unit for unit in units}
    called = [full_name(name, key) for key in calls_in_order(module)]
    called = [unit for unit in called if unit in by_name]
    after: dict[str, list[SplitUnit]] = {}
    for i, again in enumerate(called):
        between = [other for other in called[:i] if other != again]
        if again in called[:i] and called[i - 1] != again:
            after.setdefault(between[-1], []).append(replace(by_name[again], is_repeated=True))
    return [u for unit in units for u in (unit, *after.get(unit.name, ()))]


def ordered_children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children of a module in the order in which its forward names them.

    Those that it does not name stay where they were registered.
    """
    children = [(key, child) for key, child in module._modules.items() if child is not None]
    if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return children
    places = {key: place for place, (key, _) in enumerate(children)}
    named = [name for name in names_in_order(module) if name in places]
    places |= dict(zip(named, sorted(places[name] for name in named), strict=True))
    return sorted(children, key=lambda item: places[item[0]])
