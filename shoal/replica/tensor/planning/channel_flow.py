"""Follows channels through a traced forward: which activations have to be split alike.

What is not known here needs all channels; the group of an activation that reaches it is blocked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx, nn

from shoal.replica.tensor.planning.channel_functions import (
    BINARY,
    METADATA,
    UNARY,
    flattened,
    is_axis,
    mean,
    name_of,
    permuted,
)
from shoal.replica.tensor.planning.channel_groups import Activation, ChannelGroups, LayerEdge
from shoal.replica.tensor.planning.channel_layers import (
    acts_by_channel,
    is_grouped,
    is_matrix_layer,
    is_norm,
    layer_sizes,
    norm_dims,
)


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
            if x is not None and acts_by_channel(module, x):
                return x
            if isinstance(module, nn.Flatten) and x is not None and module.start_dim == 1:
                flat = flattened(x)
                if flat is not None:
                    return flat
        self._block(node)
        return None

    def _matrix(self, name: str, module: nn.Module, x: Activation | None) -> Activation:
        inputs, outputs, axis, dims = layer_sizes(module)
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
        fits = x.axis == layer_sizes(module)[2] and inputs == x.channels
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
        dims = norm_dims(module, x)
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
        name = node.target if isinstance(node.target, str) else name_of(node.target)
        if name in METADATA:
            return None
        x = self._of(node.args[0]) if node.args else None
        if name in BINARY:
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
        if name in UNARY:
            others = [n for n in node.all_input_nodes if n is not node.args[0]]
            is_spatial = "pool" in name or name == "interpolate"
            return None if any(map(self._of, others)) or (is_spatial and x.axis == -1) else x
        if name == "flatten":
            arguments = (*node.args[1:], *node.kwargs.values())
            return flattened(x) if arguments == (1,) else None
        if name in ("view", "reshape"):
            is_flat = len(node.args) == 3 and node.args[2] == -1
            return flattened(x) if is_flat else None
        if name == "mean":
            return mean(node, x)
        if name == "permute":
            return permuted(node, x)
        return None

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
        if not known or len(known) < len(values) or not is_axis(dim, known):
            self._block(node)
            return None
        for other in known[1:]:
            self.groups.join(known[0].group, other.group)
        sizes = tuple(size for value in known for size in value.sizes)
        return Activation(known[0].group, sizes, known[0].axis, known[0].dims)


def _scaled(x: Activation, features: int) -> Activation:
    """With as many features per channel as a flattened activation has."""
    factor = features // x.channels
    return Activation(x.group, tuple(size * factor for size in x.sizes), x.axis, x.dims)
