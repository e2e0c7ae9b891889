"""Which modules are FSDP units: their parameters are all-gathered together.

Walking down from the model, a module becomes a unit when it is small enough or cannot be divided
(it has parameters of its own besides those of its children). The rest, and the smallest modules,
make up the root unit, which stays gathered from the start of forward to the end of backward.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from shoal.replica.deferred_init import full_name
from shoal.replica.expert.mixtures import ListedMixture, mixtures_of

LARGEST = 8  # a unit is at most 1 / LARGEST of the model, where the modules allow it
SMALLEST = 64  # modules below 1 / SMALLEST of the model join the root unit ...
ROOT = 16  # ... as long as that stays below 1 / ROOT of the model


@dataclass(frozen=True)
class WrappedModule:
    """A module that is gathered as one, and the parameters that it is the first to have."""

    name: str
    module: nn.Module
    params: tuple[nn.Parameter, ...]


def wrap_modules(model: nn.Module, trained: Collection[nn.Parameter]) -> list[WrappedModule]:
    """The root unit, then the others in the order of the model; each parameter is in one."""
    walk = _Walk(model, trained)
    return [WrappedModule("", model, tuple(walk.root)), *walk.wrapped]


class _Walk:
    def __init__(self, model: nn.Module, trained: Collection[nn.Parameter]):
        self.root: list[nn.Parameter] = []
        self.wrapped: list[WrappedModule] = []
        self._model = model
        self._total = _numel(trained)
        self._left = {id(p) for p in trained}
        # ranks may call different experts, so those of a mixture are gathered together
        self._undivided = {m.block for m in mixtures_of(model) if isinstance(m, ListedMixture)}
        self.visit("", model)

    def visit(self, name: str, module: nn.Module) -> None:
        params = self._unassigned(module)
        if not params:
            return
        if self._is_divided(module, params):
            direct = self._unassigned(module, recurse=module in self._undivided)
            self.root.extend(direct)
            self._left.difference_update(map(id, direct))
            for key, child in module.named_children():
                self.visit(full_name(name, key), child)
            return
        self._left.difference_update(map(id, params))
        size = _numel(params)
        is_small = size * SMALLEST <= self._total
        if is_small and (_numel(self.root) + size) * ROOT <= self._total:
            self.root.extend(params)
        else:
            self.wrapped.append(WrappedModule(name, module, tuple(params)))

    def _is_divided(self, module: nn.Module, params: list[nn.Parameter]) -> bool:
        if module in self._undivided and module is not self._model:
            return False
        # containers such as ModuleList are never called
        if module is self._model or type(module).forward is nn.Module.forward:
            return True
        has_children = any(True for _ in module.children())
        is_divisible = has_children and not self._unassigned(module, recurse=False)
        return is_divisible and _numel(params) * LARGEST > self._total

    def _unassigned(self, module: nn.Module, recurse: bool = True) -> list[nn.Parameter]:
        return [p for p in module.parameters(recurse) if id(p) in self._left]


def _numel(params: Collection[nn.Parameter]) -> int:
    return sum(p.numel() for p in params)
