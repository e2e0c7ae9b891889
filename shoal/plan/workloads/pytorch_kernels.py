"""What PyTorch runs of a transformer beside its products, eager and compiled.

Under autocast the weights and the residual stream are `stored` in fp32, and products take copies of
`width` bytes. Names are those of the operations in a trace; "mixed" ones read and write numbers of
different width, for which PyTorch has slower kernels; "fused" are those of torch.compile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shoal.cluster.program import Loss, ModelProgram
from shoal.plan.workloads import Kernel, moving

_FP32 = 4


class BlockNumbers(NamedTuple):
    """How many numbers of a micro-batch and a block are on one device."""

    hidden: float
    inner: float  # of the MLP, for each expert of a token
    qkv: float
    turned: float  # queries and keys that are rotated
    weights: tuple[float, ...]  # of each matrix and bias
    norms: int
    gated: bool
    dropout: bool


class Width(NamedTuple):
    """Bytes of a number."""

    compute: int  # in products
    stored: int  # of weights and between blocks

    @property
    def is_cast(self) -> bool:
        return self.stored > self.compute

    @property
    def cast(self) -> int:
        return self.stored + self.compute if self.is_cast else 0


def pointwise(
    numbers: BlockNumbers, width: Width, compiled: bool
) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    """Of forward and of backward."""
    if compiled:
        return tuple(_compiled(numbers, width)), tuple(_compiled_backward(numbers, width))
    return tuple(_eager(numbers, width)), tuple(_eager_backward(numbers, width))


def casts(numbers: tuple[float, ...], width: Width, name: str = "to_copy") -> Iterator[Kernel]:
    """Of inputs or weights of products; their gradients come back as "to_copy mixed"."""
    if width.is_cast:
        yield from (moving(name, width.cast * one) for one in numbers)


def _eager(n: BlockNumbers, width: Width) -> Iterator[Kernel]:
    add = "add mixed" if width.is_cast else "add"
    for _ in range(n.norms):
        yield moving("native_layer_norm", 2 * width.stored * n.hidden)
    yield from casts((n.hidden,) * n.norms, width)
    yield from casts(n.weights, width)
    for _ in range(2):
        yield moving(add, (2 * width.stored + width.compute) * n.hidden)
        if n.dropout:
            yield moving("native_dropout", (2 * width.compute + 1) * n.hidden)
    if n.turned:
        yield from (moving("mul", 3 * width.compute * n.turned),) * 3
    yield moving("silu" if n.gated else "gelu", 2 * width.compute * n.inner)
    if n.gated:
        yield moving("mul", 3 * width.compute * n.inner)


def _eager_backward(n: BlockNumbers, width: Width) -> Iterator[Kernel]:
    for _ in range(n.norms):
        yield moving("native_layer_norm_backward", 3 * width.stored * n.hidden)
        yield moving("add", 3 * width.stored * n.hidden)
    yield from casts((n.hidden, n.hidden), width)
    yield from casts((n.hidden,) * n.norms + n.weights, width, "to_copy mixed")
    if n.dropout:
        yield from (moving("native_dropout_backward", (2 * width.compute + 1) * n.hidden),) * 2
    yield from _sums(n, width)
    if n.turned:
        yield from (moving("mul", 3 * width.compute * n.turned),) * 3
    yield moving("silu_backward" if n.gated else "gelu_backward", 3 * width.compute * n.inner)
    if n.gated:
        yield from (moving("mul", 3 * width.compute * n.inner),) * 2
    yield moving("cat", 2 * width.compute * n.qkv)


def _sums(n: BlockNumbers, width: Width) -> Iterator[Kernel]:
    """Gradients of biases."""
    if not n.gated:
        of_outputs = (n.qkv, n.hidden, n.inner, n.hidden)
        yield from (moving("sum", width.compute * one) for one in of_outputs)


def _compiled(n: BlockNumbers, width: Width) -> Iterator[Kernel]:
    for _ in range(n.norms):
        yield moving("fused norm", 2 * (width.stored + width.compute) * n.hidden)
    yield from casts(n.weights, width)
    if n.turned:
        yield moving("fused rotary", 2 * width.compute * n.turned)
    yield moving("fused gelu", (3 if n.gated else 2) * width.compute * n.inner)


def _compiled_backward(n: BlockNumbers, width: Width) -> Iterator[Kernel]:
    for _ in range(n.norms):
        moved = 3 * width.stored + 2 * width.compute
        yield moving("fused norm backward", moved * n.hidden)
    yield from casts(n.weights, width)
    yield from _sums(n, width)
    yield moving("fused gelu backward", (5 if n.gated else 3) * width.compute * n.inner)
    yield moving("fused cat", 2 * width.compute * (n.qkv + n.turned))


class LossCost(NamedTuple):
    """Of a table of logits."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    kept: float  # bytes, until backward
    passing: float  # bytes more, while its backward runs


def loss_cost(table: float, width: Width, program: ModelProgram) -> LossCost:
    """Cross-entropy; `table` are the numbers of the logits."""
    w = width.compute
    if program.kernels == "compiled" or program.loss == "chunked":
        kept = 0.0 if program.loss == "chunked" else w * table
        fused = (moving("fused loss", w * table),)
        back = (moving("fused loss backward", 2 * w * table), moving("pad", 2 * w * table))
        return LossCost(fused, back, kept, kept)
    inside: Loss | str = program.loss if w < _FP32 else "plain"
    v = _FP32 if inside == "fp32" else w
    nll = _FP32 if inside == "fp32" or width.is_cast else w
    there = [moving("log_softmax", 2 * v * table), moving("nll_loss_forward", nll * table)]
    gradients = [
        moving("nll_loss_backward", 2 * nll * table),
        moving("log_softmax_backward_data", 3 * v * table),
    ]
    kept = v + w if inside == "fp32" else v
    passing = nll if nll > v else nll + v
    if nll > w:  # a copy of the logits or of their logarithms, and of the gradient
        there.append(moving("to_copy mixed", (w + nll) * table))
        gradients.append(moving("to_copy", (w + nll) * table))
        kept += nll if inside == "autocast" else 0
    return LossCost(tuple(there), tuple(gradients), kept * table, passing * table)
