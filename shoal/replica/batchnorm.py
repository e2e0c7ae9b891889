"""BatchNorm that does not depend on the number of replicas.

`GlobalBatchNorm` has the statistics of the global batch (of each micro-batch of it).
Each rank sends its mean, variance and count per channel (2C + 1 numbers, one all-gather in
forward), and the ranks combine them in the same order; backward adds up two sums per channel
(2C numbers, one all-reduce). A rank whose part of the batch is empty takes part with count 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from shoal.comm.group import Group

_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Presence:
    """Whether the rows that now run through the model are real, or stand in for an empty part."""

    real = True
    again = False  # computed a second time, for backward: nothing is to be noted


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        inv_std: Tensor,
        count: Tensor,
        group: Group,
        real: bool,
    ) -> Tensor:
        shape = _channels(x)
        normal = (x - mean.view(shape)) * inv_std.view(shape)
        ctx.save_for_backward(normal, weight, inv_std, count)
        ctx.group = group
        ctx.real = real
        out = normal
        if weight is not None:
            out = out * weight.view(shape)
        if bias is not None:
            out = out + bias.view(shape)
        ctx.has_bias = bias is not None
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        normal, weight, inv_std, count = ctx.saved_tensors
        grad = grads[0].to(normal.dtype)
        others = _others(grad)
        shape = _channels(grad)
        sums = torch.stack([grad.sum(others), (grad * normal).sum(others)])
        grad_bias = sums[0].clone()
        grad_weight = sums[1].clone()
        ctx.group.all_reduce(sums).wait()
        sums /= count.clamp(min=1)
        scale = inv_std if weight is None else inv_std * weight
        grad_x = (grad - sums[0].view(shape) - normal * sums[1].view(shape)) * scale.view(shape)
        if not ctx.real:  # rows that stand in are no part of the statistics
            grad_x = torch.zeros_like(grad_x)
        affine = (
            None if weight is None else grad_weight,
            grad_bias if ctx.has_bias else None,
        )
        return grad_x.to(grads[0].dtype), *affine, None, None, None, None, None


class GlobalBatchNorm(_BatchNorm):
    """A drop-in for BatchNorm1d/2d/3d that shares statistics over a group while training."""

    def __init__(self, local: _BatchNorm, group: Group, presence: Presence):
        super().__init__(
            local.num_features, local.eps, local.momentum, local.affine, local.track_running_stats
        )
        self._parameters = local._parameters
        self._buffers = local._buffers
        self.training = local.training
        self._dims = _dims_of(local)
        self._group = group
        self._presence = presence

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() not in self._dims:
            raise ValueError(f"expected an input of {self._dims} dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        self._check_input_dim(input)
        mean, var, count = self._statistics(input)
        if count.device.type == "cpu" and count == 1:
            raise ValueError(
                "BatchNorm needs more than 1 value per channel in a global batch while training"
            )
        inv_std = torch.rsqrt(var + self.eps)
        if self.training and self.running_mean is not None:
            self._remember(mean, var, count)
        out: Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, mean, inv_std, count, self._group, self._presence.real
        )
        return out

    @torch.no_grad()
    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and variance over all ranks, merged pairwise so that nothing cancels."""
        wide = x.detach().float() if x.dtype in (torch.float16, torch.bfloat16) else x.detach()
        var, mean = torch.var_mean(wide, dim=_others(x), correction=0)
        count = wide.new_tensor([x.numel() / x.shape[1] if self._presence.real else 0.0])
        mine = torch.cat([mean, var, count])
        everyone = mine.new_empty(self._group.size * mine.numel())
        self._group.all_gather(everyone, mine).wait()
        table = everyone.view(self._group.size, -1)
        means, variances, counts = torch.split(table, [mean.numel(), mean.numel(), 1], dim=1)
        total = counts.sum()
        share = counts / total.clamp(min=1)  # all 0 where nobody has a sample
        mean = (means * share).sum(0)
        var = (share * (variances + (means - mean) ** 2)).sum(0)
        return mean, var, total

    @torch.no_grad()
    def _remember(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        happened = (count > 0).to(self.running_mean.dtype)
        self.num_batches_tracked.add_(happened.long())
        momentum = self.momentum
        if momentum is None:
            momentum = 1.0 / max(1.0, float(self.num_batches_tracked))
        unbiased = var * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), happened * momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), happened * momentum)


class MicroBatchNorm(_BatchNorm):
    """BatchNorm of one micro-batch, for exact mode: it notes what it saw, and `settle` later
    brings the running statistics up to date, micro-batch by micro-batch in the batch's order."""

    def __init__(self, local: _BatchNorm, presence: Presence):
        super().__init__(
            local.num_features, local.eps, local.momentum, local.affine, local.track_running_stats
        )
        self._parameters = local._parameters
        self._buffers = local._buffers
        self.training = local.training
        self._presence = presence
        self._seen: list[Tensor] = []

    def _check_input_dim(self, input: Tensor) -> None:
        return None

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.running_mean is None:
            return super().forward(input)
        self._note(input.detach())
        return nn.functional.batch_norm(
            input, None, None, self.weight, self.bias, training=True, eps=self.eps
        )

    def _note(self, x: Tensor) -> None:
        if self._presence.again:
            return
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        var, mean = torch.var_mean(wide, dim=_others(x), correction=1)
        self._seen.append(torch.cat([mean, var, mean.new_tensor([float(self._presence.real)])]))

    @torch.no_grad()
    def settle(self, group: Group) -> None:
        """One all-gather of 2C + 1 numbers a micro-batch; then the same updates everywhere."""
        if not self._seen or self.running_mean is None or self.running_var is None:
            return
        mine = torch.stack(self._seen)
        self._seen.clear()
        everyone = mine.new_empty(group.size * mine.shape[0], mine.shape[1])
        group.all_gather(everyone, mine).wait()
        assert self.num_batches_tracked is not None
        for row in everyone:
            if not row[-1]:
                continue
            self.num_batches_tracked.add_(1)
            momentum = self.momentum
            if momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
            mean, var = row[:-1].to(self.running_mean.dtype).chunk(2)
            self.running_mean.lerp_(mean, momentum)
            self.running_var.lerp_(var, momentum)


def has_batchnorm(model: nn.Module) -> bool:
    return any(isinstance(module, _PLAIN) for module in model.modules())


def running_statistics(model: nn.Module) -> list[Tensor]:
    """The running means and variances that are here, each once."""
    found: dict[int, Tensor] = {}
    for module in model.modules():
        if isinstance(module, _NormBase) and module.running_mean is not None:
            assert module.running_var is not None
            found |= {id(t): t for t in (module.running_mean, module.running_var)}
    return [tensor for tensor in found.values() if not tensor.is_meta]


def globalize(model: nn.Module, group: Group) -> Presence:
    """Replace every BatchNorm inside `model`; names and parameters stay as they are."""
    presence = Presence()
    _replace(model, lambda local: GlobalBatchNorm(local, group, presence))
    return presence


def note_microbatches(model: nn.Module) -> Presence:
    """Replace every BatchNorm inside `model` by one that is settled after each step."""
    presence = Presence()
    _replace(model, lambda local: MicroBatchNorm(local, presence))
    return presence


def settle(model: nn.Module, group: Group) -> None:
    for module in model.modules():
        if isinstance(module, MicroBatchNorm):
            module.settle(group)


def _replace(model: nn.Module, make: Callable[[_BatchNorm], nn.Module]) -> None:
    made: dict[int, nn.Module] = {}  # a layer that is used in two places stays one
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, _BatchNorm) and type(child) in _PLAIN:
                parent._modules[name] = made.setdefault(id(child), make(child))


def _dims_of(local: nn.Module) -> tuple[int, ...]:
    if isinstance(local, nn.BatchNorm1d):
        return (2, 3)
    return (4,) if isinstance(local, nn.BatchNorm2d) else (5,)


def _others(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _channels(x: Tensor) -> list[int]:
    return [1, -1, *[1] * (x.dim() - 2)]
