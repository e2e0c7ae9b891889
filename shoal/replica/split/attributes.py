"""Attributes that a forward sets: while it is only looked at, and on the stages of a pipeline."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.errors import BadInput
from shoal.replica.batchnorm import OwnForward

_CONSTANT = "_tensor_constant"  # torch.fx keeps the tensors of a graph in the module it has traced


@contextmanager
def attributes_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restore what modules keep, such as a table that was made for the sizes of an input.

    A forward that is traced, or runs on shapes alone, would keep stand-ins for tensors.
    """
    before = [(vars(module), dict(vars(module))) for module in modules]
    buffers = BufferValues(buffer for m in modules for buffer in m._buffers.items())
    contents = [
        (value, value.copy())
        for _, attributes in before
        for value in attributes.values()
        if type(value) in (list, dict, set)
    ]
    try:
        yield
    finally:
        for now, earlier in before:
            added = {k: v for k, v in now.items() if k not in earlier and k.startswith(_CONSTANT)}
            now.clear()
            now.update(earlier, **added)
        for value, items in contents:
            value.clear()
            value.extend(items) if type(value) is list else value.update(items)
        buffers.restore()


class BufferValues:
    """Buffers by name, which a forward may change in place, such as a count of batches."""

    def __init__(self, named: Iterable[tuple[str, Tensor | None]]):
        self._before = [
            (name, buffer, buffer._version, buffer.clone())
            for name, buffer in named
            if buffer is not None and buffer.device.type != "meta" and not buffer.is_inference()
        ]

    def restore(self) -> list[str]:
        """Undo changes in place, unseen by autograd; the names of the buffers that had any."""
        changed = [one for one in self._before if one[1]._version != one[2]]
        for _, buffer, _, value in changed:
            buffer.data.copy_(value)
        return [name for name, *_ in changed]


def copy_structure(module: nn.Module, copies: dict[int, nn.Module] | None = None) -> nn.Module:
    """What is set on a module, or replaced in it, leaves its copy as it is."""
    copies = {} if copies is None else copies
    if id(module) in copies:
        return copies[id(module)]
    if isinstance(module, torch.jit.ScriptModule):
        return module
    twin: nn.Module = object.__new__(type(module))
    copies[id(module)] = twin
    for name, value in vars(module).items():
        twin.__dict__[name] = _own(value, module, twin)
    twin.__dict__["_modules"] = {
        name: None if child is None else copy_structure(child, copies)
        for name, child in module._modules.items()
    }
    return twin


def _own(value: Any, module: nn.Module, twin: nn.Module) -> Any:
    if isinstance(value, dict) and type(value).__module__ in ("builtins", "collections"):
        return copy.copy(value)
    if isinstance(value, MethodType) and value.__self__ is module:
        return MethodType(value.__func__, twin)
    if isinstance(value, OwnForward) and value.layer is module:
        own = _own(value.own_forward, module, twin)
        shared = copy_structure(cast(nn.Module, value.shared))
        return OwnForward(cast(_BatchNorm, twin), shared, own)
    return value


Slot = tuple[str, str]  # the name of a module, and an attribute


class OnAnotherStage(Tensor):
    """Stands for what another stage has set (`self.aux_loss = …`); any use raises `BadInput`.

    Such tensors do not travel between stages, and neither the loss nor the forward may go on with
    an older value.
    """

    slot: Slot
    stage: int

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        given = [*args, *(kwargs or {}).values()]
        found = next(t for t in _tensors(given) if isinstance(t, OnAnotherStage))
        raise refusal(found.slot, found.stage)

    def __deepcopy__(self, memo: Any) -> OnAnotherStage:
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<{'.'.join(self.slot)} of stage {self.stage}>"


def refusal(slot: Slot, stage: int) -> BadInput:
    module, attribute = slot
    return BadInput(
        f"{module}.{attribute} is set by stage {stage} of the pipeline while it computes and used "
        f"on another stage, where it is not known: let the forward of {module} return it, and the "
        "model with its outputs"
    )


def kept_by(modules: Iterable[nn.Module]) -> list[Tensor]:
    """The tensors that these modules keep, parameters and buffers aside."""
    values = [value for module in modules for value in vars(module).values()]
    return [tensor for value in values for tensor in _tensors(value)]


def kept_tensors(model: nn.Module) -> dict[Slot, list[Tensor]]:
    """Those of attributes that hold some now, in lists, too, and are no parameters or buffers."""
    return {
        (name, key): tensors
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if not key.startswith("_") or isinstance(value, Tensor)
        if (tensors := list(_tensors(value)))
    }


def newly_kept(before: Mapping[Slot, list[Tensor]], model: nn.Module) -> list[Slot]:
    """What was set since then; a list that has grown counts, too."""
    now = kept_tensors(model)
    return [s for s in now if [id(t) for t in now[s]] != [id(t) for t in before.get(s, [])]]


def hide(model: nn.Module, slots: Iterable[Slot], stage: int) -> None:
    """These are set by another stage."""
    for name, key in slots:
        placeholder = torch.empty(()).as_subclass(OnAnotherStage)
        placeholder.__dict__["slot"] = (name, key)
        placeholder.__dict__["stage"] = stage
        vars(model.get_submodule(name))[key] = placeholder


@contextmanager
def hidden(model: nn.Module, slots: Iterable[Slot], stage: int) -> Iterator[None]:
    """As `hide`, for a while."""
    slots = list(slots)
    before = {slot: vars(model.get_submodule(slot[0])).get(slot[1]) for slot in slots}
    hide(model, slots, stage)
    try:
        yield
    finally:
        for (name, key), value in before.items():
            vars(model.get_submodule(name))[key] = value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif type(value) in (list, tuple, dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
