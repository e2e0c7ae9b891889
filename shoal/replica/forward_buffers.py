"""Buffers that a forward changes: running means, the vectors of spectral norm, counts of calls.

On one device a forward changes them once a step. Where a batch is computed in parts, each part
would: see `StageShard.check` for the stages of a pipeline, and `tell_of_change` for replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm

from shoal.replica.deferred_init import TensorSlot, tensor_slots


class ForwardBuffers:
    """The buffers that are here, as they are now; those with these names, if that is given."""

    def __init__(self, model: nn.Module, names: Collection[str] | None = None):
        slots = (slot for slot in tensor_slots(model) if slot.key in slot.module._buffers)
        named = [slot for slot in slots if names is None or slot.name in names]
        tensors = [(slot, slot.tensor) for slot in named if not slot.tensor.is_meta]
        self._start = [(slot, tensor, tensor.clone()) for slot, tensor in tensors]
        self._versions = [tensor._version for _, tensor in tensors]
        self._ends: dict[str, Tensor] = {}  # what forwards have left

    def restore(self) -> None:
        """As they were; unseen by autograd, which may hold a buffer."""
        for slot, tensor, value in self._start:
            slot.module._buffers[slot.key] = tensor
            tensor.data.copy_(value)
        self._versions = [tensor._version for _, tensor, _ in self._start]

    def written(self) -> dict[str, Tensor]:
        """What a forward has written since, by name, besides what BatchNorm has own rules for.

        The numbers may be the same, as those of a power iteration that has converged.
        """
        return {
            slot.name: slot.tensor.clone()
            for (slot, tensor, _), version in zip(self._start, self._versions, strict=True)
            if slot.tensor is not tensor or tensor._version != version
            if not isinstance(slot.module, _BatchNorm)
        }

    @contextmanager
    def written_once(self) -> Iterator[None]:
        """Around one of several forwards: it starts as the first one, and all leave theirs."""
        self.restore()
        yield
        self._ends |= self.written()
        for slot, _, _ in self._start:
            if slot.name in self._ends:
                slot.tensor.data.copy_(self._ends[slot.name])

    def may_follow_from_rows(self) -> str | None:
        """The first buffer that has another number than before, and that rows may have changed."""
        for slot, _, value in self._start:
            if isinstance(slot.module, _BatchNorm) or _is_power_iteration(slot):
                continue
            if slot.tensor.is_floating_point() and not torch.equal(slot.tensor, value):
                return slot.name
        return None


def tell_of_change(model: nn.Module, name: str | None, say: Callable[[str], None]) -> None:
    """Behind the first step, where replicas or micro-batches change a buffer each for itself."""
    if name is not None:
        say(
            f"the forward of {type(model).__name__} changes {name}, and not as BatchNorm does: "
            "where that follows from the batch, as a running mean does, each part of a batch "
            "changes it by its own rows, and the result depends on how batches are cut"
        )


def _is_power_iteration(slot: TensorSlot) -> bool:
    """Of spectral norm: the same whatever the batch is."""
    hooks = slot.module._forward_pre_hooks.values()
    return isinstance(slot.module, parametrizations._SpectralNorm) or any(
        isinstance(hook, SpectralNorm) for hook in hooks
    )
