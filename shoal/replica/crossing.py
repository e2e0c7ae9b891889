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

from typing import Any

import torch
from torch import Tensor

from shoal.group.group import Group
from shoal.replica.share import Share


def copy(x: Tensor, group: Group) -> Tensor:
    return _apply(_Copy, x, group)


def reduce(x: Tensor, group: Group) -> Tensor:
    return _apply(_Reduce, x, group)


def gather(x: Tensor, share: Share, group: Group) -> Tensor:
    return _apply(_Gather, x, share, group)


def scatter(x: Tensor, share: Share, group: Group) -> Tensor:
    return _apply(_Scatter, x, share, group)


def enter(x: Tensor, share: Share, group: Group) -> Tensor:
    return _apply(_Enter, x, share, group)


def leave(x: Tensor, share: Share, group: Group) -> Tensor:
    return _apply(_Leave, x, share, group)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    out: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return out


def _sum(x: Tensor, group: Group) -> Tensor:
    total = x.detach().clone(memory_format=torch.contiguous_format)
    group.all_reduce(total).wait()
    return total


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _sum(grads[0], ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Share, group: Group) -> Tensor:
        ctx.share, ctx.rank = share, group.rank
        return share.gather(x.detach(), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.share.take(grads[0], ctx.rank), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Share, group: Group) -> Tensor:
        ctx.share, ctx.group = share, group
        return share.take(x.detach(), group.rank)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.share.gather(grads[0], ctx.group), None, None


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Share, group: Group) -> Tensor:
        ctx.share, ctx.group = share, group
        return share.gather(x.detach(), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.share.add_up(grads[0], ctx.group), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Share, group: Group) -> Tensor:
        ctx.share, ctx.group = share, group
        return share.add_up(x.detach(), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.share.gather(grads[0], ctx.group), None, None
