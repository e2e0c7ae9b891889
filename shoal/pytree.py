"""Pytrees of tensors: a tensor, or tuples, lists and dicts of pytrees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    return tree


def tensors_of(tree: Tree) -> list[Tensor]:
    """The tensors of a tree, from left to right."""
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(collect, tree)
    return tensors
