"""Attributes that a forward sets while it is only looked at: they must not stay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_CONSTANT = "_tensor_constant"  # torch.fx keeps the tensors of a graph in the module it has traced


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Restore what modules keep, such as a table that was made for the sizes of an input.

    A forward that is traced, or runs on shapes alone, would keep stand-ins for tensors.
    """
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
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
