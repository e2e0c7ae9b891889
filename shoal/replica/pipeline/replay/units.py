"""The modules that a forward is split between, in the order in which it probably calls them.

Modules that only hold others are opened: containers, and modules around a row of like blocks.
What is inside of them and has parameters is a unit. The order is that of calls in the source of
each forward, or else that of registration; the first batch shows whether it is so.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torch import nn

from shoal.replica.deferred_init import full_name
from shoal.replica.pipeline.traced_forward import modules_to_open, weights_of
from shoal.runtime.decoders import parse_module

_METADATA = {"dtype", "device", "shape", "size", "data"}


def _read(module: nn.Module) -> _Reader:
    kind: Any = type(module)
    return _read_class(kind)


@cache
def _read_class(kind: Any) -> _Reader:
    reader = _Reader(kind)
    reader.method("forward")
    return reader


class _Reader(ast.NodeVisitor):
    """Follows methods of the same file, and those of parents by super().

    `calls` are the attributes of self that are called, once for every place. Of two branches only
    one counts, and none that leaves the forward.
    """

    def __init__(self, kind: type):
        self.names: list[str] = []
        self.calls: list[str] = []
        self.weights: set[str] = set()
        self._kind = kind
        self._inside: list[Any] = []  # functions
        self._self = "self"  # what the present one calls its object

    def method(self, name: str, behind: type | None = None) -> None:
        """Read a method; of a parent of `behind` where that is given."""
        parents = self._kind.__mro__
        start = 0 if behind is None else parents.index(behind) + 1
        found = next((k for k in parents[start:] if name in k.__dict__), None)
        function = None if found is None else inspect.unwrap(found.__dict__[name])
        if found is nn.Module or not inspect.isfunction(function):
            return
        if any(function is other for _, other in self._inside):
            return
        self._inside.append((found, function))
        before = self._self
        self._self = next(iter(inspect.signature(function).parameters), "self")
        try:
            self.visit(parse_module(textwrap.dedent(inspect.getsource(function))))
        except (OSError, TypeError, SyntaxError):
            pass
        finally:
            self._self = before
            self._inside.pop()

    def visit_Call(self, node: ast.Call) -> None:
        """What is called is called behind its arguments."""
        for argument in [*node.args, *node.keywords]:
            self.visit(argument)
        if isinstance(node.func, ast.Attribute) and _is_super(node.func.value):
            self.method(node.func.attr, behind=self._inside[-1][0])
        else:
            if self._is_mine(node.func):
                assert isinstance(node.func, ast.Attribute)
                self.calls.append(node.func.attr)
            self.visit(node.func)

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        start = len(self.calls)
        for statement in node.body:
            self.visit(statement)
        if isinstance(node.body[-1], (ast.Return, ast.Raise)):
            del self.calls[start:]
        before = set(self.calls[start:])
        middle = len(self.calls)
        for statement in node.orelse:
            self.visit(statement)
        self.calls[middle:] = [name for name in self.calls[middle:] if name not in before]

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        self.visit(node.body)
        middle = len(self.calls)
        self.visit(node.orelse)
        del self.calls[middle:]

    def visit_Attribute(self, node: ast.Attribute) -> None:
        inner = node.value
        if self._is_mine(node):
            self._name(node.attr)
        elif not (node.attr in _METADATA and self._is_weight(inner)):
            if self._is_weight(node) and isinstance(node.ctx, ast.Load):
                assert isinstance(inner, ast.Attribute)
                self.weights.add(inner.attr)
            self.visit(inner)

    def _is_mine(self, node: ast.expr) -> bool:
        """self.CHILD"""
        is_name = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        return is_name and node.value.id == self._self  # type: ignore[attr-defined]

    def _is_weight(self, node: ast.expr) -> bool:
        """self.CHILD.weight"""
        is_named = isinstance(node, ast.Attribute) and node.attr in ("weight", "bias")
        return is_named and self._is_mine(node.value)  # type: ignore[attr-defined]

    def _name(self, name: str) -> None:
        method: Any = getattr(self._kind, name, None)
        here = self._inside[-1][1]
        self.names.append(name)
        if inspect.isfunction(method) and inspect.unwrap(method).__module__ == here.__module__:
            self.method(name)


def _is_super(node: ast.expr) -> bool:
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return is_call and node.func.id == "super"  # type: ignore[attr-defined]


@dataclass(frozen=True, eq=False)
class SplitUnit:
    name: str
    module: nn.Module
    is_repeated: bool = False  # it was called before, and other units since

    @property
    def is_trained(self) -> bool:
        return any(p.requires_grad and p.numel() for p in self.module.parameters())

    def cost(self, seconds: Mapping[str, float] | None) -> float:
        if self.is_repeated:  # counted where it is first; the source may name it in vain
            return 0.0
        if seconds is not None:
            return seconds.get(self.name, 0.0)
        return float(sum(weights_of(self.module)))


def find_units(model: nn.Module, cuts: Sequence[str] = (), deeper: int = 0) -> list[SplitUnit]:
    """A module with several names (a shared embedding) is a unit at each of them.

    One that a forward calls again behind others (an embedding of sources and of targets) is a unit
    at each call: every stage with one of them holds it.
    """
    opened = modules_to_open(model, cuts, deeper, torch_too=True)
    return _units_in(model, "", opened)


def _units_in(module: nn.Module, name: str, opened: set[str]) -> list[SplitUnit]:
    read = _read(module)
    units: list[SplitUnit] = []
    for key, child in ordered_children(module):
        child_name = full_name(name, key)
        # a norm with an activation in it is one unit
        has_units = any(True for inner in child.children() for _ in inner.parameters())
        if child_name in opened and has_units:
            units += _units_in(child, child_name, opened)
        elif next(child.parameters(), None) is not None and key not in read.weights:
            units.append(SplitUnit(child_name, child))
    if "get_input_embeddings" in read.names:  # of Hugging Face, wherever that module is
        embedding = module.get_input_embeddings()  # type: ignore[operator]
        units.sort(key=lambda unit: unit.module is not embedding)
    return _with_repeated(module, name, units)


def _with_repeated(module: nn.Module, name: str, units: list[SplitUnit]) -> list[SplitUnit]:
    """The same units, and those that the forward calls again behind others."""
    by_name = {unit.name: unit for unit in units}
    called = [full_name(name, key) for key in _read(module).calls]
    called = [unit for unit in called if unit in by_name]
    after: dict[str, list[SplitUnit]] = {}
    for i, again in enumerate(called):
        between = [other for other in called[:i] if other != again]
        if again in called[:i] and called[i - 1] != again:
            after.setdefault(between[-1], []).append(replace(by_name[again], is_repeated=True))
    return [u for unit in units for u in (unit, *after.get(unit.name, ()))]


def ordered_children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children of a module in the order in which its forward names them.

    Those that it does not name stay where they were registered.
    """
    children = [(key, child) for key, child in module._modules.items() if child is not None]
    if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return children
    places = {key: place for place, (key, _) in enumerate(children)}
    named = [name for name in dict.fromkeys(_read(module).names) if name in places]
    places |= dict(zip(named, sorted(places[name] for name in named), strict=True))
    return sorted(children, key=lambda item: places[item[0]])
