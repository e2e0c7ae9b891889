"""Rows (tokens) travel to the workers that have their experts, and the results travel back.

    source                              owner of experts 2, 3
    rows by expert   0 0 1 2 3 3   ──▶  from rank 0: 2 3 3   from rank 1: 2 2 3
                                        by expert:   2 2 2 3 3 3      (in the order of ranks)
    results          0 0 1 2 3 3   ◀──  from the experts

How many rows go where is exchanged first: one number per expert and rank. A forward then takes two
all-to-alls of rows, a backward the same two in reverse; each moves `rows · width` numbers, less
what stays on its rank. An expert sees its rows in the order of one device. Ranks without rows take
part in every exchange, forward and backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.comm.group import Group


@dataclass(frozen=True)
class ExpertPlacement:
    """Which experts each rank of a group has; `capacity` bounds the rows of an expert."""

    group: Group
    ranges: Sequence[range]
    capacity: float | None = None

    @property
    def num_experts(self) -> int:
        return self.ranges[-1].stop

    @property
    def local(self) -> range:
        return self.ranges[self.group.rank]

    def keep(self, experts: Tensor) -> Tensor:
        """The expert of each row, or none; each gets at most capacity · rows / experts."""
        none = self.num_experts
        experts = experts.where((experts >= 0) & (experts < none), none)
        if self.capacity is None:
            return experts
        most = math.ceil(self.capacity * experts.numel() / none)
        order = experts.argsort(stable=True)
        counts = torch.bincount(experts, minlength=none + 1)
        starts = counts.cumsum(0) - counts
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device) - starts[experts[order]]
        return experts.where(place < most, none)


class Dispatch:
    """The journey of the rows of one call of a mixture."""

    def __init__(self, placement: ExpertPlacement, experts: Tensor, called: Tensor | None = None):
        """Made by all ranks; `called` marks experts that are called, perhaps without a row."""
        self._group = placement.group
        self.rows = experts.numel()
        experts = placement.keep(experts)
        counts = torch.bincount(experts, minlength=placement.num_experts + 1)[:-1]
        calls = counts + ((counts > 0) if called is None else (called | (counts > 0))).long()
        table = self._exchange_counts(calls, placement)
        self.was_called = (table > 0).any(0).tolist()
        received = (table - 1).clamp(min=0)
        self.counts = received.sum(0).tolist()
        self._sent = [int(counts[r.start : r.stop].sum()) for r in placement.ranges]
        self._received = received.sum(1).tolist()
        self.order = experts.argsort(stable=True)[: sum(self._sent)]
        labels = torch.arange(len(placement.local), device=experts.device)
        arrived = labels.repeat(self._group.size).repeat_interleave(received.flatten())
        self._by_expert = arrived.argsort(stable=True)
        self.local_experts = arrived[self._by_expert]
        """The expert of each row that has come here, counted from this rank's first one."""

    def to_experts(self, rows: Tensor) -> Tensor:
        """Rows in `order` become the rows of this rank's experts, expert by expert."""
        arrived = exchange(rows, self._group, self._sent, self._received)
        return arrived.index_select(0, self._by_expert)

    def to_sources(self, results: Tensor) -> Tensor:
        """What the experts made of their rows, back where each came from; zeros for the others."""
        inverse = self._by_expert.argsort()
        ordered = results.index_select(0, inverse)
        ordered = exchange(ordered, self._group, self._received, self._sent)
        out = ordered.new_zeros(self.rows, *ordered.shape[1:])
        return out.index_copy(0, self.order, ordered)

    def _exchange_counts(self, calls: Tensor, placement: ExpertPlacement) -> Tensor:
        """How many rows (and one more for a call) come from each rank for each expert here."""
        local = len(placement.local)
        table = calls.new_empty(self._group.size, local)
        lengths = [len(r) for r in placement.ranges]
        recv_counts = [local] * self._group.size
        self._group.all_to_all_uneven(table.view(-1), calls, recv_counts, lengths).wait()
        return table


def exchange(rows: Tensor, group: Group, sent: list[int], received: list[int]) -> Tensor:
    """`exchange_rows` with a graph on every rank, so that all of them take part in backward."""
    anchor = torch.zeros((), device=rows.device, requires_grad=torch.is_grad_enabled())
    out: Tensor = _Exchange.apply(  # type: ignore[no-untyped-call]
        rows, anchor, group, sent, received
    )
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, anchor: Tensor, group: Group, sent: list[int], received: list[int]
    ) -> Tensor:
        ctx.group = group
        ctx.sent = sent
        ctx.received = received
        return exchange_rows(rows, group, sent, received)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = exchange_rows(grads[0], ctx.group, ctx.received, ctx.sent)
        return grad, None, None, None, None


def exchange_rows(rows: Tensor, group: Group, sent: list[int], received: list[int]) -> Tensor:
    """`sent[r]` rows go to rank r, `received[r]` come from it: one all-to-all of uneven pieces."""
    width = math.prod(rows.shape[1:])
    out = rows.new_empty(sum(received), *rows.shape[1:])
    recv_counts = [count * width for count in received]
    send_counts = [count * width for count in sent]
    data = rows.contiguous().view(-1)
    group.all_to_all_uneven(out.view(-1), data, recv_counts, send_counts).wait()
    return out
