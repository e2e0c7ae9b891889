"""In which order a forward names the children of its module, by its source."""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from typing import Any

from torch import nn

from shoal.runtime.decoders import parse_module

_METADATA = {"dtype", "device", "shape", "size", "data"}


def names_in_order(module: nn.Module) -> list[str]:
    """The attributes of self in the order in which `forward` calls or reads them."""
    return list(dict.fromkeys(_read(module).names))


def calls_in_order(module: nn.Module) -> list[str]:
    """The attributes of self that `forward` calls, once for every place where it does.

    Of two branches only one counts, and none that leaves the forward.
    """
    return _read(module).calls


def open_weights(module: nn.Module) -> set[str]:
    """The children whose `weight` or `bias` the forward itself computes with."""
    return _read(module).weights


def calls_input_embeddings(module: nn.Module) -> bool:
    """Whether it calls Hugging Face's get_input_embeddings, wherever that module is."""
    return "get_input_embeddings" in _read(module).names


def _read(module: nn.Module) -> _Reader:
    kind: Any = type(module)
    return _read_class(kind)


@cache
def _read_class(kind: Any) -> _Reader:
    reader = _Reader(kind)
    reader.method("forward")
    return reader


class _Reader(ast.NodeVisitor):
    """Follows methods of the same file, and those of parents by super()."""

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
