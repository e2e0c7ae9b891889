"""Attributes that a forward sets while it is only looked at: they must not stay."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

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
