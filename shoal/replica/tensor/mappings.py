"""Where activations cross between what all ranks of a tp group have and what each has a part of.

              forward          backward
    copy      nothing          all-reduce     before a layer that is split by column
    reduce    all-reduce       nothing        behind a layer that is split by row
    gather    all-gather       take own part  a split activation, for whoever wants all of it
    scatter   take own part    all-gather     a whole activation, for a layer split by row
    enter     all-gather       reduce-scatter rows of a sequence, before a layer split by column
    leave     reduce-scatter   all-gather     behind a layer split by row, to rows of a sequence

What is the same on all ranks on one side of a crossing has the same gradient on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.comm.group import Group
from shoal.replica.tensor.shard_spec import Share

Move = Callable[[Tensor], Tensor]


def copy(x: Tensor, group: Group) -> Tensor:
    return _cross(x, lambda x: x.view_as(x), partial(_sum, group=group))


def reduce(x: Tensor, group: Group) -> Tensor:
    return _cross(x, partial(_sum, group=group), lambda grad: grad)


def gather(x: Tensor, share: Share, group: Group) -> Tensor:
    return _cross(x, partial(share.gather, group=group), partial(share.take, rank=group.rank))


def scatter(x: Tensor, share: Share, group: Group) -> Tensor:
    return _cross(x, partial(share.take, rank=group.rank), partial(share.gather, group=group))


def enter(x: Tensor, share: Share, group: Group) -> Tensor:
    return _cross(x, partial(share.gather, group=group), partial(share.add_up, group=group))


def leave(x: Tensor, share: Share, group: Group) -> Tensor:
    return _cross(x, partial(share.add_up, group=group), partial(share.gather, group=group))


def _sum(x: Tensor, group: Group) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    group.all_reduce(total).wait()
    return total


def _cross(x: Tensor, forward: Move, backward: Move) -> Tensor:
    out: Tensor = _Crossing.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return out


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Move, backward: Move) -> Tensor:
        ctx.move_back = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.move_back(grads[0]), None, None
