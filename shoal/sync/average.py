"""The mean of the replicas, for a while: what is evaluated and saved where replicas differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from shoal.group.group import Group, Op
from shoal.replica.flat import FlatParams
from shoal.sync.update import Update


@contextmanager
def kept(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Whatever the block does to these tensors, they have their values again afterwards."""
    own = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        for tensor, value in zip(tensors, own, strict=True):
            tensor.detach().copy_(value)


@contextmanager
def averaged(tensors: Sequence[Tensor], group: Group, device: torch.device) -> Iterator[None]:
    """While the block runs, each tensor holds its mean over the ranks; all ranks call it."""
    with kept(tensors):
        for tensor in tensors:
            mean = tensor.detach().to(device, copy=True).contiguous()
            group.all_reduce(mean, Op.MEAN).wait()
            tensor.detach().copy_(mean)
        yield


def replica_tensors(
    flat: FlatParams, update: Update, buffers: Sequence[Tensor], group: Group, optimizer: bool
) -> list[Tensor]:
    """What replicas hold of their own: weights, buffers and, if asked, the optimizer's state."""
    found = [flat.data, *(b for b in buffers if b.is_floating_point() and b.numel())]
    return found + (_optimizer_tensors(flat, update, group) if optimizer else [])


def _optimizer_tensors(flat: FlatParams, update: Update, group: Group) -> list[Tensor]:
    """The state of parameters that have one on all ranks; the rest stays each rank's own.

    A parameter that got a gradient on some ranks only has a state on these only.
    """
    tensors = [
        [
            value
            for _, value in sorted(update.optimizer.state.get(p, {}).items())
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel()
        ]
        for p in flat.params
    ]
    counts = torch.tensor([len(each) for each in tensors], device=flat.device)
    low, high = counts.clone(), counts.clone()
    group.all_reduce(low, Op.MIN).wait()
    group.all_reduce(high, Op.MAX).wait()
    return [
        t for each, same in zip(tensors, (low == high).tolist(), strict=True) if same for t in each
    ]
