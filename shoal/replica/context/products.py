"""Layers and matrix products: rows of positions meet weights, or each other."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shoal.replica.context.sequence_shard import SequenceAlignment, SequenceShard
from shoal.replica.context.spec import SequenceSpec
from shoal.replica.split.mapping import sum_over_ranks
from shoal.replica.split.sharded_tensor import NotAligned, ShardedCall


def _per_position(op: ShardedCall, x: Any, last_dims: int, others: list[Any]) -> Any:
    """A layer that looks at the last dimensions of each position."""
    if not isinstance(x, SequenceShard) or x.spec.dim >= x.dim() - last_dims:
        return NotImplemented
    if any(isinstance(other, SequenceShard) for other in others):
        return NotImplemented
    args = tuple(arg.local if arg is x else arg for arg in op.args)
    kwargs = {key: value.local if value is x else value for key, value in op.kwargs.items()}
    return op.context.wrap(op.function(*args, **kwargs), x.spec)


def _linear(op: ShardedCall) -> Any:
    x = op.argument(0, "input")
    return _per_position(op, x, 1, [op.argument(1, "weight"), op.argument(2, "bias")])


def _norm(op: ShardedCall) -> Any:
    shape = op.argument(1, "normalized_shape")
    return _per_position(op, op.argument(0, "input"), len(shape), list(op.args[2:]))


def _embedding(op: ShardedCall) -> Any:
    """Rows of a table for the ids of each position; the table may be used in full elsewhere."""
    ids = op.argument(0, "input")
    if op.argument(3, "max_norm") is not None:
        return NotImplemented
    return _per_position(op, ids, 0, [op.argument(1, "weight")])


def _one_hot(op: ShardedCall) -> Any:
    classes = op.argument(1, "num_classes", -1)
    return NotImplemented if classes == -1 else _per_position(op, op.args[0], 0, [])


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
    return _batched(op, a, b)


def _contracts(a: SequenceShard, b: SequenceShard) -> bool:
    """Whether the product is a sum over positions."""
    is_inner = a.spec.dim == a.dim() - 1 and b.spec.dim == b.dim() - 2
    return is_inner and a.spec.same_positions(b.spec)


def _batched(op: ShardedCall, a: Tensor, b: Tensor) -> Any:
    """Positions among the dimensions before the matrices, as in an elementwise operation."""
    alignment = SequenceAlignment(next(t for t in (a, b) if isinstance(t, SequenceShard)))
    if alignment.from_end <= 2:
        return NotImplemented
    try:
        return alignment.wrap(alignment.local(a) @ alignment.local(b))
    except NotAligned:
        return NotImplemented


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
    try:
        pairs = zip(operands, terms, strict=True)
        local = [_of_letter(op, t, term, letter, spec) for t, term in pairs]
    except NotAligned:
        return NotImplemented
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


RULES = {
    "linear": _linear,
    "layer_norm": _norm,
    "rms_norm": _norm,
    "embedding": _embedding,
    "one_hot": _one_hot,
    **dict.fromkeys(["matmul", "__matmul__", "__rmatmul__", "bmm", "mm"], _matmul),
    "addmm": _addmm,
    "einsum": _einsum,
}
