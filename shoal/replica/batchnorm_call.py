"""The forward of a BatchNorm subclass, whose `F.batch_norm` is answered by another layer."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from shoal.errors import BadInput

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


class NormalizesCalls(Protocol):
    def normalize(self, call: BatchNormCall) -> Tensor: ...


class OwnForward:
    """Stands in for the forward of `layer`; batches of training are normalized by `shared`.

    `own_forward` is one that was set on this layer, not by its class.
    """

    def __init__(self, layer: _BatchNorm, shared: Any, own_forward: Any = None):
        self.layer = layer
        self.shared: NormalizesCalls = shared
        self.own_forward = own_forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.own_forward or type(self.layer).forward.__get__(self.layer)
        tracked = self.layer.num_batches_tracked
        answers = _Answers(self.shared, tracked)
        before = _version(self.layer.running_mean)
        with answers:
            out = forward(*args, **kwargs)
        changed = _version(self.layer.running_mean) != before
        if self.layer.training and not answers.called and (answers.takes_statistics or changed):
            raise BadInput(
                f"{type(self.layer).__name__} computes the statistics of a batch without "
                "F.batch_norm, so they would be those of one replica's rows: call "
                'F.batch_norm in it, or say batchnorm="local"'
            )
        return out


class _Answers(TorchFunctionMode):
    def __init__(self, shared: NormalizesCalls, tracked: Tensor | None):
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
        call = _call_of(func, args, kwargs)
        if call is None or not call.training:
            self.called |= call is not None
            self.takes_statistics |= getattr(func, "__name__", "") in _TAKES_STATISTICS
            return func(*args, **kwargs)
        self.called = True
        if self._tracked is not None and self._before is not None:
            self._tracked.copy_(self._before)  # `shared` counts batches that have rows
        return self.shared.normalize(call)


def _call_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BatchNormCall | None:
    if func is F.batch_norm:
        return BatchNormCall(*args, **kwargs)
    if func is torch.batch_norm:
        x, weight, bias, mean, var, training, momentum, eps, *_ = args
        return BatchNormCall(x, mean, var, weight, bias, training, momentum, eps)
    return None


def _version(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor._version
