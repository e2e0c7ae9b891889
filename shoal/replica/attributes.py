"""Attributes that a forward sets while it is only looked at: they must not stay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_CONSTANT = "_tensor_constant"  # torch.fx keeps the tensors of a graph in the module it has traced


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Restore what modules keep, such as a table that was made for the sizes of an input.

    A forward that is traced, or runs on shapes alone, would keep stand-ins for tensors.
    """
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    buffers = BufferValues(model)
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
    """The buffers of a model, which a forward may change in place, such as a count of batches."""

    def __init__(self, model: nn.Module):
        self._before = [
            (name, buffer, buffer._version, buffer.clone())
            for name, buffer in model.named_buffers()
            if buffer.device.type != "meta" and not buffer.is_inference()
        ]

    @torch.no_grad()
    def restore(self) -> list[str]:
        """Undo changes in place; the names of the buffers that had any."""
        changed: list[tuple[str, Tensor, Tensor]] = [
            (name, buffer, value)
            for name, buffer, version, value in self._before
            if buffer._version != version
        ]
        for _, buffer, value in changed:
            buffer.copy_(value)
        return [name for name, _, _ in changed]
