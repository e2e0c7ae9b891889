"""Autograd mappings between activations that all ranks of a group have and sharded ones.

                     forward          backward
    copy             nothing          all-reduce      before a column-parallel layer
    reduce           all-reduce       nothing         behind a row-parallel layer
    gather           all-gather       take own shard  a sharded activation that is used in full
    scatter          take own shard   all-gather      a full activation, for a row-parallel layer
    gather_sequence  all-gather       reduce-scatter  rows of a sequence, before a column layer
    reduce_scatter   reduce-scatter   all-gather      behind a row layer, to rows of a sequence
    sum_over_ranks   all-reduce       all-reduce

The gradient of a mapping is the mapping in the other direction: second derivatives are right, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.replica.tensor.shard_spec import ShardSpec

Operation = Callable[[Tensor], Tensor]


def mapped(x: Tensor, forward: Operation, backward: Operation) -> Tensor:
    """`forward(x)`, whose gradient is `backward` of the gradient; of a sequence, what is here."""
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


def copy(x: Tensor, group: Group) -> Tensor:
    return mapped(x, lambda x: x.view_as(x), partial(all_reduced, group=group))


def reduce(x: Tensor, group: Group) -> Tensor:
    return mapped(x, partial(all_reduced, group=group), lambda grad: grad)


def gather(x: Tensor, spec: ShardSpec, group: Group) -> Tensor:
    return mapped(
        x, partial(spec.all_gather, group=group), partial(spec.take_shard, rank=group.rank)
    )


def scatter(x: Tensor, spec: ShardSpec, group: Group) -> Tensor:
    return mapped(
        x, partial(spec.take_shard, rank=group.rank), partial(spec.all_gather, group=group)
    )


def gather_sequence(x: Tensor, spec: ShardSpec, group: Group) -> Tensor:
    return mapped(
        x, partial(spec.all_gather, group=group), partial(spec.reduce_scatter, group=group)
    )


def reduce_scatter(x: Tensor, spec: ShardSpec, group: Group) -> Tensor:
    return mapped(
        x, partial(spec.reduce_scatter, group=group), partial(spec.all_gather, group=group)
    )
