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


@contextmanager
def mean_state(optimizer: torch.optim.Optimizer, group: Group) -> Iterator[None]:
    """While the block runs, rank 0's optimizer has the mean over all ranks.

    Of what has the shape of its parameter, if all ranks remember the same things (a parameter may
    get a gradient on some ranks only).
    """
    params = [p for g in optimizer.param_groups for p in g["params"]]
    named = {
        f"{i}/{key}": value
        for i, p in enumerate(params)
        for key, value in sorted(optimizer.state.get(p, {}).items())
        if isinstance(value, Tensor) and value.shape == p.shape and value.is_floating_point()
    }
    if group.size == 1 or not all_equal(group, "\n".join(named).encode()):
        yield
        return
    with kept(list(named.values()) if group.rank == 0 else []):
        for tensor in named.values():
            mean = tensor if group.rank == 0 else tensor.clone()
            group.reduce(mean, op=Op.MEAN).wait()
        yield
