"""Tensor parallelism: replaces layers of a model, and slices their parameters.

All ranks have the same batch. The input of a pair of split layers is the same on all ranks, and
so is its output, bit for bit. So layers that are not split compute the same on every rank, and
their gradients and weights stay the same without any exchange.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.pytree import Tree
from shoal.replica.deferred_init import TensorSlot, full_name, tensor_slots
from shoal.replica.split.attributes import copy_structure
from shoal.replica.split.token_axes import apply_flat
from shoal.replica.tensor.activations import pack, unpack
from shoal.replica.tensor.adapters import adapt, change_in_place
from shoal.replica.tensor.attention import ParallelAttention
from shoal.replica.tensor.linear import (
    ColumnLinear,
    PartialEmbedding,
    RowLinear,
    SelectedColumns,
    TensorParallelLayer,
    VocabularyEmbedding,
    linear_like,
)
from shoal.replica.tensor.rng import TensorParallelRng
from shoal.replica.tensor.roles import IN_PLACE, Role, Roles
from shoal.replica.tensor.shard_spec import ShardSpec, SlicedTensors


class TensorSplit(SlicedTensors):
    """A model whose layers were replaced; `specs` says which parameters are slices, by name."""

    def __init__(
        self,
        model: nn.Module,
        roles: Roles,
        group: Group,
        device: torch.device,
        filled: Iterable[list[TensorSlot]],
        sequence: bool = False,
    ):
        """`filled` yields one full tensor after the other, by its slots.

        With `sequence`, every rank has some positions between split layers.
        """
        self.model = model
        self.original = copy_structure(model)
        self.roles = roles
        self.group = group
        self.device = device
        self.sequence = sequence
        self.rng = TensorParallelRng(group.rank, has_dropout(model))
        modules = dict(model.named_modules())
        self._in_place: list[tuple[nn.Module, Mapping[str, ShardSpec]]] = []
        layers = {}
        for name, role in roles.items():
            layer = self._layer(modules[name], role)
            if layer is not None:
                layers[modules[name]] = layer
        self._slices: set[nn.Parameter] = set()
        self._slice_parameters(layers.values(), filled)
        self._replace(layers)
        adapt(model, group)
        for layer in _parallel_layers(model.modules()):
            layer.is_sequence_parallel = sequence
        self.specs = self._specs_by_name()

    def is_duplicate(self, parameter: nn.Parameter) -> bool:
        """Whether the first rank holds it, too."""
        return self.group.rank > 0 and not self.is_slice(parameter)

    def full_sizes(self) -> dict[str, int]:
        """The number of elements of each parameter of the model, over all ranks."""
        sizes = {}
        for name, p in self.model.named_parameters():
            spec = self.specs.get(name)
            sizes[name] = (p.shape if spec is None else spec.full_shape(p.shape)).numel()
        return sizes

    def full_bytes(self) -> int:
        """Of the parameters of the model, over all ranks."""
        sizes = self.full_sizes()
        return sum(sizes[n] * p.element_size() for n, p in self.model.named_parameters())

    def sums_in(self, block: str) -> list[str]:
        """Layers in a module behind which the ranks add up."""
        kinds = ("row", "attention", "vocabulary", "experts")
        inside = block + "." if block else ""
        return [n for n, r in self.roles.items() if r.kind in kinds and n.startswith(inside)]

    def typical_blocks(self) -> list[str]:
        """Modules that have split layers together, one of each kind."""
        typical: dict[str, str] = {}
        for name in self.sums_in(""):
            block = name.rpartition(".")[0]
            parts = block.split(".")
            if not any(
                r.kind == "column" and n.startswith(block + ".") for n, r in self.roles.items()
            ):
                block = block.rpartition(".")[0]
            if block:
                kind = ".".join(part for part in parts if not part.isdigit())
                typical.setdefault(kind, block)
        return list(dict.fromkeys(typical.values()))

    def pack(self, tree: Tree) -> Tree:
        """What goes from this rank of a stage to the same one of another: plain tensors."""
        return pack(tree)

    def unpack(self, tree: Tree) -> Tree:
        return unpack(tree, self.group, self.rng)

    def synchronize_copies(self, tensors: Mapping[nn.Parameter, Tensor]) -> None:
        """Replace what belongs to a parameter that every rank holds by what the first one has."""
        copies = [tensor for p, tensor in tensors.items() if not self.is_slice(p)]
        apply_flat(copies, self.group.broadcast)

    # ------------------------------------------------------------------ at the start

    def _layer(self, original: nn.Module, role: Role) -> TensorParallelLayer | None:
        """What replaces a module; None if it is changed in place."""
        group = self.group
        rng = self.rng
        if role.kind in IN_PLACE:
            change_in_place(original, role, group, rng)
            self._in_place.append((original, role.shards or {}))
            return None
        if isinstance(original, nn.Embedding):
            return self._embedding(original)
        if isinstance(original, nn.MultiheadAttention):
            return ParallelAttention(original, group, rng)
        linear = linear_like(original)
        assert linear is not None
        spec = role.spec(linear.inputs if role.kind == "row" else linear.outputs, group.size)
        if role.kind == "column":
            return ColumnLinear(original, group, rng, spec, role.output)
        if role.kind == "selected":
            return SelectedColumns(original, group, rng, spec)
        return RowLinear(original, group, rng, spec, role.input_is_sharded)

    def _embedding(self, table: nn.Embedding) -> TensorParallelLayer | None:
        if type(table).forward is nn.Embedding.forward:
            return VocabularyEmbedding(table, self.group, self.rng)
        spec = ShardSpec.even(0, table.num_embeddings, self.group.size)
        PartialEmbedding.convert(table, self.group, spec)
        self._in_place.append((table, {"weight": spec}))
        return None

    def _replace(self, layers: dict[nn.Module, TensorParallelLayer]) -> None:
        if self.model in layers:
            raise BadInput(
                f"tp cannot split a model that is one {type(self.model).__name__}: put it into an "
                "nn.Sequential"
            )
        for module in list(self.model.modules()):
            for name, child in module._modules.items():
                if child is not None and child in layers:
                    module._modules[name] = layers[child]

    def _slice_parameters(
        self, layers: Iterable[TensorParallelLayer], filled: Iterable[list[TensorSlot]]
    ) -> None:
        """Let every parameter and buffer that is split hold this rank's slice."""
        specs: dict[Tensor, ShardSpec] = {
            getattr(layer, key): spec
            for outer in layers
            for layer in _parallel_layers(outer.modules())
            for key, spec in layer.specs.items()
        }
        for module, shards in self._in_place:
            specs.update({getattr(module, key): spec for key, spec in shards.items()})
        for slots in filled:
            tensor = slots[0].tensor
            if tensor not in specs:
                continue
            own = specs[tensor].take_shard(tensor.detach(), self.group.rank)
            if isinstance(tensor, nn.Parameter):
                tensor.data = own
                self._slices.add(tensor)
            for slot in slots:
                if slot.key in slot.module._buffers:
                    slot.module._buffers[slot.key] = own

    def _specs_by_name(self) -> dict[str, ShardSpec]:
        """How a parameter is sharded, by each of its names: a head's bias may have two."""
        specs: dict[str, ShardSpec] = {}
        by_tensor: dict[Tensor, ShardSpec] = {}
        shards = {id(module): shards for module, shards in self._in_place}
        for prefix, module in self.model.named_modules(remove_duplicate=False):
            own = (
                module.specs if isinstance(module, TensorParallelLayer) else shards.get(id(module))
            )
            for key, spec in (own or {}).items():
                specs[full_name(prefix, key)] = spec
                by_tensor[getattr(module, key)] = spec
        for slot in tensor_slots(self.model):
            if slot.tensor in by_tensor:
                specs[slot.name] = by_tensor[slot.tensor]
        return specs


def _parallel_layers(modules: Iterable[nn.Module]) -> list[TensorParallelLayer]:
    return [module for module in modules if isinstance(module, TensorParallelLayer)]


def has_dropout(model: nn.Module) -> bool:
    """Whether anything in a model drops."""
    return any(
        value > 0
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and (name == "p" or "drop" in name)
    )


_KINDS = {
    "norms": r"norm|(^|\.)ln_?\w*\.|layer_?scale|\.gamma$|\.beta$",
    "position embeddings": r"pos(ition)?(s|al)?_?(embed|enc)\w*|wpe|embed_positions|rel_pos",
    "token type embeddings": r"token_type|segment_emb",
    "routers": r"router|\.gate\.weight$",
    "shared key and value heads": r"(^|\.)w?[kv](_proj|_lin)?\.(weight|bias)$|\.(key|value)\.",
    "biases": r"bias$",
}
_FEW = 3


def summary(split: TensorSplit) -> str:
    """Such as: tp(2) splits 34 of 52 tensors, 93% of the parameters; whole: norms, biases."""
    sizes = split.full_sizes()
    cut = {name for name in sizes if name in split.specs}
    share = sum(sizes[name] for name in cut) / max(1, sum(sizes.values()))
    if not cut:
        return (
            f"tp({split.group.size}) splits nothing of {type(split.model).__name__}, which every "
            f"worker holds whole ({', '.join(_kinds(sizes, split.model))}); name layers, as in "
            f'tp({split.group.size}, plan={{"blocks.*.up": "column", "blocks.*.down": "row"}})'
        )
    text = (
        f"tp({split.group.size}) splits {len(cut)} of {len(sizes)} tensors, {share:.0%} of the "
        "parameters"
    )
    if share < 0.5:
        text += ", which is less than half of them"
    kept = {name: size for name, size in sizes.items() if name not in cut}
    return f"{text}; whole: {', '.join(_kinds(kept, split.model))}" if kept else text


def _kinds(sizes: dict[str, int], model: nn.Module) -> list[str]:
    """What tensors are, the largest kinds first."""
    totals: dict[str, int] = {}
    for name, size in sizes.items():
        kind = _kind(name, model.get_submodule(name.rpartition(".")[0]))
        totals[kind] = totals.get(kind, 0) + size
    ordered = sorted(totals, key=lambda kind: -totals[kind])
    others = ordered[_FEW + 1 :]
    return [*ordered[: _FEW + 1], *([f"{len(others)} more"] if others else [])]


def _kind(name: str, module: nn.Module) -> str:
    if isinstance(module, _ConvNd):
        return "convolutions"
    if isinstance(module, nn.RNNBase):
        return "recurrent layers"
    for kind, pattern in _KINDS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return kind
    owner = name.rpartition(".")[0] or name
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", owner)
