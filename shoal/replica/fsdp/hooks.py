"""When FSDP units are gathered and resharded: hooks on modules, gradients and saved tensors.

forward of a module    gather before it, reshard after it
saved for backward     a tensor in gathered memory is saved as the position where it lay, and
                       gathered again when backward asks for it
gradients              when the last one of a unit has come, the unit is resharded
used elsewhere         a parameter that is used outside its module (a tied head) is noticed by
                       the function that uses it; its unit stays until the end of backward
"""

from __future__ import annotations

import bisect
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from shoal.errors import BadInput
from shoal.replica.fsdp.unit_gather import ShardRun, UnitGather, in_backward

if TYPE_CHECKING:
    from shoal.replica.fsdp.sharded_params import ShardedParams

_METADATA = {  # what a function may ask of a parameter without using its values
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "requires_grad", "ndim", "is_cuda", "layout", "grad")
}
_METADATA |= {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel}
_METADATA |= {torch.Tensor.is_floating_point}
_METADATA |= {torch.Tensor.data.__set__}  # type: ignore[attr-defined]


class SavedPosition(NamedTuple):
    """Where a tensor lay that backward will need."""

    unit: int
    run: ShardRun
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # from the start of the run


class UnitHooks:
    """Calls `gather` and `reshard` while the model computes."""

    def __init__(self, flat: ShardedParams, gather: UnitGather):
        self._flat = flat
        self._gather = gather
        self._depth = 0  # of forwards that are running
        self._alone: tuple[nn.Module, ExitStack] | None = None  # called outside of its model
        self._starts = [param.start for param in flat.ranges]
        self._unit_of_param = {id(p): gather.unit_of[i] for i, p in enumerate(flat.params)}
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
            module.register_forward_pre_hook(self._enter, prepend=True)
            module.register_forward_hook(self._leave, always_call=True)

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

    def watch_modules(self, modules: Sequence[nn.Module]) -> None:
        """`modules` are those of the units; the first one is the root."""
        for number, module in itertools.islice(enumerate(modules), 1, None):
            module.register_forward_pre_hook(partial(self._before_forward, number))
            module.register_forward_hook(partial(self._after_forward, number))

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        if self._flat.is_full:
            yield
            return
        self._gather.begin_forward()
        self._depth += 1
        try:
            with _ParameterUses(self._on_use), saved_tensors_hooks(self._pack, self._unpack):
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

    def _before_forward(self, number: int, module: nn.Module, inputs: Any) -> None:
        if not self._flat.is_full:
            self._gather.gather(number)

    def _after_forward(self, number: int, module: nn.Module, inputs: Any, out: Any) -> None:
        unit = self._gather.units[number]
        # inside backward (recomputing) it is resharded when its gradients have come
        if not self._flat.is_full and not unit.stays_gathered and not in_backward():
            self._gather.reshard(unit)

    def _on_use(self, p: nn.Parameter) -> None:
        """A function is about to use this parameter, maybe outside its module."""
        number = self._unit_of_param.get(id(p))
        if number is not None and not self._gather.units[number].is_gathered:
            self._gather.units[number].stays_gathered = True
            self._gather.gather(number)

    # ------------------------------------------------------------------ saved tensors

    def _pack(self, tensor: Tensor) -> Tensor | SavedPosition:
        """Backward will need this tensor: if it is gathered, save where it lies instead."""
        flat = self._flat
        if tensor.layout != torch.strided or tensor.dtype != flat.dtype:
            return flat.on_saved(tensor)
        address = tensor.untyped_storage().data_ptr()
        offset = int(tensor.storage_offset())
        if address == flat.shard_data.untyped_storage().data_ptr():
            number, run = self._run_at(flat.held.position_of(offset))
            offset -= flat.held.offset_of(run.where.start)
        elif address in self._gather.by_storage:
            number, run = self._gather.by_storage[address]
        else:
            return flat.on_saved(tensor)
        return SavedPosition(number, run, tensor.shape, tensor.stride(), offset)

    def _run_at(self, position: int) -> tuple[int, ShardRun]:
        """The unit and run of the parameter at a position of the flat buffer."""
        i = bisect.bisect(self._starts, position) - 1
        number = self._gather.unit_of[i]
        return number, next(run for run in self._gather.units[number].runs if i in run.members)

    def _unpack(self, saved: Tensor | SavedPosition) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self._gather.gather(saved.unit)
        memory = self._gather.memory_of(saved.run)
        return memory.as_strided(saved.size, saved.stride, memory.storage_offset() + saved.offset)


def _count_gradient(weak: weakref.ref[UnitGather], i: int, p: Tensor) -> None:
    gather = weak()
    if gather is not None:
        gather.count_gradient(i)


class _ParameterUses(TorchFunctionMode):
    """Calls `on_use` for every parameter that is an argument of a torch function."""

    def __init__(self, on_use: Callable[[nn.Parameter], None]):
        super().__init__()
        self._on_use = on_use

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _METADATA:
            for value in itertools.chain(args, kwargs.values()):
                if isinstance(value, nn.Parameter):
                    self._on_use(value)
                elif isinstance(value, (list, tuple)):
                    for item in value:
                        if isinstance(item, nn.Parameter):
                            self._on_use(item)
        return func(*args, **kwargs)
