"""An autograd function that is given by two operations between the ranks of a group.

Its gradient is the same function with the operations exchanged, so that second derivatives are
right, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.comm.group import Group
from shoal.errors import BadInput

Operation = Callable[[Tensor], Tensor]


def mapped(x: Tensor, forward: Operation, backward: Operation) -> Tensor:
    """`forward(x)`, whose gradient is `backward` of the gradient.

    Of a sequence that ranks of another group share, the positions that are here are mapped.
    """
    map_local = getattr(x, "map_local", None)
    if map_local is not None:
        of_positions: Tensor = map_local(lambda local: mapped(local, forward, backward))
        return of_positions
    if in_torch_func():
        raise BadInput(
            "torch.func (grad, vmap, …) transforms a model that is split over workers, and their "
            "messages cannot be transformed: use torch.autograd.grad(…, create_graph=True), or "
            "take ddp, ps, zero(1) or zero(2)"
        )
    out: Tensor = _Mapping.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return out


def in_torch_func() -> bool:
    """Whether a function is being transformed by torch.func at present."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def sum_over_ranks(x: Tensor, group: Group) -> Tensor:
    """The sum over all ranks, whose gradient is one, too: all ranks go through it together."""
    return mapped(x, partial(all_reduced, group=group), partial(all_reduced, group=group))


def all_reduced(x: Tensor, group: Group) -> Tensor:
    """The sum over all ranks, in a new tensor; autograd does not see it."""
    total = x.clone(memory_format=torch.contiguous_format)
    group.all_reduce(total).wait()
    return total


class _Mapping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Operation, backward: Operation) -> Tensor:
        ctx.operations = (backward, forward)
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return mapped(grads[0], *ctx.operations), None, None
