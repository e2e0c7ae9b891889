"""Tensors of which every rank of a group has a shard, used as if they were complete.

An operation that has a rule by its name is computed on the shards. For any other one the tensor is
gathered first: the result is right, but not cheaper. Tensors that all ranks have in full (masks,
tables, parameters) are brought to the shard that they meet. The kinds of sharded tensors:

    SequenceParallelTensor   tp: rows of a sequence, between tensor-parallel layers
    VocabParallelLogits      tp: some classes
    SequenceShard            cp: some positions of every row
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from shoal.comm.group import Group
from shoal.replica.microbatch_context import TensorParallelRng
from shoal.replica.split.mapping import ShardSpec
from shoal.runtime.pytree import Tree, map_leaves, map_tensors, tensors_of


@dataclass(frozen=True)
class ShardedCall:
    """One call of a function of torch with a sharded tensor, the `leader`, among its tensors."""

    function: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leader: Any

    @property
    def context(self) -> Any:
        """Of a `SequenceShard`."""
        return self.leader.context

    @property
    def base_name(self) -> str:
        """Without the underscore of a function that works in place."""
        return self.name[:-1] if self.is_in_place and not self.name.startswith("__") else self.name

    @property
    def is_in_place(self) -> bool:
        name = self.name
        is_method = name.endswith("_") and not name.endswith("__")
        is_operator = name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
        return is_method or is_operator or self.kwargs.get("inplace") is True

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        return self.args[index] if len(self.args) > index else self.kwargs.get(name, default)


Rule = Callable[[ShardedCall], Any]
Rules = Mapping[str, Rule]


class NotAligned(Exception):
    """A tensor does not fit beside a shard: the operation is computed in full."""


class ShardedTensor(Tensor):
    """Its memory is this rank's shard; `shape` is that of the full tensor.

    A rule returns NotImplemented, or raises `NotAligned`, where it needs the full tensor after all.
    """

    rules: ClassVar[Rules] = {}
    rng: TensorParallelRng
    full_value: Tensor | None = None  # where it is known without an exchange

    @property
    def local(self) -> Tensor:
        """This rank's shard as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    @property
    def full_shape(self) -> torch.Size:
        raise NotImplementedError

    def full(self) -> Tensor:
        """The full tensor, on every rank, which all call it."""
        raise NotImplementedError

    def like(self, local: Tensor) -> Tensor:
        """A tensor that is sharded in the same way."""
        raise NotImplementedError

    def packed(self) -> Any:
        """What goes to the same rank of another stage: plain tensors."""
        return self.full()

    def align(self, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor, for an elementwise operation with this one."""
        raise NotAligned

    def wrap_aligned(self, result: Tensor) -> Tensor:
        """What the operation made of the local parts."""
        return self.like(result)

    @classmethod
    def compute_in_full(cls, call: ShardedCall) -> Any:
        return call.function(*full_tensors(call.args), **full_tensors(call.kwargs))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        leader = next(t for t in tensors_of((args, kwargs)) if isinstance(t, ShardedTensor))
        call = ShardedCall(func, _name_of(func), args, kwargs or {}, leader)
        with torch._C.DisableTorchFunctionSubclass():
            rules = leader.rules
            rule = rules.get(call.name) or rules.get(call.base_name)
            try:
                result = NotImplemented if rule is None else rule(call)
            except NotAligned:
                result = NotImplemented
            return leader.compute_in_full(call) if result is NotImplemented else result


def pack(tree: Tree) -> Tree:
    """Sharded tensors as plain ones, for the same rank of another stage."""
    return map_leaves(
        lambda leaf: isinstance(leaf, ShardedTensor), lambda leaf: leaf.packed(), tree
    )


def full_tensors(tree: Tree, kind: type[ShardedTensor] = ShardedTensor) -> Tree:
    """The same tree with sharded tensors of a kind gathered."""
    return map_tensors(lambda t: t.full() if isinstance(t, kind) else t, tree)


def map_results(function: Callable[[Tensor], Tensor], result: Any) -> Any:
    """Applied to the tensors of a result; torch's named results keep their names."""
    if isinstance(result, tuple) and type(result).__module__ == "torch.return_types":
        return type(result)([function(t) for t in result])
    return map_tensors(function, result)


def reshaped(name: str, old: torch.Size, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The full shape after `view`, `flatten` and the like."""
    probe = torch.empty(old, device="meta")
    if name in ("view_as", "reshape_as"):
        return torch.Size(args[0] if isinstance(args[0], torch.Size) else args[0].shape)
    if name == "ravel":
        return probe.reshape(-1).shape
    function: Callable[..., Tensor] = getattr(probe, "reshape" if name == "view" else name)
    return function(*args, **kwargs).shape


def _name_of(function: Callable[..., Any]) -> str:
    name: str = getattr(function, "__name__", str(function))
    if name in ("__get__", "__set__"):
        attribute = getattr(getattr(function, "__self__", None), "__name__", "")
        return f"{name}.{attribute}"
    return name


# ------------------------------------------------------------------ what a tensor knows of itself


def _size(call: ShardedCall) -> Any:
    dim = call.argument(1, "dim")
    shape = call.args[0].full_shape
    return shape if dim is None else shape[dim]


def _stride(call: ShardedCall) -> Any:
    strides = torch.empty(call.args[0].full_shape, device="meta").stride()
    dim = call.argument(1, "dim")
    return strides if dim is None else strides[dim]


def on_itself(call: ShardedCall) -> Any:
    """Of this very tensor: the same for a shard as for all of it."""
    return call.function(*call.args, **call.kwargs)


def alike(call: ShardedCall) -> Any:
    """Another dtype, device or history of the first tensor; a second one is a pattern."""
    first = call.args[0]
    args, kwargs = map_tensors(
        lambda t: t.local if isinstance(t, ShardedTensor) else t, (call.args, call.kwargs)
    )
    result: Tensor = call.function(*args, **kwargs)
    if not isinstance(first, ShardedTensor):
        return result
    made = first.like(result)
    if first.full_value is not None and not first.full_value.requires_grad:
        assert isinstance(made, ShardedTensor)
        made.full_value = call.function(first.full_value, *args[1:], **kwargs)
    return made


_LOCAL = (
    "is_floating_point is_complex is_signed get_device element_size is_contiguous as_subclass "
    "is_shared untyped_storage data_ptr is_nested is_sparse is_inference is_conj is_neg "
    "has_names is_same_size _is_view _is_zerotensor __get__.dtype __get__.device "
    "__get__.requires_grad __get__.is_cuda __get__.is_cpu __get__.is_leaf __get__.layout "
    "__get__.grad_fn __get__._version __get__.is_sparse __get__.is_quantized __get__.is_nested "
    "__get__.is_meta __get__.is_mps __get__.is_xpu __get__.itemsize __get__.names "
    "__get__.retains_grad __get__.output_nr __get__._backward_hooks __get__.is_mkldnn "
    "__get__.is_sparse_csr __get__.is_vulkan __get__.is_xla __get__.is_ipu __get__.is_maia "
    "new_zeros new_ones new_empty new_full new_tensor"
)
_ALIKE = "to type float half bfloat16 double type_as contiguous clone"
METADATA: dict[str, Rule] = {
    "__get__.shape": lambda call: call.args[0].full_shape,
    "size": _size,
    "stride": _stride,
    **dict.fromkeys(["numel", "nelement"], lambda call: call.args[0].full_shape.numel()),
    "__len__": lambda call: int(call.args[0].full_shape[0]),
    **dict.fromkeys(
        ["dim", "ndimension", "__get__.ndim"], lambda call: len(call.args[0].full_shape)
    ),
    **dict.fromkeys(_LOCAL.split(), on_itself),
    **dict.fromkeys(_ALIKE.split(), alike),
}


# ------------------------------------------------------------------ elementwise, with broadcasting


def elementwise(call: ShardedCall) -> Any:
    if call.is_in_place:
        return _in_place(call)
    args, kwargs = map_tensors(call.leader.align, (call.args, call.kwargs))
    return map_results(call.leader.wrap_aligned, call.function(*args, **kwargs))


def _in_place(call: ShardedCall) -> Any:
    """The first tensor keeps its place; the others are brought to its shard."""
    first = call.args[0]
    if not isinstance(first, ShardedTensor):
        return call.function(first, *full_tensors(call.args[1:]), **full_tensors(call.kwargs))
    for t in tensors_of((call.args, call.kwargs)):
        if len(t.full_shape if isinstance(t, ShardedTensor) else t.shape) > len(first.full_shape):
            return NotImplemented
    args, kwargs = map_tensors(first.align, (call.args[1:], call.kwargs))
    call.function(first, *args, **kwargs)
    first.full_value = None
    return first


def drawn(call: ShardedCall) -> Any:
    """Every rank draws for its own shard from a stream of its own."""
    with call.leader.rng.forked(call.leader.local):
        return elementwise(call)


def _dropout(call: ShardedCall) -> Any:
    p = call.argument(1, "p", 0.5)
    training = call.argument(2, "training" if call.name == "dropout" else "train", True)
    return drawn(call) if training and p > 0 else elementwise(call)


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
ELEMENTWISE: dict[str, Rule] = {
    **dict.fromkeys(_NAMES.split(), elementwise),
    "dropout": _dropout,
    "native_dropout": lambda call: NotImplemented,
}


class ShardedActivation(ShardedTensor):
    """Gathered once. What changes the full tensor in place is seen by all later operations."""

    group: Group
    spec: ShardSpec
    is_modified = False  # in place, after it was gathered

    @property
    def local(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            if self.is_modified:
                return self.shard_of(self.full())
            return self.as_subclass(Tensor)

    def full(self) -> Tensor:
        if self.full_value is None:
            self.full_value = self.gather_full()
        return self.full_value

    def gather_full(self) -> Tensor:
        raise NotImplementedError

    def shard_of(self, full: Tensor) -> Tensor:
        raise NotImplementedError

    @classmethod
    def compute_in_full(cls, call: ShardedCall) -> Any:
        changed = call.args[0] if call.args else None
        sets = call.is_in_place or call.name.startswith("__set")
        if isinstance(changed, ShardedActivation) and sets:
            changed.full()
            changed.is_modified = True
        return super().compute_in_full(call)


def full_activations(tree: Tree) -> Tree:
    """The same tree with activations of tp gathered; positions of cp stay as they are."""
    return full_tensors(tree, ShardedActivation)
