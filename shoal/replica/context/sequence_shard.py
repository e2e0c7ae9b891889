"""Activations of which every rank of a cp group has some positions, used as if they were complete.

Which dimension is a sequence decides about speed and memory only: see `ShardedTensor`.

             forward        backward
    gather   all-gather     reduce-scatter     an operation needs all positions
    reduce   all-reduce     all-reduce         a sum over positions (`sum_over_ranks`)

A full activation is the same on all ranks, and its gradient is the sum of what the ranks have of
it, as that of a parameter is.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.replica.engine import Stage
from shoal.replica.microbatch_context import MicroBatch, TensorParallelRng
from shoal.replica.split.mapping import ShardSpec, mapped
from shoal.replica.split.sharded_tensor import (
    NotAligned,
    Rule,
    ShardedCall,
    ShardedTensor,
    full_tensors,
)
from shoal.runtime.pytree import Tree, is_marked, map_leaves, map_tensors, tensors_of
from shoal.schedules.pipelines import Action


@dataclass(frozen=True)
class SequenceSpec:
    """How one dimension of a tensor is sharded by positions, in zigzag order.

    8 positions, 2 ranks    0 1 | 2 3 | 4 5 | 6 7      rank 0 has 0 1 6 7, rank 1 has 2 3 4 5

    Positions `start` to `stop` of a sequence of `length` are there. The dimension may be several
    ones in one: `outer` × positions × `inner`, as after `flatten(0, 1)`.
    """

    dim: int
    length: int
    ranks: int
    start: int
    stop: int
    outer: int = 1
    inner: int = 1

    @classmethod
    def of(cls, dim: int, length: int, ranks: int) -> SequenceSpec:
        return cls(dim, length, ranks, 0, length)

    @property
    def positions(self) -> int:
        """How many there are, over all ranks."""
        return self.stop - self.start

    @property
    def size(self) -> int:
        """Of the dimension, over all ranks."""
        return self.outer * self.positions * self.inner

    @property
    def is_whole(self) -> bool:
        """Whether the dimension is all positions and nothing else."""
        return self.positions == self.length and self.outer == self.inner == 1

    def at(self, dim: int) -> SequenceSpec:
        return replace(self, dim=dim)

    def ranges(self, rank: int) -> tuple[range, ...]:
        """A rank's positions, counted from `start`."""
        found = []
        for chunk in (rank, 2 * self.ranks - 1 - rank):
            first = chunk * self.length // (2 * self.ranks)
            last = (chunk + 1) * self.length // (2 * self.ranks)
            lower = min(max(first, self.start), self.stop)
            upper = max(min(last, self.stop), lower)
            found.append(range(lower - self.start, upper - self.start))
        return tuple(found)

    def count(self, rank: int) -> int:
        return sum(map(len, self.ranges(rank)))

    def local_positions(self, rank: int, device: torch.device) -> Tensor:
        """A rank's positions in the sequence."""
        parts = [torch.arange(r.start, r.stop, device=device) for r in self.ranges(rank)]
        return torch.cat(parts) + self.start

    def full_shape(self, local: Sequence[int]) -> torch.Size:
        shape = list(local)
        shape[self.dim] = self.size
        return torch.Size(shape)

    def take_local(self, full: Tensor, rank: int) -> Tensor:
        """A rank's part of a tensor that is there in full."""
        return self._shards().take_shard(self._spread(full), rank).flatten(self.dim, self.dim + 2)

    def all_gather(self, local: Tensor, group: Group) -> Tensor:
        """The full tensor from the parts of all ranks."""
        full = self._shards().all_gather(self._spread(local), group)
        return full.flatten(self.dim, self.dim + 2)

    def sum_to_local(self, full: Tensor, group: Group) -> Tensor:
        """A rank's part of the sum over ranks of tensors that they have in full."""
        local = self._shards().reduce_scatter(self._spread(full).contiguous(), group)
        return local.flatten(self.dim, self.dim + 2)

    def reshaped(self, old: Sequence[int], new: Sequence[int]) -> SequenceSpec | None:
        """The same positions after a reshape of full shapes; None if it tears them apart."""
        before = math.prod(old[: self.dim]) * self.outer
        for dim, size in enumerate(new):
            outer, rest = divmod(before, max(1, math.prod(new[:dim])))
            if rest == 0 and outer and size % (outer * self.positions) == 0 and size:
                inner = size // (outer * self.positions)
                return replace(self, dim=dim, outer=outer, inner=inner)
        return None

    def _spread(self, tensor: Tensor) -> Tensor:
        """With a dimension of its own for positions, one before it and one behind it."""
        positions = tensor.shape[self.dim] // (self.outer * self.inner)
        return torch.unflatten(tensor, self.dim, (self.outer, positions, self.inner))

    def _shards(self) -> ShardSpec:
        ranges = tuple(self.ranges(rank) for rank in range(self.ranks))
        return ShardSpec(self.dim + 1, ranges)


_IN_WRITTEN_ATTENTION = ("matmul", "bmm", "baddbmm", "einsum", "softmax")
_ADVICE = (
    "; attention that is written out runs as ring attention if it calls "
    'scaled_dot_product_attention (attn_implementation="sdpa" in transformers)'
)
_MARK = "positions of a sequence"


@dataclass
class SequenceContext:
    """The ranks that have positions of the same rows. `say` tells a sentence once."""

    group: Group
    say: Callable[[str], None] = lambda sentence: None
    rng: TensorParallelRng = field(init=False)
    gathered: set[str] = field(default_factory=set)  # operations that needed all positions

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

    def local_part(self, tensor: Tensor, spec: SequenceSpec) -> Tensor:
        """This rank's part of any tensor, for positions that are where `spec` says.

        All of a tensor that has nothing there, or one number for all positions; else `NotAligned`.
        """
        if isinstance(tensor, SequenceShard):
            if tensor.spec == spec:
                return tensor.local
            tensor = tensor.full()
        size = tensor.shape[spec.dim] if 0 <= spec.dim < tensor.dim() else None
        if size == spec.size:
            return spec.take_local(tensor, self.rank)
        if size not in (None, 1):
            raise NotAligned
        return tensor

    def wrap(self, local: Tensor, spec: SequenceSpec) -> SequenceShard:
        shard = local.as_subclass(SequenceShard)
        shard.spec = spec
        shard.context = self
        shard.rng = self.rng
        return shard

    def tell_gathered(self, operation: str) -> None:
        if operation not in self.gathered:
            self.gathered.add(operation)
            advice = _ADVICE if operation in _IN_WRITTEN_ATTENTION else ""
            self.say(
                f"cp({self.group.size}): {operation} needs all positions of a sequence, so every "
                f"worker gathers them and computes all of them there{advice}"
            )


class SequenceShard(ShardedTensor):
    """Its memory is this rank's positions."""

    spec: SequenceSpec
    context: SequenceContext

    @property
    def full_shape(self) -> torch.Size:
        with torch._C.DisableTorchFunctionSubclass():
            return self.spec.full_shape(self.shape)

    def full(self) -> Tensor:
        if self.full_value is not None:
            return self.full_value
        group = self.context.group
        with torch._C.DisableTorchFunctionSubclass():
            gather = partial(self.spec.all_gather, group=group)
            return mapped(self.local, gather, partial(self.spec.sum_to_local, group=group))

    def packed(self) -> Any:
        return (_MARK, self.local, list(astuple(self.spec)))

    def like(self, local: Tensor) -> SequenceShard:
        return self.context.wrap(local, self.spec)

    def map_local(self, function: Callable[[Tensor], Tensor]) -> SequenceShard:
        """The same positions of what `function` makes of the ones here, in as many dimensions."""
        return self.like(function(self.local))

    def wrap_along(self, result: Tensor, dims: Sequence[int]) -> SequenceShard:
        """What was computed along other dimensions, which are not there any more or still are."""
        removed = sum(d < self.spec.dim for d in dims) if result.dim() < self.dim() else 0
        return self.context.wrap(result, self.spec.at(self.spec.dim - removed))

    def align(self, tensor: Tensor) -> Tensor:
        """Tensors are broadcast: where positions are is counted from the last dimension."""
        return self.context.local_part(tensor, self._spec_in(tensor))

    def wrap_aligned(self, result: Tensor) -> SequenceShard:
        return self.context.wrap(result, self._spec_in(result))

    def _spec_in(self, tensor: Tensor) -> SequenceSpec:
        return self.spec.at(tensor.dim() - self.dim() + self.spec.dim)

    @classmethod
    def compute_in_full(cls, call: ShardedCall) -> Any:
        first = call.args[0] if call.args else None
        context: SequenceContext = call.context
        sets = call.is_in_place or call.name.startswith("__set")
        if isinstance(first, SequenceShard) and sets:
            raise BadInput(
                f"cp({context.group.size}) cannot change some positions of a sequence in "
                f"place ({call.name}): write it as an operation that returns a new tensor"
            )
        if any(
            isinstance(t, SequenceShard) and t.full_value is None and t.is_floating_point()
            for t in tensors_of((call.args, call.kwargs))
        ):
            context.tell_gathered(call.name.strip("_"))
        return super().compute_in_full(call)


def of_sequence(rule: Callable[[ShardedCall, SequenceShard], Any]) -> Rule:
    """A rule for operations whose first tensor is a sequence."""

    def of_first(op: ShardedCall) -> Any:
        x = op.argument(0, "input")
        return rule(op, x) if isinstance(x, SequenceShard) else NotImplemented

    return of_first


def unpack(tree: Tree, context: SequenceContext) -> Tree:
    """What `pack` has made of sequences."""
    return map_leaves(
        partial(is_marked, mark=_MARK),
        lambda leaf: context.wrap(leaf[1], SequenceSpec(*leaf[2])),
        tree,
    )


class ContextStage(Stage):
    """The only stage of a replica whose workers share sequences."""

    def __init__(self, model: nn.Module, device: torch.device, context: SequenceContext):
        super().__init__(model, device)
        self.context = context

    def compute(self, action: Action, micro: MicroBatch, inputs: Tree) -> Tree:
        return super().compute(action, micro, shard_inputs(inputs, self.context))

    def predict(self, inputs: Any) -> Any:
        return in_full(super().predict(shard_inputs(inputs, self.context)))


def shard_inputs(inputs: Tree, context: SequenceContext) -> Tree:
    """Tokens (batch, time) and features (batch, time, width) by their positions."""
    found: list[Tensor] = []

    def shard(tensor: Tensor) -> Tensor:
        is_sequence = tensor.dim() == (3 if tensor.is_floating_point() else 2)
        if not is_sequence or tensor.shape[1] < 2 * context.group.size:
            return tensor
        found.append(tensor)
        return context.shard(tensor, 1)

    sharded = map_tensors(shard, inputs)
    if not found:
        ranks = context.group.size
        raise BadInput(
            f"cp({ranks}) splits sequences, and the inputs have none of at least {2 * ranks} "
            "positions: tokens (batch, time), or features (batch, time, width)"
        )
    return sharded


def has_shards(tree: Tree) -> bool:
    """Whether a tree has been through `shard_inputs`."""
    return any(isinstance(tensor, SequenceShard) for tensor in tensors_of(tree))


def in_full(tree: Tree) -> Tree:
    """Outputs with all positions; those of Hugging Face keep their class."""
    if isinstance(tree, dict) and type(tree) is not dict:
        made = copy.copy(tree)
        for key, value in tree.items():
            made[key] = in_full(value)
        return made
    return full_tensors(tree, SequenceShard)
