"""All-gather, reshard and prefetch of FSDP units.

    forward     gather 0 │ compute 0 │ compute 1 │ compute 2
                         │ gather 1  │ gather 2  │           ← prefetch, in the order of last time

Gathered memory is never resized or reused. It is released by dropping references, so a tensor
that is still held elsewhere stays valid.

Under autocast the owner casts, before they are sent, the weights of which every use takes a copy in
fewer bits (`cast_params`); what takes them as they are, as norms do, lies between them in fp32:

    memory of a run    [ norm, 4 bytes each | weight, 2 bytes each | bias, 2 bytes each | ... ]
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shoal.comm.transport.transport import Work
from shoal.replica.deferred_init import full_name
from shoal.replica.expert.mixtures import ListedMixture, mixtures_of
from shoal.replica.tensor.linear import is_transformers
from shoal.schedules.buffer_layout import aligned_bytes

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


_PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def cast_params(wrapped: Sequence[WrappedModule]) -> list[nn.Parameter]:
    """Weights and biases in fp32 that, by their modules, only products use, which autocast casts.

    None of the root unit: a loss may use them, which no hook sees. None of a mixture: a use of
    another kind has all ranks gather again, and ranks may call different experts.
    """
    model = wrapped[0].module
    cast: set[nn.Parameter] = set()
    others: set[nn.Parameter] = set()
    for mixture in mixtures_of(model):
        if isinstance(mixture, ListedMixture):
            others.update(mixture.block.parameters())
    for module in model.modules():
        is_product = type(module) in _PRODUCTS or is_transformers(module, "Conv1D")
        for name, p in module._parameters.items():
            if p is not None:
                (cast if is_product and name in ("weight", "bias") else others).add(p)
    cast -= others
    blocks = [p for unit in wrapped[1:] for p in unit.params]
    return [p for p in blocks if p in cast and p.dtype == torch.float32]


def _numel(params: Collection[nn.Parameter]) -> int:
    return sum(p.numel() for p in params)


@dataclass
class ShardRun:
    """Parameters of a unit that lie side by side in one shard: one message.

    `cast` is the dtype of the weights that are gathered in fewer bits; `offsets` are bytes, where
    the members start in `memory`.
    """

    owner: int
    where: slice
    members: list[int]
    memory: Tensor | None = None
    cast: torch.dtype | None = None
    offsets: dict[int, int] = field(default_factory=dict)

    def member_at(self, offset: int) -> int:
        """The parameter that a byte of the memory belongs to."""
        return self.members[bisect.bisect(list(self.offsets.values()), offset) - 1]


@dataclass
class Unit:
    """`stays_gathered` from its first use to the end of backward.

    `missing_grads` have not come yet in the backward of one forward.
    """

    members: list[int]
    stays_gathered: bool
    cast: torch.dtype | None = None  # of autocast, when it was gathered for forward
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
        self._cast = {index_of[id(p)] for p in cast_params(wrapped)}
        self.by_storage: dict[int, ShardRun] = {}  # gathered memory, by its address
        self._next: dict[tuple[bool, int], int] = {}
        self.lay_out()

    def gather(self, number: int) -> None:
        """The unit is here when this returns, and the next one is on its way."""
        unit = self.units[number]
        backward = in_backward()
        if not backward:
            self._compute_in(unit, autocast_dtype(self._flat.device))
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

    def _compute_in(self, unit: Unit, cast: torch.dtype | None) -> None:
        """What is computed next is under this autocast, or under none."""
        if cast != unit.cast:
            self.reshard(unit)
            unit.cast = cast

    def keep_whole(self, i: int) -> None:
        """This parameter is used as it is: it is here now, and gathered so from now on.

        All ranks use their parameters alike, so that they gather it again together.
        """
        number = self.unit_of[i]
        if self.run_of[i].memory is None or self.run_of[i].cast is None or i not in self._cast:
            return
        self._cast.remove(i)
        unit = self.units[number]
        self.reshard(unit)
        self._request(unit)
        self._wait(number, unit)

    def cast_of(self, i: int, dtype: torch.dtype) -> Tensor | None:
        """A parameter that is gathered in this dtype; None: its values are in full here."""
        run = self.run_of[i]
        if run.memory is None or run.cast != dtype or i not in self._cast:
            return None
        return self._view(run, i)

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
        self.run_of = {i: run for unit in self.units for run in unit.runs for i in run.members}
        self.by_storage.clear()
        self._latest: dict[bool, int | None] = {True: None, False: None}

    def reshard_all(self) -> None:
        for unit in self.units:
            self.reshard(unit)
        self._latest = {True: None, False: None}

    def _runs_of(self, members: list[int]) -> list[ShardRun]:
        flat = self._flat
        owners = flat.held.owners
        return [
            ShardRun(
                owners[run[0]],
                slice(flat.starts[run[0]], flat.round_up(flat.ranges[run[-1]].stop)),
                run,
            )
            for run in flat.runs(members, owners)
        ]

    def _request(self, unit: Unit) -> None:
        """Start gathering: the owner of each run broadcasts it."""
        if unit.is_requested:
            return
        unit.is_requested = True
        flat = self._flat
        for run in unit.runs:
            run.cast = None if self._cast.isdisjoint(run.members) else unit.cast
            if run.cast is not None or not flat.is_resident(run.members[0]):
                run.memory = self._memory_for(run)
        with flat.host_copies.beside() if flat.offload else nullcontext():
            for run in unit.runs:
                if run.memory is not None and run.owner == flat.group.rank:
                    self._fill(run, run.memory)
                sent = flat.shard_view(run.where) if run.memory is None else run.memory
                unit.works.append(flat.group.broadcast(sent, root=run.owner))
        if flat.offload:
            unit.works.append(flat.host_copies.begun())

    def _fill(self, run: ShardRun, memory: Tensor) -> None:
        """With values of the shard."""
        flat = self._flat
        values = flat.shard_view(run.where)
        if run.cast is None:
            memory.copy_(values, non_blocking=True)
            return
        values = values.to(flat.device, non_blocking=True)
        views = [flat.view(i, values, run.where.start) for i in run.members]
        torch._foreach_copy_([self._view(run, i) for i in run.members], views)

    def _memory_for(self, run: ShardRun) -> Tensor:
        num_bytes = 0
        for i in run.members:
            run.offsets[i] = num_bytes
            num_bytes += aligned_bytes(self._flat.sizes[i], self._dtype_in(run, i).itemsize)
        dtype = run.cast or self._flat.dtype
        return torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device=self._flat.device)

    def _dtype_in(self, run: ShardRun, i: int) -> torch.dtype:
        return run.cast if run.cast is not None and i in self._cast else self._flat.dtype

    def _view(self, run: ShardRun, i: int) -> Tensor:
        """A parameter in the memory of its run."""
        assert run.memory is not None
        dtype = self._dtype_in(run, i)
        start = run.offsets[i] // dtype.itemsize
        return self._flat.view(i, run.memory.view(dtype), self._flat.starts[i] - start)

    def _wait(self, number: int, unit: Unit) -> None:
        _wait_all(unit)
        for run in unit.runs:
            if run.memory is not None:
                self.by_storage[run.memory.untyped_storage().data_ptr()] = run
                for i in run.members:
                    if not self._flat.is_resident(i) and self._dtype_in(run, i) == self._flat.dtype:
                        self._flat.params[i].data = self._view(run, i)
        unit.is_gathered = True
        if not in_backward():  # there, some of its gradients may have come before
            unit.missing_grads = len(unit.members)


def _wait_all(unit: Unit) -> None:
    for work in unit.works:
        work.wait()
    unit.works = []


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    if not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
