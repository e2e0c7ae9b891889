"""A forward that cannot be traced, split between calls of its modules.

Every stage runs the code of the forward from its start, and leaves it where the next stage begins
(`replay.py`). So its code may do anything that follows from its inputs, its modules and random
numbers: encoders and decoders, skip connections, caches, layers that are skipped at random.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import BadInput
from shoal.pytree import Tree, tensors_of
from shoal.replica.deferred_init import is_in, tensor_slots
from shoal.replica.pipeline.balance import Choice, balanced_split, best_depth, largest_cost
from shoal.replica.pipeline.replay.lineage import CallRecord, Mark
from shoal.replica.pipeline.replay.segment import Learned, Replay
from shoal.replica.pipeline.replay.units import SplitUnit, find_units
from shoal.replica.pipeline.traced_forward import weights_of


class ModuleSplit:
    """`cuts` are the units that begin a virtual stage."""

    def __init__(
        self,
        model: nn.Module,
        virtual_stages: int,
        cuts: Sequence[str] | None = None,
        seconds: Mapping[str, float] | None = None,
    ):
        self.model = model
        self.virtual_stages = virtual_stages
        self._signature = inspect.signature(model.forward)
        self._configs = _configs_with_caches(model)
        self._usage: dict[tuple[Any, ...], dict[int, tuple[set[Mark], set[tuple[int, int]]]]] = {}
        self._learned: dict[tuple[Any, ...], dict[int, Learned]] = {}
        self.units, points = self._check(cuts) if cuts is not None else self._choose(seconds)
        self.cuts = tuple(self.units[point].name for point in points)
        edges = [0, *points, len(self.units)]
        self.stages_of: dict[nn.Module, set[int]] = {}
        for virtual, (start, stop) in enumerate(pairwise(edges)):
            for unit in self.units[start:stop]:
                self.stages_of.setdefault(unit.module, set()).add(virtual)
        inside = {module for unit in self.units for module in unit.module.modules()}
        self.around = [module for module in model.modules() if module not in inside]
        self.cost = largest_cost([u.cost(seconds) for u in self.units], points)

    # ------------------------------------------------------------------ where it is split

    def _choose(self, seconds: Mapping[str, float] | None) -> tuple[list[SplitUnit], list[int]]:
        def balanced(deeper: int) -> Choice | None:
            nonlocal units
            units = find_units(self.model, deeper=deeper)
            costs = [unit.cost(seconds) for unit in units]
            trained = [i for i, u in enumerate(units) if u.is_trained and not u.is_repeated]
            candidates = trained[1:]
            prices = [1.0 if units[i].name[-1].isdigit() else 2.0 for i in candidates]
            points = balanced_split(costs, candidates, prices, self.virtual_stages)
            if points is None:
                return None
            everywhere = self._cost_everywhere(units) if seconds is None else 0.0
            return Choice(largest_cost(costs, points) + everywhere, points, units)

        units: list[SplitUnit] = []
        best = best_depth(balanced)
        if best is None:
            raise BadInput(
                f"{type(self.model).__name__} cannot be split into {self.virtual_stages} stages: "
                f"it has {len(units)} modules with something to train"
            )
        return best.row, best.points

    def _cost_everywhere(self, units: list[SplitUnit]) -> float:
        """That of weights that belong to no unit, which every stage holds."""
        modules = {unit.module: unit for unit in units if not unit.is_repeated}
        owned = sum(unit.cost(None) for unit in modules.values())
        return max(0.0, float(sum(weights_of(self.model))) - owned)

    def _check(self, cuts: Sequence[str]) -> tuple[list[SplitUnit], list[int]]:
        units = find_units(self.model, cuts)
        points = [next((i for i, u in enumerate(units) if is_in(u.name, name)), 0) for name in cuts]
        needed = self.virtual_stages - 1
        if len(cuts) != needed or points != sorted(set(points)) or 0 in points:
            raise BadInput(
                f"cuts={list(cuts)}: {type(self.model).__name__}, whose forward cannot be traced, "
                f"is split into {self.virtual_stages} stages at {needed} of "
                f"{', '.join(unit.name for unit in units[1:])}, in this order"
            )
        return units, points

    def follow_replacements(self) -> None:
        """Modules were replaced in the model, as tensor parallelism does: units are those now."""
        present = {u.module: self.model.get_submodule(u.name) for u in self.units}
        self.units = [replace(unit, module=present[unit.module]) for unit in self.units]
        self.stages_of = {present[module]: stages for module, stages in self.stages_of.items()}

    def tensors_of(self, virtual: int) -> Iterator[Tensor]:
        """Those of its units, and those that belong to no unit: any stage may use them."""
        inside: dict[nn.Module, set[int]] = {}
        for unit, stages in self.stages_of.items():
            for module in unit.modules():
                inside.setdefault(module, set()).update(stages)
        for slot in tensor_slots(self.model):
            if virtual in inside.get(slot.module, {virtual}):
                yield slot.tensor

    # ------------------------------------------------------------------ what a stage computes

    def segment(self, virtual: int, given: tuple[str, ...]) -> Callable[..., Tree]:
        """A function from a batch's inputs, and from what a stage receives, to what it sends."""
        return partial(self._compute, virtual, given)

    def _compute(
        self,
        virtual: int,
        given: tuple[str, ...],
        inputs: tuple[Any, ...],
        received: Sequence[Any] = (),
    ) -> Tree:
        key = (given, self.model.training)
        learned = self._learned.get(key, {}).get(virtual)
        replay = Replay(self, virtual, [CallRecord(*record) for record in received], learned)
        call = inspect.BoundArguments(self._signature, OrderedDict(zip(given, inputs, strict=True)))
        devices = [t.device for t in tensors_of(inputs)] or [torch.device("cpu")]
        with ExitStack() as stack:
            for config in self._configs:  # keys and values for generating text are not kept
                stack.callback(setattr, config, "use_cache", config.use_cache)
                config.use_cache = False
            outputs = replay.run(lambda: self.model(*call.args, **call.kwargs), devices[0])
        if learned is None:
            used, modified = self._usage.setdefault(key, {}).setdefault(virtual, (set(), set()))
            used |= replay.used
            modified |= replay.modified
        return outputs if virtual == self.virtual_stages - 1 else (replay.message(),)

    # ------------------------------------------------------------------ what first batches show

    def usage(self) -> list[Any]:
        """What this rank's stages used in the forwards so far; for `learn`."""
        return [
            [list(given), training, virtual, sorted(used), sorted(modified)]
            for (given, training), by_stage in self._usage.items()
            for virtual, (used, modified) in by_stage.items()
        ]

    def learn(self, usage: Sequence[Any]) -> None:
        """From now on a stage sends what later stages have used, by the usage of all of them."""
        self._usage.clear()
        seen: dict[tuple[Any, ...], dict[int, tuple[set[Mark], set[tuple[int, int]]]]] = {}
        for given, training, virtual, used, modified in usage:
            seen.setdefault((tuple(given), training), {})[virtual] = (
                {tuple(mark) for mark in used},
                {tuple(call) for call in modified},
            )
        for key, by_stage in seen.items():
            modified = set().union(*(m for _, m in by_stage.values()))
            self._learned[key] = {
                virtual: Learned(
                    set().union(*(u for later, (u, _) in by_stage.items() if later > virtual)),
                    modified,
                )
                for virtual in range(self.virtual_stages)
            }

    def refused(self, what: str) -> BadInput:
        return BadInput(
            f"the forward of {type(self.model).__name__} cannot be traced, nor split at "
            f"{', '.join(self.cuts)}, since it {what}: choose other cuts, or put what is special "
            "into a module"
        )


def _configs_with_caches(model: nn.Module) -> list[Any]:
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    return [c for c in configs.values() if getattr(c, "use_cache", None) is True]
