"""Activations of which every rank of a cp group has some positions, used as if they were complete.

Operations that have a rule are computed on the positions that are here. For any other operation
the activation is gathered first: every rank then computes all positions, and the result is right
but not cheaper. Tensors that all ranks have in full (masks, tables of positions) are sliced when
they meet a `SequenceShard`. So which dimension is a sequence decides about speed and memory only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.pytree import Tree, map_tensors
from shoal.replica.context import mappings
from shoal.replica.context.spec import SequenceSpec
from shoal.replica.tensor.rng import TensorParallelRng

Function = Callable[..., Any]
RuleFor = Callable[["SequenceCall"], Callable[["SequenceCall"], Any] | None]

_IN_WRITTEN_ATTENTION = ("matmul", "bmm", "baddbmm", "einsum", "softmax")


@dataclass
class SequenceContext:
    """The ranks that have positions of the same rows. `say` tells a sentence once."""

    group: Group
    rule_for: RuleFor
    say: Callable[[str], None] = lambda sentence: None
    rng: TensorParallelRng = field(init=False)
    gathered: set[str] = field(default_factory=set)  # operations that needed all positions
    ring_attentions: int = 0

    def __post_init__(self) -> None:
        self.rng = TensorParallelRng(self.group.rank, active=True)

    @property
    def rank(self) -> int:
        return self.group.rank

    def shard(self, full: Tensor, dim: int) -> SequenceShard:
        """This rank's positions of a tensor that all ranks have."""
        spec = SequenceSpec.of(dim, full.shape[dim], self.group.size)
        shard = self.wrap(spec.take_local(full, self.rank), spec)
        shard.full_value = full
        return shard

    def wrap(self, local: Tensor, spec: SequenceSpec) -> SequenceShard:
        shard = local.as_subclass(SequenceShard)
        shard.spec = spec
        shard.context = self
        return shard

    def tell_gathered(self, operation: str) -> None:
        if operation not in self.gathered:
            self.gathered.add(operation)
            self.say(
                f"cp({self.group.size}): {operation} needs all positions of a sequence, so every "
                f"worker gathers them and computes all of them there{_advice(operation)}"
            )


@dataclass(frozen=True)
class SequenceCall:
    """One call of a function of torch with at least one `SequenceShard` among its tensors."""

    function: Function
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    context: SequenceContext

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


class SequenceShard(Tensor):
    """Its memory is this rank's positions; `shape` is that of the full tensor."""

    spec: SequenceSpec
    context: SequenceContext
    full_value: Tensor | None = None  # where it is known without an exchange

    @property
    def local(self) -> Tensor:
        """This rank's positions as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    @property
    def full_shape(self) -> torch.Size:
        with torch._C.DisableTorchFunctionSubclass():
            return self.spec.full_shape(self.shape)

    def full(self) -> Tensor:
        """All positions, on every rank, which all call it."""
        if self.full_value is not None:
            return self.full_value
        with torch._C.DisableTorchFunctionSubclass():
            return mappings.gather(self.as_subclass(Tensor), self.spec, self.context.group)

    def map_local(self, function: Callable[[Tensor], Tensor]) -> SequenceShard:
        """The same positions of what `function` makes of the ones here, in as many dimensions."""
        return self.context.wrap(function(self.local), self.spec)

    @classmethod
    def __torch_function__(
        cls,
        func: Function,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        context = _context_of((args, kwargs))
        operation = SequenceCall(func, _name_of(func), args, kwargs, context)
        with torch._C.DisableTorchFunctionSubclass():
            rule = context.rule_for(operation)
            result = NotImplemented if rule is None else rule(operation)
            return compute_in_full(operation) if result is NotImplemented else result


def compute_in_full(operation: SequenceCall) -> Any:
    """Gather what is sharded and compute all positions."""
    first = operation.args[0] if operation.args else None
    if isinstance(first, SequenceShard) and (operation.is_in_place or _sets(operation)):
        raise BadInput(
            f"cp({operation.context.group.size}) cannot change some positions of a sequence in "
            f"place ({operation.name}): write it as an operation that returns a new tensor"
        )
    if _gathers_activations((operation.args, operation.kwargs)):
        operation.context.tell_gathered(operation.name.strip("_"))
    return operation.function(*full_tensors(operation.args), **full_tensors(operation.kwargs))


def full_tensors(tree: Tree) -> Tree:
    """The same tree with sequence shards gathered."""
    return map_tensors(lambda t: t.full() if isinstance(t, SequenceShard) else t, tree)


def _advice(operation: str) -> str:
    if operation not in _IN_WRITTEN_ATTENTION:
        return ""
    return (
        "; attention that is written out runs as ring attention if it calls "
        'scaled_dot_product_attention (attn_implementation="sdpa" in transformers)'
    )


def _gathers_activations(tree: Tree) -> bool:
    found = []

    def look(t: Tensor) -> Tensor:
        if isinstance(t, SequenceShard) and t.full_value is None and t.is_floating_point():
            found.append(t)
        return t

    map_tensors(look, tree)
    return bool(found)


def _context_of(tree: Tree) -> SequenceContext:
    found: list[SequenceContext] = []

    def look(t: Tensor) -> Tensor:
        if isinstance(t, SequenceShard):
            found.append(t.context)
        return t

    map_tensors(look, tree)
    return found[0]


def _name_of(function: Function) -> str:
    name: str = getattr(function, "__name__", str(function))
    if name in ("__get__", "__set__"):
        attribute = getattr(getattr(function, "__self__", None), "__name__", "")
        return f"{name}.{attribute}"
    return name


def _sets(operation: SequenceCall) -> bool:
    return operation.name.startswith("__set")
