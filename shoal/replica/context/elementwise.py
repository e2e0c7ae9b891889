"""Operations that compute every position by itself, with broadcasting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from shoal.pytree import Tree, map_tensors, tensors_of
from shoal.replica.context.sequence_shard import (
    SequenceCall,
    SequenceContext,
    SequenceShard,
    full_tensors,
)
from shoal.replica.context.spec import SequenceSpec


class Alignment:
    """Where the positions are in tensors that are broadcast: counted from the last dimension."""

    def __init__(self, tensors: Sequence[Tensor], context: SequenceContext):
        leader = next(t for t in tensors if isinstance(t, SequenceShard))
        self.context = context
        self.spec: SequenceSpec = leader.spec
        self.from_end = leader.dim() - leader.spec.dim

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor, for an operation with the others."""
        if isinstance(tensor, SequenceShard):
            is_aligned = tensor.dim() - tensor.spec.dim == self.from_end
            if is_aligned and tensor.spec.same_positions(self.spec):
                return tensor.local
            tensor = tensor.full()
        dim = tensor.dim() - self.from_end
        if dim < 0 or tensor.shape[dim] == 1:
            return tensor
        if tensor.shape[dim] != self.spec.size:
            raise NotAligned
        return self.spec.at(dim).take_local(tensor, self.context.rank)

    def locals(self, tree: Tree) -> Tree:
        return map_tensors(self.local, tree)

    def wrap(self, result: Tensor) -> SequenceShard:
        return self.context.wrap(result, self.spec.at(result.dim() - self.from_end))


class NotAligned(Exception):
    """A tensor that does not fit beside the positions; torch will say so in its own words."""


def elementwise(op: SequenceCall) -> Any:
    tensors = tensors_of((op.args, op.kwargs))
    if op.is_in_place:
        return _in_place(op, tensors)
    alignment = Alignment(tensors, op.context)
    if alignment.spec.size == 1:
        return NotImplemented
    try:
        result = op.function(*alignment.locals(op.args), **alignment.locals(op.kwargs))
    except NotAligned:
        return NotImplemented
    return map_results(alignment.wrap, result)


def map_results(function: Callable[[Tensor], Tensor], result: Any) -> Any:
    """Applied to the tensors of a result; torch's named results keep their names."""
    if isinstance(result, tuple) and type(result).__module__ == "torch.return_types":
        return type(result)([function(t) for t in result])
    return map_tensors(function, result)


def _in_place(op: SequenceCall, tensors: Sequence[Tensor]) -> Any:
    """The first tensor keeps its place; the others are brought to its positions."""
    first = op.args[0]
    if not isinstance(first, SequenceShard):
        return op.function(first, *full_tensors(op.args[1:]), **full_tensors(op.kwargs))
    alignment = Alignment([first], op.context)
    if any(t.dim() > first.dim() for t in tensors):
        return NotImplemented
    try:
        others = alignment.locals(op.args[1:])
        named = alignment.locals(op.kwargs)
    except NotAligned:
        return NotImplemented
    op.function(first, *others, **named)
    first.full_value = None
    return first


def _random(op: SequenceCall) -> Any:
    """Every rank draws for its own positions from a stream of its own."""
    with op.context.rng.forked(next(t for t in op.args if isinstance(t, SequenceShard)).local):
        return elementwise(op)


def _dropout(op: SequenceCall) -> Any:
    p = op.argument(1, "p", 0.5)
    training = op.argument(2, "training" if op.name == "dropout" else "train", True)
    return _random(op) if training and p > 0 else elementwise(op)


_NAMES = """
    add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow float_power
    rsub neg negative positive abs absolute sign sgn exp exp2 expm1 log log2 log10 log1p sqrt rsqrt
    square reciprocal sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh atan2 erf erfc
    erfinv sigmoid logit floor ceil round trunc frac clamp clip clamp_min clamp_max maximum minimum
    fmax fmin where masked_fill lerp addcmul addcdiv hypot logaddexp logaddexp2 xlogy nan_to_num
    isnan isinf isfinite eq ne lt le gt ge equal_elements not_equal less less_equal greater
    greater_equal logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor
    bitwise_not bitwise_left_shift bitwise_right_shift isclose heaviside copysign sinc
    gelu relu relu6 silu mish elu selu celu leaky_relu prelu_elements softplus softsign hardtanh
    hardswish hardsigmoid hardshrink softshrink tanhshrink threshold logsigmoid log_sigmoid
    zeros_like ones_like full_like empty_like
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__
    __floordiv__ __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __neg__ __pos__ __abs__ __invert__
    __and__ __rand__ __or__ __ror__ __xor__ __rxor__ __lshift__ __rshift__ __rlshift__ __rrshift__
    __eq__ __ne__ __lt__ __le__ __gt__ __ge__
    __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__ __ipow__ __iand__
    __ior__ __ixor__
"""
_RANDOM = "rand_like randn_like randint_like bernoulli"
RULES: dict[str, Callable[[SequenceCall], Any]] = {
    **dict.fromkeys(_NAMES.split(), elementwise),
    **dict.fromkeys(_RANDOM.split(), _random),
    "dropout": _dropout,
    "native_dropout": lambda op: NotImplemented,
}
