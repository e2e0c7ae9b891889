"""Autograd mappings between activations that all ranks of a group have and sharded ones.

                     forward          backward
    copy             nothing          all-reduce      before a column-parallel layer
    reduce           all-reduce       nothing         behind a row-parallel layer
    gather           all-gather       take own shard  a sharded activation that is used in full
    scatter          take own shard   all-gather      a full activation, for a row-parallel layer
    gather_sequence  all-gather       reduce-scatter  rows of a sequence, before a column layer
    reduce_scatter   reduce-scatter   all-gather      behind a row layer, to rows of a sequence
    sum_over_ranks   all-reduce       all-reduce

The gradient of a mapping is the mapping in the other direction: second derivatives are right, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.group import Group, group_by_number
from shoal.comm.transport.transport import Work
from shoal.errors import BadInput
from shoal.replica.deferred_init import TensorSlot


def collective(verb: str, group: Group, *tensors: Tensor) -> None:
    """`group.verb(*tensors)`; the first one is changed in place.

    torch.compile keeps each as one operation of its graph. Workers with the same layers get the
    same graph, so they call their collectives in the same order.
    """
    if torch.compiler.is_compiling():
        getattr(torch.ops.shoal, verb)(*tensors, group.number)
    else:
        getattr(group, verb)(*tensors).wait()


_library: Any = torch.library.Library("shoal", "FRAGMENT")  # type: ignore[no-untyped-call]
for _name, _tensors in (
    ("all_reduce", "Tensor(a!) data"),
    ("all_gather", "Tensor(a!) out, Tensor data"),
    ("reduce_scatter", "Tensor(a!) out, Tensor data"),
):

    def _run(*given: Any, verb: str = _name) -> None:
        *tensors, number = given
        getattr(group_by_number(number), verb)(*tensors).wait()

    _library.define(f"{_name}({_tensors}, int group) -> ()", tags=(torch.Tag.cudagraph_unsafe,))
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _run, _device)
    _library.impl(_name, lambda *given: None, "Meta")


def even_ranges(size: int, ranks: int, unit: int = 1) -> list[range]:
    """Consecutive ranges of whole units, as equal as possible; the longer ones first.

    12 over 2 ranks by units of 4    0..7  8..11
    """
    units, rest = divmod(size // unit, ranks)
    ends = [unit * (units * r + min(r, rest)) for r in range(ranks + 1)]
    return [range(a, b) for a, b in itertools.pairwise(ends)]


@dataclass(frozen=True)
class ShardSpec:
    """How one dimension of a tensor is sharded: some ranges of it for every rank."""

    dim: int
    ranges: tuple[tuple[range, ...], ...]

    @classmethod
    def even(cls, dim: int, size: int, ranks: int, unit: int = 1) -> ShardSpec:
        return cls(dim, tuple((r,) for r in even_ranges(size, ranks, unit)))

    @classmethod
    def of_blocks(cls, dim: int, blocks: int, size: int, ranks: int, unit: int) -> ShardSpec:
        """Blocks of `size` stand one after the other (q, k, v); each of them is sharded."""
        return cls.of_sections(dim, [size] * blocks, size // unit, ranks)

    @classmethod
    def of_sections(cls, dim: int, sizes: Sequence[int], groups: int, ranks: int) -> ShardSpec:
        """Sections of different sizes stand one after the other; each has so many groups."""
        starts = [0, *itertools.accumulate(sizes)]
        ranges = tuple(
            tuple(
                range(start + (size // groups) * r.start, start + (size // groups) * r.stop)
                for start, size in zip(starts, sizes, strict=False)
            )
            for r in even_ranges(groups, ranks)
        )
        return cls(dim, ranges)

    @property
    def size(self) -> int:
        """Of the dimension, over all ranks."""
        return sum(len(r) for ranges in self.ranges for r in ranges)

    def length(self, rank: int) -> int:
        """Of the dimension, on one rank."""
        return sum(map(len, self.ranges[rank]))

    def shard_shape(self, full: Sequence[int], rank: int) -> torch.Size:
        shape = list(full)
        shape[self.dim] = self.length(rank)
        return torch.Size(shape)

    def full_shape(self, shard: Sequence[int]) -> torch.Size:
        shape = list(shard)
        shape[self.dim] = self.size
        return torch.Size(shape)

    def take_shard(self, full: Tensor, rank: int) -> Tensor:
        """That rank's shard, as a tensor of its own."""
        slices = [full.narrow(self.dim, r.start, len(r)) for r in self.ranges[rank]]
        return torch.cat(slices, self.dim) if len(slices) > 1 else slices[0].clone()

    def concatenate(self, shards: Sequence[Tensor]) -> Tensor:
        """The full tensor from the shards of all ranks."""
        full = shards[0].new_empty(self.full_shape(shards[0].shape))
        for shard, ranges in zip(shards, self.ranges, strict=True):
            start = 0
            for r in ranges:
                values = shard.narrow(self.dim, start, len(r))
                full.narrow(self.dim, r.start, len(r)).copy_(values)
                start += len(r)
        return full

    def reduce_scatter(self, full: Tensor, group: Group) -> Tensor:
        """This rank's shard of the sum over ranks: one reduce-scatter of padded shards."""
        shards = [self.take_shard(full, rank).reshape(-1) for rank in range(group.size)]
        longest = max(shard.numel() for shard in shards)
        rows = full.new_zeros(group.size, longest)
        for row, shard in zip(rows, shards, strict=True):
            row[: shard.numel()] = shard
        out = full.new_empty(longest)
        collective("reduce_scatter", group, out, rows.view(-1))
        return out[: shards[group.rank].numel()].view(self.shard_shape(full.shape, group.rank))

    def all_gather(self, shard: Tensor, group: Group) -> Tensor:
        """The full tensor on every rank: one all-gather of shards, padded to the longest."""
        full = self.full_shape(shard.shape)
        shapes = [self.shard_shape(full, rank) for rank in range(group.size)]
        longest = max(shape.numel() for shape in shapes)
        padded = shard.new_zeros(longest)
        padded[: shard.numel()] = shard.reshape(-1)
        gathered = padded.new_empty(longest * group.size)
        collective("all_gather", group, gathered, padded)
        rows = gathered.view(group.size, longest)
        return self.concatenate([r[: s.numel()].view(s) for r, s in zip(rows, shapes, strict=True)])


class SlicedTensors:
    """Tensors by name, of which every rank of a group has a slice where `specs` has the name.

    A name is that of a parameter, or that and "/" and the name of an optimizer state.
    """

    group: Group
    device: torch.device
    specs: dict[str, ShardSpec]
    _slices: set[nn.Parameter]

    def is_slice(self, parameter: nn.Parameter) -> bool:
        """Whether other ranks have another part of it, or all of it."""
        return parameter in self._slices

    def hold_shard(self, slots: list[TensorSlot], spec: ShardSpec) -> None:
        """Let a parameter, or a buffer in all of its slots, hold this rank's slice."""
        tensor = slots[0].tensor
        shard = spec.take_shard(tensor.detach(), self.group.rank)
        if isinstance(tensor, nn.Parameter):
            tensor.data = shard
            return
        for slot in slots:
            slot.module._buffers[slot.key] = shard

    def gather_full(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Full tensors from slices; all ranks call it."""
        return {name: self._full(name, tensor) for name, tensor in tensors.items()}

    def take_shard(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """This rank's slices of full tensors; what has another shape is left as it is."""
        return {name: self.shard_of(name, tensor) for name, tensor in tensors.items()}

    def shard_of(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's slice of the full parameter of that name, or of its gradient."""
        spec = self._spec_of(name)
        if spec is None or spec.dim >= tensor.dim() or tensor.shape[spec.dim] != spec.size:
            return tensor
        return spec.take_shard(tensor, self.group.rank)

    def _full(self, name: str, tensor: Tensor) -> Tensor:
        spec = self._spec_of(name)
        if spec is None or spec.dim >= tensor.dim():
            return tensor
        return spec.all_gather(tensor.to(self.device), self.group).to(tensor.device)

    def _spec_of(self, name: str) -> ShardSpec | None:
        return self.specs.get(name) or self.specs.get(name.rpartition("/")[0])


Operation = Callable[[Tensor], Tensor]


def mapped(x: Tensor, forward: Operation, backward: Operation) -> Tensor:
    """`forward(x)`, whose gradient is `backward` of the gradient; of a sequence, what is here."""
    map_local = getattr(x, "map_local", None)
    if map_local is not None:
        of_positions: Tensor = map_local(lambda local: mapped(local, forward, backward))
        return of_positions
    if not torch.compiler.is_compiling() and in_torch_func():
        raise BadInput(
            "torch.func (grad, vmap, …) transforms a model that is split over workers, and their "
            "messages cannot be transformed: use torch.autograd.grad(…, create_graph=True), or "
            "take ddp, ps, zero(1) or zero(2)"
        )
    out: Tensor = _Mapping.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return out


def in_torch_func() -> bool:
    """Whether a function is being transformed by torch.func at present."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def sum_over_ranks(x: Tensor, group: Group) -> Tensor:
    """The sum over all ranks, whose gradient is one, too: all ranks go through it together."""
    return mapped(x, partial(all_reduced, group=group), partial(all_reduced, group=group))


def all_reduced(x: Tensor, group: Group) -> Tensor:
    """The sum over all ranks, in a new tensor; autograd does not see it."""
    total = x.clone(memory_format=torch.contiguous_format)
    collective("all_reduce", group, total)
    return total


class _Mapping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Operation, backward: Operation) -> Tensor:
        ctx.operations = (backward, forward)
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return mapped(grads[0], *ctx.operations), None, None


def copy(x: Tensor, group: Group) -> Tensor:
    return mapped(x, lambda x: x.view_as(x), partial(all_reduced, group=group))


def reduce(x: Tensor, group: Group) -> Tensor:
    return mapped(x, partial(all_reduced, group=group), lambda grad: grad)


def gather(x: Tensor, spec: ShardSpec, group: Group) -> Tensor:
    return mapped(
        x, partial(spec.all_gather, group=group), partial(spec.take_shard, rank=group.rank)
    )


def scatter(x: Tensor, spec: ShardSpec, group: Group) -> Tensor:
    return mapped(
        x, partial(spec.take_shard, rank=group.rank), partial(spec.all_gather, group=group)
    )


def gather_sequence(x: Tensor, spec: ShardSpec, group: Group) -> Tensor:
    return mapped(
        x, partial(spec.all_gather, group=group), partial(spec.reduce_scatter, group=group)
    )


def reduce_scatter(x: Tensor, spec: ShardSpec, group: Group) -> Tensor:
    return mapped(
        x, partial(spec.reduce_scatter, group=group), partial(spec.all_gather, group=group)
    )


def gather_rows(rows: Tensor, group: Group) -> Tensor:
    """The rows of all ranks, in their order; a gradient is the sum of those of all ranks.

    Ranks may have different numbers of them.
    """
    counts = torch.zeros(group.size, dtype=torch.int64, device=rows.device)
    counts[group.rank] = len(rows)
    group.all_reduce(counts).wait()
    ends = [0, *counts.cumsum(0).tolist()]
    ranges = tuple((range(a, b),) for a, b in itertools.pairwise(ends))
    return gather_sequence(rows, ShardSpec(0, ranges), group)


def apply_flat(tensors: Sequence[Tensor], apply: Callable[[Tensor], Work]) -> None:
    """Change tensors in place by one operation on all of their numbers."""
    if not tensors:
        return
    if len(tensors) == 1 and tensors[0].is_contiguous():
        apply(tensors[0].view(-1)).wait()
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    apply(flat).wait()
    pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, piece in zip(tensors, pieces, strict=True):
        tensor.copy_(piece.view(tensor.shape))
