"""The mean of the replicas, for a while: what is evaluated and saved where they differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from shoal.comm.group import Group, Op
from shoal.comm.objects import all_equal


@contextmanager
def kept(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Whatever the block does to these tensors, they have their values again afterwards."""
    before = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)


@contextmanager
def averaged(tensors: Sequence[Tensor], group: Group) -> Iterator[None]:
    """While the block runs, each tensor holds its mean over the ranks; all ranks call it."""
    with kept(tensors):
        for tensor in tensors:
            group.all_reduce(tensor, Op.MEAN).wait()
        yield


def mean_state(optimizer: torch.optim.Optimizer, group: Group) -> list[tuple[Tensor, Tensor]]:
    """Put the mean over all ranks into rank 0's optimizer; returns (tensor, what it was before)."""
    named = _alike(optimizer)
    device = optimizer.param_groups[0]["params"][0].device
    names = "\n".join(name for name, _ in named).encode()
    if group.size == 1 or not all_equal(group, names, device):
        return []
    means = []
    for _, tensor in named:
        mean = tensor.clone()
        group.reduce(mean, op=Op.MEAN).wait()
        if group.rank == 0:
            means.append((tensor, mean))
    return [(tensor, _exchange(tensor, mean)) for tensor, mean in means]


def _exchange(tensor: Tensor, other: Tensor) -> Tensor:
    """Give the tensor the values of the other one, and the other one its values."""
    before = tensor.clone()
    tensor.copy_(other)
    return other.copy_(before)


def _alike(optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    """State tensors that are shaped as their parameters, in the order of the parameters."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [
        (f"{i}/{key}", value)
        for i, p in enumerate(params)
        for key, value in sorted(optimizer.state.get(p, {}).items())
        if isinstance(value, Tensor) and value.shape == p.shape and value.is_floating_point()
    ]
