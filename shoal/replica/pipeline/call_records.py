"""What a stage tells the next one about the modules that were called so far.

A record is a tuple of plain values, so that it can be sent:

    module      its number
    result      the tree that it returned; a tensor that no later stage uses is only described
    random      the states of random generators behind the call, where it drew numbers
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.errors import BadInput

_SHAPE = "shoal:shape"
_CLASS = "shoal:class"
_PLAIN = (type(None), bool, int, float, str, bytes, torch.Size, torch.dtype, torch.device)
OnTensor = Callable[[Tensor, int], Any]


class CallRecord(NamedTuple):
    module: int
    result: Any
    random: list[bytes] | None

    def plain(self) -> tuple[Any, ...]:
        return tuple(self)


def pack_result(result: Any, module: nn.Module, name: str) -> Any:
    """A result as plain containers; dataclasses and named tuples by name and fields."""
    if isinstance(result, Tensor) or type(result) in _PLAIN:
        return result
    if is_dataclass(result) and not isinstance(result, type):
        items = {f.name: getattr(result, f.name, None) for f in fields(result)}
        _class_of(type(result).__name__, module, name)
        packed = {key: pack_result(value, module, name) for key, value in items.items()}
        return {_CLASS: type(result).__name__, "fields": packed}
    if isinstance(result, dict):
        return {key: pack_result(value, module, name) for key, value in result.items()}
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        _class_of(type(result).__name__, module, name)
        packed = {key: pack_result(getattr(result, key), module, name) for key in result._fields}
        return {_CLASS: type(result).__name__, "fields": packed}
    if isinstance(result, tuple | list):
        packed_items = [pack_result(item, module, name) for item in result]
        return packed_items if isinstance(result, list) else tuple(packed_items)
    raise BadInput(
        f"{name} returns a {type(result).__name__}, which cannot be sent to the stages behind it: "
        "only numbers, text, tensors, and lists, tuples, dicts and dataclasses of these can"
    )


def unpack_result(packed: Any, module: nn.Module, name: str) -> Any:
    if isinstance(packed, dict) and _CLASS in packed:
        made = {k: unpack_result(v, module, name) for k, v in packed["fields"].items()}
        return _class_of(packed[_CLASS], module, name)(**made)
    if isinstance(packed, dict):
        return {key: unpack_result(value, module, name) for key, value in packed.items()}
    if isinstance(packed, tuple | list):
        return type(packed)(unpack_result(item, module, name) for item in packed)
    return packed


def map_leaves(change: OnTensor, packed: Any) -> Any:
    """The same tree with tensors and descriptions of tensors changed; each has its number."""
    count = 0

    def visit(node: Any) -> Any:
        nonlocal count
        if isinstance(node, Tensor) or is_description(node):
            count += 1
            return change(node, count - 1)
        if isinstance(node, dict):
            return {key: visit(value) for key, value in node.items()}
        if type(node) in (tuple, list):
            return type(node)(visit(item) for item in node)
        return node

    return visit(packed)


def is_description(node: Any) -> bool:
    return isinstance(node, dict) and _SHAPE in node


def description_of(tensor: Tensor) -> dict[str, Any]:
    return {_SHAPE: torch.Size(tensor.shape), "dtype": tensor.dtype}


def unknown_values(description: dict[str, Any], device: torch.device) -> Tensor:
    """A tensor as it is described; nothing that is trained may depend on its values."""
    dtype = description["dtype"]
    value = math.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full(description[_SHAPE], value, dtype=dtype, device=device)


def _class_of(name: str, module: nn.Module, module_name: str) -> Any:
    """A dataclass or named tuple that the source file of the module knows by this name."""
    for kind in type(module).__mro__:
        found = getattr(sys.modules.get(kind.__module__), name, None)
        if isinstance(found, type) and (is_dataclass(found) or hasattr(found, "_fields")):
            return found
    raise BadInput(
        f"{module_name} returns a {name}, which is not a dataclass or named tuple of the file that "
        f"defines {type(module).__name__}: import it there, or return a tuple or dict"
    )
