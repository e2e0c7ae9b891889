"""Tensor parallelism: replaces layers of a model, and slices their parameters.

All ranks have the same batch. The input of a pair of split layers is the same on all ranks, and
so is its output, bit for bit. So layers that are not split compute the same on every rank, and
their gradients and weights stay the same without any exchange.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from copy import copy as shallow_copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.replica.deferred_init import TensorSlot, tensor_slots
from shoal.replica.microbatch_context import TensorParallelRng
from shoal.replica.split.attributes import copy_structure
from shoal.replica.split.mapping import ShardSpec, SlicedTensors, copy, reduce
from shoal.replica.split.sharded_tensor import full_activations
from shoal.replica.tensor.linear import (
    ColumnLinear,
    ParallelAttention,
    RowLinear,
    SelectedColumns,
    TensorParallelLayer,
    VocabularyEmbedding,
    is_transformers,
    linear_like,
)
from shoal.replica.tensor.roles import IN_PLACE, Role, Roles
from shoal.runtime.pytree import map_tensors


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
        """`filled` yields full tensors; with `sequence` ranks have positions between layers."""
        self.model = model
        self.original = copy_structure(model)
        self.roles = roles
        self.group = group
        self.device = device
        self.sequence = sequence
        self.rng = TensorParallelRng(group.rank, has_dropout(model))
        modules = dict(model.named_modules())
        layers = {modules[name]: self._layer(modules[name], role) for name, role in roles.items()}
        self._shards: dict[nn.Module, Mapping[str, ShardSpec]] = {
            modules[name]: role.shards for name, role in roles.items() if role.shards
        }
        for outer in layers.values():
            self._shards |= {layer: layer.specs for layer in _parallel_layers(outer.modules())}
        self._slices: set[nn.Parameter] = set()
        self._slice_parameters(filled)
        self._replace(layers)
        _adapt(model, group)
        for layer in _parallel_layers(model.modules()):
            layer.is_sequence_parallel = sequence
        specs = self._specs_by_tensor()
        slots = tensor_slots(model)  # a parameter by each of its names: a head's bias may have two
        self.specs = {slot.name: specs[slot.tensor] for slot in slots if slot.tensor in specs}

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

    # ------------------------------------------------------------------ at the start

    def _layer(self, original: nn.Module, role: Role) -> nn.Module:
        """What replaces a module, or itself if it is changed in place."""
        group = self.group
        rng = self.rng
        if role.kind in IN_PLACE:
            _change_in_place(original, role, group, rng)
            return original
        if isinstance(original, nn.Embedding):
            return VocabularyEmbedding.become(original, group, rng)
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

    def _replace(self, layers: dict[nn.Module, nn.Module]) -> None:
        if layers.get(self.model, self.model) is not self.model:
            raise BadInput(
                f"tp cannot split a model that is one {type(self.model).__name__}: put it into an "
                "nn.Sequential"
            )
        for module in list(self.model.modules()):
            for name, child in module._modules.items():
                if child is not None:
                    module._modules[name] = layers.get(child, child)

    def _slice_parameters(self, filled: Iterable[list[TensorSlot]]) -> None:
        """Let every parameter and buffer that is split hold this rank's slice."""
        specs = self._specs_by_tensor()
        for slots in filled:
            tensor = slots[0].tensor
            if tensor in specs:
                self.hold_shard(slots, specs[tensor])
                if isinstance(tensor, nn.Parameter):
                    self._slices.add(tensor)

    def _specs_by_tensor(self) -> dict[Tensor, ShardSpec]:
        shards = self._shards.items()
        return {getattr(module, key): spec for module, own in shards for key, spec in own.items()}


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


def _adapt(model: nn.Module, group: Group) -> None:
    """Change what modules around split layers would get wrong."""
    for module in model.modules():
        if is_transformers(module, "GPT2Attention"):
            layer = getattr(module, "c_attn", None)
            if isinstance(layer, ColumnLinear):  # it splits by a number that it keeps
                module.split_size = layer.spec.length(group.rank) // 3  # type: ignore[assignment]
        elif isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # no fast path in evaluation
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
            module.enable_nested_tensor = False


_EXPERT_WIDTHS = ("intermediate_dim", "intermediate_size", "expert_dim", "ffn_dim")


def _change_in_place(module: nn.Module, role: Role, group: Group, rng: TensorParallelRng) -> None:
    """Before its parameters are sliced."""
    if role.heads is not None:
        role.heads.set_local_counts(module, group.rank)
    if role.kind == "experts":
        _set_expert_width(module, role, group.rank)
        module.forward = partial(_add_up, module.forward, group=group, rng=rng)
    elif role.kind in ("summed", "heads"):
        names = [name for name in module._parameters if name not in (role.shards or {})]
        if any(module._parameters[name] is not None for name in names):
            around = partial(_with_summed_gradients, module, names, group)
            module.forward = partial(around, module.forward)


def _add_up(
    forward: Callable[..., Any], *args: Any, group: Group, rng: TensorParallelRng, **kwargs: Any
) -> Any:
    """Every rank computes a part of each expert; inputs have gradients of all ranks."""
    inputs, named = map_tensors(
        lambda x: copy(x, group) if x.is_floating_point() and x.requires_grad else x,
        (full_activations(args), kwargs),
    )
    first = next(x for x in (*inputs, *named.values()) if isinstance(x, Tensor))
    with rng.forked(first) if rng.active else nullcontext():
        partial_sum = forward(*inputs, **named)
    return reduce(partial_sum, group)


def _with_summed_gradients(
    module: nn.Module,
    names: list[str],
    group: Group,
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Its own parameters are used on the shards that the ranks have of an activation."""
    own = {name: p for name in names if (p := module._parameters[name]) is not None}
    if not torch.is_grad_enabled() or not any(p.requires_grad for p in own.values()):
        return forward(*args, **kwargs)
    shared = {f"module.{name}": copy(p, group) for name, p in own.items()}
    return functional_call(_Call(module, forward), shared, args, kwargs)


class _Call(nn.Module):
    """A module that is called by its original forward."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]):
        super().__init__()
        self.module = module
        self._forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


def _set_expert_width(module: nn.Module, role: Role, rank: int) -> None:
    down = (role.shards or {}).get("down_proj")
    if down is None:
        return
    for name in _EXPERT_WIDTHS:
        if getattr(module, name, None) == down.size:
            setattr(module, name, down.length(rank))
    config = getattr(module, "config", None)
    is_aligned = all(down.length(r) % 8 == 0 for r in range(len(down.ranges)))
    if hasattr(config, "_experts_implementation") and not is_aligned:
        own: Any = shallow_copy(config)  # kernels for groups want multiples of 16 bytes
        own._experts_implementation = "eager"
        module.config = own


_MOST_KINDS = 4


def summary(split: TensorSplit) -> str:
    """Such as: tp(2) splits 34 of 52 tensors, 93% of the parameters; whole: LayerNorm, Conv2d."""
    sizes = split.full_sizes()
    whole = {name: size for name, size in sizes.items() if name not in split.specs}
    share = 1 - sum(whole.values()) / max(1, sum(sizes.values()))
    kinds: Counter[str] = Counter()
    for name, size in whole.items():
        kinds[type(split.model.get_submodule(name.rpartition(".")[0])).__name__] += size
    largest = [kind for kind, _ in kinds.most_common(_MOST_KINDS)]
    listed = ", ".join(largest) + (", …" if len(kinds) > _MOST_KINDS else "")
    label = f"tp({split.group.size})"
    if len(whole) == len(sizes):
        return (
            f"{label} splits nothing of {type(split.model).__name__}, which every worker holds "
            f"whole ({listed}); name layers, as in "
            f'tp({split.group.size}, plan={{"blocks.*.up": "column", "blocks.*.down": "row"}})'
        )
    text = f"{label} splits {len(sizes) - len(whole)} of {len(sizes)} tensors, {share:.0%} of the"
    text += " parameters" + (", which is less than half of them" if share < 0.5 else "")
    return f"{text}; whole: {listed}" if whole else text
