"""Convolutions, linear layers and norms of which every rank of a tp group has some channels.

    conv (some outputs) ─ norm, activation, depthwise conv (some channels) ─ conv (some inputs) ─ +
    └ column                └ by channels                                    └ row, all-reduce

A layer stays what it is, with slices of its tensors. Hooks around its forward hand it what this
rank has of its input, and say what its output is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.utils.hooks import RemovableHandle

from shoal.comm.group import Group
from shoal.replica.tensor.activations.channel_ops import OPS
from shoal.replica.tensor.activations.channel_tensor import ChannelShardedTensor, local_shard
from shoal.replica.tensor.activations.sequence_parallel import SequenceParallelTensor
from shoal.replica.tensor.activations.shard_spec import ShardSpec, even_ranges
from shoal.replica.tensor.activations.sharded_tensor import full_tensors
from shoal.replica.tensor.mappings import copy, reduce
from shoal.replica.tensor.rng import TensorParallelRng

ChannelShardedTensor.sharded_ops = OPS


class Channels(NamedTuple):
    """Channels in segments of these sizes, each of the same number of units that stay together."""

    sizes: tuple[int, ...]
    units: int

    def spec(self, dim: int, ranks: int) -> ShardSpec:
        return ShardSpec.of_sections(dim, self.sizes, self.units, ranks)


@dataclass(frozen=True)
class ChannelRole:
    """Which channels of a layer are split: its outputs (column), its inputs (row), or both."""

    inputs: Channels | None = None
    outputs: Channels | None = None


class SplitChannels:
    """A layer that is split; `specs` says how each of its parameters and buffers is sharded."""

    is_sequence_parallel = False  # sums of a linear layer stay sharded by position

    def __init__(self, layer: nn.Module, role: ChannelRole, group: Group, rng: TensorParallelRng):
        self.layer = layer
        self.role = role
        self.group = group
        self.rng = rng
        self.specs = _specs(layer, role, group.size)
        self._bias: Tensor | None = None
        self._hooks: list[RemovableHandle] = []

    def attach(self) -> None:
        """From now on the layer computes with slices."""
        _set_sizes(self.layer, self.role, self.group)
        self._hooks = [
            self.layer.register_forward_pre_hook(self._before, with_kwargs=True),
            self.layer.register_forward_hook(self._after, prepend=True, always_call=True),
        ]

    def detach(self) -> None:
        """Of a layer that keeps no sizes."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (self._input(args[0]), *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, {**kwargs, name: self._input(kwargs[name])}

    def _input(self, x: Tensor) -> Tensor:
        inputs = self.role.inputs
        if inputs is None:
            if isinstance(x, SequenceParallelTensor):
                return x.gather_sequence()
            return copy(full_tensors(x), self.group)
        if self.role.outputs is None:  # a row layer: the bias is added once, behind the sum
            self._bias = self.layer._parameters.get("bias")
            if self._bias is not None:
                self.layer._parameters["bias"] = None
        dim = _channel_dim(self.layer, x)
        return local_shard(x, inputs.spec(dim, self.group.size), self.group)

    def _after(self, layer: nn.Module, args: Any, out: Any) -> Any:
        if self._bias is not None:
            layer._parameters["bias"] = self._bias  # type: ignore[assignment]
        if out is None:  # the forward failed
            return None
        dim = _channel_dim(layer, out)
        outputs = self.role.outputs
        if outputs is not None:
            spec = outputs.spec(dim, self.group.size)
            return ChannelShardedTensor.of(out, spec, self.group, self.rng)
        total = self._sum(out)
        if self._bias is None:
            return total
        bias = self._bias.to(total.dtype)
        return total + bias.view(-1, *[1] * (out.dim() - dim - 1))

    def _sum(self, partial: Tensor) -> Tensor:
        is_linear = isinstance(self.layer, nn.Linear)
        if self.is_sequence_parallel and is_linear and partial.dim() > 1:
            return SequenceParallelTensor.summed(partial, self.group, self.rng)
        return reduce(partial, self.group)


def _specs(layer: nn.Module, role: ChannelRole, ranks: int) -> dict[str, ShardSpec]:
    names = {
        name
        for name, tensor in [*layer._parameters.items(), *layer._buffers.items()]
        if tensor is not None and tensor.dim() > 0
    }
    if role.inputs is not None and role.outputs is not None:
        dims = {name: (0, role.outputs) for name in names}
        if isinstance(layer, _ConvTransposeNd):
            dims["weight"] = (0, role.inputs)
    elif role.outputs is not None:
        is_transposed = isinstance(layer, _ConvTransposeNd)
        dims = {"weight": (int(is_transposed), role.outputs), "bias": (0, role.outputs)}
    else:
        assert role.inputs is not None
        is_transposed = isinstance(layer, _ConvTransposeNd)
        dims = {"weight": (int(not is_transposed), role.inputs)}
    return {
        name: channels.spec(dim, ranks) for name, (dim, channels) in dims.items() if name in names
    }


def _set_sizes(layer: nn.Module, role: ChannelRole, group: Group) -> None:
    """The numbers that a forward asks its layer for."""
    if role.inputs is None or role.outputs is None:
        return
    if isinstance(layer, _NormBase):
        layer.num_features = role.outputs.spec(0, group.size).length(group.rank)
    for name in ("groups", "num_groups"):
        count = getattr(layer, name, None)
        if isinstance(count, int):
            own = even_ranges(count, group.size, count // role.outputs.units)[group.rank]
            setattr(layer, name, len(own))


def _channel_dim(layer: nn.Module, x: Tensor) -> int:
    if isinstance(layer, _ConvNd):
        return x.dim() - len(layer.kernel_size) - 1
    if isinstance(layer, (_NormBase, nn.GroupNorm)):
        return 1
    return x.dim() - 1
