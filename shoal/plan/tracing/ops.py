"""What an operation of torch costs: matrix products by their sizes, all others by their bytes.

Shapes alone count, so fake tensors do. A fused attention skips what a causal mask hides, and its
backward computes the scores again: five products for the two of forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from shoal.plan.workloads import Kernel
from shoal.runtime.pytree import tensors_of

aten = torch.ops.aten


class OpCost(NamedTuple):
    """Kernels of one operation, and its FLOPs as papers count them."""

    kernels: tuple[Kernel, ...]
    flops: float = 0.0


NOTHING = OpCost(())
_FREE = {  # they move no data
    *(aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided),
    *(aten._unsafe_view, aten.detach, aten.lift_fresh, aten.scalar_tensor),
    *(aten._local_scalar_dense, aten._fused_sdp_choice),
}
# they read as many rows of their first input as they write
_LOOKUPS = {aten.embedding, aten.index, aten.index_select, aten.gather, aten._embedding_bag}

_WIDENING = {aten._to_copy, aten.add}


def cost_of(func: OpOverload, arguments: dict[str, Any], out: Any) -> OpCost:
    """The cost of a call, from its arguments by name and what it returned."""
    packet = func.overloadpacket
    if func.namespace == "prim" or func.is_view or packet in _FREE:
        return NOTHING
    if packet in _PRODUCTS:
        return _PRODUCTS[packet](arguments, out)
    written = bytes_of(out)
    values = list(arguments.values())
    read = bytes_of(values[1:]) + written if packet in _LOOKUPS else bytes_of(values)
    name = packet.__name__.strip("_")
    if packet in _WIDENING and _is_widened(values, out):
        name = f"{name} mixed"
    return OpCost((Kernel(name, 0.0, read + written),))


def _is_widened(values: Sequence[Any], out: Tensor) -> bool:
    """Whether narrower numbers than those of the result are read: slower kernels of PyTorch."""
    return any(t.dim() and t.element_size() < out.element_size() for t in tensors_of(values[:2]))


def bytes_of(tree: Any) -> float:
    return float(sum(_bytes(tensor) for tensor in tensors_of(tree)))


def _bytes(tensor: Tensor) -> float:
    """Of an expanded tensor, what is in memory."""
    whole = tensor.numel() * tensor.element_size()
    return float(min(whole, tensor.untyped_storage().nbytes()))


class _Product(NamedTuple):
    m: int
    n: int
    k: int
    batch: int = 1

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.batch

    def kernel(self, name: str, num_bytes: float) -> Kernel:
        m, n, k, batch = (max(1, size) for size in self)
        return Kernel(name, self.flops, num_bytes, m, n, k, batch)


def _matrix(name: str, left: str, right: str) -> Callable[[dict[str, Any], Any], OpCost]:
    """[.., m, k] x [.., k, n], where `left` and `right` name the arguments."""

    def cost(arguments: dict[str, Any], out: Any) -> OpCost:
        a = arguments[left]
        b = arguments[right]
        rows = a.shape[-2] if a.dim() > 1 else 1
        columns = b.shape[-1] if b.dim() > 1 else 1
        batch = math.prod(a.shape[:-2])
        sizes = _Product(rows, columns, a.shape[-1], batch)
        kernel = sizes.kernel(name, bytes_of(list(arguments.values())) + bytes_of(out))
        return OpCost((kernel,), sizes.flops)

    return cost


def _grouped(arguments: dict[str, Any], out: Any) -> OpCost:
    """Products of several groups of rows, each with its own matrix: experts."""
    a, b = list(arguments.values())[:2]
    groups = b.shape[0] if b.dim() == 3 else len(arguments["offs"])
    rows = a.shape[-2] if a.dim() == 3 or b.dim() == 2 else math.ceil(a.shape[-2] / groups)
    inner = a.shape[-1] if b.dim() == 3 else math.ceil(a.shape[-1] / groups)
    sizes = _Product(rows, b.shape[-1], inner, groups)
    kernel = sizes.kernel("grouped_mm", bytes_of([a, b]) + bytes_of(out))
    return OpCost((kernel,), sizes.flops)


def grouped_shape(
    func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[int, ...] | None:
    """The shape of a grouped product's result; None of other operations."""
    if func.overloadpacket is not getattr(aten, "_grouped_mm", None):
        return None
    arguments = named_arguments(func, args, kwargs)
    a, b = list(arguments.values())[:2]
    if a.dim() == 2 and b.dim() == 2:  # groups of the inner size: gradients of weights
        return (len(arguments["offs"]), a.shape[0], b.shape[1])
    rows = a.shape[:-1] if a.dim() == 2 or b.dim() == 3 else (a.shape[-2],)
    return (*rows, b.shape[-1])


def _convolution_sizes(out_shape: Sequence[int], x: Tensor, arguments: dict[str, Any]) -> _Product:
    """A row for each position of the output, with its window as the inner size."""
    weight = arguments["weight"]
    groups = arguments["groups"]
    spatial = x.shape[2:] if arguments["transposed"] else out_shape[2:]
    positions = x.shape[0] * math.prod(spatial)
    outputs = weight.shape[0]
    inputs = weight.shape[1]
    if arguments["transposed"]:
        outputs = weight.shape[1] * groups
        inputs = weight.shape[0] // groups
    window = math.prod(weight.shape[2:])
    return _Product(positions, outputs // groups, inputs * window, groups)


def _convolution(arguments: dict[str, Any], out: Tensor) -> OpCost:
    sizes = _convolution_sizes(out.shape, arguments["input"], arguments)
    moved = bytes_of(list(arguments.values())) + bytes_of(out)
    return OpCost((sizes.kernel("convolution", moved),), sizes.flops)


def _convolution_backward(arguments: dict[str, Any], out: Any) -> OpCost:
    """One operation that gives both gradients, or one of them."""
    grad, x, weight = (arguments[name] for name in ("grad_output", "input", "weight"))
    m, n, k, batch = _convolution_sizes(grad.shape, x, arguments)
    moved = bytes_of([grad, x, weight])
    to_input, to_weight, _ = arguments["output_mask"]
    kernels = []
    if to_input:
        kernels.append(_Product(m, k, n, batch).kernel("convolution input gradient", moved))
    if to_weight:
        kernels.append(_Product(k, n, m, batch).kernel("convolution weight gradient", moved))
    return OpCost(tuple(kernels), sum(kernel.flops for kernel in kernels))


def _attention_cost(
    name: str, arguments: dict[str, Any], out: Any, *, products: int, counted: int
) -> OpCost:
    query = arguments["query"]
    key = arguments["key"]
    heads = math.prod(query.shape[:-2])
    sizes = _Product(query.shape[-2], key.shape[-2], query.shape[-1], heads)
    seen = 0.5 if arguments.get("is_causal") else 1.0
    moved = bytes_of(list(arguments.values())) + bytes_of(out)
    kernel = sizes.kernel(name, moved)._replace(flops=products * seen * sizes.flops)
    return OpCost((kernel,), counted * sizes.flops)


_attention = partial(_attention_cost, "attention", products=2, counted=2)
_attention_backward = partial(_attention_cost, "attention backward", products=5, counted=4)


def _packets(*names: str) -> list[Any]:
    """Those of these operations that this version of torch has."""
    return [getattr(aten, name) for name in names if hasattr(aten, name)]


_FUSED = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
_PRODUCTS: dict[Any, Callable[[dict[str, Any], Any], OpCost]] = {
    aten.mm: _matrix("mm", "self", "mat2"),
    aten.addmm: _matrix("addmm", "mat1", "mat2"),
    aten.bmm: _matrix("bmm", "self", "mat2"),
    aten.baddbmm: _matrix("baddbmm", "batch1", "batch2"),
    aten.mv: _matrix("mv", "self", "vec"),
    aten.addmv: _matrix("addmv", "mat", "vec"),
    aten.dot: _matrix("dot", "self", "tensor"),
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
    **dict.fromkeys(_packets("_grouped_mm"), _grouped),
    **dict.fromkeys(_packets(*(f"_scaled_dot_product_{kind}" for kind in _FUSED)), _attention),
    **dict.fromkeys(
        _packets(*(f"_scaled_dot_product_{kind}_backward" for kind in _FUSED)), _attention_backward
    ),
}


def named_arguments(
    func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by the names of the operation's schema, in its order."""
    schema = func._schema.arguments
    given = dict(zip((argument.name for argument in schema), args, strict=False)) | kwargs
    return {argument.name: given.get(argument.name, argument.default_value) for argument in schema}
