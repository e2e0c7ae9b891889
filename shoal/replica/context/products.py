"""Layers and matrix products: rows of positions meet weights, or each other."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.pytree import map_tensors, tensors_of
from shoal.replica.context.sequence_shard import (
    SequenceAlignment,
    SequenceShard,
    SequenceSpec,
    of_sequence,
)
from shoal.replica.context.views import Along
from shoal.replica.split.mapping import sum_over_ranks
from shoal.replica.split.sharded_tensor import NotAligned, Rule, ShardedCall


def _per_position(op: ShardedCall, x: SequenceShard, last_dims: int) -> Any:
    """A layer that looks at the last dimensions of each position; weights are not sharded."""
    others = [t for t in tensors_of((op.args, op.kwargs)) if t is not x]
    if x.spec.dim >= x.dim() - last_dims or any(isinstance(t, SequenceShard) for t in others):
        return NotImplemented
    args, kwargs = map_tensors(lambda t: t.local if t is x else t, (op.args, op.kwargs))
    return x.like(op.function(*args, **kwargs))


def _linear(op: ShardedCall, x: SequenceShard) -> Any:
    return _per_position(op, x, 1)


def _norm(op: ShardedCall, x: SequenceShard) -> Any:
    return _per_position(op, x, len(op.argument(1, "normalized_shape")))


def _embedding(op: ShardedCall, ids: SequenceShard) -> Any:
    """Rows of a table for the ids of each position; the table may be used in full elsewhere."""
    return _per_position(op, ids, 0) if op.argument(3, "max_norm") is None else NotImplemented


def _one_hot(op: ShardedCall, ids: SequenceShard) -> Any:
    return _per_position(op, ids, 0) if op.argument(1, "num_classes", -1) != -1 else NotImplemented


def _matmul(op: ShardedCall) -> Any:
    a = op.args[0]
    b = op.argument(1, "other", op.kwargs.get("mat2", op.kwargs.get("vec2")))
    if op.name == "__rmatmul__":
        a, b = b, a
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.dim() < 2 or b.dim() < 2:
        return NotImplemented
    if isinstance(a, SequenceShard) and a.spec.dim == a.dim() - 2:
        right = b.full() if isinstance(b, SequenceShard) else b
        product = a.local @ right
        return op.context.wrap(product, a.spec.at(product.dim() - 2))
    if isinstance(a, SequenceShard) and isinstance(b, SequenceShard) and _contracts(a, b):
        return sum_over_ranks(a.local @ b.local, op.context.group)
    if isinstance(b, SequenceShard) and b.spec.dim == b.dim() - 1:
        left = a.full() if isinstance(a, SequenceShard) else a
        product = left @ b.local
        return op.context.wrap(product, b.spec.at(product.dim() - 1))
    # positions among the dimensions before the matrices, as in an elementwise operation
    alignment = SequenceAlignment(next(t for t in (a, b) if isinstance(t, SequenceShard)))
    if alignment.from_end <= 2:
        return NotImplemented
    return alignment.wrap(alignment.local(a) @ alignment.local(b))


def _contracts(a: SequenceShard, b: SequenceShard) -> bool:
    """Whether the product is a sum over positions."""
    is_inner = a.spec.dim == a.dim() - 1 and b.spec.dim == b.dim() - 2
    return is_inner and a.spec.same_positions(b.spec)


def _addmm(op: ShardedCall) -> Any:
    """bias + x @ weight, with positions among the rows of x."""
    bias, x, weight = op.args[:3]
    if not isinstance(x, SequenceShard) or x.spec.dim != 0 or isinstance(weight, SequenceShard):
        return NotImplemented
    if isinstance(bias, SequenceShard) or bias.dim() != 1:
        return NotImplemented
    return op.context.wrap(op.function(bias, x.local, weight, **op.kwargs), x.spec)


def _einsum(op: ShardedCall) -> Any:
    equation = op.args[0]
    operands = list(op.args[1]) if isinstance(op.args[1], (list, tuple)) else list(op.args[1:])
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return NotImplemented
    inputs, output = equation.replace(" ", "").split("->")
    terms = inputs.split(",")
    leader = next(i for i, t in enumerate(operands) if isinstance(t, SequenceShard))
    spec = operands[leader].spec
    letter = terms[leader][spec.dim]
    pairs = zip(operands, terms, strict=True)
    local = [_of_letter(op, t, term, letter, spec) for t, term in pairs]
    result = op.function(equation, *local)
    if letter in output:
        return op.context.wrap(result, spec.at(output.index(letter)))
    return sum_over_ranks(result, op.context.group)


def _of_letter(
    op: ShardedCall, tensor: Tensor, term: str, letter: str, spec: SequenceSpec
) -> Tensor:
    """The local part of an operand, where `letter` stands for the positions."""
    if isinstance(tensor, SequenceShard):
        if term[tensor.spec.dim] == letter and tensor.spec.same_positions(spec):
            return tensor.local
        tensor = tensor.full()
    if letter not in term:
        return tensor
    if term.count(letter) > 1 or tensor.shape[term.index(letter)] != spec.size:
        raise NotAligned
    return spec.at(term.index(letter)).take_local(tensor, op.context.rank)


PRODUCTS = {
    "linear": of_sequence(_linear),
    "layer_norm": of_sequence(_norm),
    "rms_norm": of_sequence(_norm),
    "embedding": of_sequence(_embedding),
    "one_hot": of_sequence(_one_hot),
    **dict.fromkeys(["matmul", "__matmul__", "__rmatmul__", "bmm", "mm"], _matmul),
    "addmm": _addmm,
    "einsum": _einsum,
}


_LEGACY = {"size_average", "reduce"}
_COMMON = ["input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"]
_CLASSIFIED = {"cross_entropy": [*_COMMON, "label_smoothing"], "nll_loss": _COMMON}
_POINTWISE = (
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits kl_div"
)


def _sum(op: ShardedCall, x: SequenceShard) -> Any:
    """`sum` and `mean`, over the positions of all ranks where the call is along them."""
    dim = op.argument(1, "dim", op.kwargs.get("axis"))
    dims = [dim] if isinstance(dim, int) else dim or range(x.dim())
    dims = [d % x.dim() for d in dims]
    if x.spec.dim not in dims:
        return Along(1)(op)
    if op.argument(3, "dtype") is not None:
        return NotImplemented
    # it may be larger than a half-precision number can be
    wide = x.local.float() if x.dtype in (torch.float16, torch.bfloat16) else x.local
    local = wide.sum(dims, keepdim=bool(op.argument(2, "keepdim", False)))
    total = sum_over_ranks(local, op.context.group)
    if op.name == "mean":
        total = total / math.prod(x.full_shape[d] for d in dims)
    return total.to(x.dtype) if x.is_floating_point() else total


def _classified(op: ShardedCall) -> Any:
    """`cross_entropy` and `nll_loss`: classes are dimension 1, or 0 of a single sample."""
    given = dict(zip(_CLASSIFIED[op.name], op.args, strict=False)) | op.kwargs
    logits = given["input"]
    reduction = given.get("reduction", "mean")
    is_odd = any(given.get(name) is not None for name in _LEGACY)
    if is_odd or not isinstance(logits, SequenceShard) or logits.dim() < 2 or logits.spec.dim == 1:
        return NotImplemented
    if isinstance(given.get("weight"), SequenceShard) or reduction not in ("none", "mean", "sum"):
        return NotImplemented
    wanted = _target(op, logits, given["target"])
    names = ("weight", "ignore_index", "label_smoothing")
    options = {name: given[name] for name in names if given.get(name) is not None}
    function = F.cross_entropy if op.name == "cross_entropy" else F.nll_loss
    if reduction == "none":
        loss = function(logits.local, wanted, reduction="none", **options)
        return logits.wrap_along(loss, [1])
    here = function(logits.local, wanted, reduction="sum", **options)
    total = sum_over_ranks(here, op.context.group)
    return total / _count(op, wanted, options) if reduction == "mean" else total


def _target(op: ShardedCall, logits: SequenceShard, target: Tensor) -> Tensor:
    """This rank's targets: classes without the dimension of classes, or probabilities with it."""
    spec = logits.spec
    if target.dim() == logits.dim() - 1:
        spec = spec.at(spec.dim - int(spec.dim > 1))
    if isinstance(target, SequenceShard):
        if target.spec.dim == spec.dim and target.spec.same_positions(spec):
            return target.local
        target = target.full()
    if target.dim() <= spec.dim or target.shape[spec.dim] != spec.size:
        raise NotAligned
    return spec.take_local(target, op.context.rank)


def _count(op: ShardedCall, target: Tensor, options: dict[str, Any]) -> Tensor:
    """What a mean over tokens divides by, over all ranks: the weight of those that count."""
    counts = target != options.get("ignore_index", -100)
    weight = options.get("weight")
    if target.is_floating_point():
        number = torch.tensor(target.numel() / target.shape[1], device=target.device)
    elif weight is None:
        number = counts.sum().to(torch.float32)
    else:
        number = weight[target.where(counts, 0)].where(counts, 0).sum()
    total = number.detach().clone()
    op.context.group.all_reduce(total).wait()
    return total


def _pointwise(op: ShardedCall) -> Any:
    """Losses that compare elements: without a reduction they are elementwise."""
    names = ("input", "target")
    given = dict(zip(names, op.args, strict=False)) | op.kwargs
    reduction = given.pop("reduction", "mean")
    is_odd = len(op.args) > 2 or any(given.get(name) is not None for name in _LEGACY)
    shapes = [t.full_shape if isinstance(t, SequenceShard) else t.shape
              for t in (given[name] for name in names)]  # fmt: skip
    if is_odd or reduction not in ("none", "mean", "sum") or shapes[0] != shapes[1]:
        return NotImplemented
    alignment = SequenceAlignment(op.leader)
    loss = op.function(**alignment.locals(given), reduction="none")
    if reduction == "none":
        return alignment.wrap(loss)
    total = sum_over_ranks(loss.sum(), op.context.group)
    return total if reduction == "sum" else total / shapes[0].numel()


LOSSES: dict[str, Rule] = {
    **dict.fromkeys(["sum", "mean"], of_sequence(_sum)),
    **dict.fromkeys(_CLASSIFIED, _classified),
    **dict.fromkeys(_POINTWISE.split(), _pointwise),
}
