"""What PyTorch runs of a transformer beside its products, eager and compiled.

Under autocast the weights and the residual stream are `stored` in fp32, and products take copies of
`width` bytes. Names are those of the operations in a trace; "mixed" ones read and write numbers of
different width, for which PyTorch has slower kernels; "fused" are those of torch.compile.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shoal.cluster.program import Loss, ModelProgram
from shoal.plan.workloads import Kernel, moving

_FP32 = 4
_RUNS = msgspec.toml.decode((Path(__file__).parent / "pytorch_kernels.toml").read_bytes())


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
    """Of forward and of backward, as `pytorch_kernels.toml` has them."""
    runs = _RUNS["compiled" if compiled else "eager"]
    forward, backward = (tuple(_kernels(runs[way], numbers, width)) for way in runs)
    return forward, backward


def _kernels(rows: list[list[Any]], numbers: BlockNumbers, width: Width) -> Iterator[Kernel]:
    true = {
        "": True,
        "cast": width.is_cast,
        "same": not width.is_cast,
        "dropout": numbers.dropout,
        "gated": numbers.gated,
        "plain": not numbers.gated,
    }
    amounts = {
        **{name: (size,) if size else () for name, size in numbers._asdict().items()},
        "weights": numbers.weights,
        "outputs": (numbers.qkv, numbers.hidden, numbers.inner, numbers.hidden),
        "rotated": (numbers.qkv + numbers.turned,),
    }
    for name, of, times, where, stored, compute, mask in rows:
        if true[where]:
            moved = stored * width.stored + compute * width.compute + mask
            often = numbers.norms if times == "norms" else times
            yield from [moving(name, moved * size) for size in amounts[of]] * often


def casts(numbers: tuple[float, ...], width: Width, name: str = "to_copy") -> Iterator[Kernel]:
    """Of inputs or weights of products; their gradients come back as "to_copy mixed"."""
    if width.is_cast:
        yield from (moving(name, width.cast * one) for one in numbers)


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
