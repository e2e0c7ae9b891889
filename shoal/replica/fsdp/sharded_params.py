"""Fully sharded parameters: each lives on one rank and is gathered where the model uses it.

    of this rank's shard    a view of the shard, always; also of shards that it has copies of
    of other shards         gathered: a view of memory that their owner has broadcast
                            resharded: a placeholder of the right shape that holds one nan

A unit (a block of the model, see `wrap_modules`) is all-gathered before its module's forward and
resharded after it (`unit_gather.py`). What backward needs of it is gathered again (`UnitHooks`).
All ranks run the same modules in the same order, so they gather alike.
"""

from __future__ import annotations

import bisect
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils.hooks import RemovableHandle

from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.replica.compiled import Compiler
from shoal.replica.deferred_init import DeferredInit
from shoal.replica.flat_params import FlatLayout, FlatParams, real_view
from shoal.replica.fsdp.unit_gather import (
    UnitGather,
    WrappedModule,
    in_backward,
    wrap_modules,
)
from shoal.replica.host_memory import HostCopies, host_zeros
from shoal.replica.split.state_dicts import refuse_released
from shoal.schedules.buffer_layout import held_shards

_METADATA = {  # what a function may ask of a parameter without using its values
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "requires_grad", "ndim", "is_cuda", "layout", "grad")
}
_METADATA |= {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel}
_METADATA |= {torch.Tensor.is_floating_point}
_METADATA |= {torch.Tensor.data.__set__}  # type: ignore[attr-defined]


# what autocast gives its parameters in fewer bits
_LOWERED = {F.linear, torch.matmul, torch.mm, torch.addmm, torch.bmm, torch.baddbmm}
_LOWERED |= {torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.mm}
_LOWERED |= {torch.conv1d, torch.conv2d, torch.conv3d}


class SavedParameter(NamedTuple):
    """What backward will need of a parameter, as it is or in the dtype of autocast."""

    param: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # from the start of the parameter


class UnitHooks:
    """Calls `gather` and `reshard` while the model computes.

    forward of a module    gather before it, reshard after it
    saved for backward     a tensor in gathered memory is saved as the parameter that it is of,
                           and gathered again when backward asks for it
    gradients              when the last one of a unit has come, the unit is resharded
    used elsewhere         a parameter that is used outside its module (a tied head) is noticed by
                           the function that uses it; its unit stays until the end of backward
    """

    def __init__(self, flat: ShardedParams, gather: UnitGather):
        self._flat = flat
        self._gather = gather
        self._depth = 0  # of forwards that are running
        self._alone: tuple[nn.Module, ExitStack] | None = None  # called outside of its model
        self._watched: dict[nn.Module, tuple[RemovableHandle, RemovableHandle]] = {}
        self._has_grad = True  # the forward that runs
        self._uses = _ParameterUses(self)
        self._index_of = {id(p): i for i, p in enumerate(flat.params)}
        # a hook does not keep the units alive: Python's collector does not see it in the tensor
        weak = weakref.ref(gather)
        for i, p in enumerate(flat.params):
            p.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(_count_gradient, weak, i)
            )

    def watch_forward(self, model: nn.Module) -> None:
        forward = model.forward

        def sharded_forward(*args: Any, **kwargs: Any) -> Any:
            with self.forward_context():
                return forward(*args, **kwargs)

        model.forward = sharded_forward
        for module in itertools.islice(model.modules(), 1, None):
            entered = module.register_forward_pre_hook(self._enter, prepend=True)
            left = module.register_forward_hook(self._leave, always_call=True)
            self._watched[module] = entered, left

    def compiled(self, unit: WrappedModule, compiler: Compiler) -> Callable[..., Any]:
        """The forward of a unit, which finds gathered what it would ask for on its way."""
        for inner in itertools.islice(unit.module.modules(), 1, None):
            for hook in self._watched.pop(inner, ()):
                hook.remove()
        forward = compiler(unit.module.forward)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._flat.is_full:
                return forward(*args, **kwargs)
            for p in unit.module.parameters():
                self.use_whole(p)
            with _pop_mode_temporarily():
                return forward(*args, **kwargs)

        return call

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        """A module that is called by itself, as the encoder of T5 when it generates text."""
        if not self._depth and not self._flat.is_full and not in_backward():
            self._alone = (module, ExitStack())
            self._alone[1].enter_context(self.forward_context())

    def _leave(self, module: nn.Module, inputs: Any, out: Any) -> None:
        if self._alone is not None and self._alone[0] is module and self._depth == 1:
            context = self._alone[1]
            self._alone = None
            context.close()

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        if self._flat.is_full:
            yield
            return
        self._gather.begin_forward()
        self._depth += 1
        if self._depth == 1:
            self._has_grad = torch.is_grad_enabled()
        try:
            with self._uses, saved_tensors_hooks(self._pack, self._unpack):
                yield
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            raise BadInput(
                "torch.func.grad, vjp, jacrev or hessian is used in the model or around it, which "
                "torch does not allow while zero(3) shards what is saved for backward: use "
                "torch.autograd.grad(…, create_graph=True), or take ddp, ps, zero(1) or zero(2)"
            ) from error
        finally:
            self._depth -= 1
        if not torch.is_grad_enabled():
            self._gather.reshard_all()

    # ------------------------------------------------------------------ modules and gradients

    def before_forward(self, number: int, module: nn.Module, inputs: Any) -> None:
        if not self._flat.is_full:
            self._gather.gather(number)

    def after_forward(self, number: int, module: nn.Module, inputs: Any, out: Any) -> None:
        unit = self._gather.units[number]
        # inside backward (recomputing) it is resharded when its gradients have come
        if not self._flat.is_full and not unit.stays_gathered and not in_backward():
            self._gather.reshard(unit)

    def before_use(self, p: nn.Parameter) -> int | None:
        """A function is about to use this parameter, maybe outside its module; its index."""
        i = self._index_of.get(id(p))
        if i is not None:
            number = self._gather.unit_of[i]
            if not self._gather.units[number].is_gathered:
                self._gather.units[number].stays_gathered = True
                self._gather.gather(number)
        return i

    def use_whole(self, p: nn.Parameter) -> None:
        """A function is about to use this parameter as it is."""
        i = self.before_use(p)
        if i is not None:
            self._gather.keep_whole(i)

    def cast_for_use(self, p: nn.Parameter, dtype: torch.dtype) -> Tensor | None:
        """The parameter as it was gathered in fewer bits; None: it is here in full."""
        i = self.before_use(p)
        if i is None:
            return None
        if not self._computes_once():
            self._gather.keep_whole(i)
        return self._gather.cast_of(i, dtype)

    def _computes_once(self) -> bool:
        """Not where backward computes again, when no function is seen; nor inside torch.func."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return False
        if not self._has_grad:
            return True
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return torch.is_grad_enabled() and hooks is not None and hooks[0] == self._pack

    # ------------------------------------------------------------------ saved tensors

    def _pack(self, tensor: Tensor) -> Tensor | SavedParameter:
        """Backward will need this tensor: if it is gathered, save which parameter it is of."""
        flat = self._flat
        if tensor.layout != torch.strided:
            return flat.on_saved(tensor)
        storage = tensor.untyped_storage().data_ptr()
        offset = int(tensor.storage_offset())
        run = self._gather.by_storage.get(storage)
        copied = self._index_of.get(id(self._uses.copies.get(storage)))
        if copied is not None:
            i = copied
        elif run is not None and tensor.dtype in (flat.dtype, run.cast):
            i = run.member_at(offset * tensor.itemsize)
            offset -= run.offsets[i] // tensor.itemsize
        elif storage == flat.shard_data.untyped_storage().data_ptr() and tensor.dtype == flat.dtype:
            position = flat.held.position_of(offset)
            i = bisect.bisect(flat.starts, position) - 1
            offset = position - flat.starts[i]
        else:
            return flat.on_saved(tensor)
        return SavedParameter(i, tensor.dtype, tensor.shape, tensor.stride(), offset)

    def _unpack(self, saved: Tensor | SavedParameter) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        i = saved.param
        gather = self._gather
        gather.gather(gather.unit_of[i])
        values = gather.cast_of(i, saved.dtype)
        if values is None:
            gather.keep_whole(i)
            values = real_view(self._flat.params[i].detach())
            values = values.to(saved.dtype)
        start = int(values.storage_offset()) + saved.offset
        return values.as_strided(saved.size, saved.stride, start)


def _count_gradient(weak: weakref.ref[UnitGather], i: int, p: Tensor) -> None:
    gather = weak()
    if gather is not None:
        gather.count_gradient(i)


class _Cast(torch.autograd.Function):
    """A parameter, whose values in fewer bits are here already; backward is that of a cast."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, values: Sequence[Tensor]) -> Tensor:
        return values[0].detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].float(), None


class _ParameterUses(TorchFunctionMode):
    """Tells `hooks` of every parameter that is an argument of a torch function.

    Under autocast it makes the copies in fewer bits itself, which autocast would keep for the whole
    forward, where they were not gathered so. `copies` has those of the function that runs, by their
    address.
    """

    def __init__(self, hooks: UnitHooks):
        super().__init__()
        self._hooks = hooks
        self.copies: dict[int, nn.Parameter] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LOWERED and torch.is_autocast_enabled(_device_of(args)):
            args = [self._lowered(value) for value in args]
            kwargs = {name: self._lowered(value) for name, value in kwargs.items()}
            try:
                return func(*args, **kwargs)
            finally:
                self.copies.clear()
        if func not in _METADATA:
            for value in itertools.chain(args, kwargs.values()):
                for item in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(item, nn.Parameter):
                        self._hooks.use_whole(item)
        return func(*args, **kwargs)

    def _lowered(self, value: Any) -> Any:
        if not isinstance(value, nn.Parameter):
            return value
        if value.dtype is not torch.float32:
            self._hooks.use_whole(value)
            return value
        dtype = torch.get_autocast_dtype(value.device.type)
        gathered = self._hooks.cast_for_use(value, dtype)
        if gathered is not None:
            return _Cast.apply(value, [gathered])  # type: ignore[no-untyped-call]
        copy = value.to(dtype)
        self.copies[copy.untyped_storage().data_ptr()] = value
        return copy


def _device_of(args: Sequence[Any]) -> str:
    return next((value.device.type for value in args if isinstance(value, Tensor)), "cpu")


class HeldShards:
    """Where the shards of a rank lie in its memory, one after the other: its own, then copies.

    flat buffer    [ shard 0 | shard 1 | shard 2 | shard 3 ]
    of rank 2      [ shard 2 | shard 1 ]                        with copies=1
    """

    def __init__(self, flat: FlatLayout, rank: int, ranks: int, copies: int):
        self._flat = flat
        self.rank = rank
        self.ranks = ranks
        self.slices = flat.shards(ranks)
        self.own = self.slices[rank]
        self.owners = flat.owners(ranks)
        self.shards = held_shards(rank, ranks, copies)
        held = [self.slices[shard] for shard in self.shards]
        self.copied = held[1:]  # the shards of other ranks
        self.params = [i for where in held for i in flat.params_in(where)]  # the own shard's first
        self.size = 0  # elements of all shards that are held
        self._places: list[tuple[int, slice]] = []  # where each of them starts in the memory
        for where in held:
            self._places.append((self.size, where))
            self.size += where.stop - where.start

    def view(self, i: int, memory: Tensor) -> Tensor:
        """A parameter that is held, in memory of `size` elements."""
        start = self._flat.ranges[i].start
        return self._flat.view(i, memory, start - self.offset_of(start))

    def offset_of(self, position: int) -> int:
        """Where a position of the flat buffer is in the memory of this rank."""
        held = (place for place in self._places if place[1].start <= position < place[1].stop)
        start, where = next(held)
        return start + position - int(where.start)

    def position_of(self, offset: int) -> int:
        """The other way round; of the end of the memory, too."""
        places = [place for place in self._places if place[1].start < place[1].stop]
        start, where = max((place for place in places if place[0] <= offset), key=itemgetter(0))
        return int(where.start) + offset - start


class ShardedParams(FlatParams):
    """As FlatParams, and `data` is empty except inside `full_params`.

    The initialization of the model may be deferred: its modules are then filled one by one. Of a
    model that is split into stages, `stage` is what computes here; the engine says when, with
    `forward_context`.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        device: torch.device,
        deferred: DeferredInit,
        named: Sequence[tuple[str, nn.Parameter]] | None = None,
        stage: nn.Module | None = None,
        copies: int = 0,
        offload: bool = False,
    ):
        """`copies`: on how many ranks a shard is, besides its owner; `offload`: in host memory."""
        self.model = model
        self.offload = offload
        self.host_copies = HostCopies(device)
        self.copies = copies
        self._target_device = device
        self.group: Group = group.duplicate()
        self._deferred = deferred
        self.is_full = False  # whether all parameters are here, for reading
        self.on_saved: Callable[[Tensor], Tensor] = lambda tensor: tensor  # for memory probes
        super().__init__(model.named_parameters() if named is None else named)
        self._wrapped = wrapped = wrap_modules(stage or model, self.params)
        self.unit_gather = UnitGather(self, wrapped)
        self._hooks = UnitHooks(self, self.unit_gather)
        for number, unit in itertools.islice(enumerate(wrapped), 1, None):  # behind the root
            unit.module.register_forward_pre_hook(partial(self._hooks.before_forward, number))
            unit.module.register_forward_hook(partial(self._hooks.after_forward, number))
        if stage is None:
            self._hooks.watch_forward(model)
        refuse_released(model, self)

    def forward_context(self) -> AbstractContextManager[None]:
        return self._hooks.forward_context()

    def compile(self, compiler: Compiler) -> bool:
        """Each unit by itself: between them parameters are gathered."""
        for unit in self._wrapped[1:]:
            unit.module.forward = self._hooks.compiled(unit, compiler)
        return True

    def is_held(self, i: int) -> bool:
        """Whether a parameter is in this rank's shard, or in one that it has a copy of."""
        return self.held.owners[i] in self.held.shards

    def is_resident(self, i: int) -> bool:
        """Whether a parameter is on the device when it is not gathered."""
        return self.is_held(i) and not self.offload

    @contextmanager
    def held_params(self) -> Iterator[None]:
        if not self.offload:
            yield
            return
        for i in self.held.params:
            self.params[i].data = self.held_view(i)
        try:
            yield
        finally:
            for i in self.held.params:
                self.reshard_param(i)

    def reshard(self) -> None:
        """Release everything that was gathered."""
        self.unit_gather.reshard_all()

    @contextmanager
    def full_params(self, only: int | None = None, computes: bool = True) -> Iterator[None]:
        self.reshard()
        here = only is None or only == self.group.rank
        if here:
            device = self.device if computes else self.shard_data.device
            self.data = torch.zeros(self.size, dtype=self.dtype, device=device)
        self._gather_on(only)
        if here:
            for i, p in enumerate(self.params):
                p.data = self.view(i, self.data, 0)
        self.is_full = True
        try:
            yield
        finally:
            self.is_full = False
            self.data = self.shard_data.new_zeros(0)
            for i in range(len(self.params)):
                self.reshard_param(i)

    def gathered(self) -> list[Tensor]:
        """Memory that parameters take now, besides the shard."""
        runs = [run for unit in self.unit_gather.units for run in unit.runs]
        return [self.data, *(run.memory for run in runs if run.memory is not None)]

    def shard_view(self, where: slice) -> Tensor:
        """A slice of the flat buffer that lies in a shard which this rank holds."""
        offset = self.held.offset_of(where.start)
        return self.shard_data[offset : offset + where.stop - where.start]

    def reshard_param(self, i: int) -> None:
        p = self.params[i]
        p.data = self.held_view(i) if self.is_resident(i) else self._nan.expand(p.shape)

    def held_view(self, i: int) -> Tensor:
        """A parameter of a shard that this rank holds."""
        return self.held.view(i, self.shard_data)

    def take_shards(self, held: HeldShards, data: Tensor) -> None:
        """The group has changed: this rank holds these shards now, with values in `data`."""
        self.is_full = False
        self.data = data.new_zeros(0)
        self.held = held
        self.shard_data = data
        self.unit_gather.lay_out()
        for i in range(len(self.params)):
            self.reshard_param(i)

    # ------------------------------------------------------------------ at the start

    def _move(self) -> Tensor:
        """Take over this rank's shard, module by module, as rank 0 has it."""
        self.device = device = self._target_device
        self.held = HeldShards(self, self.group.rank, self.group.size, self.copies)
        size = self.held.size
        self.shard_data = torch.zeros(0 if self.offload else size, dtype=self.dtype, device=device)
        if self.offload:
            self.shard_data = host_zeros(size, self.dtype, device)
        self._nan = torch.full((), torch.nan, dtype=self.dtype, device=self.device)
        index_of = {id(p): i for i, p in enumerate(self.params)}
        for module in self.model.modules():
            self._deferred.fill(module)
            for p in module._parameters.values():
                if p is not None and (i := index_of.pop(id(p), None)) is not None:
                    values = p.data.to(self.device).contiguous()
                    self.group.broadcast(values).wait()
                    if self.is_held(i):
                        self.held_view(i).copy_(values)
                    self.reshard_param(i)
        return self.shard_data.new_zeros(0)

    # ------------------------------------------------------------------ all parameters at once

    def _gather_on(self, root: int | None) -> None:
        """All shards, on every rank or on `root`."""
        group = self.group
        shard = self.held.own
        own = self.shard_data[: shard.stop - shard.start]
        if root in (None, group.rank):
            self.data[shard].copy_(own)
        shards = [
            (r, where) for r, where in enumerate(self.held.slices) if where.start < where.stop
        ]
        if root is None:
            works = [group.broadcast(self.data[where], root=rank) for rank, where in shards]
        elif group.rank == root:
            works = [group.recv(self.data[where], rank) for rank, where in shards if rank != root]
        else:
            works = [group.send(own, root)] if own.numel() else []
        for work in works:
            work.wait()
