"""Layers and matrix products: rows of positions meet weights, or each other."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shoal.pytree import map_tensors, tensors_of
from shoal.replica.context.sequence_shard import SequenceAlignment, SequenceShard, of_sequence
from shoal.replica.context.spec import SequenceSpec
from shoal.replica.split.mapping import sum_over_ranks
from shoal.replica.split.sharded_tensor import NotAligned, ShardedCall


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


RULES = {
    "linear": of_sequence(_linear),
    "layer_norm": of_sequence(_norm),
    "rms_norm": of_sequence(_norm),
    "embedding": of_sequence(_embedding),
    "one_hot": of_sequence(_one_hot),
    **dict.fromkeys(["matmul", "__matmul__", "__rmatmul__", "bmm", "mm"], _matmul),
    "addmm": _addmm,
    "einsum": _einsum,
}
