"""What the functions in a traced forward do to channels: tables of their names, and views."""

from __future__ import annotations

from typing import Any

from torch import fx

from shoal.replica.tensor.planning.channel_groups import Activation

BINARY = {"add", "sub", "mul", "div", "truediv", "iadd", "isub", "imul", "itruediv"} | {
    *("add_", "sub_", "mul_", "div_", "maximum", "minimum", "true_divide")
}
UNARY = {
    *("relu", "relu_", "relu6", "gelu", "silu", "mish", "elu", "selu", "celu", "leaky_relu"),
    *("softplus", "hardtanh", "hardswish", "hardsigmoid", "sigmoid", "tanh", "sigmoid_", "exp"),
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "interpolate", "contiguous", "clone"),
    *("float", "clamp", "clamp_", "sqrt", "square", "abs", "neg", "pow"),
    *(f"{kind}_pool{n}d" for n in (1, 2, 3) for kind in ("max", "avg")),
    *(f"adaptive_{kind}_pool{n}d" for n in (1, 2, 3) for kind in ("avg", "max")),
}
METADATA = {"size", "dim", "numel", "getattr", "ndimension", "__len__", "len"}


def name_of(function: Any) -> str:
    module = getattr(function, "__module__", None)
    known = module in ("torch.nn.functional", "_operator", "torch", "builtins", None)
    is_torch = known or str(module).startswith("torch.")
    return str(getattr(function, "__name__", "")).lstrip("_") if is_torch else ""


def mean(node: fx.Node, x: Activation) -> Activation | None:
    """Over all dimensions behind the channels."""
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    keepdim = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
    if x.dims is None or not isinstance(dim, (list, tuple)):
        return None
    behind = set(range(x.axis + 1, 0))
    if {d - x.dims if d >= 0 else d for d in dim} != behind:
        return None
    return x if keepdim else Activation(x.group, x.sizes, -1, x.dims - len(behind))


def permuted(node: fx.Node, x: Activation) -> Activation | None:
    order = list(node.args[1:])
    if len(order) == 1 and isinstance(order[0], (list, tuple)):
        order = list(order[0])
    if not all(isinstance(d, int) for d in order) or x.dims not in (None, len(order)):
        return None
    dims = len(order)
    axis = [d % dims for d in order].index(x.axis + dims)  # type: ignore[operator]
    return Activation(x.group, x.sizes, axis - dims, dims)


def is_axis(dim: Any, values: list[Activation]) -> bool:
    first = values[0]
    if not isinstance(dim, int) or any(v.axis != first.axis for v in values):
        return False
    return dim == first.axis or (first.dims is not None and dim - first.dims == first.axis)


def flattened(x: Activation) -> Activation | None:
    """(batch, channels, …) as (batch, features)."""
    if x.dims is None or x.axis != 1 - x.dims or len(x.sizes) > 1:
        return None
    return Activation(x.group, x.sizes, -1, 2)
