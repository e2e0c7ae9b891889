"""What is gathered together where parameters are sharded: a block of the model, as a rule.

Walking down from the model, a module becomes a unit when it is small enough or cannot be divided
(it has parameters of its own besides those of its children). What is left over, and the smallest
modules, make up the root unit, which stays from the start of forward to the end of backward.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

LARGEST = 8  # a unit is at most this part of the model, where the modules allow it
SMALLEST = 64  # smaller modules than this part of the model join the root unit ...
ROOT = 16  # ... as long as that is smaller than this part


@dataclass(frozen=True)
class UnitOf:
    """A module that is gathered as one, and the parameters that it is the first to have."""

    name: str
    module: nn.Module
    params: tuple[nn.Parameter, ...]


def find_units(model: nn.Module, trained: Collection[nn.Parameter]) -> list[UnitOf]:
    """The root unit, then the others in the order of the model; each parameter is in one."""
    ids = {id(p) for p in trained}
    total = sum(p.numel() for p in trained)
    seen: set[int] = set()
    found: list[UnitOf] = []
    root: list[nn.Parameter] = []

    def fresh(module: nn.Module, recurse: bool = True) -> list[nn.Parameter]:
        return [p for p in module.parameters(recurse) if id(p) in ids and id(p) not in seen]

    def walk(name: str, module: nn.Module) -> None:
        params = fresh(module)
        size = _numel(params)
        if not params:
            return
        divisible = not fresh(module, recurse=False) and any(True for _ in module.children())
        if module is model or not _has_forward(module) or (divisible and size * LARGEST > total):
            own = fresh(module, recurse=False)
            root.extend(own)
            seen.update(map(id, own))
            for child_name, child in module.named_children():
                walk(f"{name}.{child_name}" if name else child_name, child)
            return
        seen.update(map(id, params))
        if size * SMALLEST <= total and (_numel(root) + size) * ROOT <= total:
            root.extend(params)
        else:
            found.append(UnitOf(name, module, tuple(params)))

    walk("", model)
    return [UnitOf("", model, tuple(root)), *found]


def _has_forward(module: nn.Module) -> bool:
    """Containers such as ModuleList are never called."""
    return type(module).forward is not nn.Module.forward


def _numel(params: list[nn.Parameter]) -> int:
    return sum(p.numel() for p in params)
