"""What the layers of a model do to channels."""

from __future__ import annotations

from typing import Any, TypeGuard

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from shoal.replica.tensor.adapters import ELEMENTWISE
from shoal.replica.tensor.planning.channel_groups import Activation

_MODULES_BY_CHANNEL = (
    *ELEMENTWISE,
    *(nn.Hardsigmoid, nn.LogSigmoid, nn.Softsign, nn.Threshold, nn.Tanhshrink),
    *(nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.Upsample),
    *(nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d, nn.ZeroPad2d, nn.ReflectionPad2d),
    *(nn.ReplicationPad2d, nn.ConstantPad2d),
    *(getattr(nn, f"{kind}{n}d") for n in (1, 2, 3) for kind in ("MaxPool", "AvgPool")),
    *(getattr(nn, f"Adaptive{kind}{n}d") for n in (1, 2, 3) for kind in ("AvgPool", "MaxPool")),
)
_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_CONVOLVING = ("__call__", "forward", "_conv_forward", "_output_padding")
_SINGLE_CHANNEL_NORMS = (_BatchNorm, _InstanceNorm)


def is_matrix_layer(module: nn.Module) -> bool:
    """A convolution of one group, or a linear layer, that computes what torch's does."""
    if not _has_plain_tensors(module):
        return False
    if isinstance(module, nn.Linear):
        return type(module).forward is nn.Linear.forward
    return _is_convolution(module) and module.groups == 1


def is_grouped(module: nn.Module) -> bool:
    """A convolution of several groups, such as a depthwise one."""
    return _has_plain_tensors(module) and _is_convolution(module) and module.groups > 1


def _is_convolution(module: nn.Module) -> TypeGuard[_ConvNd]:
    """Of torch, or a class of its own that computes as torch's does."""
    kind = type(module)
    for base in _CONVOLUTIONS:
        if isinstance(module, base):
            same = (getattr(kind, n, None) is getattr(base, n, None) for n in _CONVOLVING)
            return all(same) or _pads_as_tensorflow(kind)
    return False


def _pads_as_tensorflow(kind: type[nn.Module]) -> bool:
    return kind.__name__ == "Conv2dSame" and kind.__module__.startswith("timm.")


def is_norm(module: nn.Module) -> bool:
    """One that treats each channel, or each group of channels, by itself."""
    kind = type(module)
    if kind.__module__.startswith("timm."):
        return kind.__name__ in ("BatchNormAct2d", "GroupNormAct", "GroupNorm")
    is_own = kind.__module__.startswith(("torch.nn.", "shoal."))
    return is_own and isinstance(module, (*_SINGLE_CHANNEL_NORMS, nn.GroupNorm))


def _has_plain_tensors(module: nn.Module) -> bool:
    """Not those of weight norm and the like, which are computed from others."""
    return set(module._parameters) == {"weight", "bias"}


def layer_sizes(module: Any) -> tuple[int, int, int, int | None]:
    """Inputs, outputs, the dimension of channels, and the number of dimensions."""
    if isinstance(module, _ConvNd):
        dims = len(module.kernel_size)
        return module.in_channels, module.out_channels, -dims - 1, dims + 2
    return module.in_features, module.out_features, -1, None


def norm_dims(module: nn.Module, x: Activation) -> int | None:
    if x.dims is None and isinstance(module, nn.BatchNorm1d):
        return 2
    return x.dims


def acts_by_channel(module: nn.Module, x: Activation) -> bool:
    """Whether it does not mix channels; pooling and resizing act behind them."""
    if type(module) not in _MODULES_BY_CHANNEL:
        return False
    name = type(module).__name__
    dims = next((n for n in (1, 2, 3) if name.endswith(f"{n}d")), 0)
    return x.axis < -dims if not name.startswith("Dropout") else True
