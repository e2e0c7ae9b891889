"""Parameters that live on one rank each, and are gathered where the model uses them.

    own        a view of this rank's shard, always
    others'    gathered: a view of memory that their owner has filled
               at rest: a placeholder of the right shape that holds one nan

A unit (a block of the model, see `units`) is gathered before its module's forward and let go
after it. What backward needs of it is not kept: a saved tensor that is a view of gathered memory
is saved as a note of where it lay, and gathered again when backward asks for it. A unit is let go
once all its gradients have come. While one unit computes, the one that came next the last time is
on its way. A parameter that is used outside its module (a tied head, say) is noticed by the
function that uses it; its unit then stays until the end of backward.

All ranks run the same modules in the same order, so they gather alike.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from shoal.comm.group import Group
from shoal.replica.deferred_init import DeferredInit
from shoal.replica.flat_params import FlatParams
from shoal.replica.fsdp.wrapping import find_units
from shoal.transport.transport import Work

_LOOKS = {  # what a function may ask of a parameter without using its values
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "requires_grad", "ndim", "is_cuda", "layout", "grad")
}
_LOOKS |= {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point}
_LOOKS |= {torch.Tensor.data.__set__}  # type: ignore[attr-defined]


@dataclass
class Run:
    """Parameters of a unit that lie side by side in one shard: one message."""

    owner: int
    where: slice
    members: list[int]
    memory: Tensor | None = None


@dataclass
class Unit:
    name: str
    members: list[int]
    runs: list[Run]
    stays: bool  # from its first use to the end of backward
    works: list[Work] = field(default_factory=list)
    is_asked: bool = False
    is_here: bool = False
    missing: int = 0  # gradients that have not come in the backward of one forward


class _Note(NamedTuple):
    """Where a tensor lay that backward will need."""

    unit: int
    run: Run
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # from the start of the run


class ShardedParams(FlatParams):
    """As FlatParams, and `data` is empty except inside `assembled`.

    The initialization of the model may be deferred: its modules are then filled one by one. Of a
    model that is split into stages, `stage` is what computes here; the engine says when, with
    `computing`.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        device: torch.device,
        deferred: DeferredInit,
        named: Sequence[tuple[str, nn.Parameter]] | None = None,
        stage: nn.Module | None = None,
    ):
        self.model = model
        self._on = device
        self.group: Group = group.duplicate()
        self._deferred = deferred
        self._stage = stage
        self._is_whole = False
        self.on_saved: Callable[[Tensor], Tensor] = lambda tensor: tensor  # for who counts
        super().__init__(model.named_parameters() if named is None else named)
        self._make_units()
        self._watch_modules()
        self._latest: dict[bool, int | None] = {True: None, False: None}
        self._follows: dict[tuple[bool, int], int] = {}

    # ------------------------------------------------------------------ where parameters are

    def rest(self) -> None:
        """Let everything go that was gathered; what is gathered from now on is new."""
        for unit in self.units:
            self._let_go(unit)
        self._latest = {True: None, False: None}

    @contextmanager
    def assembled(self, only: int | None = None) -> Iterator[None]:
        """While the block runs the model is whole, on all ranks or on one; for reading."""
        self.rest()
        here = only is None or only == self.group.rank
        if here:
            self.data = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        if only is None:
            self._share_all()
        else:
            self._send_all(only)
        if here:
            for i, p in enumerate(self.params):
                p.data = self.view(i, self.data, 0)
        self._is_whole = True
        try:
            yield
        finally:
            self._is_whole = False
            self.data = self.own.new_zeros(0)
            for i in range(len(self.params)):
                self._put_to_rest(i)

    def resident_bytes(self) -> int:
        """Memory that parameters take now: the shard, and what is gathered."""
        runs = [run for unit in self.units for run in unit.runs]
        gathered = sum(run.memory.nbytes for run in runs if run.memory is not None)
        return self.own.nbytes + self.data.nbytes + gathered

    def _move(self) -> Tensor:
        """Take over this rank's shard, module by module, as rank 0 has it."""
        self.device = self._on
        self.cuts = self.shards(self.group.size)
        self.shard = self.cuts[self.group.rank]
        self.owners = [self._owner_of(piece.start) for piece in self.ranges]
        self.own = torch.zeros(
            self.shard.stop - self.shard.start, dtype=self.dtype, device=self.device
        )
        self._nan = torch.full((), torch.nan, dtype=self.dtype, device=self.device)
        index = {id(p): i for i, p in enumerate(self.params)}
        for module in self.model.modules():
            self._deferred.fill(module)
            for p in module._parameters.values():
                if p is not None and (i := index.pop(id(p), None)) is not None:
                    self._settle(i)
        return self.own.new_zeros(0)

    def _settle(self, i: int) -> None:
        start = self.params[i].data.to(self.device).contiguous()
        self.group.broadcast(start).wait()
        if self.owners[i] == self.group.rank:
            self.view(i, self.own, self.shard.start).copy_(start)
        self._put_to_rest(i)

    def _put_to_rest(self, i: int) -> None:
        p = self.params[i]
        is_own = self.owners[i] == self.group.rank
        p.data = self.view(i, self.own, self.shard.start) if is_own else self._nan.expand(p.shape)

    def _owner_of(self, start: int) -> int:
        return next(r for r, cut in enumerate(self.cuts) if cut.start <= start < cut.stop)

    def _share_all(self) -> None:
        if self.own.numel():
            self.data[self.shard].copy_(self.own)
        parts = [(r, self.data[cut]) for r, cut in enumerate(self.cuts) if cut.start < cut.stop]
        for work in [self.group.broadcast(part, root=rank) for rank, part in parts]:
            work.wait()

    def _send_all(self, root: int) -> None:
        if self.group.rank == root:
            self.data[self.shard].copy_(self.own)
            for rank, cut in enumerate(self.cuts):
                if rank != root and cut.start < cut.stop:
                    self.group.recv(self.data[cut], rank).wait()
        elif self.own.numel():
            self.group.send(self.own, root).wait()

    # ------------------------------------------------------------------ units

    def _make_units(self) -> None:
        index = {id(p): i for i, p in enumerate(self.params)}
        found = find_units(self._stage or self.model, self.params)
        self._modules = [unit.module for unit in found]
        self.units: list[Unit] = []
        self._unit_of = [0] * len(self.params)
        for number, unit in enumerate(found):
            members = sorted(index[id(p)] for p in unit.params)
            self.units.append(Unit(unit.name, members, self._runs_of(members), stays=number == 0))
            for i in members:
                self._unit_of[i] = number
        self._unit_of_param = {id(p): self._unit_of[i] for i, p in enumerate(self.params)}
        self._own_starts = [p.start for p in self.ranges]
        self._by_storage: dict[int, tuple[int, Run]] = {}

    def _runs_of(self, members: list[int]) -> list[Run]:
        runs: list[Run] = []
        for i in members:
            piece = self.ranges[i]
            owner = self.owners[i]
            stop = self.round_up(piece.stop)
            if runs and runs[-1].owner == owner and runs[-1].where.stop == piece.start:
                runs[-1].where = slice(runs[-1].where.start, stop)
                runs[-1].members.append(i)
            else:
                runs.append(Run(owner, slice(piece.start, stop), [i]))
        return runs

    def _ask(self, unit: Unit) -> None:
        """Start gathering; every rank asks for the same units in the same order."""
        if unit.is_asked:
            return
        unit.is_asked = True
        for run in unit.runs:
            if run.owner == self.group.rank:
                memory = self._own_part(run)
            else:
                memory = self.own.new_empty(run.where.stop - run.where.start)
                run.memory = memory
            unit.works.append(self.group.broadcast(memory, root=run.owner))

    def _own_part(self, run: Run) -> Tensor:
        start = self.shard.start
        return self.own[run.where.start - start : run.where.stop - start]

    def _gather(self, number: int) -> None:
        """The unit is here when this returns, and the next one is on its way."""
        unit = self.units[number]
        backward = _in_backward()
        self._ask(unit)
        if not unit.is_here:
            self._arrive(number, unit)
        last = self._latest[backward]
        if last == number or (backward and unit.stays):  # that comes between any two others
            return
        if last is not None:
            self._follows[backward, last] = number
            if backward and self.splits_backward:  # whose gradients are not told of
                self._let_go(self.units[last])
        self._latest[backward] = number
        following = self._follows.get((backward, number))
        if following is not None:
            self._ask(self.units[following])

    def _arrive(self, number: int, unit: Unit) -> None:
        for work in unit.works:
            work.wait()
        unit.works = []
        for run in unit.runs:
            if run.memory is not None:
                self._by_storage[run.memory.untyped_storage().data_ptr()] = (number, run)
                for i in run.members:
                    self.params[i].data = self.view(i, run.memory, run.where.start)
        unit.is_here = True
        if not _in_backward():  # there, some of its gradients may have come before
            unit.missing = len(unit.members)

    def _let_go(self, unit: Unit) -> None:
        """Forget gathered memory; a tensor that somebody else still holds stays valid."""
        if not unit.is_asked:
            return
        for work in unit.works:
            work.wait()
        unit.works = []
        for run in unit.runs:
            if run.memory is not None:
                self._by_storage.pop(run.memory.untyped_storage().data_ptr(), None)
                run.memory = None
                for i in run.members:
                    self._put_to_rest(i)
        unit.is_asked = unit.is_here = False

    # ------------------------------------------------------------------ when they are used

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Around a forward of the model, or of a stage."""
        if self._is_whole:
            yield
            return
        self._latest[False] = None
        self._gather(0)
        with _Noticing(self._notice), saved_tensors_hooks(self._note, self._find):
            yield
        if not torch.is_grad_enabled():
            self.rest()

    def _watch_modules(self) -> None:
        forward = self.model.forward

        def whole_forward(*args: Any, **kwargs: Any) -> Any:
            with self.computing():
                return forward(*args, **kwargs)

        if self._stage is None:
            self.model.forward = whole_forward
        for number, module in itertools.islice(enumerate(self._modules), 1, None):
            module.register_forward_pre_hook(self._before(number))
            module.register_forward_hook(self._after(number))
        for i, p in enumerate(self.params):
            p.register_post_accumulate_grad_hook(self._got(i))  # type: ignore[no-untyped-call]

    def _before(self, number: int) -> Callable[[nn.Module, Any], None]:
        def gather(module: nn.Module, inputs: Any) -> None:
            if not self._is_whole:
                self._gather(number)

        return gather

    def _after(self, number: int) -> Callable[[nn.Module, Any, Any], None]:
        def let_go(module: nn.Module, inputs: Any, out: Any) -> None:
            unit = self.units[number]
            # inside backward (recomputing) it is let go when its gradients have come
            if not self._is_whole and not unit.stays and not _in_backward():
                self._let_go(unit)

        return let_go

    def _got(self, i: int) -> Callable[[Tensor], None]:
        def count(p: Tensor) -> None:
            unit = self.units[self._unit_of[i]]
            unit.missing -= 1
            if unit.missing == 0:
                self._let_go(unit)
                unit.missing = len(unit.members)

        return count

    def _notice(self, p: nn.Parameter) -> None:
        """A function is about to use this parameter, maybe outside its module."""
        number = self._unit_of_param.get(id(p))
        if number is not None and not self.units[number].is_here:
            self.units[number].stays = True
            self._gather(number)

    def _note(self, tensor: Tensor) -> Tensor | _Note:
        """Backward will need this tensor: if it is gathered, note where it lies instead."""
        if tensor.layout != torch.strided or tensor.dtype != self.dtype:
            return self.on_saved(tensor)
        at = tensor.untyped_storage().data_ptr()
        offset = int(tensor.storage_offset())
        if at == self.own.untyped_storage().data_ptr():
            i = bisect.bisect(self._own_starts, offset + self.shard.start) - 1
            number = self._unit_of[i]
            run = next(run for run in self.units[number].runs if i in run.members)
            offset -= run.where.start - self.shard.start
        elif at in self._by_storage:
            number, run = self._by_storage[at]
        else:
            return self.on_saved(tensor)
        return _Note(number, run, tensor.shape, tensor.stride(), offset)

    def _find(self, saved: Tensor | _Note) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self._gather(saved.unit)
        run = saved.run
        memory = self._own_part(run) if run.memory is None else run.memory
        return memory.as_strided(saved.size, saved.stride, memory.storage_offset() + saved.offset)


class _Noticing(TorchFunctionMode):
    """Tells of every parameter that is an argument of a torch function."""

    def __init__(self, tell: Callable[[nn.Parameter], None]):
        super().__init__()
        self._tell = tell

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _LOOKS:
            for value in itertools.chain(args, kwargs.values()):
                if isinstance(value, nn.Parameter):
                    self._tell(value)
                elif isinstance(value, (list, tuple)):
                    for item in value:
                        if isinstance(item, nn.Parameter):
                            self._tell(item)
        return func(*args, **kwargs)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
