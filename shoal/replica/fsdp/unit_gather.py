"""All-gather, reshard and prefetch of FSDP units.

    forward     gather 0 │ compute 0 │ compute 1 │ compute 2
                         │ gather 1  │ gather 2  │           ← prefetch, in the order of last time

Gathered memory is never resized or reused. It is released by dropping references, so a tensor
that is still held elsewhere stays valid.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shoal.replica.deferred_init import full_name
from shoal.replica.expert.mixtures import ListedMixture, mixtures_of
from shoal.transport.transport import Work

if TYPE_CHECKING:
    from shoal.replica.fsdp.sharded_params import ShardedParams


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
    root: list[nn.Parameter] = []
    wrapped: list[WrappedModule] = []
    total = _numel(trained)
    left = {id(p) for p in trained}
    # ranks may call different experts, so those of a mixture are gathered together
    undivided = {m.block for m in mixtures_of(model) if isinstance(m, ListedMixture)}

    def unassigned(module: nn.Module, recurse: bool = True) -> list[nn.Parameter]:
        return [p for p in module.parameters(recurse) if id(p) in left]

    def is_divided(module: nn.Module, params: list[nn.Parameter]) -> bool:
        if module in undivided and module is not model:
            return False
        # containers such as ModuleList are never called
        if module is model or type(module).forward is nn.Module.forward:
            return True
        has_children = any(True for _ in module.children())
        is_divisible = has_children and not unassigned(module, recurse=False)
        return is_divisible and _numel(params) * LARGEST > total

    def visit(name: str, module: nn.Module) -> None:
        params = unassigned(module)
        if not params:
            return
        if is_divided(module, params):
            direct = unassigned(module, recurse=module in undivided)
            root.extend(direct)
            left.difference_update(map(id, direct))
            for key, child in module.named_children():
                visit(full_name(name, key), child)
            return
        left.difference_update(map(id, params))
        size = _numel(params)
        if size * SMALLEST <= total and (_numel(root) + size) * ROOT <= total:
            root.extend(params)
        else:
            wrapped.append(WrappedModule(name, module, tuple(params)))

    visit("", model)
    return [WrappedModule("", model, tuple(root)), *wrapped]


def _numel(params: Collection[nn.Parameter]) -> int:
    return sum(p.numel() for p in params)


@dataclass
class ShardRun:
    """Parameters of a unit that lie side by side in one shard: one message."""

    owner: int
    where: slice
    members: list[int]
    memory: Tensor | None = None


@dataclass
class Unit:
    """`stays_gathered` from its first use to the end of backward.

    `missing_grads` have not come yet in the backward of one forward.
    """

    members: list[int]
    stays_gathered: bool
    runs: list[ShardRun] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    is_requested: bool = False
    is_gathered: bool = False
    missing_grads: int = 0


class UnitGather:
    """The units of a model. Every rank gathers the same units in the same order."""

    def __init__(self, flat: ShardedParams, wrapped: Sequence[WrappedModule]):
        self._flat = flat
        index_of = {id(p): i for i, p in enumerate(flat.params)}
        members = [sorted(index_of[id(p)] for p in module.params) for module in wrapped]
        self.units = [Unit(m, stays_gathered=number == 0) for number, m in enumerate(members)]
        number_of = {i: number for number, m in enumerate(members) for i in m}
        self.unit_of = [number_of.get(i, 0) for i in range(len(flat.params))]
        self.by_storage: dict[int, tuple[int, ShardRun]] = {}  # gathered memory, by its address
        self._next: dict[tuple[bool, int], int] = {}
        self.lay_out()

    def gather(self, number: int) -> None:
        """The unit is here when this returns, and the next one is on its way."""
        unit = self.units[number]
        backward = in_backward()
        self._request(unit)
        if not unit.is_gathered:
            self._wait(number, unit)
        last = self._latest[backward]
        # a unit that stays gathered comes between any two others
        if last == number or (backward and unit.stays_gathered):
            return
        if last is not None:
            self._next[backward, last] = number
            if backward and self._flat.splits_backward:  # no hook reports its gradients
                self.reshard(self.units[last])
        self._latest[backward] = number
        following = self._next.get((backward, number))
        if following is not None:
            self._request(self.units[following])

    def begin_forward(self) -> None:
        """The root unit; what was computed before is no predecessor of it."""
        self._latest[False] = None
        self.gather(0)

    def reshard(self, unit: Unit) -> None:
        """Release gathered memory; a tensor that is held elsewhere stays valid."""
        if not unit.is_requested:
            return
        _wait_all(unit)
        for run in unit.runs:
            if run.memory is not None:
                self.by_storage.pop(run.memory.untyped_storage().data_ptr(), None)
                run.memory = None
                for i in run.members:
                    self._flat.reshard_param(i)
        unit.is_requested = False
        unit.is_gathered = False

    def count_gradient(self, i: int) -> None:
        """The gradient of parameter `i` has come: with the last one its unit is resharded."""
        unit = self.units[self.unit_of[i]]
        unit.missing_grads -= 1
        if unit.missing_grads == 0:
            self.reshard(unit)
            unit.missing_grads = len(unit.members)

    def lay_out(self) -> None:
        """As parameters are owned now. What was being gathered is dropped: its group is closed."""
        for unit in self.units:
            unit.runs = self._runs_of(unit.members)
            unit.works = []
            unit.is_requested = unit.is_gathered = False
        self.by_storage.clear()
        self._latest: dict[bool, int | None] = {True: None, False: None}

    def reshard_all(self) -> None:
        for unit in self.units:
            self.reshard(unit)
        self._latest = {True: None, False: None}

    def memory_of(self, run: ShardRun) -> Tensor:
        return self._flat.shard_view(run.where) if run.memory is None else run.memory

    def _runs_of(self, members: list[int]) -> list[ShardRun]:
        runs: list[ShardRun] = []
        for i in members:
            param = self._flat.ranges[i]
            owner = self._flat.held.owners[i]
            stop = self._flat.round_up(param.stop)
            if runs and runs[-1].owner == owner and runs[-1].where.stop == param.start:
                runs[-1].where = slice(runs[-1].where.start, stop)
                runs[-1].members.append(i)
            else:
                runs.append(ShardRun(owner, slice(param.start, stop), [i]))
        return runs

    def _request(self, unit: Unit) -> None:
        """Start gathering: the owner of each run broadcasts it."""
        if unit.is_requested:
            return
        unit.is_requested = True
        flat = self._flat
        for run in unit.runs:
            if not flat.is_resident(run.members[0]):
                numel = run.where.stop - run.where.start
                run.memory = torch.empty(numel, dtype=flat.dtype, device=flat.device)
        with flat.host_copies.beside() if flat.offload else nullcontext():
            for run in unit.runs:
                if run.memory is not None and flat.is_held(run.members[0]):
                    run.memory.copy_(flat.shard_view(run.where), non_blocking=True)
                unit.works.append(flat.group.broadcast(self.memory_of(run), root=run.owner))
        if flat.offload:
            unit.works.append(flat.host_copies.begun())

    def _wait(self, number: int, unit: Unit) -> None:
        _wait_all(unit)
        for run in unit.runs:
            if run.memory is not None:
                self.by_storage[run.memory.untyped_storage().data_ptr()] = (number, run)
                for i in run.members:
                    self._flat.params[i].data = self._flat.view(i, run.memory, run.where.start)
        unit.is_gathered = True
        if not in_backward():  # there, some of its gradients may have come before
            unit.missing_grads = len(unit.members)


def _wait_all(unit: Unit) -> None:
    for work in unit.works:
        work.wait()
    unit.works = []


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
