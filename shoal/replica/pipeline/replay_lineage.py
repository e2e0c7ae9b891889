"""Which results of modules a value was computed from.

While it is active, every operation is followed: what is computed from a marked tensor, or written
into the same memory, has its marks. So it is known which results a module's arguments, the outputs
and decisions of the forward (`if x.mean() > 0`) depend on.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.errors import BadInput

Mark = tuple[int, int, int]  # a module, the number of its call, a tensor of its result
NONE: frozenset[Mark] = frozenset()
_DEEPEST = 4  # levels of attributes of objects that are looked into

# operations that bring values of tensors into Python
_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}
_OPERATORS = "add sub mul matmul truediv floordiv mod pow and or xor"
_IN_PLACE_OPERATORS = {f"__i{name}__" for name in _OPERATORS.split()}
_READING_METHODS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}


class Lineage:
    """`on_use` is called with marks that Python reads, `on_write` with memory before it changes.

    `on_meta` is called with tensors without memory that are computed with.
    """

    def __init__(
        self,
        on_use: Callable[[frozenset[Mark]], None],
        on_write: Callable[[Tensor], None],
        on_meta: Callable[[Tensor], None],
    ):
        self._marks: dict[int, tuple[StorageWeakRef, frozenset[Mark]]] = {}
        self.on_use = on_use
        self.on_write = on_write
        self.on_meta = on_meta
        self._active = ExitStack()

    def __enter__(self) -> Lineage:
        self._active.enter_context(_Methods(self))
        self._active.enter_context(_Operations(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._active.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._active.close()
        try:
            yield
        finally:
            self.__enter__()

    def mark(self, tensor: Tensor, marks: frozenset[Mark]) -> None:
        reference = memory_of(tensor)
        known = self._marks.get(reference.cdata, (reference, NONE))[1]
        self._marks[reference.cdata] = (reference, known | marks)

    def marks_of(self, value: Any) -> frozenset[Mark]:
        """The marks of all tensors in a value: in containers, and in attributes of objects."""
        found = NONE
        for tensor in all_tensors(value) if self._marks else ():
            known = self._marks.get(memory_of(tensor).cdata)
            found |= NONE if known is None else known[1]
        return found


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The outputs of an operation, and what it wrote into, have the marks of its inputs."""

    def __init__(self, lineage: Lineage):
        super().__init__()  # type: ignore[no-untyped-call]
        self._lineage = lineage

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        lineage = self._lineage
        for tensor in all_tensors((args, kwargs)):
            if tensor.is_meta and not _is_rescaled(tensor, func, args, kwargs):
                lineage.on_meta(tensor)
        outputs = func(*args, **kwargs)
        marks = lineage.marks_of((args, kwargs))
        if marks and func in _READS:
            lineage.on_use(marks)
        for tensor in [*_written(func, args, kwargs), *all_tensors(outputs)] if marks else ():
            lineage.mark(tensor, marks)
        return outputs


class _Methods(TorchFunctionMode):
    """What the operations below autograd do not show: reads by Python, and writes before."""

    def __init__(self, lineage: Lineage):
        super().__init__()
        self._lineage = lineage

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READING_METHODS:
            self._lineage.on_use(self._lineage.marks_of(args))
        elif (writes(func) or kwargs.get("inplace")) and args:  # as of F.relu
            for tensor in (args[0], kwargs.get("out")):
                if isinstance(tensor, Tensor):
                    self._lineage.on_write(tensor)
        return func(*args, **kwargs)


def all_tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """The tensors of a value, however it holds them; modules are not looked into."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from all_tensors(item, depth)
    elif isinstance(value, tuple | list | set):
        for item in value:
            yield from all_tensors(item, depth)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from all_tensors(getattr(value, field.name, None), depth + 1)
    elif depth < _DEEPEST and not isinstance(value, nn.Module | type):
        yield from all_tensors(getattr(value, "__dict__", None), depth + 1)


def memory_of(tensor: Tensor) -> StorageWeakRef:
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def writes(func: Any) -> bool:
    """Whether this function of torch writes to its first argument, which has to stay what it is."""
    name = getattr(func, "__name__", "")
    is_in_place = name.endswith("_") and not name.startswith("__")
    return is_in_place or name == "__setitem__" or name in _IN_PLACE_OPERATORS


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from all_tensors(value)


def _is_rescaled(tensor: Tensor, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """A weight is multiplied in place, by a number: the stage that has it does the same."""
    written = [*_written(func, args, kwargs)]
    is_alone = all(t is tensor for t in (*all_tensors((args, kwargs)), *written))
    return bool(written) and is_alone and not torch.is_grad_enabled()


_SHAPE = "shoal:shape"
_CLASS = "shoal:class"
_PLAIN = (type(None), bool, int, float, str, bytes, torch.Size, torch.dtype, torch.device)
OnTensor = Callable[[Tensor, int], Any]


class CallRecord(NamedTuple):
    module: int
    result: Any
    random: list[bytes] | None


def pack_result(result: Any, module: nn.Module, name: str) -> Any:
    """A result as plain containers; dataclasses and named tuples by name and fields."""
    if isinstance(result, Tensor) or type(result) in _PLAIN:
        return result
    keys = getattr(result, "_fields", None)
    if is_dataclass(result) and not isinstance(result, type):
        keys = [field.name for field in fields(result)]
    if keys is not None:
        _class_of(type(result).__name__, module, name)
        packed = {key: pack_result(getattr(result, key, None), module, name) for key in keys}
        return {_CLASS: type(result).__name__, "fields": packed}
    if isinstance(result, dict):
        return {key: pack_result(value, module, name) for key, value in result.items()}
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
