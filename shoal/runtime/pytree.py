"""Pytrees of tensors: a tensor, or tuples, lists, dicts and dataclasses of pytrees."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

Tree = Any


def map_tensors(function: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """The same tree with `function` applied to its tensors; other leaves stay."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, item) for item in tree))
    if isinstance(tree, tuple):
        return tuple(map_tensors(function, item) for item in tree)
    if isinstance(tree, list):
        return [map_tensors(function, item) for item in tree]
    if is_record(tree):
        return map_fields(lambda value: map_tensors(function, value), tree)
    return tree


def map_leaves(is_leaf: Callable[[Any], bool], function: Callable[[Any], Any], tree: Tree) -> Tree:
    """The same dicts, tuples and lists with `function` applied where `is_leaf` holds."""
    if is_leaf(tree):
        return function(tree)
    if isinstance(tree, dict):
        return {key: map_leaves(is_leaf, function, value) for key, value in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)(map_leaves(is_leaf, function, item) for item in tree)
    return tree


def is_marked(leaf: Any, mark: str) -> bool:
    """Whether it is a tensor that was packed with what describes it, for a message."""
    match leaf:
        case (str(found), Tensor(), [*_]):
            return found == mark
    return False


def is_record(tree: Tree) -> bool:
    """Whether it is an instance of a dataclass."""
    return is_dataclass(tree) and not isinstance(tree, type)


def map_fields(function: Callable[[Any], Any], record: Tree) -> Tree:
    """A copy of a dataclass instance, which may be frozen, with its fields changed."""
    changed = copy.copy(record)
    for field in fields(record):
        if hasattr(record, field.name):
            object.__setattr__(changed, field.name, function(getattr(record, field.name)))
    return changed


def tensors_of(tree: Tree) -> list[Tensor]:
    """The tensors of a tree, from left to right."""
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(collect, tree)
    return tensors
