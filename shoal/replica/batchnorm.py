"""BatchNorm that does not depend on the number of replicas.

`GlobalBatchNorm` has the statistics of the global batch (of each micro-batch of it).
Each rank sends its mean, variance and count per channel (2C + 1 numbers, one all-gather in
forward), and the ranks combine them in the same order; backward adds up two sums per channel
(2C numbers, one all-reduce). A rank whose rows of the batch are empty joins with count 0.

A subclass, such as one with an activation behind it, keeps its own forward: what that asks
`F.batch_norm` is answered with these statistics (`OwnForward`).

Second derivatives (`torch.autograd.grad(…, create_graph=True)`, as in a gradient penalty) go
through the statistics as well: backward is then made of operations that autograd can follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.overrides import TorchFunctionMode

from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.replica.split.mapping import collective, sum_over_ranks

_TAKES_STATISTICS = ("mean", "var", "std", "var_mean", "std_mean", "native_batch_norm")


class BatchNormCall(NamedTuple):
    """The arguments of F.batch_norm, in its order."""

    input: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float | None = 0.1
    eps: float = 1e-5


class OwnForward:
    """Stands in for the forward of `layer`; batches of training are normalized by `shared`.

    `own_forward` is one that was set on this layer, not by its class.
    """

    def __init__(self, layer: _BatchNorm, shared: Any, own_forward: Any = None):
        self.layer = layer
        self.shared: GlobalBatchNorm | MicroBatchNorm = shared
        self.own_forward = own_forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self.layer
        forward = self.own_forward or type(layer).forward.__get__(layer)
        answers = _Answers(self.shared, layer.num_batches_tracked)
        before = _version(layer.running_mean)
        with answers:
            out = forward(*args, **kwargs)
        changed = _version(layer.running_mean) != before
        if layer.training and not answers.called and (answers.takes_statistics or changed):
            raise BadInput(
                f"{type(layer).__name__} computes the statistics of a batch without F.batch_norm, "
                "so they would be those of one replica's rows: call F.batch_norm in it, or say "
                'batchnorm="local"'
            )
        return out


class _Answers(TorchFunctionMode):
    def __init__(self, shared: GlobalBatchNorm | MicroBatchNorm, tracked: Tensor | None):
        super().__init__()
        self.shared = shared
        self.called = False
        self.takes_statistics = False
        self._tracked = tracked
        self._before = None if tracked is None else tracked.clone()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        call = _arguments_of(func, args, kwargs)
        if call is None or not call.training:
            self.called |= call is not None
            self.takes_statistics |= getattr(func, "__name__", "") in _TAKES_STATISTICS
            return func(*args, **kwargs)
        self.called = True
        if self._tracked is not None and self._before is not None:
            self._tracked.copy_(self._before)  # `shared` counts batches that have rows
        return self.shared.normalize(call)


def _arguments_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BatchNormCall | None:
    if func is F.batch_norm:
        return BatchNormCall(*args, **kwargs)
    if func is torch.batch_norm:
        x, weight, bias, mean, var, training, momentum, eps, *_ = args
        return BatchNormCall(x, mean, var, weight, bias, training, momentum, eps)
    return None


def _version(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor._version


_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class ForwardState:
    """What the forward that runs now computes on."""

    rows_are_real = True  # False: one row stands in for an empty micro-batch
    is_recomputed = False  # for backward: statistics are already up to date


class _Statistics(NamedTuple):
    mean: Tensor
    var: Tensor
    samples: Tensor  # per channel, over all ranks
    eps: float

    def inv_std(self) -> Tensor:
        return torch.rsqrt(self.var + self.eps)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: _Statistics,
        group: Group,
        real: bool,
    ) -> Tensor:
        shape = _channels(x)
        inv_std = statistics.inv_std()
        normal = (x - statistics.mean.view(shape)) * inv_std.view(shape)
        ctx.save_for_backward(x, weight)
        ctx.statistics = statistics
        ctx.group = group
        ctx.real = real
        if weight is not None:
            normal = normal * weight.view(shape)
        if bias is not None:
            normal = normal + bias.view(shape)
        ctx.has_bias = bias is not None
        return normal.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0].to(ctx.statistics.mean.dtype)
        others = _all_but_channels(grad)
        shape = _channels(grad)
        normal, inv_std = _normal_of(x.to(grad.dtype), ctx)
        local = torch.stack([grad.sum(others), (grad * normal).sum(others)])
        grad_bias, grad_weight = local.unbind()
        sums = sum_over_ranks(local, ctx.group)
        means = sums / ctx.statistics.samples.clamp(min=1)
        scale = inv_std if weight is None else inv_std * weight
        grad_x = (grad - means[0].view(shape) - normal * means[1].view(shape)) * scale.view(shape)
        if not ctx.real:  # rows that stand in are not in the statistics
            grad_x = grad_x * 0.0  # it stays in the graph: ranks go through it together
        affine = (None if weight is None else grad_weight, grad_bias if ctx.has_bias else None)
        return grad_x.to(grads[0].dtype), *affine, None, None, None


def _normal_of(x: Tensor, ctx: Any) -> tuple[Tensor, Tensor]:
    """Normalized rows and 1/σ, for backward; functions of all rows where it has a graph."""
    shape = _channels(x)
    statistics: _Statistics = ctx.statistics
    if not torch.is_grad_enabled():
        inv_std = statistics.inv_std()
        return (x - statistics.mean.view(shape)) * inv_std.view(shape), inv_std
    others = _all_but_channels(x)
    count = statistics.samples.clamp(min=1)
    counted = float(ctx.real)  # rows that stand in do not count
    sums = sum_over_ranks(x.sum(others) * counted, ctx.group)
    centered = x - (sums / count).view(shape)
    squares = centered.square().sum(others) * counted
    total = sum_over_ranks(squares, ctx.group)
    inv_std = torch.rsqrt(total / count + statistics.eps)
    return centered * inv_std.view(shape), inv_std


class _ReplacedNorm(_BatchNorm):
    """A drop-in for BatchNorm1d/2d/3d: `normalize` computes with the statistics of a batch."""

    def __init__(self, local: _BatchNorm, state: ForwardState):
        nn.Module.__init__(self)
        self.__dict__.update(local.__dict__)  # parameters, buffers and hooks are the same
        self._kind = type(local)
        self._state = state

    def forward(self, input: Tensor) -> Tensor:
        self._kind._check_input_dim(self, input)  # type: ignore[no-untyped-call]
        if not self.training and self.running_mean is not None:
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        mean, var = (self.running_mean, self.running_var) if self.training else (None, None)
        return self.normalize(
            BatchNormCall(input, mean, var, self.weight, self.bias, True, self.momentum, self.eps)
        )

    def normalize(self, call: BatchNormCall) -> Tensor:
        raise NotImplementedError


class GlobalBatchNorm(_ReplacedNorm):
    """Shares statistics over a group while training."""

    def __init__(self, local: _BatchNorm, group: Group, state: ForwardState):
        super().__init__(local, state)
        self._group = group

    def normalize(self, call: BatchNormCall) -> Tensor:
        """What F.batch_norm computes while training; with the statistics of all ranks."""
        statistics = self._statistics(call.input, call.eps)
        is_checked = call.input.device.type == "cpu" and not torch.compiler.is_compiling()
        if is_checked and statistics.samples == 1:
            raise ValueError(
                "BatchNorm needs more than 1 value per channel in a global batch while training"
            )
        if call.running_mean is not None:
            self._update_running(statistics, call)
        real = self._state.rows_are_real
        out: Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
            call.input, call.weight, call.bias, statistics, self._group, real
        )
        return out

    @torch.no_grad()
    def _statistics(self, x: Tensor, eps: float) -> _Statistics:
        """Mean and variance over all ranks, merged pairwise so that nothing cancels."""
        var, mean = _var_mean(x, correction=0)
        count = mean.new_tensor([x.numel() / x.shape[1] if self._state.rows_are_real else 0.0])
        local = torch.cat([mean, var, count])
        gathered = local.new_empty(self._group.size * local.numel())
        collective("all_gather", self._group, gathered, local)
        table = gathered.view(self._group.size, -1)
        means, variances, counts = torch.split(table, [mean.numel(), mean.numel(), 1], dim=1)
        total = counts.sum()
        fraction = counts / total.clamp(min=1)  # all 0 where no rank has a sample
        mean = (means * fraction).sum(0)
        var = (fraction * (variances + (means - mean) ** 2)).sum(0)
        return _Statistics(mean, var, total, eps)

    @torch.no_grad()
    def _update_running(self, statistics: _Statistics, call: BatchNormCall) -> None:
        count = statistics.samples
        assert call.running_mean is not None and call.running_var is not None
        has_samples = (count > 0).to(call.running_mean.dtype)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(has_samples.long())
        momentum = call.momentum
        if momentum is None:
            assert self.num_batches_tracked is not None
            momentum = 1.0 / max(1.0, float(self.num_batches_tracked))
        unbiased = statistics.var * (count / (count - 1).clamp(min=1))
        for running, now in ((call.running_mean, statistics.mean), (call.running_var, unbiased)):
            running.lerp_(now.to(running.dtype), has_samples * momentum)


class MicroBatchNorm(_ReplacedNorm):
    """BatchNorm of one micro-batch, for exact mode: it records its statistics.

    `update_running` later updates the running statistics, in the order of micro-batches.
    """

    def __init__(self, local: _BatchNorm, state: ForwardState):
        super().__init__(local, state)
        self._recorded: list[Tensor] = []

    def normalize(self, call: BatchNormCall) -> Tensor:
        """What F.batch_norm computes while training; running statistics are updated later."""
        if call.running_mean is not None and not self._state.is_recomputed:
            var, mean = _var_mean(call.input, correction=1)
            real = mean.new_tensor([float(self._state.rows_are_real)])
            self._recorded.append(torch.cat([mean, var, real]))
        if self.momentum is not None:
            self.momentum = call.momentum  # a subclass may have its own
        return F.batch_norm(
            call.input, None, None, call.weight, call.bias, training=True, eps=call.eps
        )

    @torch.no_grad()
    def update_running(self, group: Group, missing: float) -> None:
        """One all-gather of 2C + 1 numbers per micro-batch; then the same updates on all ranks.

        A rank with fewer micro-batches than others adds rows that do not count: `missing` for
        each row that it has.
        """
        if not self._recorded or self.running_mean is None or self.running_var is None:
            return
        local = torch.stack(self._recorded)
        self._recorded.clear()
        padding = local.new_zeros(round(missing * local.shape[0]), local.shape[1])
        local = torch.cat([local, padding])
        gathered = local.new_empty(group.size * local.shape[0], local.shape[1])
        group.all_gather(gathered, local).wait()
        assert self.num_batches_tracked is not None
        for row in gathered:
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
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def running_statistics(model: nn.Module) -> list[Tensor]:
    """The running means and variances that are here, each once."""
    tensors: dict[int, Tensor] = {}
    for module in model.modules():
        if isinstance(module, _NormBase) and module.running_mean is not None:
            assert module.running_var is not None
            tensors |= {id(t): t for t in (module.running_mean, module.running_var)}
    return [tensor for tensor in tensors.values() if not tensor.is_meta]


def use_global_batchnorm(model: nn.Module, group: Group) -> ForwardState:
    """Replace every BatchNorm inside `model`; names and parameters stay as they are."""
    state = ForwardState()
    _replace(model, lambda local: GlobalBatchNorm(local, group, state))
    return state


def use_microbatch_norm(model: nn.Module) -> ForwardState:
    """Replace every BatchNorm inside `model` by one that is updated after each step."""
    state = ForwardState()
    _replace(model, lambda local: MicroBatchNorm(local, state))
    return state


def update_running_statistics(model: nn.Module, group: Group, missing: float = 0.0) -> None:
    for layer in _microbatch_norms(model):
        layer.update_running(group, missing)


def forget_statistics(model: nn.Module) -> None:
    """Drop what was recorded for the running statistics in a step that is computed again."""
    for layer in _microbatch_norms(model):
        layer._recorded.clear()


def _microbatch_norms(model: nn.Module) -> Iterator[MicroBatchNorm]:
    for module in model.modules():
        own = module.__dict__.get("forward")
        layer = own.shared if isinstance(own, OwnForward) else module
        if isinstance(layer, MicroBatchNorm):
            yield layer


def _replace(
    model: nn.Module, make: Callable[[_BatchNorm], GlobalBatchNorm | MicroBatchNorm]
) -> None:
    replaced: dict[int, nn.Module] = {}  # a layer that is used twice stays one
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            is_plain = type(child) in _PLAIN and "forward" not in child.__dict__
            if isinstance(child, _BatchNorm) and is_plain:
                parent._modules[name] = replaced.setdefault(id(child), make(child))
    for module in model.modules():
        if isinstance(module, _BatchNorm) and id(module) not in map(id, replaced.values()):
            own = module.__dict__.get("forward")
            module.forward = OwnForward(module, make(module), own)  # type: ignore[method-assign]


def _var_mean(x: Tensor, correction: int) -> tuple[Tensor, Tensor]:
    """Per channel, of numbers with enough digits."""
    wide = x.detach().float() if x.dtype in (torch.float16, torch.bfloat16) else x.detach()
    return torch.var_mean(wide, dim=_all_but_channels(x), correction=correction)


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _channels(x: Tensor) -> list[int]:
    return [1, -1, *[1] * (x.dim() - 2)]
