"""The axes of a replica along which workers hold the same parameters and have other tokens.

    cp    the same rows, other positions of each sequence
    ep    other rows; experts are slices, every other parameter is a copy

A loss is weighted so that its sum over both axes is that of the replica's rows. So a gradient is
that of one device after it was summed over both axes, before replicas synchronize.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.comm.group import Group
from shoal.replica.grad_buckets import GradBuckets
from shoal.transport.transport import Work


@dataclass(frozen=True)
class TokenAxis:
    """`is_slice` says of which parameters each rank has another part; all others are copies."""

    group: Group
    is_slice: Callable[[nn.Parameter], bool] = lambda parameter: False
    has_slices: bool = False


class TokenAxes:
    """Sums over the axes, and what is the same along them."""

    def __init__(self, *axes: TokenAxis):
        self.axes = [axis for axis in axes if axis.group.size > 1]

    def __bool__(self) -> bool:
        return bool(self.axes)

    def attach(self, grads: GradBuckets) -> None:
        """Sum gradients before replicas synchronize them."""
        # where workers hold slices their buckets may differ, and tokens that travel in backward
        # depend on the batch: so gradients are then summed behind it, parameter by parameter
        if any(axis.has_slices for axis in self.axes):
            grads.before_flush = self._sum_at_parameters
        elif self.axes:
            grads.sum_gradients = self.sum_gradients

    def _sum_at_parameters(self, params: Sequence[nn.Parameter], loss: Tensor) -> None:
        self.sum_parameter_gradients(params)
        loss.copy_(self.sum(loss[0]))

    def sum(self, number: Tensor) -> Tensor:
        """The sum of a number over all workers that have other tokens of the replica's rows."""
        if not self.axes:
            return number
        total = number.detach().clone().view(1)
        for axis in self.axes:
            axis.group.all_reduce(total).wait()
        return total.view(())

    def sum_gradients(self, grads: Mapping[nn.Parameter, Tensor], header: Tensor | None) -> None:
        """Sum gradients in place; `header` has numbers that are summed along with them."""
        for axis in self.axes:
            tensors = [grad for p, grad in grads.items() if not axis.is_slice(p)]
            _sum_in_place([*tensors, *([] if header is None else [header])], axis.group)

    def sum_parameter_gradients(self, params: Sequence[nn.Parameter]) -> None:
        """Sum what backward has put at the parameters; what has none on any rank keeps None."""
        for axis in self.axes:
            copies = [p for p in params if not axis.is_slice(p)]
            has_grad = torch.tensor([float(p.grad is not None) for p in copies])
            arrived = has_grad.to(copies[0].device) if copies else has_grad
            axis.group.all_reduce(arrived).wait()
            grads = []
            for p, count in zip(copies, arrived.tolist(), strict=True):
                if count:
                    grad = torch.zeros_like(p) if p.grad is None else p.grad
                    p.grad = grad.to_dense() if grad.is_sparse else grad
                    grads.append(p.grad)
            _sum_in_place(grads, axis.group)

    def synchronize_copies(self, tensors: Mapping[nn.Parameter, Tensor]) -> None:
        """Replace what belongs to a copy by what the first rank has."""
        for axis in self.axes:
            copies = [tensor for p, tensor in tensors.items() if not axis.is_slice(p)]
            apply_flat(copies, axis.group.broadcast)

    def is_duplicate(self, parameter: nn.Parameter) -> bool:
        """Whether the first rank of an axis holds it, too."""
        return any(axis.group.rank > 0 and not axis.is_slice(parameter) for axis in self.axes)


def _sum_in_place(tensors: Sequence[Tensor], group: Group) -> None:
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        apply_flat(alike, group.all_reduce)


def apply_flat(tensors: Sequence[Tensor], apply: Callable[[Tensor], Work]) -> None:
    """Change tensors in place by one operation on all of their numbers."""
    if not tensors:
        return
    if len(tensors) == 1 and tensors[0].is_contiguous():
        apply(tensors[0].view(-1)).wait()
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    apply(flat).wait()
    pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, piece in zip(tensors, pieces, strict=True):
        tensor.copy_(piece.view(tensor.shape))
