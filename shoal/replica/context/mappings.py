"""Autograd mappings between activations of which ranks have positions and full ones.

             forward        backward
    gather   all-gather     reduce-scatter     an operation needs all positions
    reduce   all-reduce     all-reduce         a sum over positions

A full activation is the same on all ranks, and its gradient is the sum of what the ranks have of
it, as that of a parameter is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.comm.group import Group
from shoal.replica.context.spec import SequenceSpec

Operation = Callable[[Tensor], Tensor]


def gather(local: Tensor, spec: SequenceSpec, group: Group) -> Tensor:
    forward = partial(spec.all_gather, group=group)
    return _map(local, forward, partial(spec.sum_to_local, group=group))


def reduce(x: Tensor, group: Group) -> Tensor:
    return _map(x, partial(_sum, group=group), partial(_sum, group=group))


def _sum(x: Tensor, group: Group) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    group.all_reduce(total).wait()
    return total


def _map(x: Tensor, forward: Operation, backward: Operation) -> Tensor:
    out: Tensor = _Mapping.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return out


class _Mapping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Operation, backward: Operation) -> Tensor:
        ctx.backward_operation = backward
        return forward(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward_operation(grad.contiguous()), None, None
