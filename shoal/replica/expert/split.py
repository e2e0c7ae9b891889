"""Expert parallelism of a model: which tensors of experts each worker has.

Stacked parameters are sliced: a `ShardSpec` says which experts a worker has. Experts of a list are
whole on one worker, and shapes without memory on the others. All other parameters are copies. Every
worker has other rows of the batch; the gradient of an expert is complete on its worker, since the
tokens of all of them have come there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from shoal.comm.group import Group
from shoal.comm.objects import PytreeChannel
from shoal.replica.deferred_init import TensorSlot, tensor_slots
from shoal.replica.expert.dispatch import ExpertPlacement
from shoal.replica.expert.forwards import ListedExperts, spread_batched, spread_stacked
from shoal.replica.expert.mixtures import Mixture, StackedMixture
from shoal.replica.pipeline.stages import replace_by_shape
from shoal.replica.split.attributes import copy_structure
from shoal.replica.split.mapping import ShardSpec, SlicedTensors, even_ranges
from shoal.runtime.pytree import Tree

Named = list[tuple[str, nn.Parameter]]
_GATHER_TAG = 0


class ExpertSplit(SlicedTensors):
    """A model whose experts are spread over `group`; `specs` are those of stacked tensors."""

    def __init__(
        self,
        model: nn.Module,
        mixtures: Sequence[Mixture],
        group: Group,
        device: torch.device,
        capacity: float | None = None,
    ):
        self.model = model
        self.group = group
        self.device = device
        self.drops = capacity is not None
        self._twins: dict[int, nn.Module] = {}
        self.original = copy_structure(model, self._twins)
        self.full_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        self._mixtures = list(mixtures)
        self.summary = expert_summary(model, mixtures, group.size, capacity)
        self.specs: dict[str, ShardSpec] = {}
        self._owner: dict[str, int] = {}  # of tensors of experts in lists
        self._channel = PytreeChannel(group, device)
        exchange = group.duplicate()
        for mixture in mixtures:
            ranges = even_ranges(mixture.num_experts, group.size)
            self._place(mixture, ranges)
            placement = ExpertPlacement(exchange, ranges, capacity)
            if not isinstance(mixture, StackedMixture):
                ListedExperts(mixture, placement)
            elif mixture.routed is None:
                spread_batched(mixture, placement)
            else:
                spread_stacked(mixture, placement)
        named = list(model.named_parameters())
        self.slice_indices = [i for i, (name, _) in enumerate(named) if self.is_of_expert(name)]
        self._slices = {p for name, p in named if self.is_of_expert(name)}

    def take(self, filled: Iterable[list[TensorSlot]]) -> Iterator[list[TensorSlot]]:
        """Keep this worker's part of each tensor as it is filled."""
        for slots in filled:
            name = slots[0].name
            if not self.is_here(name):
                for slot in slots:
                    replace_by_shape(slot.module, slot.key)
                    replace_by_shape(self._twins[id(slot.module)], slot.key)
            elif name in self.specs:
                self.hold_shard(slots, self.specs[name])
            yield slots

    def held(self, named: Named) -> Named:
        """Those of the parameters that are here."""
        return [(n, p) for n, p in named if self.is_here(n)]

    def complete(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Full tensors, those of experts in lists from their workers; all ranks call it."""
        full = self.gather_full(tensors)
        for name, owner in self._owner.items():
            if name in full:
                tensor = torch.empty_like(full[name], device=self.device)
                if owner == self.group.rank:
                    tensor.copy_(full[name])
                self.group.broadcast(tensor, owner).wait()
                full[name] = tensor
        return full

    @property
    def kinds(self) -> list[str]:
        """The modules of mixtures, one of each kind."""
        found: dict[tuple[str, ...], str] = {}
        for mixture in self._mixtures:
            parts = mixture.name.split(".")
            found.setdefault(tuple(p for p in parts if not p.isdigit()), mixture.name)
        return list(found.values())

    def router_block(self, name: str) -> str:
        """The module that calls the router of a mixture of that name."""
        stacked = {m.name for m in self._mixtures if isinstance(m, StackedMixture)}
        return name.rpartition(".")[0] if name in stacked else name

    def is_of_expert(self, name: str) -> bool:
        """Whether a parameter of the model belongs to experts."""
        return name in self.specs or name in self._owner

    def is_here(self, name: str) -> bool:
        """Whether this rank has it, or a slice of it."""
        return self._owner.get(name, self.group.rank) == self.group.rank

    def gather(self, tree: Tree) -> list[Tree]:
        """The trees of all ranks on the first one; the others get their own."""
        return self._channel.gather(tree, _GATHER_TAG) if self._owner else [tree]

    # ------------------------------------------------------------------ inside

    def _place(self, mixture: Mixture, ranges: Sequence[range]) -> None:
        if isinstance(mixture, StackedMixture):
            spec = ShardSpec(0, tuple((r,) for r in ranges))
            self.specs |= dict.fromkeys(mixture.stacked, spec)
            return
        experts = list(mixture.experts.items())
        for rank, local in enumerate(ranges):
            for name, expert in experts[local.start : local.stop]:
                self._owner |= {f"{name}.{slot.name}": rank for slot in tensor_slots(expert)}


def keep_first_experts(mixtures: Sequence[Mixture], ranks: int) -> None:
    """Leave of a model that is not run what the first of `ranks` workers has of its experts."""
    for mixture in mixtures:
        local = even_ranges(mixture.num_experts, ranks)[0]
        if isinstance(mixture, StackedMixture):
            for tensor in mixture.stacked.values():
                tensor.data = tensor.data[local.start : local.stop]
            continue
        for expert in list(mixture.experts.values())[local.stop :]:
            for slot in list(tensor_slots(expert)):
                slot.module._parameters.pop(slot.key, None)
                slot.module._buffers.pop(slot.key, None)


def expert_summary(
    model: nn.Module, mixtures: Sequence[Mixture], ranks: int, capacity: float | None
) -> str:
    """How many experts are where, and how much of the model they are."""
    owned = {p for m in mixtures for p in m.parameters}
    total = sum(p.numel() for p in model.parameters())
    share = sum(p.numel() for p in owned) / max(1, total)
    sizes = sorted({m.num_experts for m in mixtures})
    held = {size: sorted({len(r) for r in even_ranges(size, ranks)}) for size in sizes}
    words = (f"{' or '.join(map(str, each))} of {size}" for size, each in held.items())
    experts = " or ".join(words)
    layers = f"{len(mixtures)} layer" + "s" * (len(mixtures) > 1)
    drops = "" if capacity is None else f"; tokens above capacity={capacity} are dropped"
    placed = f"ep({ranks}): {layers} of experts, {experts} on each worker"
    return f"{placed}; they have {share:.0%} of the parameters{drops}"
