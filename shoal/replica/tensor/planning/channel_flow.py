"""Follows channels through a traced forward: which activations have to be split alike.

What is not known here needs all channels; the group of an activation that reaches it is blocked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from shoal.replica.tensor.adapters import ELEMENTWISE
from shoal.replica.tensor.planning.channel_groups import Activation, ChannelGroups, LayerEdge

_MODULES_BY_CHANNEL = (
    *ELEMENTWISE,
    *(nn.Hardsigmoid, nn.LogSigmoid, nn.Softsign, nn.Threshold, nn.Tanhshrink),
    *(nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.Upsample),
    *(nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d, nn.ZeroPad2d, nn.ReflectionPad2d),
    *(nn.ReplicationPad2d, nn.ConstantPad2d),
    *(getattr(nn, f"{kind}{n}d") for n in (1, 2, 3) for kind in ("MaxPool", "AvgPool")),
    *(getattr(nn, f"Adaptive{kind}{n}d") for n in (1, 2, 3) for kind in ("AvgPool", "MaxPool")),
)
_BINARY = {"add", "sub", "mul", "div", "truediv", "iadd", "isub", "imul", "itruediv"} | {
    *("add_", "sub_", "mul_", "div_", "maximum", "minimum", "true_divide")
}
_UNARY = {
    *("relu", "relu_", "relu6", "gelu", "silu", "mish", "elu", "selu", "celu", "leaky_relu"),
    *("softplus", "hardtanh", "hardswish", "hardsigmoid", "sigmoid", "tanh", "sigmoid_", "exp"),
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "interpolate", "contiguous", "clone"),
    *("float", "clamp", "clamp_", "sqrt", "square", "abs", "neg", "pow"),
    *(f"{kind}_pool{n}d" for n in (1, 2, 3) for kind in ("max", "avg")),
    *(f"adaptive_{kind}_pool{n}d" for n in (1, 2, 3) for kind in ("avg", "max")),
}
_METADATA = {"size", "dim", "numel", "getattr", "ndimension", "__len__", "len"}
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
    kind = type(module)
    plain = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    transposed = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    if kind in (*plain, *transposed):
        return True
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


class ChannelFlow:
    """Walks over the nodes of a graph. `may_split` says which layers, by name, may be split."""

    def __init__(
        self,
        groups: ChannelGroups,
        modules: dict[str, nn.Module],
        may_split: Callable[[str], bool],
    ):
        self.groups = groups
        self.modules = modules
        self.may_split = may_split
        self.inputs: dict[str, Activation] = {}  # of layers, by name
        self.outputs: dict[str, Activation] = {}
        self.values: dict[fx.Node, Activation] = {}

    def walk(self, prefix: str, graph: fx.Graph) -> None:
        """`prefix` is the name of the module whose forward was traced, with a dot behind it."""
        for node in graph.nodes:
            result = self._result(prefix, node)
            if result is not None:
                self.values[node] = result

    def _result(self, prefix: str, node: fx.Node) -> Activation | None:
        if node.op == "call_module":
            return self._module(prefix + str(node.target), node)
        if node.op in ("call_function", "call_method"):
            return self._function(node)
        if node.op == "output":
            self._block(node)
        return None

    def _of(self, value: Any) -> Activation | None:
        return self.values.get(value) if isinstance(value, fx.Node) else None

    def _block(self, node: fx.Node) -> None:
        for argument in node.all_input_nodes:
            value = self._of(argument)
            if value is not None:
                self.groups.block(value.group)

    # ------------------------------------------------------------------ modules

    def _module(self, name: str, node: fx.Node) -> Activation | None:
        module = self.modules[name]
        x = self._of(node.args[0]) if node.args else None
        if len(node.all_input_nodes) == 1 and node.args:
            if is_matrix_layer(module) and self.may_split(name):
                return self._matrix(name, module, x)
            if x is not None and self.may_split(name):
                if is_grouped(module):
                    return self._grouped(name, module, x)
                if is_norm(module):
                    return self._norm(name, module, x)
            by_channel = type(module) in _MODULES_BY_CHANNEL
            if x is not None and by_channel and _keeps_axis(module, x):
                return x
            if isinstance(module, nn.Flatten) and x is not None and module.start_dim == 1:
                flat = self._flat(x)
                if flat is not None:
                    return flat
        self._block(node)
        return None

    def _matrix(self, name: str, module: nn.Module, x: Activation | None) -> Activation:
        inputs, outputs, axis, dims = _layer_sizes(module)
        if x is not None and (x.axis != axis or inputs % x.channels):
            self.groups.block(x.group)
            x = None
        out = self.outputs.get(name)
        if out is None:
            out = Activation(self.groups.new(outputs), (outputs,), axis, dims)
            source = None if x is None else x.group
            parameters = sum(p.numel() for p in module.parameters())
            self.groups.edges[name] = LayerEdge(source, out.group, parameters)
            self.outputs[name] = out
            if x is not None:
                self.inputs[name] = _scaled(x, inputs)
        else:
            self._again(name, x, inputs)
        return out

    def _again(self, name: str, x: Activation | None, inputs: int) -> None:
        """A layer that is used twice is split the same way for both."""
        before = self.inputs.get(name)
        if x is not None and before is not None and before.sizes == _scaled(x, inputs).sizes:
            self.groups.join(x.group, before.group)
            return
        for value in (x, before):
            if value is not None:
                self.groups.block(value.group)

    def _grouped(self, name: str, module: Any, x: Activation) -> Activation | None:
        inputs = module.in_channels
        is_depthwise = module.groups == inputs
        fits = x.axis == _layer_sizes(module)[2] and inputs == x.channels
        if not fits or name in self.inputs or (len(x.sizes) > 1 and not is_depthwise):
            self.groups.block(x.group)
            return None
        self.groups.constrain(x.group, module.groups)
        self.inputs[name] = x
        ratio = module.out_channels
        sizes = tuple(size * ratio // inputs for size in x.sizes)
        self.outputs[name] = Activation(x.group, sizes, x.axis, x.dims)
        return self.outputs[name]

    def _norm(self, name: str, module: Any, x: Activation) -> Activation | None:
        is_group_norm = isinstance(module, nn.GroupNorm)
        features = module.num_channels if is_group_norm else module.num_features
        dims = _norm_dims(module, x)
        fits = dims is not None and x.axis == 1 - dims and features % x.channels == 0
        if not fits or name in self.inputs or (is_group_norm and len(x.sizes) > 1):
            self.groups.block(x.group)
            return None
        if is_group_norm:
            self.groups.constrain(x.group, module.num_groups)
        self.inputs[name] = self.outputs[name] = _scaled(x, features)
        return x

    # ------------------------------------------------------------------ functions

    def _function(self, node: fx.Node) -> Activation | None:
        name = node.target if isinstance(node.target, str) else _name(node.target)
        if name in _METADATA:
            return None
        x = self._of(node.args[0]) if node.args else None
        if name in _BINARY:
            return self._binary(node)
        if name in ("cat", "concat"):
            return self._cat(node)
        if x is None or len(node.all_input_nodes) < 1:
            self._block(node)
            return None
        found = self._view(name, node, x)
        if found is None:
            self._block(node)
        return found

    def _view(self, name: str, node: fx.Node, x: Activation) -> Activation | None:
        if name in _UNARY:
            others = [n for n in node.all_input_nodes if n is not node.args[0]]
            is_spatial = "pool" in name or name == "interpolate"
            return None if any(map(self._of, others)) or (is_spatial and x.axis == -1) else x
        if name == "flatten":
            arguments = (*node.args[1:], *node.kwargs.values())
            return self._flat(x) if arguments == (1,) else None
        if name in ("view", "reshape"):
            is_flat = len(node.args) == 3 and node.args[2] == -1
            return self._flat(x) if is_flat else None
        if name == "mean":
            return _mean(node, x)
        if name == "permute":
            return _permuted(node, x)
        return None

    def _flat(self, x: Activation) -> Activation | None:
        """(batch, channels, …) as (batch, features)."""
        if x.dims is None or x.axis != 1 - x.dims or len(x.sizes) > 1:
            return None
        return Activation(x.group, x.sizes, -1, 2)

    def _binary(self, node: fx.Node) -> Activation | None:
        values = [self._of(argument) for argument in node.args]
        known = [value for value in values if value is not None]
        unknown = [
            a
            for a, value in zip(node.args, values, strict=True)
            if value is None and isinstance(a, fx.Node) and a.op != "get_attr"
        ]
        first = known[0] if known else None
        same = all((v.sizes, v.axis) == (known[0].sizes, known[0].axis) for v in known)
        if first is None or unknown or not same or node.kwargs:
            self._block(node)
            return None
        for other in known[1:]:
            self.groups.join(first.group, other.group)
        return first

    def _cat(self, node: fx.Node) -> Activation | None:
        tensors = node.args[0] if node.args else ()
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        values = (
            [self._of(tensor) for tensor in tensors] if isinstance(tensors, (list, tuple)) else []
        )
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values) or not _is_axis(dim, known):
            self._block(node)
            return None
        for other in known[1:]:
            self.groups.join(known[0].group, other.group)
        sizes = tuple(size for value in known for size in value.sizes)
        return Activation(known[0].group, sizes, known[0].axis, known[0].dims)


def _layer_sizes(module: Any) -> tuple[int, int, int, int | None]:
    """Inputs, outputs, the dimension of channels, and the number of dimensions."""
    if isinstance(module, _ConvNd):
        dims = len(module.kernel_size)
        return module.in_channels, module.out_channels, -dims - 1, dims + 2
    return module.in_features, module.out_features, -1, None


def _norm_dims(module: nn.Module, x: Activation) -> int | None:
    if x.dims is None and isinstance(module, nn.BatchNorm1d):
        return 2
    return x.dims


def _scaled(x: Activation, features: int) -> Activation:
    """With as many features per channel as a flattened activation has."""
    factor = features // x.channels
    return Activation(x.group, tuple(size * factor for size in x.sizes), x.axis, x.dims)


def _keeps_axis(module: nn.Module, x: Activation) -> bool:
    """Pooling and resizing act behind the channels."""
    name = type(module).__name__
    dims = next((n for n in (1, 2, 3) if name.endswith(f"{n}d")), 0)
    return x.axis < -dims if not name.startswith("Dropout") else True


def _is_axis(dim: Any, values: list[Activation]) -> bool:
    first = values[0]
    if not isinstance(dim, int) or any(v.axis != first.axis for v in values):
        return False
    return dim == first.axis or (first.dims is not None and dim - first.dims == first.axis)


def _mean(node: fx.Node, x: Activation) -> Activation | None:
    """Over all dimensions behind the channels."""
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    keepdim = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
    if x.dims is None or not isinstance(dim, (list, tuple)):
        return None
    behind = set(range(x.axis + 1, 0))
    if {d - x.dims if d >= 0 else d for d in dim} != behind:
        return None
    return x if keepdim else Activation(x.group, x.sizes, -1, x.dims - len(behind))


def _permuted(node: fx.Node, x: Activation) -> Activation | None:
    order = list(node.args[1:])
    if len(order) == 1 and isinstance(order[0], (list, tuple)):
        order = list(order[0])
    if not all(isinstance(d, int) for d in order) or x.dims not in (None, len(order)):
        return None
    dims = len(order)
    axis = [d % dims for d in order].index(x.axis + dims)  # type: ignore[operator]
    return Activation(x.group, x.sizes, axis - dims, dims)


def _name(function: Any) -> str:
    module = getattr(function, "__module__", None)
    known = module in ("torch.nn.functional", "_operator", "torch", "builtins", None)
    is_torch = known or str(module).startswith("torch.")
    return str(getattr(function, "__name__", "")).lstrip("_") if is_torch else ""
